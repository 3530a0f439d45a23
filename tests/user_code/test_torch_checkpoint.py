"""What plain PyG runs again in backward runs once on a part, with the same numbers.

Checkpoints of the user's, and reversible blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convolutions import sample_graph
from kagome import check
from kagome.errors import ModelError
from parity import assert_equal, random_owner, split, whole

Body = Callable[["Checkpointed", Tensor, Tensor, bool], Tensor]

BODIES: dict[str, Body] = {
    "layers": lambda m, x, e, again: checkpoint(
        m.last, checkpoint(m.first, x, e, use_reentrant=again).relu(), e, use_reentrant=again
    ),
    "a function": lambda m, x, e, again: m.last(
        torch.utils.checkpoint.checkpoint(lambda y: m.drop(m.norm(m.first(y, e))), x, use_reentrant=again), e
    ),
    "a sequence": lambda m, x, e, again: m.last(
        torch.utils.checkpoint.checkpoint_sequential(
            nn.Sequential(m.norm, nn.ReLU(), m.drop), 2, m.first(x, e), use_reentrant=again
        ),
        e,
    ),
    "a mean": lambda m, x, e, again: m.last(
        checkpoint(lambda y: (y - y.mean(0)).tanh(), m.first(x, e), use_reentrant=again), e
    ),
}


class Checkpointed(nn.Module):
    def __init__(self, body: str, reentrant: bool, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.last = pyg.GATConv(6, 8), pyg.GCNConv(8, 3)
        self.norm, self.drop, self.body, self.reentrant = norm(8), nn.Dropout(0.3), body, reentrant

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return BODIES[self.body](self, x.clone().requires_grad_(), edge_index, self.reentrant)


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.conv = norm(4), pyg.SAGEConv(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x).relu()
        return self.conv(x if mask is None else x * mask, edge_index)


class Reversible(nn.Module):
    """As PyG's example builds it, with a mask that all its blocks share."""

    def __init__(self, dropout: bool = True, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.into, self.out, self.dropout = nn.Linear(6, 8), nn.Linear(8, 3), dropout
        self.blocks = nn.ModuleList(pyg.GroupAddRev(Block(norm), num_groups=2) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.into(x)
        mask = (torch.zeros_like(x).bernoulli_(0.8) / 0.8,) if self.dropout else ()
        for block in self.blocks:
            x = block(x, edge_index, *mask)
        return self.out(F.dropout(x.relu(), 0.2, self.training and self.dropout))


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
@pytest.mark.parametrize("body", BODIES)
def test_a_checkpoint_is_plain_pyg_s_and_drops_the_same_on_any_ranks(body, reentrant):
    torch.manual_seed(0)
    found = check(Checkpointed(body, reentrant), sample_graph(1))
    assert found.first is None, found.text()


def test_reversible_blocks_are_plain_pyg_s_and_drop_the_same_on_any_ranks():
    torch.manual_seed(0)
    found = check(Reversible(), sample_graph(1))
    assert found.first is None, found.text()


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "new": partial(Checkpointed, "layers", False),
    "reentrant": partial(Checkpointed, "layers", True),
    "reversible": partial(Reversible, dropout=False),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", BUILDS)
def test_ranks_run_once_what_plain_pyg_runs_again(ranks, name, world):
    data = sample_graph(1)
    owner = random_owner(data.num_nodes, world)
    assert_equal(split(ranks, world, BUILDS[name], data, owner), whole(BUILDS[name], data))


@pytest.mark.parametrize(
    "model", [Checkpointed("a function", False, nn.BatchNorm1d), Reversible(norm=nn.BatchNorm1d)]
)
def test_running_statistics_that_plain_pyg_moves_twice_are_refused(model):
    with pytest.raises(ModelError, match="plain PyG moves them twice") as caught:
        check(model, sample_graph(1))
    assert "norm" in caught.value.where


def test_torch_is_left_as_it_was():
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    before = [getattr(torch.utils.checkpoint, name) for name in names]
    check(Checkpointed("layers", True), sample_graph(1))
    assert [getattr(torch.utils.checkpoint, name) for name in names] == before
    assert all(each.__module__ == "torch.utils.checkpoint" for each in before)
