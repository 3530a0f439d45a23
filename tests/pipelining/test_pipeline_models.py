"""Models that are not plain chains of layers: a pipeline gives one rank's numbers, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome.comm.channel import Channel
from pipelines import HIDDEN, data, told
from training import CLASSES, FEATURES

EXACT = {"pipe": 2, "chunks": 4, "cross_chunk": "exact"}


class Between(nn.Module):
    """Three layers, with something done to the rows of the first, which the last reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv(FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, HIDDEN)
        self.three = pyg.SAGEConv(HIDDEN, CLASSES)

    def between(self, rows: Tensor) -> Tensor:
        return rows  # what a kind does to them is its own

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.between(self.one(x, edge_index))
        return self.three(self.two(rows, edge_index).tanh() + rows, edge_index)


class Unmarked(Between):
    """A call that gives no mark: what its rows are is told by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 3)

    def between(self, rows: Tensor) -> Tensor:
        return torch.einsum("nd,df->nf", rows, self.weight)


class Zeros(Between):
    """Zeros that need a gradient once something is written to them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def between(self, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        return out.add_(self.inner(rows))


class InPlace(Between):
    """Rows that are written to after other steps gave them."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def between(self, rows: Tensor) -> Tensor:
        return self.act(rows.add_(0.25))


class Rectifies(pyg.SAGEConv):
    """A layer that begins by writing to what it is given."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(F.relu(x, inplace=True), edge_index)


class InPlaceInside(Between):
    """Rows that a layer writes to are read again, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.two = nn.Identity(), Rectifies(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.one(x, edge_index)
        same = self.keep(rows)
        return self.three(self.two(same, edge_index).tanh() + rows + same, edge_index)


class InputInPlace(Between):
    """The features are written to by the layer that they are given to."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Rectifies(FEATURES, HIDDEN)


class Recurrent(Between):
    """A layer that gives two tensors, both of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def between(self, rows: Tensor) -> Tensor:
        out, last = self.gru(torch.stack([rows, rows.tanh()], 1))
        return out[:, -1] + last[0]


class Named(Between):
    """Torch calls that give several tensors, which are asked for by name."""

    def between(self, rows: Tensor) -> Tensor:
        pairs = rows.view(rows.size(0), -1, 2)
        parts = [pairs.max(-1).values, pairs.min(-1).values, rows.topk(2).values, rows.sort(1).values[:, :1]]
        return torch.cat([*parts, rows.median(1).values.unsqueeze(1)], 1)[:, -HIDDEN:]


class Middle(Between):
    """A value of all vertices that no sum gives."""

    def between(self, rows: Tensor) -> Tensor:
        return rows - rows.median(0).values


class Attention(Between):
    """Weights of edges and of loops that the layer has added: they have no place in a chunk's edges."""

    def __init__(self) -> None:
        super().__init__()
        self.one = pyg.GATConv(FEATURES, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows, (_, weights) = self.one(x, edge_index, return_attention_weights=True)
        return self.three(self.two(rows.tanh(), edge_index) * weights.mean(), edge_index)


class Spectral(Between):
    """Each call moves a buffer that the next call reads, in an epoch and from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.utils.spectral_norm(nn.Linear(HIDDEN, HIDDEN))

    def between(self, rows: Tensor) -> Tensor:
        return self.map(self.map(rows).tanh())


class Constant(Between):
    """A buffer that autograd keeps of each chunk, and nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, HIDDEN))
        self.norm = nn.BatchNorm1d(HIDDEN)

    def between(self, rows: Tensor) -> Tensor:
        return self.norm(rows) * self.scale


class Cached(nn.Module):
    """What a layer keeps of one chunk is not another's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.SGConv(FEATURES, HIDDEN, K=2, cached=True)
        self.second = pyg.GCNConv(HIDDEN, HIDDEN, cached=True)
        self.hops, self.last = pyg.APPNP(2, 0.1, cached=True), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.second(self.first(x, edge_index).relu(), edge_index)
        return self.last(self.hops(rows, edge_index))


class Fresh(Cached):
    """The same layers, which keep nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first.cached = self.second.cached = self.hops.cached = False


class Shifted(Between):
    """Rows that move: wrong wherever the graph is cut."""

    def between(self, rows: Tensor) -> Tensor:
        return rows.roll(1, 0)


class Sized(Between):
    """A weight for each vertex, by its place."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Parameter(torch.randn(120, HIDDEN))

    def between(self, rows: Tensor) -> Tensor:
        return rows + self.each


class Kinds(Between):
    """Vertices of two kinds, told apart by their place, with a layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def between(self, rows: Tensor) -> Tensor:
        kinds = torch.cat([self.first(rows[:30]), self.second(rows[30:])])
        return torch.where(torch.arange(rows.size(0))[:, None] < 40, kinds, rows)


class Pooled(Between):
    """The mean of some vertices, and one vertex's row."""

    def between(self, rows: Tensor) -> Tensor:
        return rows - rows[-20:].mean(0) + rows[3]


KINDS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (
        Unmarked,
        InPlace,
        InPlaceInside,
        InputInPlace,
        Recurrent,
        Named,
        Middle,
        Attention,
        Spectral,
        Constant,
        Cached,
        Fresh,
        Shifted,
        Sized,
        Kinds,
        Pooled,
        Zeros,
    )
}


def ran(channel: Channel, name: str, parallel: dict[str, Any], check: bool) -> Any:
    torch.manual_seed(1)
    found = told(KINDS[name]().double(), data(), 3, parallel, train={"check": check, "timeout": 20.0})
    return found if isinstance(found, str) else found["losses"]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "name",
    [
        "Unmarked",
        "InPlace",
        "InPlaceInside",
        "Recurrent",
        "Named",
        "Attention",
        "Spectral",
        "Constant",
        "Cached",
        "Kinds",
        "Pooled",
        "Sized",
        "Zeros",
    ],
)
def test_it_is_what_one_rank_gives(ranks, name):
    alone = ran(Channel(None, "cpu"), name, {}, False)
    assert isinstance(alone, list), alone
    for found in ranks(2, ran, name, EXACT, True):
        assert found == pytest.approx(alone, rel=0, abs=1e-10)


@pytest.mark.parametrize("name", ["Sized", "Unmarked", "Kinds", "Pooled"])
def test_merged_chunks_know_each_vertex_by_its_place(name):
    """Own rows in the order of chunks took another vertex's weight, where one rank has all stages."""
    alone, found = (
        ran(Channel(None, "cpu"), name, parallel, bool(parallel))
        for parallel in ({}, {"chunks": 3, "cross_chunk": "exact"})
    )
    assert found == pytest.approx(alone, rel=0, abs=1e-10)


def test_layers_that_keep_what_they_have_seen_do_so_on_one_rank_too():
    kept, fresh = (ran(Channel(None, "cpu"), name, {}, False) for name in ("Cached", "Fresh"))
    assert kept == pytest.approx(fresh, rel=0, abs=1e-10)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Shifted", ["ModelError", "roll, which goes from one vertex to the next"]),
        ("InputInPlace", ["ModelError", "changes 'x' in place (one)"]),
        ("Middle", ["ModelError", "a call of 'median' over all vertices"]),
    ],
)
def test_what_a_cut_would_change_is_refused_in_a_pipeline_too(ranks, name, words):
    for found in ranks(2, ran, name, EXACT, True, spoils=True):
        assert isinstance(found, str), found
        for word in words:
            assert word in found
