"""Models, and a call that trains them on a mesh of stages, parts and chunks: what their tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.errors import KagomeError
from kagome.graph.partition.chunks import cut_part
from kagome.model.split.stages import links
from kagome.records.spans import action_of, training
from training import CLASSES, FEATURES, QUIET, graph, losses, settings

HIDDEN = 8
SEED = 3


class Chain(nn.Module):
    """Layers that follow each other, dropout by a function between them."""

    def __init__(self, conv: Callable[[int, int], nn.Module], layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        widths = [FEATURES, *[HIDDEN] * (layers - 1), CLASSES]
        self.convs = nn.ModuleList(conv(one, other) for one, other in pairwise(widths))
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index).tanh(), self.dropout, self.training)
        return self.convs[-1](x, edge_index)


class Gcnii(nn.Module):
    """Every layer reads the first rows as well: they go from stage to stage."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.convs = nn.ModuleList(pyg.GCN2Conv(HIDDEN, 0.2, 0.5, n + 1) for n in range(6))
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = first = self.first(F.dropout(x, self.dropout, self.training)).tanh()
        for conv in self.convs:
            x = conv(F.dropout(x, self.dropout, self.training), first, edge_index).tanh()
        return self.last(x)


class Jumping(nn.Module):
    """The last stage reads what every layer gave."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        widths = [FEATURES, HIDDEN, HIDDEN, HIDDEN]
        self.convs = nn.ModuleList(pyg.SAGEConv(one, other) for one, other in pairwise(widths))
        self.drop, self.jump = nn.Dropout(dropout), pyg.JumpingKnowledge("cat")
        self.last = nn.Linear(3 * HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        given = []
        for conv in self.convs:
            x = self.drop(conv(x, edge_index).tanh())
            given.append(x)
        return self.last(self.jump(given))


class Normed(nn.Module):
    """Statistics over all vertices. No bias before a norm: its gradient is rounding alone.

    One norm's name holds a word that Kagome's own sums have, as users' names may.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = pyg.GCNConv(FEATURES, HIDDEN, bias=False)
        self.one, self.backward = nn.BatchNorm1d(HIDDEN), pyg.BatchNorm(HIDDEN)
        self.second = pyg.GCNConv(HIDDEN, HIDDEN, bias=False)
        self.last, self.drop = pyg.SAGEConv(HIDDEN, CLASSES), nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.drop(self.one(self.first(x, edge_index)).tanh())
        x = self.drop(self.backward(self.second(x, edge_index)).tanh())
        return self.last(x, edge_index)


