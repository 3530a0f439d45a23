"""Branches by numbers of edges or rows: all ranks take the whole graph's, also those that have none."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from convolutions import double_precision
from kagome.comm.in_process.thread_group import ThreadGroup
from kagome.errors import ModelError
from parity import differences, joined, parity, whole

N, LINKED = 30, 24
OWNER = (torch.arange(N) >= LINKED).long()
"""Rank 1 has six vertices, no edge and no vertex of kind 1."""

Body = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
BRANCHES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "numel above 0": lambda h, e, k: e.numel() > 0,
    "numel": lambda h, e, k: e.numel(),
    "numel at least 1": lambda h, e, k: e.numel() >= 1,
    "numel over its rows": lambda h, e, k: e.numel() // 2 > 0,
    "columns above 0": lambda h, e, k: e.size(1) > 0,
    "columns": lambda h, e, k: e.size(1),
    "columns are not 0": lambda h, e, k: e.shape[1] != 0,
    "more columns than rows": lambda h, e, k: e.size(1) > h.size(0),
    "length": lambda h, e, k: len(e[0]),
    "some edges": lambda h, e, k: e[:, e[0] < e[1]].size(1),
    "no edges": lambda h, e, k: not e[:, k[e[0]] == 9].size(1),
    "some edges, by numel": lambda h, e, k: e[:, e[0] < e[1]].numel(),
    "rows of a mask": lambda h, e, k: h[k == 1].size(0) > 0,
    "length of a mask's rows": lambda h, e, k: len(h[k == 1]),
    "numel of a mask's rows": lambda h, e, k: h[k == 1].numel(),
    "places of a mask": lambda h, e, k: (k == 1).nonzero().size(0),
    "length of places of a mask": lambda h, e, k: len((k == 1).nonzero()),
    "numel of places of a mask": lambda h, e, k: (k == 1).nonzero().view(-1).numel() > 0,
    "equal": lambda h, e, k: not torch.equal(k, k.clamp(max=0)),
    "all close": lambda h, e, k: not torch.allclose(h * k[:, None], h * 0),
}
NUMBERS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "numel": lambda h, e, k: h.sum(0) / h.numel(),
    "nelement": lambda h, e, k: h.sum(0) / h.nelement(),
    "numel over columns": lambda h, e, k: h.sum(0) / (h.numel() // 4),
    "numel of edges": lambda h, e, k: 1 / e.numel(),
    "length of edges": lambda h, e, k: 1 / len(e[0]),
    "length of places": lambda h, e, k: 1 / len(k.nonzero()),
    "less their number": lambda h, e, k: 1 - h.size(0) + h * 0 + h.size(0) * 1.0,
    "a tensor of it": lambda h, e, k: 1 / torch.tensor(h.size(0)),
    "a list with it": lambda h, e, k: 1 / torch.tensor([h.size(0), 1, 2, e.size(1)]),
    "a new tensor of it": lambda h, e, k: 1 / h.new_tensor(h.size(0)),
    "filled with it": lambda h, e, k: 1 / torch.full((4,), h.size(0)),
    "rows filled with it": lambda h, e, k: 1 / torch.full((h.size(0), 1), h.size(0)),
    "compared with it": lambda h, e, k: (h * 20 > h.size(0)) + 1,
    "at most that": lambda h, e, k: (h * 99).clamp(max=h.size(0)),
    "with it in place of some": lambda h, e, k: h.masked_fill(h > 0, h.size(0)),
    "so many times": lambda h, e, k: torch.add(h, h, alpha=h.size(0)),
    "with a rest": lambda h, e, k: sum(divmod(h.size(0), 7)) + abs(h.size(0)) + 2 ** (e.size(1) > 0),
    "a column an entry": lambda h, e, k: torch.zeros(h.numel()).view(-1, 4) + 0.5,
}
TAKEN: dict[str, Callable[[Tensor], object]] = {
    "a list": lambda h: sum(h[:, 0].tolist()),
    "an array": lambda h: float(h.detach().numpy().mean()),
    "a number of what is lost": lambda h: h.quantile(0.5).item(),
    "a float of what is lost": lambda h: float(h.detach().quantile(0.5)),
    "a branch by what is lost": lambda h: 2.0 if h.quantile(0.5) > 0 else 1.0,
    "all close to what is lost": lambda h: float(torch.allclose(h, h.quantile(0.5))),
}


def graph() -> Data:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, LINKED, (2, 90), generator=generator)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    return Data(x=x, edge_index=edges, kind=(torch.arange(N) < LINKED).long(), num_nodes=N)


class Between(nn.Module):
    """Two convolutions, a third one, and what is done between them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.third, self.last = pyg.GCNConv(5, 4), pyg.GCNConv(4, 4), pyg.GCNConv(4, 3)
        self.body = body

    def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
        h = self.first(x, edge_index)
        return self.last(self.body(self, h, edge_index, kind), edge_index)


def assert_same(body: Body) -> None:
    data = graph()
    with double_precision():
        torch.manual_seed(0)
        model = Between(body)
        build = lambda: copy.deepcopy(model)  # noqa: E731 - threads share a generator
        expected = whole(build, data)
        shares = ThreadGroup(2).run(lambda channel: parity(channel, build, data, OWNER))
    found = differences(joined(shares, N), expected)
    assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("name", BRANCHES)
def test_all_ranks_take_the_branch_of_the_whole_graph(name: str) -> None:
    asked = BRANCHES[name]
    assert_same(lambda m, h, e, k: m.third(h, e) if asked(h, e, k) else h)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_entries_are_the_whole_graphs(name: str) -> None:
    assert_same(lambda m, h, e, k: h * NUMBERS[name](h, e, k))


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_part_holds_is_not_taken_out_of_torch(name: str) -> None:
    with pytest.raises(ModelError, match=r"test_branches\.py, line"):
        assert_same(lambda m, h, e, k: h * TAKEN[name](h))
