"""What a forward draws for no vertex and no edge is the same on any ranks, in any stage, for any chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome.comm.channel import Channel
from pipelines import HIDDEN, data, same, told
from training import CLASSES, FEATURES

EXACT = {"cross_chunk": "exact"}


class Depth(nn.Module):
    """A layer that is left out of some epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training and float(torch.rand(1)) < 0.5:
            return x
        return (x + self.conv(x, edge_index)).tanh()


class Drawing(nn.Module):
    """Draws in several stages, one that two stages read, dropout among them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, CLASSES)
        self.depths = nn.ModuleList(Depth() for _ in range(3))
        self.scores = nn.Parameter(torch.zeros(HIDDEN))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        both = 0.5 + torch.rand(1, dtype=x.dtype)
        x = self.drop(self.first(x, edge_index).tanh()) * both
        x = x * F.gumbel_softmax(self.scores) * HIDDEN
        for depth in self.depths:
            x = depth(x, edge_index)
        x = x[:, torch.randperm(HIDDEN)] * torch.normal(1.0, 0.1, (HIDDEN,), dtype=x.dtype)
        return self.last(self.drop(x), edge_index) * both


def drawing(channel: Channel, parallel: dict[str, Any], rest: dict[str, Any]) -> Any:
    torch.manual_seed(1 + channel.rank)
    mine = Drawing().double()
    torch.manual_seed(100 * channel.rank)  # where a rank's own generator stands is nothing to the model
    return told(mine, data(), 4, parallel, plain_steps=True, **rest)


@pytest.fixture(scope="module")
def alone(ranks):
    found = ranks(1, drawing, {}, {})[0]
    assert len(set(found["losses"])) == 4
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "mesh",
    [
        {"graph": 2},
        {"pipe": 2, "chunks": 1},
        {"pipe": 3, "chunks": 3, **EXACT},
        {"chunks": 3, **EXACT},
        {"pipe": 2, "graph": 2, "chunks": 2, **EXACT},
    ],
    ids=["parts", "stages", "stages and chunks", "chunks", "hybrid"],
)
def test_any_mesh_draws_what_one_rank_draws(ranks, alone, mesh):
    world = mesh.get("pipe", 1) * mesh.get("graph", 1)
    same(ranks(world, drawing, mesh, {"train": {"check": True, "timeout": 20.0}}), alone)


@pytest.mark.parametrize("rest", [{"recompute": True}, {"fast": False}])
def test_so_do_layers_that_run_again_and_pyg_s_own_ways(ranks, alone, rest):
    same(ranks(1, drawing, {}, rest), alone)
