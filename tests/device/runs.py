"""Runs of a Trainer on fake devices and, with the same settings, on the CPU, which the tests here share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch_geometric.nn as pyg
from bed import waits, without_gpus
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome import Parallel, Trainer
from kagome.config import Train
from kagome.train import admission
from training import CLASSES, FEATURES, QUIET, graph

EPOCHS = 4
EDGE_COLUMNS = 3


@dataclass(frozen=True)
class Run:
    """Settings of a run.

    Args:
        ranks: How many.
        model: One of ``MODELS``.
        parallel: What ``Parallel`` gets.
        train: What ``Train`` gets beside the defaults of these tests.
        recompute: Whether layers run again in backward.
        near: How far losses may be from the CPU's, as a share of them.
    """

    ranks: int
    model: str = "GCN"
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    near: float = 1e-10


@dataclass(frozen=True)
class Found:
    """What a rank found.

    Args:
        device: Where it computed.
        losses: Of all epochs.
        metric: Of the test rows, after the last.
        scores: Predictions, on rank 0.
        waits: Waits of the host in an epoch that is neither the first nor the last, by place.
    """

    device: str
    losses: list[float | None]
    metric: float | None
    scores: Tensor | None
    waits: dict[str, int]


class Stack(nn.Module):
    """Convolutions with ReLU and dropout between them."""

    def __init__(self, make: Callable[[int, int], nn.Module], layers: int = 4) -> None:
        super().__init__()
        widths = [FEATURES, *[8] * (layers - 1), CLASSES]
        self.convs = nn.ModuleList(make(a, b) for a, b in pairwise(widths))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = self.drop(conv(x, edge_index).relu())
        return self.convs[-1](x, edge_index)


class EdgeStack(Stack):
    """The same of convolutions that read edge features."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = self.drop(conv(x, edge_index, edge_attr).relu())
        return self.convs[-1](x, edge_index, edge_attr)


class Normed(nn.Module):
    """A convolution and a norm. A bias between them has a gradient of rounding alone."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv, self.norm = pyg.GCNConv(a, b, bias=False), pyg.BatchNorm(b)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.norm(self.conv(x, edge_index))


def _heads(kind: type[nn.Module], **more: Any) -> Callable[[int, int], nn.Module]:
    return lambda a, b: kind(a, b, heads=2, concat=False, **more)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: Stack(pyg.GCNConv),
    "SAGE": lambda: Stack(pyg.SAGEConv),
    "max": lambda: Stack(lambda a, b: pyg.SAGEConv(a, b, aggr="max")),
    "GIN": lambda: Stack(
        lambda a, b: pyg.GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b)))
    ),
    "GAT": lambda: Stack(_heads(pyg.GATConv)),
    "GATv2": lambda: Stack(_heads(pyg.GATv2Conv)),
    "Transformer": lambda: EdgeStack(_heads(pyg.TransformerConv, edge_dim=EDGE_COLUMNS)),
    "GEN": lambda: Stack(pyg.GENConv),
    "norms": lambda: Stack(Normed),
}


def model(name: str) -> nn.Module:
    """A model in float64, the same wherever it is made."""
    torch.manual_seed(1)
    return MODELS[name]().double()


def data(name: str) -> Data:
    """The graph of a model, in float64."""
    made = graph(torch.float64)
    if name == "Transformer":
        generator = torch.Generator().manual_seed(5)
        made.edge_attr = torch.randn(made.num_edges, EDGE_COLUMNS, generator=generator, dtype=torch.float64)
    return made


def counting(it: Trainer) -> list[dict[str, int]]:
    """A list that gets, as each epoch begins, the waits of the host since the one before began."""
    train, found = it.engine.train, []

    def counted(*args: Any, **more: Any) -> Any:
        found.append(waits().take())
        return train(*args, **more)

    it.engine.train = counted  # type: ignore[method-assign]
    return found


def trainer(run: Run, **more: Any) -> Trainer:
    """The Trainer of a run."""
    train = Train(**{"check": False, "timeout": 30.0, "epochs": EPOCHS, "eval_every": 10**6, **run.train})
    cut = Parallel(**{"reuse": False, "partitioner": "contiguous", **run.parallel})
    made = model(run.model)
    return Trainer(
        made, data(run.model), parallel=cut, train=train, report=QUIET, recompute=run.recompute, **more
    )


_rates: dict[tuple[str, ...], Any] = {}


@contextmanager
def foreseen_once() -> Iterator[None]:
    """Measure what memory a model takes once on each device: it is a third of a short run's work."""
    measure = admission.rates_of

    def once(model: nn.Module, optimizer: Any, part: Any, options: Any, **more: Any) -> Any:
        key = (repr(model), repr(options), repr(more))
        if key not in _rates:
            _rates[key] = measure(model, optimizer, part, options, **more)
        return _rates[key]

    with patch.object(admission, "rates_of", once):
        yield


def trained(run: Run) -> Found:
    """Train on this rank's device."""
    # Small tensors are moved, too, where activations leave the device.
    with foreseen_once(), patch("kagome.components.offload.LEAST", 64), trainer(run) as it:
        epochs = counting(it)
        it.fit()
        scores = it.predict()
        return Found(
            str(it.mesh.device),
            [record.loss for record in it.records],
            it.evaluate("test"),
            None if scores is None else scores.cpu(),
            epochs[-1],
        )


def both(run: Run) -> tuple[Found, Found]:
    """Train on the rank's fake device, then on the CPU."""
    found = trained(run)
    with without_gpus():
        return found, trained(run)
