"""Training with late rows in one process, in plain PyG on the whole graph: what ``Line`` must give.

Where it sits: each layer's reads of its neighbours are replaced, edge by edge, by ``history_reference``'s
``rewire``; nothing of Kagome's lists, lines or exchanges is used, only which part a vertex is in.

::

    edge j -> i     same part       h[j]
                    another part    forward   h[j] of the last epoch, a constant
                                    backward  h[j] gets what the last epoch's edge gave it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from history_reference import rewire
from kagome.model.exact import dropout as draws


@dataclass
class Mean:
    """A moving average, corrected for its beginning."""

    share: float
    total: Tensor | float = 0.0
    weight: float = 0.0

    def take(self, value: Tensor) -> None:
        self.total = self.share * self.total + (1 - self.share) * value
        self.weight = self.share * self.weight + 1 - self.share

    @property
    def value(self) -> Tensor:
        assert isinstance(self.total, Tensor)
        return self.total / self.weight


@dataclass
class Reads:
    """How the edges of one epoch read, and what they left for the next.

    Args:
        part: The part of each vertex.
        smoothing: Share of earlier epochs.
    """

    part: Tensor
    smoothing: float = 0.0
    exact: bool = True
    rows: dict[Any, Mean] = field(default_factory=dict)
    gradients: dict[Any, Mean] = field(default_factory=dict)
    passed_on: list[Tensor] = field(default_factory=list)
    _read: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def begin(self, exact: bool) -> None:
        """An epoch begins: what the last one left is known now."""
        for key, (rows, edges) in self._read.items():
            assert edges.grad is not None
            self.rows.setdefault(key, Mean(self.smoothing)).take(rows)
            self.gradients.setdefault(key, Mean(self.smoothing)).take(edges.grad)
        self._read, self.passed_on, self.exact = {}, [], exact

    def of(self, key: Any, h: Tensor, edge_index: Tensor) -> Tensor:
        """What every edge reads of rows h."""
        source, target = edge_index
        found = h[source]
        if not h.requires_grad:
            return found  # the same in every epoch
        if not self.exact:
            away = (self.part[source] != self.part[target]).view(-1, *[1] * (h.dim() - 1))
            self.passed_on.append((found * self.gradients[key].value * away).sum())
            found = torch.where(away, self.rows[key].value[source], found)
        found = found + 0.0  # one leaf an edge: late reads too leave a gradient
        found.retain_grad()
        self._read[key] = h.detach().clone(), found
        return found

    def normalise(self, name: str, norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
        """Statistics are this epoch's, of all vertices."""
        return nn.BatchNorm1d.forward(norm, x)


@contextmanager
def dropping(module: nn.Module, seed: int, epoch: int) -> Iterator[None]:
    """Let the dropouts in a module's own forward draw what Kagome's do: by vertex."""
    count = 0

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        nonlocal count
        if not training or p == 0:
            return x
        count += 1
        key = draws.call_key(seed, epoch, type(module).__name__, count)
        return draws.plain_scaled(x, torch.arange(x.size(0)), key, p)

    with mock.patch.object(F, "dropout", dropout):
        yield


@dataclass
class Course:
    """What training left: of each epoch the loss and the gradients."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def reference(
    mine: nn.Module,
    data: Data,
    part: Tensor,
    epochs: int,
    *,
    seed: int,
    rate: float,
    late: bool = True,
    sync_every: int | Collection[int] = (),
    smoothing: float = 0.0,
    fast: bool = False,
    looks: Callable[[int], None] | None = None,
) -> Course:
    """Train in place with SGD.

    Args:
        mine: The model; dropouts are calls of its own forward.
        data: The whole graph.
        part: The part of each vertex.
        epochs: The first one reads no late rows.
        seed: Of the draws.
        rate: Of SGD.
        late: Off, every epoch is exact.
        sync_every: So are each so many, or these.
        smoothing: Share of earlier epochs in late rows and gradients.
        fast: As Kagome's fast paths do it: see ``rewire``.
        looks: Called after each epoch.
    """
    reads = Reads(part, smoothing)
    rewire(mine, reads, fast=fast)
    optimizer = torch.optim.SGD(mine.parameters(), lr=rate)
    course = Course([], [])
    for epoch in range(1, epochs + 1):
        due = epoch % sync_every == 0 if isinstance(sync_every, int) else epoch in sync_every
        exact = epoch == 1 or not late or due
        reads.begin(exact)
        mine.train()
        optimizer.zero_grad()
        with dropping(mine, seed, epoch):
            out = mine(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        torch.stack([loss, *reads.passed_on]).sum().backward()
        course.losses.append(float(loss.detach()))
        named = mine.named_parameters()
        course.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        optimizer.step()
        if looks is not None:
            looks(epoch)
    return course
