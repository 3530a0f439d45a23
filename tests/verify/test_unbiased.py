"""Rows are drawn for layers alone whose messages of drawn rows are right on the mean; others are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome.comm.channel import Channel
from kagome.graph.partition.partition import partition
from kagome.verify.check import biased
from pipelines import HIDDEN, told
from training import CLASSES, FEATURES, graph


class Two(nn.Module):
    """A layer of rows that need a gradient, after one of the features."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(FEATURES, HIDDEN), conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).tanh(), edge_index)


class Gated(pyg.MessagePassing):
    """A message by its row's own sign: as large for a larger row, and not for a smaller one."""

    def __init__(self, sharp: float) -> None:
        super().__init__(aggr="add")
        self.lin, self.sharp = nn.Linear(HIDDEN, CLASSES), sharp

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * (self.sharp * x_j).sigmoid() if self.sharp else x_j.relu() + 1


class Divided(Gated):
    """Nothing at all of a row of zeros."""

    def message(self, x_j: Tensor) -> Tensor:
        return x_j / x_j.norm(dim=1, keepdim=True)


class Choosy(Gated):
    """A message that cannot be of other rows than there are."""

    def message(self, x_j: Tensor) -> Tensor:
        if not x_j.any():
            raise RuntimeError("zeros")
        return x_j


class Edged(Gated):
    """A weight of each edge, of the rows at its ends."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        return self.propagate(edge_index, x=x, gate=self.edge_updater(edge_index, x=x))

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i * x_j).sum(1, keepdim=True).sigmoid()

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return x_j * gate


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "GCNConv": lambda: pyg.GCNConv(HIDDEN, CLASSES),
    "SAGEConv": lambda: pyg.SAGEConv(HIDDEN, CLASSES, project=True),
    "GINConv": lambda: pyg.GINConv(nn.Sequential(nn.Linear(HIDDEN, 8), nn.ReLU(), nn.Linear(8, CLASSES))),
    "ChebConv": lambda: pyg.ChebConv(HIDDEN, CLASSES, 3),
    "APPNP": lambda: pyg.APPNP(3, 0.2),
    "relu of a row, and 1": lambda: Gated(0.0),
    "GENConv": lambda: pyg.GENConv(HIDDEN, CLASSES, aggr="add"),
    "two sums": lambda: pyg.SAGEConv(HIDDEN, CLASSES, aggr=["mean", "sum"]),
    "not known": lambda: Choosy(1.0),
}
WRONG: dict[str, Callable[[], nn.Module]] = {
    "EdgeConv": lambda: pyg.EdgeConv(pyg.MLP([2 * HIDDEN, 8, CLASSES], norm=None), aggr="add"),
    "CGConv": lambda: pyg.CGConv(HIDDEN),
    "ResGatedGraphConv": lambda: pyg.ResGatedGraphConv(HIDDEN, CLASSES),
    "Gated": lambda: Gated(1.0),
    "Divided": lambda: Divided(1.0),
    "Edged": lambda: Edged(1.0),
    "SAGEConv": lambda: pyg.SAGEConv(HIDDEN, CLASSES, aggr=["mean", "std"]),
    "SAGEConv, max": lambda: pyg.SAGEConv(HIDDEN, CLASSES, aggr="max"),
    "GENConv": lambda: pyg.GENConv(HIDDEN, CLASSES, aggr="powermean"),
    "GENConv, softmax": lambda: pyg.GENConv(HIDDEN, CLASSES, aggr="softmax"),
}


def found(conv: nn.Module) -> Any:
    torch.manual_seed(1)
    data: Data = graph(torch.float32)
    return biased(Two(conv), partition(data, parts=1, method="contiguous")[0], 0.25, 0)


@pytest.mark.parametrize("name", RIGHT)
def test_sums_of_rows_times_weights_are_right_on_the_mean(name):
    assert found(RIGHT[name]()) is None


@pytest.mark.parametrize("name", WRONG)
def test_another_function_of_a_row_is_not(name):
    refused = str(found(WRONG[name]()))
    assert f"got {name.partition(',')[0]}, " in refused
    assert re.search(
        r"off by \d+%|off by nan%|each edge from the rows|reduces them by \w+Aggregation", refused
    )
    assert "(second)" in refused


def test_what_needs_no_gradient_is_not_drawn():
    """Features cross whole, once: a first layer may do with them what it likes."""
    lines = nn.Sequential(nn.Linear(2 * FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    part = partition(graph(torch.float32), parts=1, method="contiguous")[0]
    assert biased(pyg.EdgeConv(lines), part, 0.25, 0) is None


def trained(channel: Channel, name: str, check: bool) -> Any:
    torch.manual_seed(1)
    parallel = {"graph": channel.size, "halo_sample": 0.5}
    return told(Two({**WRONG, **RIGHT}[name]()), graph(torch.float32), 2, parallel, train={"check": check})


def test_a_run_is_refused_on_every_rank_unless_it_is_not_checked(ranks):
    for rank in ranks(2, trained, "EdgeConv", True, spoils=True):
        assert rank.startswith("ModelError: expected sums of messages that are multiples")
    assert all(isinstance(rank, dict) for rank in ranks(2, trained, "EdgeConv", False))
    assert all(isinstance(rank, dict) for rank in ranks(2, trained, "GCNConv", True))
