"""Loops for sums over neighbours that GAT's attention weighs, without a number for each edge and head.

Where it sits: ``dispatch`` collects these for ``kernels.ops``; ``base.thread_pool`` divides their rows among
threads. Attention of a row's entries lives in a small buffer; backward computes it again.

::

    forward             p = softmax of leaky_relu(a_i + b_j),  out_i = sum of p x_j
    backward, by row    p again, D_i = sum of p <g_i, x_j>,  ga_i = sum of p (<g_i, x_j> - D_i) leaky'
                        notes a_i, the largest logit, 1 / total and D_i / total
    by source           p from these notes,  gx_j = sum of p g_i,  gb_j = sum of p (<g_i, x_j> - D_i) leaky'

Source: Dao et al., FlashAttention, NeurIPS 2022, algorithm 4: probabilities are computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from kagome.kernels.base.csr import CsrLayout, Structure
from kagome.kernels.base.reference import TINY
from kagome.kernels.base.thread_pool import array, compiled, flat, share
from kagome.kernels.cpu.exp import exponential
from kagome.kernels.cpu.prefetch import ahead_of, fetch
from kagome.kernels.cpu.simd import add_from, add_two, dot, gain, gain_bent, join_bent, subtract
from kagome.kernels.cpu.softmax import COST, HEADS, room_for
from kagome.kernels.cpu.spmm import WIDTHS, bounds

NOTES = 4
"""Numbers that the pass by row notes for a row and head."""


FEW = 1 << 23
"""Bytes of b up to which its short rows need no prefetch: many of them fit a line, and most stay in cache.

