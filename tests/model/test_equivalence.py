"""Likeness: a model whose steps do not give what forward gives is refused, others are left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions
from kagome.config import Model
from kagome.errors import ModelError
from kagome.graph.partition.partition import partition
from kagome.model.trace.builder import chain
from kagome.model.trace.shapes import Survey, trace
from kagome.model.zoo import build_model
from kagome.profile.step_shapes import survey_on_sample
from odd_models import ODD_MODELS
from pipelines import HIDDEN, MODELS, data, told
from training import CLASSES, FEATURES, graph

ZOO = (
    *("gcn", "sage", "gin", "gat", "gatv2", "pna", "edgecnn"),
    *("gcn2", "appnp", "sgc", "deepgcn", "resgcn+", "transformer"),
)


class Two(nn.Module):
    """Two layers, and something done to the rows between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, CLASSES)
        self.norm, self.map = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def between(self, rows: Tensor) -> Tensor:
        return rows  # what a kind does to them is its own

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.between(self.first(x, edge_index)).tanh(), edge_index)


class Typed(Two):
    """What stands for a tensor while notes are taken is none."""

    def between(self, rows: Tensor) -> Tensor:
        return self.norm(rows) if isinstance(rows, Tensor) else rows


class TypedEvaluation(Two):
    """The same, where training does not come by."""

    def between(self, rows: Tensor) -> Tensor:
        return self.norm(rows) if isinstance(rows, Tensor) and not self.training else rows


class Alias(Two):
    """Two names of one tensor, which is added to in place."""

    def between(self, rows: Tensor) -> Tensor:
        before = rows
        rows += self.map(rows.detach())
        return rows + before


class Last(Two):
    """The difference comes after every module."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = super().forward(x, edge_index)
        return out * 2 if isinstance(out, Tensor) else out


class Residual(Two):
    """A branch that does not count yet, as its weight is still zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def between(self, rows: Tensor) -> Tensor:
        other = rows.relu() if isinstance(rows, Tensor) else rows
        return rows + self.weight * self.map(other)


class Plain(Two):
    """An activation between two layers that alone are named."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Undefined(Two):
    """Rows without numbers, some infinite."""

    def between(self, rows: Tensor) -> Tensor:
        return torch.cat([rows[:, :2].clamp(max=-1).log(), rows[:, 2:3] / 0, rows[:, 3:]], 1)


class Elsewhere(Two):
    """A number that is drawn where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def between(self, rows: Tensor) -> Tensor:
        return self.noise(rows)


class Noise(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows * random.random() if rows.sum() < 1e9 else rows


class Counts(Two):
    """Calls are counted, in a buffer and beside it, and the numbers are used."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def between(self, rows: Tensor) -> Tensor:
        return self.count(rows)


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + rows.detach().mean()
        return rows * self.calls + self.seen


class Draws(Two):
    """Rows that are dropped here and there, edges, and numbers for no row."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.batch = nn.Dropout(0.5), nn.BatchNorm1d(HIDDEN)
        self.inside = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.3), nn.ReLU(inplace=True))

    def between(self, rows: Tensor) -> Tensor:
        rows = self.inside(F.dropout(self.batch(rows), 0.4, self.training))
        return self.drop(rows) + torch.rand(HIDDEN)


class Again(Two):
    """Layers that are to run again in backward."""

    def between(self, rows: Tensor) -> Tensor:
        return checkpoint(self.map, rows, use_reentrant=False)


class ChangesInput(Two):
    """The features are written to, and not read again."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x += 1
        return super().forward(x, edge_index)


def look(model: nn.Module, layers: tuple[str, ...] = (), *, amp: bool = False) -> Survey:
    kind = next(model.parameters()).dtype
    part = partition(graph(kind, 120), parts=1, method="contiguous")[0]
    names = ["edge_index", *part.nodes, *part.edges]
    steps = chain(model, layers, names) if layers else trace(model, names)
    return survey_on_sample(model, steps, part, PartOptions(seed=3, amp=amp), named=bool(layers))


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return build().double()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Typed, ["outputs in training that differ by up to", "is second, after first", "no step calls norm"]),
        (TypedEvaluation, ["outputs in evaluation that differ by up to", "no step calls norm"]),
        (Alias, ["outputs in training that differ by up to", "is second, after map", "test_equivalence.py:"]),
        (Last, ["outputs in training that differ by up to", "look behind the last one, after second"]),
        (Residual, ["outputs in training that are alike, but", "is map, after first"]),
    ],
)
def test_a_model_that_is_traced_wrongly_is_refused(build, words):
    with pytest.raises(ModelError) as caught:
        look(made(build))
    for word in [*words, "h = h + a for h += a", "isinstance(h, Tensor)", "--parallel.layers"]:
        assert word in str(caught.value)


def test_what_lies_between_named_layers_is_not_left_out():
    with pytest.raises(ModelError) as caught:
        look(made(Plain), ("first", "second"))
    for word in ("outputs in training that differ by up to", "is second, after first", "goes into modules"):
        assert word in str(caught.value)


def test_a_forward_that_fails_where_its_named_layers_do_not_is_refused():
    class Fails(Two):
        def between(self, rows: Tensor) -> Tensor:
            return rows.view(-1, 7 * HIDDEN + 1)

    with pytest.raises(
        ModelError, match=r"forward to run on a small sample, .*; got RuntimeError(.|\n)*x.size\(0\)"
    ):
        look(made(Fails), ("first", "second"))


def trained(channel: Channel, layers: tuple[str, ...]) -> Any:
    model = made(Plain if layers else Typed)
    return told(model, data(), 2, {"pipe": 2, "chunks": 2, "cross_chunk": "exact", "layers": layers})


@pytest.mark.parametrize("layers", [(), ("first", "second")])
def test_every_rank_refuses(ranks, layers):
    for found in ranks(2, trained, layers, spoils=True):
        assert isinstance(found, str)
        assert "ModelError" in found
        assert "is second, after first" in found


GOOD: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: MODELS[name](0.4) for name in MODELS},  # type: ignore[misc]
    **{each.__name__: each for each in (Undefined, Elsewhere, Counts, Draws, Again, ChangesInput)},
    **{
        f"odd {name}": lambda name=name: ODD_MODELS[name](FEATURES, CLASSES)  # type: ignore[misc]
        for name in ODD_MODELS
    },
}


def state(model: nn.Module) -> dict[str, Any]:
    return {
        name: (dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for name, module in model.named_modules()
    }


@pytest.mark.some(14)
@pytest.mark.parametrize("name", GOOD)
def test_other_models_are_let_pass_and_left_as_they_were(name):
    model = made(GOOD[name])
    before, weights = state(model), {key: value.clone() for key, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    look(model)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert state(model) == before
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)


@pytest.mark.some(8)
@pytest.mark.parametrize("amp", ["none", "bf16"])
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_passes(name, amp):
    settings = Model(name=name, layers=2, hidden=HIDDEN, dropout=0.5, heads=2)
    histogram = torch.bincount(torch.bincount(data().edge_index[1]))
    torch.manual_seed(1)
    model = build_model(
        settings,
        in_channels=FEATURES,
        out_channels=CLASSES,
        num_nodes=data().num_nodes,
        degree_histogram=histogram,
    )
    look(model.double() if amp == "none" else model, amp=amp == "bf16")
