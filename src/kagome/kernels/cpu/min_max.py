"""Loops that treat each column separately: minimum and maximum over neighbours, and softmax by column.

Where it sits: ``dispatch`` collects these for ``kernels.ops``; ``base.thread_pool`` divides their rows among
threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kagome.kernels.base.csr import CsrLayout
from kagome.kernels.base.reference import TINY
from kagome.kernels.base.thread_pool import compiled, flat, share
from kagome.kernels.cpu.exp import exponential
from kagome.kernels.cpu.prefetch import ahead_of, fetch
from kagome.kernels.cpu.spmm import bounds


@compiled
def _extreme(
    low: int, high: int, begin: Any, end: Any, index: Any, ahead: int, x: Any, sign: Any, best: Any, ties: Any
) -> None:
    for i in range(low, high):
        # ``top`` holds the largest sign * x until the end, so that one loop serves maximum and minimum.
        top, same = best[i], ties[i]
        top[:] = -np.inf if begin[i] < end[i] else 0
        same[:] = 0
        for k in range(begin[i], end[i]):
            fetch(x, index, k, ahead, 0)
            other = x[index[k]]
            for f in range(top.size):
                v = sign * other[f]
                # NaN wins over every number and stays: a run that diverges must show it.
                beats = (v > top[f]) | (v != v)
                tied = same[f] + 1 if v == top[f] else same[f]
                same[f] = 1 if beats else tied
                top[f] = v if beats else top[f]
        for f in range(top.size):
            top[f] *= sign


@compiled
def _extreme_back(
    low: int, high: int, begin: Any, end: Any, column: Any, ahead: int, x: Any, best: Any, part: Any, out: Any
) -> None:
    for u in range(low, high):
        row, mine = out[u], x[u]
        row[:] = 0
        for k in range(begin[u], end[u]):
            fetch(best, column, k, ahead, 0)
            fetch(part, column, k, ahead, 0)
            # ``part`` is the gradient divided by the number of ties.
            top, given = best[column[k]], part[column[k]]
            for f in range(row.size):
                row[f] += given[f] if mine[f] == top[f] else 0


@compiled
def _extreme_edges_back(
    low: int, high: int, begin: Any, end: Any, edge: Any, values: Any, best: Any, part: Any, out: Any
) -> None:
    for i in range(low, high):
        top, given = best[i], part[i]
        for k in range(begin[i], end[i]):
            row, mine = out[edge[k]], values[edge[k]]
            for f in range(row.size):
                row[f] = given[f] if mine[f] == top[f] else 0


@compiled
def _softmax(
    low: int,
    high: int,
    begin: Any,
    end: Any,
    column: Any,
    ahead: int,
    z: Any,
    m: Any,
    out: Any,
    top: Any,
    total: Any,
) -> None:
    tiny = out.dtype.type(TINY)
    for i in range(low, high):
        sums, most, totals = out[i], top[i], total[i]
        sums[:] = 0
        totals[:] = 0
        most[:] = -np.inf if begin[i] < end[i] else 0
        for k in range(begin[i], end[i]):
            fetch(z, column, k, ahead, 0)
            fetch(m, column, k, ahead, 0)
            other = z[column[k]]
            for f in range(most.size):
                v = other[f]
                most[f] = v if (v > most[f]) | (v != v) else most[f]
        # The first pass has brought these rows into the cache, so the second one does not prefetch.
        for k in range(begin[i], end[i]):
            other, read = z[column[k]], m[column[k]]
            for f in range(most.size):
                p = exponential(other[f] - most[f])
                totals[f] += p
                sums[f] += p * read[f]
        for f in range(most.size):
            sums[f] /= totals[f] + tiny


@compiled
def _softmax_back(
    low: int,
    high: int,
    begin: Any,
    end: Any,
    column: Any,
    ahead: int,
    z: Any,
    m: Any,
    out: Any,
    top: Any,
    part: Any,
    gz: Any,
    gm: Any,
) -> None:
    for u in range(low, high):
        of_z, of_m, mine, read = gz[u], gm[u], z[u], m[u]
        of_z[:] = 0
        of_m[:] = 0
        for k in range(begin[u], end[u]):
            fetch(out, column, k, ahead, 0)
            fetch(top, column, k, ahead, 0)
            fetch(part, column, k, ahead, 0)
            i = column[k]
            sums, most, given = out[i], top[i], part[i]
            # With out[i] = sum of p * m over the neighbours of i, the gradients are d m[u] = sum of p * g[i]
            # and d z[u] = sum of p * g[i] * (m[u] - out[i]). ``given`` is g[i] / total[i].
            for f in range(of_z.size):
                p = exponential(mine[f] - most[f]) * given[f]
                of_m[f] += p
                of_z[f] += p * (read[f] - sums[f])


def extreme_rows(layout: CsrLayout, x: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Compute ``ops.extreme_rows`` with numba loops."""
    return _extremes(layout, layout.arrays.column, x, sign)


