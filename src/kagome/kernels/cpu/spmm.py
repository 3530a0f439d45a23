"""Sparse matrix multiplication (SpMM) loops: sums over neighbours, and dot products along edges.

Where it sits: ``dispatch`` collects these for ``kernels.ops``; ``base.thread_pool`` divides their rows among
threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kagome.kernels.base.csr import CsrLayout
from kagome.kernels.base.reference import Span
from kagome.kernels.base.thread_pool import array, compiled, flat, share
from kagome.kernels.cpu.prefetch import ahead_of, fetch
from kagome.kernels.cpu.simd import add_four, add_one, add_products, add_two, dot

BLOCK = 16
"""Columns per vector in an unweighted sum; more would not fit the registers of a small core."""
WIDEST = 256
"""Largest width for which an unweighted sum has a loop of its own; the width must be a multiple of four."""
WIDEST_WEIGHTED = 64
"""Largest such width for a weighted sum; for wider rows the compiler's own loop is faster."""
WIDTHS = (8, 16, 32, 64, 128)
"""Columns per head that have a loop of their own; other widths are computed four columns at a time."""


def part_of(layout: CsrLayout, span: Span, *, edges: bool = False) -> CsrLayout:
    """Return the layout of a span's entries alone.

    Args:
        layout: The layout of all entries.
        span: Which of them.
        edges: Whether their edges will be asked for.
    """
    if edges:
        _ = layout.edge  # found once for both spans
    # Lambdas, because ``own`` and ``halo`` are built and kept on their first access.
    return {"all": lambda: layout, "own": lambda: layout.own, "halo": lambda: layout.halo}[span]()


def bounds(layout: CsrLayout, rows: slice | Tensor | None = None) -> tuple[Any, Any]:
    """Return where each row's entries begin and end, as numpy arrays."""
    pointer = layout.arrays.pointer
    begin, end = pointer[:-1], pointer[1:]
    which = array(rows) if isinstance(rows, Tensor) else rows
    return (begin, end) if which is None else (begin[which], end[which])


def known(width: int) -> int:
    """Return the width if there is a loop for it, otherwise 0."""
    return width if width in WIDTHS else 0


@cache
def _sum(width: int) -> Callable[..., None]:
    """Return the loop for an unweighted sum over rows of ``width`` columns; 0 stands for any number.

    With a known width the compiler makes no loop over columns and need not test whether rows overlap. Rows of
    up to 100 columns then take two thirds of the time.
    """
    blocked_width = width - width % BLOCK

    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        offset: int,
        ahead: int,
        x: Any,
        scale: Any,
        fresh: bool,
        out: Any,
    ) -> None:
        for i in range(low, high):
            # ``scale`` has one factor per row, or a single one for all rows: see ``_ones``.
            row, factor = out[i], scale[min(i, scale.size - 1)]
            if fresh:  # cleared here, while it is in cache, and not in a pass before
                row[:] = 0
            k, last = begin[i], end[i]
            while k + 4 <= last:  # four at once: the result is read and written a quarter as often
                for j in range(k, k + 4):
                    fetch(x, column, j, ahead, offset)
                a, b = x[column[k] - offset], x[column[k + 1] - offset]
                c, d = x[column[k + 2] - offset], x[column[k + 3] - offset]
                if width > 0:
                    for at in range(0, blocked_width, BLOCK):
                        add_four(BLOCK, row, at, a, b, c, d, factor)
                    for at in range(blocked_width, width, 4):
                        add_four(4, row, at, a, b, c, d, factor)
                else:
                    for f in range(row.size):
                        row[f] += factor * ((a[f] + b[f]) + (c[f] + d[f]))
                k += 4
            while k < last:
                fetch(x, column, k, ahead, offset)
                a = x[column[k] - offset]
                if width > 0:
                    for at in range(0, blocked_width, BLOCK):
                        add_one(BLOCK, row, at, a, factor)
                    for at in range(blocked_width, width, 4):
                        add_one(4, row, at, a, factor)
                else:
                    for f in range(row.size):
                        row[f] += factor * a[f]
                k += 1

    return loop


