"""Loops for sums over neighbours and dot products along edges.

Where it sits: ``loops`` gathers these for ``ops``; ``crew`` shares their rows among threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kagome.kernels.crew import array, compiled, flat, reordered, share
from kagome.kernels.plain import Span, count_of
from kagome.kernels.structure import Layout

WIDTHS = (4, 8, 16, 32, 64, 128)
"""Columns a head that have a loop of their own: a length the compiler knows becomes whole vectors."""
BLOCK = 256
"""Bytes of a row that are summed at once: the narrower, the more of the rows a cache holds."""


def bounds(layout: Layout, span: Span = "all", rows: slice | None = None) -> tuple[Any, Any]:
    """Where each row's entries of a span begin and end, as numpy arrays."""
    kept = slice(None) if rows is None else rows
    begin = (layout.middle if span == "halo" else layout.pointer[:-1])[kept]
    end = (layout.middle if span == "own" else layout.pointer[1:])[kept]
    return array(begin), array(end)


def known(width: int) -> int:
    """The width, if there is a loop for it; else 0."""
    return width if width in WIDTHS else 0


@compiled
def _sum(
    low: int, high: int, left: int, right: int, begin: Any, end: Any, column: Any, x: Any, scale: Any, out: Any
) -> None:
    for i in range(low, high):
        row = out[i, left:right]
        factor = scale[min(i, scale.size - 1)]
        k, last = begin[i], end[i]
        while k + 4 <= last:  # four at once: the result is read and written a quarter as often
            a, b = x[column[k], left:right], x[column[k + 1], left:right]
            c, d = x[column[k + 2], left:right], x[column[k + 3], left:right]
            for f in range(row.size):
                row[f] += factor * ((a[f] + b[f]) + (c[f] + d[f]))
            k += 4
        while k < last:
            a = x[column[k], left:right]
            for f in range(row.size):
                row[f] += factor * a[f]
            k += 1


@compiled
def _weighted(
    low: int,
    high: int,
    left: int,
    right: int,
    begin: Any,
    end: Any,
    column: Any,
    edge: Any,
    weight: Any,
    x: Any,
    scale: Any,
    out: Any,
) -> None:
    for i in range(low, high):
        row = out[i, left:right]
        factor = scale[min(i, scale.size - 1)]
        k, last = begin[i], end[i]
        while k + 4 <= last:
            a, b = x[column[k], left:right], x[column[k + 1], left:right]
            c, d = x[column[k + 2], left:right], x[column[k + 3], left:right]
            p, q = factor * weight[edge[k]], factor * weight[edge[k + 1]]
            r, s = factor * weight[edge[k + 2]], factor * weight[edge[k + 3]]
            for f in range(row.size):
                row[f] += (p * a[f] + q * b[f]) + (r * c[f] + s * d[f])
            k += 4
        while k < last:
            a, p = x[column[k], left:right], factor * weight[edge[k]]
            for f in range(row.size):
                row[f] += p * a[f]
            k += 1


@cache
def _headed(width: int) -> Callable[..., None]:
    """The sum with a weight an edge and head, for that many columns a head; 0: for any number."""

    @compiled
    def loop(
        low: int,
        high: int,
        left: int,
        right: int,
        begin: Any,
        end: Any,
        column: Any,
        edge: Any,
        weight: Any,
        x: Any,
        scale: Any,
        out: Any,
    ) -> None:
        size = width if width > 0 else out.shape[1] // weight.shape[1]
        for i in range(low, high):
            factor = scale[min(i, scale.size - 1)]
            k, last = begin[i], end[i]
            while k + 2 <= last:
                a, b = x[column[k]], x[column[k + 1]]
                p, q = weight[edge[k]], weight[edge[k + 1]]
                for h in range(left, right):
                    row, one, two = out[i, h * size :], a[h * size :], b[h * size :]
                    s, t = factor * p[h], factor * q[h]
                    for f in range(size):
                        row[f] += s * one[f] + t * two[f]
                k += 2
            if k < last:
                a, p = x[column[k]], weight[edge[k]]
                for h in range(left, right):
                    row, one = out[i, h * size :], a[h * size :]
                    s = factor * p[h]
                    for f in range(size):
                        row[f] += s * one[f]

    return loop


@cache
def _dots(width: int) -> Callable[..., None]:
    """Dot products for that many columns a head; 0: for any number."""

    @reordered
    def loop(low: int, high: int, begin: Any, end: Any, column: Any, edge: Any, a: Any, b: Any, out: Any) -> None:
        heads = out.shape[1]
        size = width if width > 0 else a.shape[1] // heads
        for i in range(low, high):
            for k in range(begin[i], end[i]):
                other, result = b[column[k]], out[edge[k]]
                for h in range(heads):
                    one, two = a[i, h * size :], other[h * size :]
                    total = out.dtype.type(0)
                    for f in range(size):
                        total += one[f] * two[f]
                    result[h] = total

    return loop


def sum_rows(
    layout: Layout,
    x: Tensor,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    span: Span = "all",
    offset: int = 0,
    rows: slice | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """See ``ops.sum_rows``."""
    begin, end = bounds(layout, span, rows)
    shape = (count_of(layout, rows), *x.shape[1:])
    out = into if into is not None and into.is_contiguous() else x.new_zeros(shape)
    values, result = flat(x), flat(out)
    column = shifted(layout.column, offset)
    factor = array(x.new_ones(1) if scale is None else scale.to(x.dtype).reshape(-1))
    width, step = result.shape[1], max(BLOCK // x.element_size(), 1)
    if weight is None:
        arguments = (begin, end, column, values, factor, result)
        _blocks(_sum, begin, end, width, step, arguments)
    else:
        weight = weight.to(x.dtype)
        heads = weight.numel() // max(layout.edges, 1)
        edge = array(layout.edge)
        if heads == 1:
            arguments = (begin, end, column, edge, array(weight.reshape(-1)), values, factor, result)
            _blocks(_weighted, begin, end, width, step, arguments)
        elif heads > 1:
            size = width // heads
            arguments = (begin, end, column, edge, array(weight), values, factor, result)
            _blocks(_headed(known(size)), begin, end, heads, max(step // max(size, 1), 1), arguments)
    if into is None or out is into:
        return out
    return into.add_(out)


def shifted(column: Tensor, offset: int) -> Any:
    """Columns less an offset."""
    return array(column) - np.int32(offset) if offset else array(column)


def _blocks(
    loop: Callable[..., None], begin: Any, end: Any, width: int, step: int, arguments: tuple[Any, ...]
) -> None:
    """A loop over all rows for one block of columns (or heads) after another."""
    for left in range(0, width, step):
        right = min(left + step, width)

        def work(low: int, high: int, left: int = left, right: int = right) -> None:
            loop(low, high, left, right, *arguments)

        share(work, begin, end, right - left)


def dot_edges(
    layout: Layout, a: Tensor, b: Tensor, *, span: Span = "all", offset: int = 0, into: Tensor | None = None
) -> Tensor:
    """See ``ops.dot_edges``."""
    begin, end = bounds(layout, span)
    heads, width = a.shape[1:]
    make = torch.zeros if span != "all" else torch.empty
    out = into if into is not None else make(layout.edges, heads, dtype=a.dtype)
    kept = out if out.is_contiguous() else out.contiguous()
    loop = _dots(known(width))
    column, edge, one, two = shifted(layout.column, offset), array(layout.edge), flat(a), flat(b)
    share(
        lambda low, high: loop(low, high, begin, end, column, edge, one, two, kept.detach().numpy()),
        begin,
        end,
        heads * width,
    )
    return out if kept is out else out.copy_(kept)