def extreme_edges(layout: CsrLayout, values: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Compute ``ops.extreme_edges`` with numba loops."""
    return _extremes(layout, layout.edge_array, values, sign)


def _extremes(layout: CsrLayout, index: Any, x: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    begin, end = bounds(layout)
    best, ties = x.new_empty(layout.rows, *x.shape[1:]), x.new_empty(layout.rows, *x.shape[1:])
    values, top, same = flat(x), flat(best), flat(ties)
    flip, ahead = values.dtype.type(sign), ahead_of(values)
    share(
        lambda low, high: _extreme(low, high, begin, end, index, ahead, values, flip, top, same),
        begin,
        end,
        top.shape[1],
    )
    return best, ties


def extreme_back(layout: CsrLayout, x: Tensor, best: Tensor, ties: Tensor, g: Tensor) -> Tensor:
    """Compute ``ops.extreme_back`` with numba loops."""
    begin, end = bounds(layout)
    out = x.new_empty(x.shape)
    column, values, top, result = layout.arrays.column, flat(x), flat(best), flat(out)
    part, ahead = flat(g / ties.clamp(min=1)), ahead_of(top)
    share(
        lambda low, high: _extreme_back(low, high, begin, end, column, ahead, values, top, part, result),
        begin,
        end,
        2 * result.shape[1],
    )
    return out


def extreme_edges_back(layout: CsrLayout, values: Tensor, best: Tensor, ties: Tensor, g: Tensor) -> Tensor:
    """Compute ``ops.extreme_edges_back`` with numba loops."""
    begin, end = bounds(layout)
    out = values.new_empty(values.shape)
    edge, given, top, result = layout.edge_array, flat(values), flat(best), flat(out)
    part = flat(g / ties.clamp(min=1))
    share(
        lambda low, high: _extreme_edges_back(low, high, begin, end, edge, given, top, part, result),
        begin,
        end,
        2 * result.shape[1],
    )
    return out


def column_softmax(layout: CsrLayout, z: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``ops.column_softmax`` with numba loops."""
    begin, end = bounds(layout)
    # Sums, maxima and totals: backward computes the weights again from the last two and stores none per edge.
    made = [torch.empty(layout.rows, *z.shape[1:], dtype=z.dtype) for _ in range(3)]
    column, logits, values = layout.arrays.column, flat(z), flat(m)
    out, top, total = (flat(t) for t in made)
    ahead = ahead_of(logits)
    share(
        lambda low, high: _softmax(low, high, begin, end, column, ahead, logits, values, out, top, total),
        begin,
        end,
        # An exponential counts as eight numbers read: see ``softmax.COST``.
        8 * out.shape[1],
    )
    return made[0], made[1], made[2]


def column_softmax_back(
    layout: CsrLayout, z: Tensor, m: Tensor, out: Tensor, top: Tensor, total: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.column_softmax_back`` with numba loops."""
    begin, end = bounds(layout)
    gz, gm = torch.empty(z.shape, dtype=z.dtype), torch.empty(z.shape, dtype=z.dtype)
    column, part = layout.arrays.column, flat(g / (total + TINY))
    logits, values, sums, most = (flat(t) for t in (z, m, out, top))
    of_z, of_m, ahead = flat(gz), flat(gm), ahead_of(sums)
    share(
        lambda low, high: _softmax_back(
            low, high, begin, end, column, ahead, logits, values, sums, most, part, of_z, of_m
        ),
        begin,
        end,
        8 * of_z.shape[1],
    )
    return gz, gm
