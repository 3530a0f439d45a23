"""Training with historical rows in one process, in plain PyG on the whole graph: what ``History`` must give.

Where it sits: each layer's reads of its neighbours are replaced, edge by edge; nothing of Kagome's tables,
lists or exchanges is used, only which chunk a vertex is in and the order of an epoch.

::

    edge j -> i     same chunk                                      h[j]
                    j's chunk before i's, or a peer's in one step   h[j], gradient times the scale if before
                    else                                            the row that was last kept, a constant
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import softmax

from kagome.graph.partition.chunks import order_of


@dataclass
class Reads:
    """How the edges of one epoch read, and what they left for the next.

    Args:
        part: The part of each vertex.
        chunk: Its chunk in that part.
        scale: Of gradients that pass to an earlier step.
        stale: Historical reads pass on what they got in the epoch before.
    """

    part: Tensor
    chunk: Tensor
    scale: float = 2.0
    stale: bool = False
    step: Tensor | None = None
    """Of each vertex in this epoch; None in an exact one."""
    rows: dict[Any, Tensor] = field(default_factory=dict)
    kept: dict[Any, Tensor] = field(default_factory=dict)
    taken: dict[Any, Tensor] = field(default_factory=dict)
    """What each edge read in this epoch; its gradient is the next epoch's stale one."""
    before: dict[Any, Tensor] = field(default_factory=dict)
    passed_on: list[Tensor] = field(default_factory=list)
    means: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """Mean and variance of each norm's rows in the last epoch, or what else it sums up."""

    def begin(self, orders: list[tuple[int, ...]] | None) -> None:
        """An epoch begins; without orders an exact one."""
        self.before = {key: value.grad for key, value in self.taken.items() if value.grad is not None}
        self.rows, self.taken, self.passed_on = {}, {}, []
        self.step = None
        if orders is not None:
            places = torch.tensor([[order.index(c) for c in range(len(order))] for order in orders])
            self.step = places[self.part, self.chunk]

    def of(self, key: Any, h: Tensor, edge_index: Tensor) -> Tensor:
        """What every edge reads of rows h."""
        source, target = edge_index
        self.rows[key] = h.detach().clone()
        found = h[source]
        if self.step is not None:
            together = self.part[source] == self.part[target]
            one, other = self.step[source], self.step[target]
            same = together & (self.chunk[source] == self.chunk[target])
            fresh = same | torch.where(together, one < other, one <= other)
            scale = torch.where((one < other) & fresh, self.scale, 1.0).to(h.dtype)
            shape = (-1, *[1] * (h.dim() - 1))
            scale, fresh = scale.view(shape), fresh.view(shape)
            scaled = found * scale - (found * (scale - 1)).detach()
            if self.stale and key in self.before:
                self.passed_on.append((found * self.before[key] * ~fresh).sum())
            found = torch.where(fresh, scaled, self.kept[key][source])
        if self.stale and found.requires_grad:
            # One leaf an edge: historical reads too have a gradient to pass on an epoch later.
            self.taken[key] = found = _noted(found)
        return found

    def normalise(self, name: str, norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
        """With the last epoch's statistics as constants; the first epoch with its own."""
        if self.step is None:
            mean, var = x.mean(0), x.var(0, correction=0)
        else:
            mean, var = self.means[name]
        with torch.no_grad():
            # What is gathered lies around the mean that is known while it is gathered.
            self.means[name] = x.mean(0), (x - mean).square().mean(0)
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(var * (x.size(0) / (x.size(0) - 1)), norm.momentum)
            norm.num_batches_tracked.add_(1)
        return (x - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias

    def pair(self, name: str, norm: pyg.PairNorm, x: Tensor) -> Tensor:
        """The same of rows around their mean and of one length."""
        mean, length = self._known(name) or (x.mean(0), (x - x.mean(0)).square().sum(-1).mean())
        self.means[name] = x.mean(0).detach(), (x - mean).square().sum(-1).mean().detach()
        return norm.scale * (x - mean) / (norm.eps + length).sqrt()

    def layer(self, name: str, norm: pyg.LayerNorm, x: Tensor) -> Tensor:
        """The same of all values of all rows; the spread has a mean of its own."""
        mean, rest, var = self._known(name) or (x.mean(), (x - x.mean()).mean(), x.var(correction=0))
        found = x.mean(), (x - mean).mean(), (x - mean - rest).square().mean()
        self.means[name] = tuple(each.detach() for each in found)
        return (x - mean) / (var.sqrt() + norm.eps) * norm.weight + norm.bias

    def _known(self, name: str) -> tuple[Tensor, ...] | None:
        return None if self.step is None else self.means[name]


def _noted(value: Tensor) -> Tensor:
    value = value + 0.0
    value.retain_grad()
    return value


def rewire(mine: nn.Module, reads: Reads, *, fast: bool) -> None:
    """Let the layers of a model read by ``reads``.

    Args:
        mine: The model.
        reads: How.
        fast: As Kagome's fast paths do it: constant rows are summed before they are mapped, and wide rows
            mapped before they are summed.
    """
    first = True
    for name, conv in mine.named_modules():
        if isinstance(conv, nn.BatchNorm1d):
            conv.forward = partial(reads.normalise, name, conv)
        elif isinstance(conv, pyg.PairNorm):
            conv.forward = partial(reads.pair, name, conv)
        elif isinstance(conv, pyg.LayerNorm):
            conv.forward = partial(reads.layer, name, conv)
        elif isinstance(conv, pyg.GATConv):
            _rewire_attention(name, conv, reads)
        elif isinstance(conv, pyg.MessagePassing):
            _rewire_sum(name, conv, reads)
            if fast and isinstance(conv, pyg.GCNConv) and first:
                _map_late(conv)
            elif fast and isinstance(conv, pyg.SAGEConv) and conv.out_channels < conv.in_channels:
                _map_early(conv)
            first = False


def _map_late(conv: nn.Module) -> None:
    summed, conv.lin.forward = conv.propagate, lambda x: x
    conv.propagate = lambda *given, **named: F.linear(summed(*given, **named), conv.lin.weight)


def _map_early(conv: nn.Module) -> None:
    summed, conv.lin_l.forward = conv.propagate, lambda x: x + conv.lin_l.bias
    conv.propagate = lambda edge_index, x, **_: summed(edge_index, F.linear(x[0], conv.lin_l.weight))


def _rewire_sum(name: str, conv: nn.Module, reads: Reads) -> None:
    mean = isinstance(conv, pyg.SAGEConv)

    def propagate(edge_index: Tensor, x: Any, edge_weight: Tensor | None = None, **_: Any) -> Tensor:
        h = x[0] if isinstance(x, tuple) else x
        found = reads.of(name, h, edge_index)
        if edge_weight is not None:
            found = found * edge_weight.view(-1, 1)
        out = torch.zeros_like(h).index_add(0, edge_index[1], found)
        if mean:
            out = out / torch.bincount(edge_index[1], minlength=h.size(0)).clamp(min=1).view(-1, 1)
        return out

    conv.propagate = propagate


def _rewire_attention(name: str, conv: nn.Module, reads: Reads) -> None:
    def edge_updater(edge_index: Tensor, alpha: Any, **_: Any) -> Tensor:
        score = reads.of((name, "score"), alpha[0], edge_index) + alpha[1][edge_index[1]]
        return softmax(F.leaky_relu(score, 0.2), edge_index[1], num_nodes=alpha[1].size(0))

    def propagate(edge_index: Tensor, x: Any, alpha: Tensor, **_: Any) -> Tensor:
        found = reads.of((name, "x"), x[0], edge_index) * alpha.unsqueeze(-1)
        return torch.zeros_like(x[0]).index_add(0, edge_index[1], found)

    conv.edge_updater, conv.propagate = edge_updater, propagate


def reference(
    mine: nn.Module,
    data: Data,
    chunks: list[list[Tensor]],
    epochs: int,
    *,
    seed: int,
    rate: float = 1.0,
    history_epochs: int = 20,
    shuffle: bool = True,
    scale: float = 2.0,
    stale: bool = False,
    fast: bool = False,
    exact: Collection[int] = (1,),
) -> list[float]:
    """Train in place with SGD; the losses.

    Args:
        mine: The model, without dropout.
        data: The whole graph.
        chunks: The original ids of each chunk of each part.
        epochs: How many.
        seed: Of the run: orders of chunks go by it.
        rate: Of SGD.
        history_epochs: Epochs of history between two that are kept.
        shuffle: Whether orders change.
        scale: Of gradients that pass to an earlier chunk.
        stale: Reuse gradients of the epoch before where this one's come too late.
        fast: As Kagome's fast paths do it.
        exact: Epochs whose reads are all fresh; the first is one.
    """
    part, chunk = (torch.full((data.num_nodes,), -1) for _ in range(2))
    for number, pieces in enumerate(chunks):
        for piece, ids in enumerate(pieces):
            part[ids], chunk[ids] = number, piece
    assert int(part.min()) == 0
    reads = Reads(part, chunk, 1.0 if stale else scale, stale)
    rewire(mine, reads, fast=fast)
    optimizer = torch.optim.SGD(mine.parameters(), lr=rate)
    since, losses = 0, []
    for epoch in range(1, epochs + 1):
        orders = [
            order_of(len(pieces), seed=seed, epoch=epoch, part=number, shuffle=shuffle)
            for number, pieces in enumerate(chunks)
        ]
        reads.begin(None if epoch in exact else orders)
        mine.train()
        optimizer.zero_grad()
        out = mine(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        torch.stack([loss, *reads.passed_on]).sum().backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        since = 0 if epoch in exact else since + 1
        if epoch in exact or since >= history_epochs:
            reads.kept, since = dict(reads.rows), 0
    return losses
