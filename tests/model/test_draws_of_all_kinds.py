"""Draws in place, of a virtual node, of a weight: the same on every mesh, and on one rank all run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convolutions import sample_graph
from parity import assert_equal, one_rank, random_owner, split

DRAWS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "uniform_": lambda m, h: h + torch.empty_like(h).uniform_(-1, 2),
    "normal_": lambda m, h: h + torch.zeros_like(h).normal_(0.5, 2.0),
    "bernoulli_": lambda m, h: h * torch.empty_like(h).bernoulli_(0.3),
    "exponential_": lambda m, h: h + torch.empty_like(h).exponential_(),
    "gumbel_softmax": lambda m, h: F.gumbel_softmax(h, tau=0.7, dim=-1),
    "a virtual node": lambda m, h: h + F.dropout(h.mean(0, keepdim=True), 0.5, m.training),
    "a weight": lambda m, h: F.linear(h, F.dropout(m.more.weight, 0.5, m.training)),
    "as many rows on all ranks as the first one has": lambda m, h: (
        h + F.dropout(h.mean(0, keepdim=True).expand(10, -1) * torch.arange(1, 11.0)[:, None], 0.5).sum(0)
    ),
}


class Drawing(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.lin, self.more, self.what = nn.Linear(6, 5), nn.Linear(5, 5), what

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = DRAWS[self.what](self, self.lin(x))
        return h.new_zeros(h.shape).index_add_(0, edge_index[1], h[edge_index[0]]) + h


class Built:
    """Makes one."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self) -> nn.Module:
        return Drawing(self.what)


@pytest.mark.parametrize("what", DRAWS)
def test_rows_draw_the_same_wherever_they_lie(ranks, what):
    data = sample_graph(1)
    alone = one_rank(Built(what), data, epochs=2)
    assert_equal(one_rank(Built(what), data, epochs=2), alone)
    ten = torch.arange(data.num_nodes).lt(20).long()  # the first rank has the last ten vertices
    for world, owner in ((2, ten), (3, random_owner(data.num_nodes, 3))):
        assert_equal(split(ranks, world, Built(what), data, owner, epochs=2), alone)