@cache
def _weighted(width: int) -> Callable[..., None]:
    """Return the loop for a sum with one weight per edge, for ``width`` columns; 0 stands for any number."""
    blocked_width = width - width % BLOCK

    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        offset: int,
        edge: Any,
        weight: Any,
        near: int,
        ahead: int,
        x: Any,
        scale: Any,
        fresh: bool,
        out: Any,
    ) -> None:
        for i in range(low, high):
            row, factor = out[i], scale[min(i, scale.size - 1)]
            if fresh:
                row[:] = 0
            k, last = begin[i], end[i]
            while k + 4 <= last:
                for j in range(k, k + 4):
                    fetch(x, column, j, ahead, offset)
                    fetch(weight, edge, j, near, 0)
                a, b = x[column[k] - offset], x[column[k + 1] - offset]
                c, d = x[column[k + 2] - offset], x[column[k + 3] - offset]
                # The row's factor multiplies four weights here and not every column below.
                p, q = factor * weight[edge[k], 0], factor * weight[edge[k + 1], 0]
                r, s = factor * weight[edge[k + 2], 0], factor * weight[edge[k + 3], 0]
                if width > 0:
                    for at in range(0, blocked_width, BLOCK):
                        add_products(BLOCK, row, at, a, p, b, q, c, r, d, s)
                    for at in range(blocked_width, width, 4):
                        add_products(4, row, at, a, p, b, q, c, r, d, s)
                else:
                    for f in range(row.size):
                        row[f] += (p * a[f] + q * b[f]) + (r * c[f] + s * d[f])
                k += 4
            while k < last:
                fetch(x, column, k, ahead, offset)
                fetch(weight, edge, k, near, 0)
                a, p = x[column[k] - offset], factor * weight[edge[k], 0]
                if width > 0:
                    for at in range(0, blocked_width, BLOCK):
                        add_one(BLOCK, row, at, a, p)
                    for at in range(blocked_width, width, 4):
                        add_one(4, row, at, a, p)
                else:
                    for f in range(row.size):
                        row[f] += p * a[f]
                k += 1

    return loop


@cache
def _headed(width: int) -> Callable[..., None]:
    """Return the loop for a sum weighted by edge and head, for ``width`` columns per head; 0: any number."""

    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        offset: int,
        edge: Any,
        weight: Any,
        near: int,
        ahead: int,
        x: Any,
        scale: Any,
        fresh: bool,
        out: Any,
    ) -> None:
        # Columns [h * size, h * size + size) of a row belong to head h.
        heads = weight.shape[1]
        size = out.shape[1] // heads
        for i in range(low, high):
            row, factor = out[i], scale[min(i, scale.size - 1)]
            if fresh:
                row[:] = 0
            k, last = begin[i], end[i]
            while k < last:
                # Two entries at once; an odd last entry is added as two halves of itself.
                pair = min(k + 1, last - 1)
                part = factor if pair > k else factor / 2
                for j in range(k, pair + 1):
                    fetch(x, column, j, ahead, offset)
                    fetch(weight, edge, j, near, 0)
                a, b = x[column[k] - offset], x[column[pair] - offset]
                for h in range(heads):
                    p, q = part * weight[edge[k], h], part * weight[edge[pair], h]
                    if width > 0:
                        add_two(width, row, h * width, a, p, b, q)
                    else:
                        f, stop = h * size, h * size + size
                        while f + 4 <= stop:
                            add_two(4, row, f, a, p, b, q)
                            f += 4
                        while f < stop:
                            add_two(1, row, f, a, p, b, q)
                            f += 1
                k += 2

    return loop


