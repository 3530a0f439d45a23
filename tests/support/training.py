"""A small graph, small models, a call that trains on the pool's ranks: what the tests of ``run`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

import kagome
from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.components.offload import Offload
from kagome.config import Report, Train

QUIET = Report(page=False, trace=False, progress=False)
FEATURES, CLASSES, VERTICES = 8, 4, 200


def graph(dtype: torch.dtype = torch.float32, vertices: int = VERTICES) -> Data:
    data = kagome.load(
        f"sbm:vertices={vertices},degree=6,features={FEATURES},classes={CLASSES},communities=4"
    )
    data.x = data.x.to(dtype)
    return data


def settings(**values: Any) -> Train:
    return Train(**{"check": False, "timeout": 20.0, "epochs": 5, **values})


@contextmanager
def host_apart() -> Iterator[None]:
    """Let activations move to the host from a CPU too, as if its memory were not the host's."""
    inner = Offload.__init__

    def made(self: Offload, memory: Any, device: torch.device, stays: Callable[[Tensor], bool]) -> None:
        inner(self, memory, torch.device("cuda"), stays)

    with mock.patch.object(Offload, "__init__", made):
        yield


class Gcn(nn.Module):
    """No bias before a batch norm: its gradient is rounding alone, and Adam makes steps of that."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = pyg.GCNConv(FEATURES, 8, bias=False), nn.BatchNorm1d(8)
        self.last, self.dropout = pyg.GCNConv(8, CLASSES), dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm(self.first(x, edge_index)).relu()
        return self.last(F.dropout(x, self.dropout, self.training), edge_index)


class Gat(nn.Module):
    """Dropout on attention, on rows, and a batch norm between."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = pyg.GATConv(FEATURES, 4, heads=2, dropout=dropout, bias=False)
        self.norm, self.drop = pyg.BatchNorm(8), nn.Dropout(dropout)
        self.last = pyg.GATv2Conv(8, CLASSES, heads=2, concat=False, dropout=dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.drop(F.elu(self.norm(self.first(x, edge_index)))), edge_index)


MODELS: dict[str, Callable[[float], nn.Module]] = {"gcn": Gcn, "gat": Gat}


def model(name: str, dropout: float = 0.0, dtype: torch.dtype = torch.float32, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name](dropout).to(dtype)


def losses(trainer: Trainer) -> list[float | None]:
    return [record.loss for record in trainer.records]


def curve(channel: Channel, name: str, dropout: float, dtype: torch.dtype, epochs: int) -> dict[str, Any]:
    """Train on this many ranks; what came out, as plain values."""
    # Other ranks start from other weights: rank 0's are to win.
    mine = model(name, dropout, dtype, seed=1 + channel.rank)
    with Trainer(mine, graph(dtype), train=settings(epochs=epochs), report=QUIET) as trainer:
        trainer.fit()
        last = {k: v.clone() for k, v in mine.state_dict().items()}
        scores = trainer.predict()
        return {
            "losses": losses(trainer),
            "metrics": [(record.train_metric, record.val_metric) for record in trainer.records],
            "test": trainer.evaluate("test"),
            "weights": last,
            "scores": scores if channel.rank == 0 else None,
        }


def plain_losses(mine: nn.Module, data: Data, epochs: int) -> list[float]:
    """A training loop as PyG's tutorial has it, with Kagome's default optimizer."""
    optimizer = torch.optim.Adam(mine.parameters(), lr=0.01, weight_decay=5e-4)
    found = []
    for _ in range(epochs):
        mine.train()
        optimizer.zero_grad()
        out = mine(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found
