"""Loops between rows and edges: gather, its transpose, and the sum of the rows at an edge's two ends.

Where it sits: ``dispatch`` collects these for ``kernels.ops``; ``base.thread_pool`` divides their rows among
threads.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from kagome.kernels.base.csr import CsrLayout, Structure
from kagome.kernels.base.reference import count_of
from kagome.kernels.base.thread_pool import array, compiled, flat, share, spread
from kagome.kernels.cpu.prefetch import ahead_of, fetch
from kagome.kernels.cpu.spmm import bounds


@compiled
def _gather(low: int, high: int, index: Any, ahead: int, x: Any, out: Any) -> None:
    for e in range(low, high):
        fetch(x, index, e, ahead, 0)
        row, other = out[e], x[index[e]]
        for f in range(row.size):
            row[f] = other[f]


LINE = 16
"""Fewest columns for one thread: a cache line of float32 values."""


@compiled
def _added(
    low: int, high: int, place: Any, which: Any, scale: Any, ahead: int, rows: Any, table: Any
) -> None:
    for e in range(place.size):
        fetch(table, place, e, ahead, 0)
        row, other, factor = table[place[e]], rows[which[e]], scale[e]
        for f in range(low, high):
            row[f] += factor * other[f]


@compiled
def _gathered(
    low: int, high: int, begin: Any, end: Any, edge: Any, ahead: int, values: Any, out: Any
) -> None:
    for i in range(low, high):
        row = out[i]
        # The result is allocated without being filled: each thread clears its own rows, while they are in
        # cache.
        row[:] = 0
        for k in range(begin[i], end[i]):
            fetch(values, edge, k, ahead, 0)
            other = values[edge[k]]
            for f in range(row.size):
                row[f] += other[f]


@compiled
def _join(low: int, high: int, target: Any, source: Any, a: Any, b: Any, slope: Any, out: Any) -> None:
    for e in range(low, high):
        row, one, two = out[e], a[target[e]], b[source[e]]
        for f in range(row.size):
            z = one[f] + two[f]
            row[f] = z if z > 0 else z * slope


@compiled
def _join_back(
    low: int,
    high: int,
    begin: Any,
    end: Any,
    column: Any,
    edge: Any,
    near: int,
    ahead: int,
    mine: Any,
    its: Any,
    slope: Any,
    g: Any,
    out: Any,
) -> None:
    for i in range(low, high):
        row, one = out[i], mine[i]
        row[:] = 0
        for k in range(begin[i], end[i]):
            fetch(its, column, k, ahead, 0)
            fetch(g, edge, k, near, 0)
            two, given = its[column[k]], g[edge[k]]
            # The gradient of a_i + b_j is the same at both ends, so one loop serves both: ``mine`` is the end
            # that this layout groups by. The sign is computed again in place of a stored tensor [E, F].
            for f in range(row.size):
                row[f] += given[f] if one[f] + two[f] > 0 else given[f] * slope


def gather(index: Tensor, x: Tensor) -> Tensor:
    """Compute ``ops.gather`` with numba loops."""
    out = x.new_empty(index.numel(), *x.shape[1:])
    ids, values, result = array(index), flat(x), flat(out)
    ahead = ahead_of(values)
    spread(lambda low, high: _gather(low, high, ids, ahead, values, result), index.numel(), result.shape[1])
    return out


def add_rows(table: Tensor, place: Tensor, rows: Tensor, which: Tensor, scale: Tensor) -> None:
    """Compute ``ops.add_rows`` with numba loops."""
    ids, taken, factor, given, held = array(place), array(which), array(scale), flat(rows), flat(table)
    ahead, width = ahead_of(held), held.shape[1]
    # Threads divide the columns and not the rows: a place may occur twice.
    spread(
        lambda low, high: _added(LINE * low, min(LINE * high, width), ids, taken, factor, ahead, given, held),
        -(-width // LINE),
        2 * LINE * place.numel(),
    )


def sum_edges(layout: CsrLayout, values: Tensor, rows: slice | None = None) -> Tensor:
    """Compute ``ops.sum_edges`` with numba loops."""
    begin, end = bounds(layout, rows)
    out = values.new_empty(count_of(layout, rows), *values.shape[1:])
    edge, given, result = layout.edge_array, flat(values), flat(out)
    ahead = ahead_of(given)
    share(
        lambda low, high: _gathered(low, high, begin, end, edge, ahead, given, result),
        begin,
        end,
        result.shape[1],
    )
    return out


def join_edges(structure: Structure, a: Tensor, b: Tensor, slope: float | None) -> Tensor:
    """Compute ``ops.join_edges`` with numba loops."""
    out = a.new_empty(structure.edges, *a.shape[1:])
    target, source, one, two, result = (
        array(structure.target),
        array(structure.source),
        flat(a),
        flat(b),
        flat(out),
    )
    # With slope 1 leaky_relu is the identity, so one loop serves both cases. The slope has the type of the
    # rows: with a Python float numba would compute in float64.
    bend = result.dtype.type(1 if slope is None else slope)
    spread(
        lambda low, high: _join(low, high, target, source, one, two, bend, result),
        structure.edges,
        2 * result.shape[1],
    )
    return out


def join_edges_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float | None, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.join_edges_back`` with numba loops."""
    # Without leaky_relu the gradient of either end is a plain sum over its edges.
    if slope is None:
        return sum_edges(structure.by_target, g), sum_edges(structure.by_source, g)
    ga = _bent(structure.by_target, a, b, slope, g)
    return ga, _bent(structure.by_source, b, a, slope, g)


def _bent(layout: CsrLayout, mine: Tensor, its: Tensor, slope: float, g: Tensor) -> Tensor:
    begin, end = bounds(layout)
    out = mine.new_empty(mine.shape)
    column, edge = layout.arrays.column, layout.edge_array
    one, two, given, result = flat(mine), flat(its), flat(g), flat(out)
    # Two prefetch distances, in entries: ``near`` for rows of g, ``ahead`` for rows of the other end.
    bend, near, ahead = result.dtype.type(slope), ahead_of(given), ahead_of(two)
    share(
        lambda low, high: _join_back(
            low, high, begin, end, column, edge, near, ahead, one, two, bend, given, result
        ),
        begin,
        end,
        2 * prod(mine.shape[1:]),
    )
    return out