class Paired(nn.Module):
    """Sums over all vertices that are no batch norm's: they come in evaluation, too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.pair = pyg.SAGEConv(FEATURES, HIDDEN), pyg.PairNorm()
        self.second, self.layer = pyg.SAGEConv(HIDDEN, HIDDEN), pyg.LayerNorm(HIDDEN, mode="graph")
        self.last, self.drop = pyg.SAGEConv(HIDDEN, CLASSES), nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.drop(self.pair(self.first(x, edge_index)).tanh())
        x = self.drop(self.layer(self.second(x, edge_index)).tanh())
        return self.last(x, edge_index)


def _attention(dropout: float) -> nn.Module:
    return Chain(partial(pyg.GATConv, heads=2, concat=False, dropout=dropout), 4, dropout)


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "gcn": lambda dropout: Chain(pyg.GCNConv, 4, dropout),
    "sage": lambda dropout: Chain(pyg.SAGEConv, 4, dropout),
    "gcnii": Gcnii,
    "jumping": Jumping,
    "normed": Normed,
    "paired": Paired,
    "gat": _attention,
}


def model(name: str, dropout: float = 0.0, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name](dropout).double()


def data(vertices: int = 120, *, validated: bool = False) -> Data:
    """A small graph; without a validation set the weights at the end are the last epoch's."""
    made = graph(torch.float64, vertices)
    if not validated:
        made.val_mask = torch.zeros_like(made.val_mask)
    return made


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Weights after an epoch differ from those before by the gradient itself."""
    return torch.optim.SGD(parameters, lr=1.0)


def told(mine: nn.Module, given: Data, epochs: int, parallel: dict[str, Any], **rest: Any) -> Any:
    """Train; what came out as plain values, or the error's leaf and text."""
    train = settings(**{"seed": SEED, **rest.pop("train", {})})
    optimizer = sgd if rest.pop("plain_steps", False) else rest.pop("optimizer", None)
    resume = rest.pop("resume", None)
    try:
        with Trainer(
            mine, given, parallel=Parallel(**parallel), train=train, report=QUIET, optimizer=optimizer, **rest
        ) as trainer:
            summary = trainer.fit(epochs, resume=resume)
            spans: dict[int, list[str]] = {}
            for span in training(trainer.spans.as_list()):
                if span.epoch is not None and action_of(span.name) is not None:
                    spans.setdefault(span.epoch, []).append(span.name)
            chunks = parallel.get("chunks") or 1
            return {
                "losses": losses(trainer),
                "metrics": [(record.train_metric, record.val_metric) for record in trainer.records],
                "weights": {k: v.clone() for k, v in mine.state_dict().items()},
                "scores": trainer.predict(),
                "test": trainer.evaluate("test"),
                "best_epoch": summary["best_epoch"],
                "own": trainer.part.own,
                "bytes": [dict(record.bytes) for record in trainer.records],
                "bytes_per_epoch": summary["bytes_per_epoch"],
                "uncoded": [dict(record.uncoded) for record in trainer.records],
                "crossing": summary.get("crossing"),
                "max_age": summary["max_age"],
                "actions": spans,
                "links": links(trainer.engine.staging.stages) if hasattr(trainer.engine, "staging") else (),
                "notes": trainer.notes,
                "chunks": [piece.part.own for piece in cut_part(trainer.part, chunks, seed=SEED).pieces],
                "part": trainer.part.part,
                "stage": trainer.mesh.stage,
                "engine": type(trainer.engine).__name__,
            }
    except KagomeError as error:
        return f"{type(error).__name__}: {error}"


def trained(
    channel: Channel,
    name: str,
    parallel: dict[str, Any],
    epochs: int = 4,
    dropout: float = 0.4,
    plain_steps: bool = False,
    **rest: Any,
) -> Any:
    """Train a model of :data:`MODELS` on this many ranks; only rank 0's weights are to count."""
    mine = model(name, dropout, seed=1 + channel.rank)
    return told(mine, data(), epochs, parallel, plain_steps=plain_steps, **rest)


def trained_plainly(
    channel: Channel, name: str, parallel: dict[str, Any], epochs: int, train: dict[str, Any] | None = None
) -> Any:
    """The same without dropout, with SGD, and without fast paths: they may sum rows before mapping them."""
    return trained(channel, name, parallel, epochs, 0.0, plain_steps=True, fast=False, train=train or {})


def same(found: list[Any], alone: dict[str, Any], atol: float = 1e-9) -> None:
    """Every rank has the losses and weights of one rank, the same bits each."""
    for rank in found:
        assert isinstance(rank, dict), rank
    torch.testing.assert_close(found[0]["losses"], alone["losses"], rtol=0, atol=atol)
    torch.testing.assert_close(found[0]["weights"], alone["weights"], rtol=0, atol=10 * atol)
    torch.testing.assert_close(found[0]["scores"], alone["scores"], rtol=0, atol=100 * atol)
    for rank in found:
        assert rank["losses"] == found[0]["losses"]
        assert rank["test"] == alone["test"]
        for key, value in rank["weights"].items():
            assert torch.equal(value, found[0]["weights"][key]), f"{key} drifts apart"
        if rank is not found[0]:  # rank 0 has all scores, the others their own rows
            torch.testing.assert_close(rank["scores"], found[0]["scores"][rank["own"]])


def rotated(names: Iterable[Any], cases: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Each name with a case, each case with a name: all of both, not all pairs, which would take an hour."""
    one, other = list(names), [case if isinstance(case, tuple) else (case,) for case in cases]
    count = max(len(one), len(other))
    return [(one[place % len(one)], *other[place % len(other)]) for place in range(count)]
