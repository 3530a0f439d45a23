"""Tiled columns: extremes and softmaxes over feature slices, one chunk of destinations at a time.

Where it sits: ``deferred.sliced_reduce`` uses it where ``memory_gib`` is set and a layer takes the extreme of
its neighbours' rows, or a softmax for each column. ``tiled_reduce`` does the same for sums. The rows are in
feature slices before and after, so nothing is sent meanwhile. The results of a chunk that backward needs are
kept on the device of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kagome.feature_parallel.all_to_all import SliceCut
from kagome.feature_parallel.edge_layout import EdgeLayout
from kagome.feature_parallel.tiled_reduce import (
    DestinationChunk,
    TileBound,
    WorkingMemory,
    refuse_second_derivative,
    walked,
)
from kagome.kernels import ops
from kagome.kernels.base.csr import CsrLayout


class Reduction(Protocol):
    """A reduction of neighbours' rows that computes each column by itself."""

    @property
    def room(self) -> WorkingMemory:
        """The tensors that the reduction holds on the device at a time."""

    def reduce(self, layout: CsrLayout, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the result, and other tensors of its shape that backward needs."""

    def back(
        self, layout: CsrLayout, rows: tuple[Tensor, ...], found: tuple[Tensor, ...], g: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the rows; ``layout`` groups the edges by source."""


@dataclass(frozen=True)
class Extreme:
    """The maximum (sign 1) or minimum (sign -1) of neighbours' rows; equal values share a gradient.

    Args:
        sign: 1 for the maximum, -1 for the minimum.
    """

    sign: int

    @property
    def room(self) -> WorkingMemory:
        """Tensors of backward: rows and their gradient; the result, the number of ties, and its gradient."""
        return WorkingMemory(reads=2, writes=3)

    def reduce(self, layout: CsrLayout, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the extreme and the number of rows that attain it."""
        return ops.extreme_rows(layout, rows[0], self.sign)

    def back(
        self, layout: CsrLayout, rows: tuple[Tensor, ...], found: tuple[Tensor, ...], g: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradient of the rows."""
        best, ties = found
        return (ops.extreme_back(layout, rows[0], best, ties, g),)


@dataclass(frozen=True)
class ColumnSoftmax:
    """The sum of the second rows, weighted by a softmax of the first, column by column."""

    @property
    def room(self) -> WorkingMemory:
        """Tensors of backward: both rows and their gradients; the result, its maximum, total and gradient."""
        return WorkingMemory(reads=4, writes=4)

    def reduce(self, layout: CsrLayout, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the weighted sums, the maximum and the total of the softmax."""
        z, m = rows
        return ops.column_softmax(layout, z, m)

    def back(
        self, layout: CsrLayout, rows: tuple[Tensor, ...], found: tuple[Tensor, ...], g: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the logits and of the summed rows."""
        (z, m), (out, top, total) = rows, found
        return ops.column_softmax_back(layout, z, m, out, top, total, g)


def by_chunk(
    bound: TileBound, edge_layout: EdgeLayout, cut: SliceCut, how: Reduction, parts: tuple[Tensor, ...]
) -> Tensor:
    """Reduce over all edges in this rank's columns, within the bound on working memory.

    Args:
        bound: The bound on working memory.
        edge_layout: The edges of all ranks.
        cut: Columns of each rank. Chunks are sized for the widest, so that either all ranks refuse or none
            does.
        how: The reduction.
        parts: The rows that it reads.

    Shapes:
        each of parts ``[V, d]``; result ``[V, d]``, of the vertex set that is written.

    Raises:
        ConfigError: If even the smallest chunks exceed the bound.

    Cost:
        Keeps the results of ``how``, on the device of the rows.
    """
    width = max(cut.taken(rank) for rank in range(len(edge_layout.rows.counts)))
    chunks = bound.chunks(edge_layout, width, parts[0].itemsize, how.room)
    rows = edge_layout.written.total
    out: Tensor = _ByChunk.apply(bound, chunks, how, rows, *parts)  # type: ignore[no-untyped-call]
    return out


def _read(bound: TileBound, chunk: DestinationChunk, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy the rows of a chunk to the device, padded with zeros to the number of rows of its structure."""
    # A structure has no fewer rows to read than to write, so a chunk that reads few rows needs rows that no
    # edge reads.
    more = chunk.structure.num_sources - chunk.reads.numel()
    rows = (part.index_select(0, chunk.reads).to(bound.device, non_blocking=True) for part in parts)
    return tuple(torch.cat([each, each.new_zeros(more, each.size(1))]) if more else each for each in rows)


class _ByChunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        bound: TileBound,
        chunks: tuple[DestinationChunk, ...],
        how: Reduction,
        rows: int,
        *parts: Tensor,
    ) -> Tensor:
        kept: tuple[Tensor, ...] = ()
        # Rows come and go in feature slices, so nothing is in transit meanwhile.
        bound.gauge.moving = 0
        for chunk in chunks:
            read, layout = _read(bound, chunk, parts), chunk.structure.by_target
            found = how.reduce(layout, read)
            bound.gauge.note(*read, *found, *walked(layout))
            # found      result [rows of the chunk, d], and what backward needs: ties, or maximum and total
            # kept       the same for all rows written, on the device of the rows, which may be the host
            kept = kept or tuple(parts[0].new_empty(rows, *each.shape[1:]) for each in found)
            for place, each in zip(kept, found, strict=True):
                place[chunk.begin : chunk.end] = each.to(place.device)
        # No chunk: a group without rows. The result has no rows, but is part of the graph.
        if not kept:
            kept = (parts[0].new_zeros(rows, parts[0].size(1)),)
        ctx.bound, ctx.chunks, ctx.how = bound, chunks, how
        ctx.count = len(parts)
        ctx.save_for_backward(*parts, *kept)
        return kept[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        bound: TileBound = ctx.bound
        parts, kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        lies = [torch.zeros_like(part) for part in parts]
        # ``by_source`` groups the chunk's edges by the row read: each such row adds up what its edges bring
        # back. A row that several chunks read gets a share from each.
        for chunk in reversed(ctx.chunks):
            span = slice(chunk.begin, chunk.end)
            read, layout = _read(bound, chunk, parts), chunk.structure.by_source
            found = tuple(each[span].to(bound.device) for each in kept)
            g = grads[0][span].to(bound.device).contiguous()
            back = ctx.how.back(layout, read, found, g)
            bound.gauge.note(*read, *found, g, *back, *walked(layout))
            for place, each in zip(lies, back, strict=True):
                place.index_add_(0, chunk.reads, each[: chunk.reads.numel()].to(place.device))
        return (None, None, None, None, *lies)
