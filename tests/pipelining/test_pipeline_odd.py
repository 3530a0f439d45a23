"""Odd shapes train, bad input is refused, and a fault on one rank ends all: nothing waits for ever."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.errors import KagomeError
from kagome.launch.host_memory import available_bytes
from kagome.train import admission
from pipelines import HIDDEN, data, model, same, sgd, told
from training import CLASSES, FEATURES, QUIET, settings

EXACT = {"cross_chunk": "exact"}
HISTORY = {"cross_chunk": "history", "guard": False}
KINDS = ("history", "exact", "drop")


class Untraceable(nn.Module):
    """What it does goes by a value."""

    def __init__(self) -> None:
        super().__init__()
        widths = [FEATURES, HIDDEN, HIDDEN, CLASSES]
        self.convs = nn.ModuleList(pyg.SAGEConv(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            if x.sum() < 1e9:
                x = conv(x, edge_index)
        return x


ODD: dict[str, Callable[[], nn.Module]] = {
    "both ways": lambda: pyg.DirGNNConv(pyg.SAGEConv(HIDDEN, HIDDEN)),
    "out-edges": lambda: pyg.SAGEConv(HIDDEN, HIDDEN, flow="target_to_source"),
    "everyone": lambda: pyg.GPSConv(HIDDEN, pyg.SAGEConv(HIDDEN, HIDDEN), heads=2),
}
"""Layers that read what the edges into a chunk do not bring."""


def refused(channel: Channel, how: str) -> Any:
    mine: nn.Module = model("gcn")
    parallel: dict[str, Any] = {"pipe": 2, "chunks": 2, **EXACT}
    rest: dict[str, Any] = {}
    if how == "stages":
        mine, parallel = pyg.GCN(FEATURES, HIDDEN, 1, CLASSES).double(), {"pipe": channel.size, "chunks": 1}
    elif how == "world":
        parallel = {"pipe": 2}
    elif how == "product":
        parallel = {"pipe": 3, "graph": 2}
    elif how in ODD:
        torch.manual_seed(1)
        odd = ODD[how]()
        mine = pyg.Sequential(
            "x, edge_index",
            [
                (pyg.SAGEConv(FEATURES, HIDDEN), "x, edge_index -> x"),
                (odd, "x, edge_index -> x"),
                (pyg.SAGEConv(HIDDEN, CLASSES), "x, edge_index -> x"),
            ],
        ).double()
    elif how == "trace":
        mine = Untraceable().double()
    elif how == "recompute":
        rest = {"recompute": True}
    elif how == "mean":
        rest = {"loss": nn.CrossEntropyLoss()}
    left = 2000 if how == "memory" else available_bytes()
    with mock.patch.object(admission, "available_bytes", return_value=left):
        train = {"timeout": 10.0, "check": how == "memory"}
        return told(mine, data(), 2, parallel, train=train, **rest)


@pytest.mark.parametrize(
    ("how", "world", "words"),
    [
        ("stages", 4, ["ModelError", "pipe=4", "4 stages", "1 step with weights", "at most"]),
        ("world", 3, ["ConfigError", "2 ranks for the mesh pipe=2 x graph=1", "got 3"]),
        ("product", 4, ["ConfigError", "6 ranks for the mesh pipe=3 x graph=2", "got 4"]),
        ("trace", 2, ["ModelError", "if x.sum() < 1e9", "layers"]),
        *((how, 2, ["ModelError", "chunks=2 to read their neighbours' rows", "(module_1"]) for how in ODD),
        (
            "memory",
            2,
            ["ModelError", "at least", "2 ranks on", "got 2.00 kB left", "rank 0, stage 0)"],
        ),
        ("recompute", 2, ["ConfigError", "model.recompute", "pipe=2", "chunks=2"]),
        ("mean", 2, ["ConfigError", 'reduction="none"']),
    ],
)
def test_refusals_reach_every_rank(ranks, how, world, words):
    found = ranks(world, refused, how, spoils=True)
    for rank in found[-1:] if how == "mean" else found:  # the last stage alone has a loss
        assert isinstance(rank, str)
        for word in words:
            assert word in rank
    assert all(isinstance(rank, str) for rank in found)


@pytest.mark.parametrize("schedule", ["1f1b", "kfkb"])
@pytest.mark.parametrize("kind", ["history", "exact"])
def test_schedules_for_independent_chunks_are_refused_where_they_read_each_other(schedule, kind):
    with pytest.raises(KagomeError, match=rf"schedule='{schedule}'(.|\n)*cross_chunk='{kind}'"):
        Parallel(pipe=2, chunks=4, schedule=schedule, cross_chunk=kind)


def untraceable(channel: Channel, parallel: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return told(Untraceable().double(), data(), 3, parallel)


@pytest.mark.parametrize("mesh", [{"pipe": 2, "chunks": 1}, {"pipe": 3, "chunks": 3, **EXACT}])
def test_a_model_that_cannot_be_traced_trains_by_the_names_of_its_layers(ranks, mesh):
    found = ranks(mesh["pipe"], untraceable, {**mesh, "layers": ("convs.0", "convs.1", "convs.2")})
    same(found, ranks(1, untraceable, {})[0])


# Odd shapes ----------------------------------------------------------------------------------------


def small(channel: Channel, vertices: int, parallel: dict[str, Any], trains: int = 1) -> Any:
    """A path with a training vertex or two: most chunks have none, some have no vertex."""
    ids = torch.arange(vertices)
    given = Data(
        x=torch.eye(vertices, FEATURES).double(),
        edge_index=torch.stack([ids[:-1], ids[1:]]),
        y=ids % CLASSES,
        train_mask=(ids >= 1) & (ids < 1 + trains),
        val_mask=ids < 0,
        test_mask=ids == 2,
    )
    return told(model("gcnii", 0.2), given, 4, parallel)


@pytest.mark.some(1)
@pytest.mark.parametrize("vertices", [3, 7])
@pytest.mark.parametrize(
    "mesh",
    [
        {"pipe": 1, "chunks": 6},
        {"pipe": 2, "chunks": 6},
        {"pipe": 3, "chunks": 2},
        {"pipe": 2, "graph": 2, "chunks": 5},
    ],
    ids=["one stage", "two stages", "fewer chunks than stages", "hybrid"],
)
def test_empty_chunks_and_chunks_without_a_training_vertex_are_exact(ranks, mesh, vertices):
    world = mesh["pipe"] * mesh.get("graph", 1)
    same(ranks(world, small, vertices, {**mesh, **EXACT}), ranks(1, small, vertices, {})[0])


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "mesh",
    [{"pipe": 1, "chunks": 6}, {"pipe": 3, "chunks": 2}, {"pipe": 2, "graph": 2, "chunks": 5}],
    ids=["one stage", "fewer chunks than stages", "hybrid"],
)
@pytest.mark.parametrize(("kind", "schedule"), [("history", "auto"), ("drop", "kfkb")])
def test_empty_chunks_train_on(ranks, kind, mesh, schedule):
    if kind == "history":
        mesh = {**mesh, "guard": False}
    found = ranks(
        mesh["pipe"] * mesh.get("graph", 1), small, 7, {**mesh, "cross_chunk": kind, "schedule": schedule}
    )
    for rank in found:
        assert isinstance(rank, dict), rank
        assert rank["losses"] == found[0]["losses"]
        assert all(torch.isfinite(torch.tensor(rank["losses"])))
        for key, value in rank["weights"].items():
            assert torch.equal(value, found[0]["weights"][key]), key


def edgeless(channel: Channel, parallel: dict[str, Any]) -> Any:
    given = data()
    given.edge_index = given.edge_index[:, :0]
    return told(model("sage", 0.2), given, 3, parallel)


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_without_edges_is_the_same_however_it_is_cut(ranks, kind):
    alone = ranks(1, edgeless, {})[0]
    guard = {"guard": False} if kind == "history" else {}
    for mesh in ({"pipe": 2, "chunks": 3}, {"pipe": 1, "graph": 2, "chunks": 2}):
        same(ranks(2, edgeless, {**mesh, "cross_chunk": kind, **guard}), alone)


# A fault on one rank -------------------------------------------------------------------------------


class Failing(pyg.GCNConv):
    """A layer that raises once it is told to."""

    armed: str | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.armed == "forward" and self.training:
            raise ValueError("this layer is armed")
        out = super().forward(x, edge_index)
        if self.armed == "backward" and out.requires_grad:
            out.register_hook(_raise)
        return out


def _raise(_: Tensor) -> None:
    raise ValueError("this layer is armed")


def armed(channel: Channel, failing: int, how: str, parallel: dict[str, Any]) -> tuple[str, str, str]:
    """What each rank raised, and what it printed, where one rank's layer raises in the second epoch."""
    mine = model("gcn")
    mine.convs = nn.ModuleList(Failing(conv.in_channels, conv.out_channels).double() for conv in mine.convs)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            with Trainer(
                mine,
                data(),
                parallel=Parallel(**parallel),
                train=settings(timeout=4.0),
                report=QUIET,
                optimizer=sgd,
            ) as trainer:
                trainer.fit(1)
                if channel.rank == failing:
                    for conv in mine.convs:
                        conv.armed = how
                trainer.fit(3)
        except (KagomeError, ValueError) as error:
            return type(error).__name__, str(error), said.getvalue()
    return "", "", said.getvalue()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("kind", "failing", "how"),
    [("history", 0, "backward"), ("history", 1, "forward"), ("exact", 0, "backward"), ("drop", 1, "forward")],
)
def test_a_fault_in_an_action_ends_all_ranks(ranks, kind, failing, how):
    guard = {"guard": False} if kind == "history" else {}
    parallel = {"pipe": 2, "chunks": 3, "cross_chunk": kind, **guard}
    found = ranks(2, armed, failing, how, parallel, spoils=True, timeout=50.0)
    name, text, said = found[failing]
    assert (name, text) == ("ValueError", "this layer is armed")
    action = "F" if how == "forward" else "B"
    lines = said.splitlines()
    at = next(place for place, line in enumerate(lines) if f"rank {failing} stopped here" in line)
    arrow = lines[at + 2].index("^")
    assert lines[at + 1][arrow:].startswith(f"{failing}{action}")
    name, text, _ = found[1 - failing]
    assert name == "CommError"
    assert f"rank {failing}, which was last seen in 'epoch 2: {failing}{action}" in text