With 800,000 rows (26 MB) and 8 heads of 16, three pairs of runs on one core took 0.68 to 0.92 of the time
forward and 0.73 to 0.88 by row. With 50,000 rows (1.6 MB) forward took longer.
"""


def fuses(heads: int, width: int) -> bool:
    """Return whether there are loops for so many heads of so many columns."""
    return heads in HEADS and width in WIDTHS


@cache
def _sum(heads: int, width: int) -> Callable[..., None]:
    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        ahead: int,
        near: int,
        a: Any,
        b: Any,
        slope: Any,
        x: Any,
        out: Any,
        p: Any,
        room: Any,
    ) -> None:
        top, total = room[0], room[1]
        for i in range(low, high):
            first, entries, mine, row = begin[i], end[i] - begin[i], a[i], out[i]
            top[:] = -np.inf
            for k in range(entries):
                fetch(b, column, first + k, near, 0)
                join_bent(heads, p, k * heads, mine, b[column[first + k]], slope, top)
            for k in range(entries):
                subtract(heads, p, k * heads, top)
            # One loop over entries and heads fills the vectors of the exponential.
            for at in range(entries * heads):
                p[at] = exponential(p[at])
            row[:] = 0
            total[:] = 0
            k = 0
            while k < entries:
                # Two entries at once; an odd last entry is added as two halves of itself.
                pair = min(k + 1, entries - 1)
                part = p.dtype.type(1) if pair > k else p.dtype.type(0.5)
                for j in range(k, pair + 1):
                    fetch(x, column, first + j, ahead, 0)
                    gain(heads, total, p, j * heads)
                one, two = x[column[first + k]], x[column[first + pair]]
                for h in range(heads):
                    at = h * width
                    add_two(width, row, at, one, part * p[k * heads + h], two, part * p[pair * heads + h])
                k += 2
            for h in range(heads):
                share_of = 1 / (total[h] + p.dtype.type(TINY))
                for f in range(h * width, h * width + width):
                    row[f] *= share_of

    return loop


# [Note: two halves] The gradient of leaky_relu is 1 or the slope. Sums of p x_j over the entries with either
# are all that the gradient of a needs of the entries, so no product of rows is computed for an edge:
#
#     steep = sum over z > 0 of p x_j      gentle = the sum over the others      D = <g_i, steep + gentle>
#     ga_i = <g_i, steep> + slope <g_i, gentle> - D (sum over z > 0 of p + slope times that over the others)
#
# With the rows' roles exchanged the same holds for the gradient of b, where D is the other end's.


@cache
def _back_by_row(heads: int, width: int) -> Callable[..., None]:
    columns = heads * width

    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        ahead: int,
        near: int,
        a: Any,
        b: Any,
        slope: Any,
        x: Any,
        g: Any,
        ga: Any,
        notes: Any,
        halves: Any,
        p: Any,
        room: Any,
        ones: Any,
    ) -> None:
        steep, gentle = halves[:columns], halves[columns:]
        top, total = room[0], room[1]
        for i in range(low, high):
            first, entries, mine, given = begin[i], end[i] - begin[i], a[i], g[i]
            own, note = ga[i], notes[i]
            top[:] = -np.inf
            for k in range(entries):
                fetch(b, column, first + k, near, 0)
                join_bent(heads, p, k * heads, mine, b[column[first + k]], slope, top)
            for k in range(entries):
                subtract(heads, p, k * heads, top)
            for at in range(entries * heads):
                p[at] = exponential(p[at])
            total[:] = 0
            halves[:] = 0
            own[:] = 0
            for k in range(entries):
                fetch(x, column, first + k, ahead, 0)
                its, read = b[column[first + k]], x[column[first + k]]
                gain(heads, total, p, k * heads)
                gain_bent(heads, own, p, k * heads, mine, its, slope, ones)
                for h in range(heads):
                    at = h * width if mine[h] + its[h] > 0 else columns + h * width
                    add_from(width, halves, at, read, h * width, p[k * heads + h])
            for h in range(heads):
                share_of = 1 / (total[h] + p.dtype.type(TINY))
                upper = share_of * dot(width, steep, h * width, given)
                lower = share_of * dot(width, gentle, h * width, given)
                own[h] = upper + slope * lower - (upper + lower) * share_of * own[h]
                note[h], note[heads + h], note[2 * heads + h] = mine[h], top[h], share_of
                note[3 * heads + h] = share_of * (upper + lower)

    return loop


@cache
def _back_by_source(heads: int, width: int) -> Callable[..., None]:
    columns = heads * width

    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        ahead: int,
        near: int,
        b: Any,
        slope: Any,
        x: Any,
        g: Any,
        notes: Any,
        gb: Any,
        gx: Any,
        halves: Any,
        p: Any,
        room: Any,
    ) -> None:
        steep, gentle, top = halves[:columns], halves[columns:], room[0]
        for j in range(low, high):
            first, entries = begin[j], end[j] - begin[j]
            mine, read, own, row = b[j], x[j], gb[j], gx[j]
            top[:] = 0  # not read here
            for k in range(entries):
                fetch(notes, column, first + k, near, 0)
                note = notes[column[first + k]]
                join_bent(heads, p, k * heads, note, mine, slope, top)
                subtract(heads, p, k * heads, note[heads:])
            for at in range(entries * heads):
                p[at] = exponential(p[at])
            halves[:] = 0
            own[:] = 0
            for k in range(entries):
                fetch(g, column, first + k, ahead, 0)
                note, given = notes[column[first + k]], g[column[first + k]]
                # The last numbers of a note are D_i over the total.
                gain_bent(heads, own, p, k * heads, note, mine, slope, note[3 * heads :])
                for h in range(heads):
                    at = h * width if note[h] + mine[h] > 0 else columns + h * width
                    add_from(width, halves, at, given, h * width, p[k * heads + h] * note[2 * heads + h])
            for h in range(heads):
                upper, lower = dot(width, steep, h * width, read), dot(width, gentle, h * width, read)
                own[h] = upper + slope * lower - own[h]
            for f in range(columns):
                row[f] = steep[f] + gentle[f]

    return loop


def attention_sum(layout: CsrLayout, a: Tensor, b: Tensor, slope: float, x: Tensor) -> Tensor:
    """Compute ``ops.attention_sum`` with numba loops, for heads that :func:`fuses` knows."""
    begin, end = bounds(layout)
    heads, width = x.shape[1:]
    out = x.new_empty(layout.rows, heads, width)
    loop, column = _sum(heads, width), layout.arrays.column
    mine, its, rows, result = array(a), array(b), flat(x), flat(out)
    bend, ahead, near = result.dtype.type(slope), ahead_of(rows), ahead_of(its, FEW)

    def work(low: int, high: int) -> None:
        room = room_for(begin, end, low, high, mine)
        loop(low, high, begin, end, column, ahead, near, mine, its, bend, rows, result, *room)

    share(work, begin, end, heads * (COST + width))
    return out


def attention_sum_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float, x: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``ops.attention_sum_back`` with numba loops, for heads that :func:`fuses` knows."""
    heads, width = x.shape[1:]
    ga, gb, gx = a.new_empty(a.shape), b.new_empty(b.shape), x.new_empty(x.shape)
    mine, its, rows, given = array(a), array(b), flat(x), flat(g)
    of_a, of_b, of_x = array(ga), array(gb), flat(gx)
    # [own, NOTES * heads]: what backward must know of a row to compute its attention again
    notes = np.empty((mine.shape[0], NOTES * heads), mine.dtype)
    bend, cost = mine.dtype.type(slope), heads * (COST + 2 * width)

    layout = structure.by_target
    begin, end = bounds(layout)
    first, column, ahead = _back_by_row(heads, width), layout.arrays.column, ahead_of(rows)
    close = ahead_of(its, FEW)

    def by_row(low: int, high: int) -> None:
        p, room = room_for(begin, end, low, high, mine)
        ones = np.ones(heads, rows.dtype)
        held = notes, np.empty(2 * rows.shape[1], rows.dtype), p, room, ones
        first(low, high, begin, end, column, ahead, close, mine, its, bend, rows, given, of_a, *held)

    share(by_row, begin, end, cost)

    layout = structure.by_source
    start, stop = bounds(layout)
    second, target = _back_by_source(heads, width), layout.arrays.column
    far, near = ahead_of(given), ahead_of(notes)

    def by_source(low: int, high: int) -> None:
        held = np.empty(2 * rows.shape[1], rows.dtype), *room_for(start, stop, low, high, its)
        second(low, high, start, stop, target, far, near, its, bend, rows, given, notes, of_b, of_x, *held)

    share(by_source, start, stop, cost)
    return ga, gb, gx