@cache
def _dots(width: int) -> Callable[..., None]:
    """Return the loop for dot products with ``width`` columns per head; 0 stands for any number."""

    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        offset: int,
        edge: Any,
        ahead: int,
        a: Any,
        b: Any,
        out: Any,
    ) -> None:
        heads = out.shape[1]
        size = a.shape[1] // heads
        for i in range(low, high):
            mine = a[i]
            for k in range(begin[i], end[i]):
                fetch(b, column, k, ahead, offset)
                its, result = b[column[k] - offset], out[edge[k]]
                for h in range(heads):
                    if width > 0:
                        result[h] = dot(width, mine, h * width, its)
                    else:
                        f, stop, total = h * size, h * size + size, out.dtype.type(0)
                        while f + 4 <= stop:
                            total += dot(4, mine, f, its)
                            f += 4
                        while f < stop:
                            total += dot(1, mine, f, its)
                            f += 1
                        result[h] = total

    return loop


@cache
def _ones(dtype: Any) -> Any:
    """Return the factor 1: loops read one factor per row, or a single one for all."""
    return np.ones(1, dtype)


def _numbers(scale: Tensor, like: Tensor) -> Any:
    """Return one factor per row, in the data type of the tensor it scales."""
    scale = scale if scale.dtype == like.dtype else scale.to(like.dtype)
    return array(scale if scale.dim() == 1 else scale.reshape(-1))


def sum_rows(
    layout: CsrLayout,
    x: Tensor,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    span: Span = "all",
    offset: int = 0,
    rows: slice | Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Compute ``ops.sum_rows`` with numba loops."""
    layout = part_of(layout, span, edges=weight is not None)
    begin, end = bounds(layout, rows)
    # The loops add to ``into`` as it is, and clear the rows of a new tensor.
    fresh = into is None or not into.is_contiguous()
    out = x.new_empty(begin.size, *x.shape[1:]) if fresh or into is None else into
    values, result, column = flat(x), flat(out), layout.arrays.column
    ahead = ahead_of(values)
    factor = _ones(values.dtype) if scale is None else _numbers(scale, x)
    # 0 selects the loop for any width.
    columns = result.shape[1] if result.shape[1] % 4 == 0 else 0
    # x and out have their heads joined: [rows, H * C]. An unweighted sum needs no heads.
    loop = _sum(columns if columns <= WIDEST else 0)
    weights: tuple[Any, ...] = ()
    heads = 1
    if weight is not None:
        # 1 for weights [E], H for [E, H], and 0 for a part without edges, which adds nothing.
        heads = weight.numel() // max(weight.size(0), 1)
        loop = (
            _weighted(columns if columns <= WIDEST_WEIGHTED else 0)
            if heads == 1
            else _headed(known(result.shape[1] // max(heads, 1)))
        )
        of_edges = array(weight.to(x.dtype).reshape(-1, max(heads, 1)))
        weights = layout.edge_array, of_edges, ahead_of(of_edges)
    if result.shape[1] and heads:
        share(
            lambda low, high: loop(
                low, high, begin, end, column, offset, *weights, ahead, values, factor, fresh, result
            ),
            begin,
            end,
            result.shape[1],
        )
    elif fresh:
        out.zero_()
    return out if into is None or out is into else into.add_(out)


def dot_edges(
    layout: CsrLayout,
    a: Tensor,
    b: Tensor,
    *,
    span: Span = "all",
    offset: int = 0,
    into: Tensor | None = None,
) -> Tensor:
    """Compute ``ops.dot_edges`` with numba loops."""
    heads, width = a.shape[1:]
    # The loop does not write edges outside the span.
    make = torch.zeros if span != "all" else torch.empty
    out = into if into is not None else make(layout.edges, heads, dtype=a.dtype)
    # The loop writes a contiguous array. A strided ``into`` is copied with its values, and copied back below.
    kept = out if out.is_contiguous() else out.contiguous()
    layout = part_of(layout, span, edges=True)
    begin, end = bounds(layout)
    column, edge, one, two, result = layout.arrays.column, layout.edge_array, flat(a), flat(b), flat(kept)
    loop, ahead = _dots(known(width)), ahead_of(two)
    share(
        lambda low, high: loop(low, high, begin, end, column, offset, edge, ahead, one, two, result),
        begin,
        end,
        heads * width,
    )
    return out if kept is out else out.copy_(kept)