# A chunk that does less than the others -------------------------------------------------------------


class Idle(pyg.SAGEConv):
    """A layer that leaves rows as they are where there are so many edges."""

    edges = -1

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if edge_index.size(1) == self.edges:
            return x
        return super().forward(x, edge_index)


def idle(channel: Channel, chunk: int, parallel: dict[str, Any]) -> str:
    """What each rank raised, where a chunk skips a layer from the second epoch on."""
    mine = model("sage")
    mine.convs[1] = layer = Idle(HIDDEN, HIDDEN).double()
    given = {"parallel": Parallel(**parallel), "train": settings(timeout=4.0, eval_every=9), "report": QUIET}
    with contextlib.redirect_stderr(io.StringIO()), Trainer(mine, data(), optimizer=sgd, **given) as trainer:
        trainer.fit(1)
        edges = [scope.views[0].edge_index.size(1) for scope in trainer.engine.chunks.pieces]
        assert edges.count(edges[chunk]) == 1
        layer.edges = edges[chunk]
        try:
            trainer.fit(3)
        except KagomeError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.some(1)
@pytest.mark.parametrize("chunk", [0, 1])
def test_chunks_that_read_less_often_than_others_are_refused(ranks, chunk):
    """Others read what it had not written."""
    parallel = {"pipe": 2, "chunks": 3, "cross_chunk": "history", "guard": False}
    found = ranks(2, idle, chunk, parallel, spoils=True, timeout=40.0)
    for rank in found:  # the others are told
        assert "ModelError: expected all chunks of a part to read their neighbours at the same places" in rank
        assert f"chunk {chunk}" in rank
        assert "convs.1" in rank


def few_rows_mixed(channel: Channel, epochs: int) -> Any:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        values = nn.functional.cross_entropy(out, y, reduction="none")
        return values if len(y) > 3 else values - out.mean()

    return told(model("gcn"), data(), epochs, {"pipe": 2, "chunks": 12, **HISTORY}, loss=loss)


def test_a_loss_is_tried_on_the_rows_of_chunks_when_they_first_have_it(ranks):
    """The first epoch is exact and has all rows at once: what a chunk's few rows would change is not seen."""
    assert not isinstance(ranks(2, few_rows_mixed, 1)[-1], str)
    for rank in ranks(2, few_rows_mixed, 2, spoils=True):
        assert rank.startswith("ConfigError")
        assert "it looks at all rows of one rank" in rank
