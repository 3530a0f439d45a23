"""What is read otherwise than by the fast paths of edges crosses as the settings say, or is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.halo.exchange import all_rows
from pipelines import HIDDEN, told
from training import CLASSES, FEATURES, graph


class Stack(nn.Module):
    """Layers in a row, between a map in and a map out."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.into, self.layers = nn.Linear(FEATURES, HIDDEN), nn.ModuleList(layers)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x, edge_index).tanh()
        return self.out(x)


class Dropped(nn.Module):
    """The features lose entries before the first layer reads them: no gradient, and other rows each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training)
        return self.second(self.first(x, edge_index).tanh(), edge_index)


def _most() -> nn.Module:
    return Stack(*[pyg.SAGEConv(HIDDEN, HIDDEN, aggr="max") for _ in range(3)])


def _attentive() -> nn.Module:
    return Stack(pyg.GPSConv(HIDDEN, pyg.SAGEConv(HIDDEN, HIDDEN), heads=2))


class BothWays(nn.Module):
    """Reads along edges and against them."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.there, self.back = pyg.SAGEConv(FEATURES, HIDDEN), pyg.SAGEConv(FEATURES, HIDDEN)
        self.out, self.turn = nn.Linear(HIDDEN, CLASSES), turn

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.out((self.there(x, edge_index) + self.back(x, self.turn(edge_index))).tanh())


class Transformed(nn.Module):
    """Its middle attends to all vertices."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, CLASSES)
        self.layer = nn.TransformerEncoderLayer(HIDDEN, 2, HIDDEN, batch_first=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.out(self.layer(self.into(x).unsqueeze(0)).squeeze(0), edge_index)


MODELS = {
    "most": _most,
    "attentive": _attentive,
    "dropped": Dropped,
    "flipped": lambda: BothWays(lambda edges: edges.flip(0)),
    "stacked": lambda: BothWays(lambda edges: torch.stack([edges[1], edges[0]])),
    "turned": lambda: BothWays(lambda edges: edges[[1, 0]]),
    "both ways": lambda: Stack(pyg.DirGNNConv(pyg.SAGEConv(HIDDEN, HIDDEN))),
    "transformed": Transformed,
}


def trained(channel: Channel, name: str, parallel: dict[str, Any], fast: bool = True, epochs: int = 4) -> Any:
    torch.manual_seed(1)
    mine, given = MODELS[name](), graph(torch.float32)
    return told(mine, given, epochs, parallel, train={"check": False}, fast=fast)


@pytest.mark.parametrize(("world", "cut"), [(2, {"graph": 2}), (4, {"pipe": 2, "graph": 2, "chunks": 1})])
def test_a_maximum_over_drawn_rows_is_refused_in_pipelines_too(ranks, world, cut):
    found = ranks(world, trained, "most", {**cut, "halo_sample": 0.3}, spoils=True)
    assert all(isinstance(rank, str) for rank in found)
    assert any("the reduction max over neighbours, which wants all of them" in rank for rank in found)


def test_attention_over_drawn_rows_of_all_vertices_is_refused(ranks):
    for rank in ranks(2, trained, "attentive", {"graph": 2, "halo_sample": 0.3}, spoils=True):
        assert "attention over all vertices, which wants all of them" in rank


@pytest.mark.some(2)
@pytest.mark.parametrize("cross_chunk", ["history", "exact", "drop"])
@pytest.mark.parametrize("name", ["flipped", "stacked", "turned", "both ways", "attentive", "transformed"])
def test_chunks_refuse_other_reads_on_all_ranks_before_the_first_epoch(ranks, name, cross_chunk):
    found = ranks(2, trained, name, {"graph": 2, "chunks": 2, "cross_chunk": cross_chunk}, spoils=True)
    for rank in found:
        assert "chunks=2 to read their neighbours' rows by the edges into them" in rank


@pytest.mark.parametrize("given", [{"codec": "int4", "adaptive_bits": True}, {"codec": "onebit"}])
def test_attention_over_all_vertices_trains_on_coded_rows(ranks, given):
    found = ranks(3, trained, "attentive", {"graph": 3, "guard": False, **given})
    plain = ranks(3, trained, "attentive", {"graph": 3})
    for rank, other in zip(found, plain, strict=True):
        assert all(math.isfinite(loss) for loss in rank["losses"])
        assert rank["losses"] == found[0]["losses"]
        assert rank["bytes"][-1]["halo"] < 0.4 * other["bytes"][-1]["halo"]


def known_rows(channel: Channel) -> dict[str, Any]:
    own = torch.arange(3 + channel.rank) * 10 + channel.rank
    found = all_rows(own, channel)
    return {"own": own, "ids": found.ids, "row_ids": found.row_ids, "reads": found.reads}


@pytest.mark.parametrize("world", [2, 3])
def test_rows_that_all_read_are_drawn_for_by_their_vertices(ranks, world):
    found = ranks(world, known_rows)
    for rank, each in enumerate(found):
        others = torch.cat([other["own"] for peer, other in enumerate(found) if peer != rank])
        torch.testing.assert_close(each["ids"], torch.cat([each["own"], others]))
        torch.testing.assert_close(each["row_ids"][0], each["own"].repeat(world - 1))
        torch.testing.assert_close(each["row_ids"][1], others)
        assert each["reads"].tolist() == [1] * others.numel()


def test_rows_without_a_gradient_that_change_are_coded_and_counted(ranks):
    """Off the fast paths, too."""
    exact = ranks(2, trained, "dropped", {"graph": 2}, False)
    coded = ranks(2, trained, "dropped", {"graph": 2, "codec": "onebit", "guard": False}, False)
    for rank, other in zip(coded, exact, strict=True):
        would, whole = ([epoch["halo"] for epoch in each] for each in (rank["uncoded"], other["bytes"]))
        assert would[1:] == whole[1:]
        assert rank["bytes"][-1]["halo"] < 0.5 * other["bytes"][-1]["halo"]


def test_rows_without_a_gradient_that_change_come_late(ranks):
    on_time, late = (
        ranks(2, trained, "dropped", {"graph": 2, "max_age": age, "guard": False}, False) for age in (0, 1)
    )
    assert late[0]["losses"][0] == on_time[0]["losses"][0]
    assert late[0]["losses"][1] != on_time[0]["losses"][1]
    assert late[0]["max_age"] == 1
