"""Chunks that know nothing of each other: what goes over all vertices goes over a chunk's, as in PyG."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import subgraph

from kagome.comm.channel import Channel
from pipelines import HIDDEN, data, sgd, told
from training import CLASSES, FEATURES

EPOCHS = 2
Body = Callable[[Any, Tensor], Tensor]


class Over(nn.Module):
    """Its middle goes over all vertices; ``factor`` is what a sum over a chunk is taken times."""

    factor = 1.0

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, CLASSES)
        self.graph, self.pair, self.batch = pyg.GraphNorm(HIDDEN), pyg.PairNorm(), nn.BatchNorm1d(HIDDEN)
        self.virtual, self.body = nn.Linear(HIDDEN, HIDDEN), body

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.body(self, self.first(x, edge_index)).tanh(), edge_index)


BODIES: dict[str, Body] = {
    "mean": lambda m, x: x - x.mean(0),
    "deviation": lambda m, x: x / x.std(0, correction=0),
    "largest": lambda m, x: x - x.max(0).values,
    "smallest": lambda m, x: x - x.amin(0),
    "sum": lambda m, x: x + (0.01 * m.factor * x.sum(0)).sin(),
    "sum by size": lambda m, x: x - x.sum(0) / x.size(0),
    "added pool": lambda m, x: x + (0.01 * m.factor * pyg.global_add_pool(x, None)).sin(),
    "virtual node": lambda m, x: x + m.virtual(pyg.global_mean_pool(x, None)),
    "virtual maximum": lambda m, x: x + m.virtual(x.amax(0, keepdim=True)),
    "pool by group": lambda m, x: x + pyg.global_mean_pool(x, x.new_zeros(x.size(0), dtype=torch.long)),
    "graph norm": lambda m, x: m.graph(x),
    "pair norm": lambda m, x: m.pair(x),
    "batch norm": lambda m, x: m.batch(x),
    "softmax": lambda m, x: x * (1 + x.sum(1, keepdim=True).softmax(0) / m.factor * 100),
    "product": lambda m, x: x + x @ (0.01 * m.factor * x.t() @ x),
    "einsum": lambda m, x: x + x @ (0.01 * m.factor * torch.einsum("ni,nj->ij", x, x)),
}


def made(name: str) -> Over:
    torch.manual_seed(1)
    return Over(BODIES[name]).double()


def dropped(channel: Channel, name: str, parallel: dict[str, Any]) -> Any:
    return told(made(name), data(), EPOCHS, {**parallel, "cross_chunk": "drop"}, plain_steps=True)


def by_chunks(name: str, chunks: list[Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Each chunk a graph of its own, and one step for all of them: the losses and the weights."""
    given, model, losses = data(), made(name), []
    optimizer = sgd(model.parameters())
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for own in chunks:
            edges = subgraph(own, given.edge_index, relabel_nodes=True, num_nodes=given.num_nodes)[0]
            model.factor, mask = given.num_nodes / own.numel(), given.train_mask[own]
            out = model(given.x[own], edges)[mask]
            total = total + F.cross_entropy(out, given.y[own][mask], reduction="sum")
        loss = total / given.train_mask.sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters())


@pytest.mark.some(4)
@pytest.mark.parametrize("mesh", [{"pipe": 2, "chunks": 3}, {"graph": 2, "chunks": 2}], ids=["pipe", "graph"])
@pytest.mark.parametrize("name", BODIES)
def test_what_goes_over_all_vertices_goes_over_a_chunk(ranks, name, mesh):
    found = ranks(2, dropped, name, mesh)
    parts = found if "graph" in mesh else found[:1]
    losses, weights = by_chunks(name, [ids for rank in parts for ids in rank["chunks"]])
    for rank in found:
        assert rank["losses"] == pytest.approx(losses, abs=1e-10)
        for key, value in weights.items():
            torch.testing.assert_close(rank["weights"][key], value.detach(), rtol=0, atol=1e-9)
        assert any("sums over all vertices are told from a chunk's own" in note for note in rank["notes"])


def few(channel: Channel, name: str, parallel: dict[str, Any]) -> Any:
    given = data(7)
    ids = torch.arange(7)
    given.train_mask, given.val_mask, given.test_mask = ids < 3, ids < 0, ids == 6
    return told(made(name), given, EPOCHS, {**parallel, "cross_chunk": "drop"})


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name",
    [
        "virtual node",
        "virtual maximum",
        "batch norm",
        "graph norm",
        "largest",
        "softmax",
    ],
)
def test_chunks_without_a_vertex_spoil_no_weight_and_no_statistic(ranks, name):
    for rank in ranks(2, few, name, {"pipe": 2, "chunks": 9}):
        assert isinstance(rank, dict), rank
        assert all(torch.isfinite(torch.tensor(rank["losses"])))
        for key, value in rank["weights"].items():
            assert bool(value.isfinite().all()), key


class Derived(pyg.MessagePassing):
    """A layer that takes a derivative through its own sums."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = self.propagate(edge_index, x=self.map(x)).square().sum()
            return x + torch.autograd.grad(energy, x, create_graph=True)[0]


def derived(channel: Channel, kind: str) -> Any:
    torch.manual_seed(1)
    layers = [
        (pyg.SAGEConv(FEATURES, HIDDEN), "x, edge_index -> x"),
        (Derived(), "x, edge_index -> x"),
        (pyg.SAGEConv(HIDDEN, CLASSES), "x, edge_index -> x"),
    ]
    mine = pyg.Sequential("x, edge_index", layers).double()
    return told(mine, data(), 1, {"pipe": 2, "chunks": 3, "cross_chunk": kind})


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["drop", "exact", "history"])
def test_a_derivative_through_chunks_is_refused_on_all_ranks_before_training(ranks, kind):
    """One rank refused it in the first epoch."""
    found = ranks(2, derived, kind, spoils=True)
    assert found[0] == found[1]
    assert "ModelError: expected a derivative inside forward to be one of the whole graph's" in found[0]


NAMED: dict[str, Body] = {
    "a row": lambda m, x: x - x[3],
    "named rows": lambda m, x: x + x[torch.tensor([3, 50, 3])].mean(0),
    "a selected row": lambda m, x: x + x.select(0, 7),
}


def named(channel: Channel, name: str, parallel: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return told(Over(NAMED[name]).double(), data(), EPOCHS, parallel, plain_steps=True)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", NAMED)
def test_rows_of_named_vertices_are_refused_on_all_ranks_before_training(ranks, name):
    """They lie in one chunk: the others took zeros for them, or refused in the first epoch by one rank."""
    found = ranks(2, named, name, {"pipe": 2, "chunks": 3, "cross_chunk": "drop"}, spoils=True)
    assert found[0] == found[1]
    assert "expected each of the 3 chunks to know its own rows alone with cross_chunk='drop'" in found[0]
    assert "test_isolated_chunk.py, line" in found[0]


@pytest.mark.some(1)
@pytest.mark.parametrize("name", NAMED)
def test_rows_of_named_vertices_are_read_from_another_chunk(ranks, name):
    """With history they are the last epoch's: in the second one no such sum had been kept under its name."""
    alone = ranks(1, named, name, {})[0]
    exact, old = (
        ranks(2, named, name, {"pipe": 2, "chunks": 3, "cross_chunk": kind, "guard": False})[0]
        for kind in ("exact", "history")
    )
    assert exact["losses"] == pytest.approx(alone["losses"], abs=1e-10)
    assert len(old["losses"]) == EPOCHS
    assert old["losses"][0] == pytest.approx(alone["losses"][0], abs=1e-10)
