"""Loops for softmax over each row's edges by head, of given logits or of GAT's sums of two ends.

Where it sits: ``dispatch`` collects these for ``kernels.ops``; ``base.thread_pool`` divides their rows among
threads. The values of one row are kept in a small buffer while they are worked on; no other tensor with one
row per edge is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from kagome.kernels.base.csr import CsrLayout, Structure
from kagome.kernels.base.jit import inlined
from kagome.kernels.base.reference import TINY
from kagome.kernels.base.thread_pool import array, compiled, share
from kagome.kernels.cpu.edges import sum_edges
from kagome.kernels.cpu.exp import exponential
from kagome.kernels.cpu.prefetch import ahead_of, fetch
from kagome.kernels.cpu.spmm import bounds

HEADS = (1, 2, 4, 8, 16)
"""Head counts with a loop of their own: the compiler turns a known length into whole vectors."""
COST = 8
"""Cost of one entry's exponential, in numbers read."""


def known(heads: int) -> int:
    """Return the number of heads if there is a loop for it, otherwise 0."""
    return heads if heads in HEADS else 0


def room_for(begin: Any, end: Any, low: int, high: int, like: Any) -> tuple[Any, Any]:
    """Return buffers for the longest of these rows and for two numbers per head."""
    heads = like.shape[1]
    longest = int((end[low:high] - begin[low:high]).max(initial=0))
    return np.empty(longest * heads, like.dtype), np.empty((2, heads), like.dtype)


@inlined
def _normalised(z: Any, entries: int, heads: int, top: Any, total: Any) -> None:
    """Normalise ``entries`` times ``heads`` logits to a softmax in place, given each head's largest."""
    for k in range(entries):
        for h in range(heads):
            z[k * heads + h] -= top[h]
    # One loop over entries and heads, so that the vectors of the exponential are full with any number of
    # heads.
    for j in range(entries * heads):
        z[j] = exponential(z[j])
    total[:] = 0
    for k in range(entries):
        for h in range(heads):
            total[h] += z[k * heads + h]
    for h in range(heads):
        # ``total`` becomes the reciprocal: a product per entry in place of a division.
        total[h] = 1 / (total[h] + z.dtype.type(TINY))
    for k in range(entries):
        for h in range(heads):
            z[k * heads + h] *= total[h]


@cache
def _of_logits(width: int) -> Callable[..., None]:
    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        edge: Any,
        ahead: int,
        logits: Any,
        out: Any,
        z: Any,
        room: Any,
    ) -> None:
        heads = width if width > 0 else out.shape[1]
        top, total = room[0], room[1]
        for i in range(low, high):
            first, entries = begin[i], end[i] - begin[i]
            top[:] = -np.inf
            # Copy the row's logits from the order of the edge list, since the passes below read them several
            # times.
            for k in range(entries):
                fetch(logits, edge, first + k, ahead, 0)
                given = logits[edge[first + k]]
                for h in range(heads):
                    v = given[h]
                    z[k * heads + h] = v
                    # NaN counts as the largest, so that a diverged run shows NaN in place of a wrong number.
                    top[h] = v if (v > top[h]) | (v != v) else top[h]
            _normalised(z, entries, heads, top, total)
            for k in range(entries):
                row = out[edge[first + k]]
                for h in range(heads):
                    row[h] = z[k * heads + h]

    return loop


@cache
def _of_sums(width: int) -> Callable[..., None]:
    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        edge: Any,
        a: Any,
        b: Any,
        slope: Any,
        out: Any,
        z: Any,
        room: Any,
    ) -> None:
        heads = width if width > 0 else out.shape[1]
        top, total = room[0], room[1]
        for i in range(low, high):
            first, entries, mine = begin[i], end[i] - begin[i], a[i]
            top[:] = -np.inf
            # The sum of two ends is computed here and lives in ``z`` alone.
            for k in range(entries):
                its = b[column[first + k]]
                for h in range(heads):
                    v = mine[h] + its[h]
                    v = v if v > 0 else v * slope
                    z[k * heads + h] = v
                    top[h] = v if (v > top[h]) | (v != v) else top[h]
            _normalised(z, entries, heads, top, total)
            for k in range(entries):
                row = out[edge[first + k]]
                for h in range(heads):
                    row[h] = z[k * heads + h]

    return loop


@cache
def _back(width: int) -> Callable[..., None]:
    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        edge: Any,
        ahead: int,
        alpha: Any,
        g: Any,
        out: Any,
        total: Any,
    ) -> None:
        heads = width if width > 0 else out.shape[1]
        for i in range(low, high):
            total[:] = 0
            for k in range(begin[i], end[i]):
                fetch(alpha, edge, k, ahead, 0)
                fetch(g, edge, k, ahead, 0)
                p, given = alpha[edge[k]], g[edge[k]]
                for h in range(heads):
                    total[h] += p[h] * given[h]
            # d logit = p * (g - sum over the row of p * g).
            for k in range(begin[i], end[i]):
                p, given, row = alpha[edge[k]], g[edge[k]], out[edge[k]]
                for h in range(heads):
                    row[h] = p[h] * (given[h] - total[h])

    return loop


@cache
def _sums_back(width: int) -> Callable[..., None]:
    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        edge: Any,
        a: Any,
        b: Any,
        slope: Any,
        ahead: int,
        alpha: Any,
        g: Any,
        gz: Any,
        ga: Any,
        total: Any,
    ) -> None:
        heads = width if width > 0 else gz.shape[1]
        for i in range(low, high):
            mine, own = a[i], ga[i]
            total[:] = 0
            own[:] = 0
            for k in range(begin[i], end[i]):
                fetch(alpha, edge, k, ahead, 0)
                fetch(g, edge, k, ahead, 0)
                p, given = alpha[edge[k]], g[edge[k]]
                for h in range(heads):
                    total[h] += p[h] * given[h]
            for k in range(begin[i], end[i]):
                p, given, row, its = alpha[edge[k]], g[edge[k]], gz[edge[k]], b[column[k]]
                for h in range(heads):
                    v = p[h] * (given[h] - total[h])
                    v = v if mine[h] + its[h] > 0 else v * slope
                    # A gradient per edge is stored because the sum by source follows another layout. The
                    # gradient of a is summed on the way, since it belongs to this row.
                    row[h] = v
                    own[h] += v

    return loop


def softmax_edges(layout: CsrLayout, logits: Tensor) -> Tensor:
    """Compute ``ops.softmax_edges`` with numba loops."""
    begin, end = bounds(layout)
    out = logits.new_empty(logits.shape)
    heads = logits.size(1)
    loop, edge, given, result = _of_logits(known(heads)), layout.edge_array, array(logits), array(out)
    ahead = ahead_of(given)

    # Compiled loops may not create arrays (see ``compiled``), so each piece brings its buffers.
    def work(low: int, high: int) -> None:
        loop(low, high, begin, end, edge, ahead, given, result, *room_for(begin, end, low, high, result))

    share(work, begin, end, COST * heads)
    return out


def softmax_edges_back(layout: CsrLayout, alpha: Tensor, g: Tensor) -> Tensor:
    """Compute ``ops.softmax_edges_back`` with numba loops."""
    begin, end = bounds(layout)
    out = alpha.new_empty(alpha.shape)
    heads = alpha.size(1)
    loop, edge, result = _back(known(heads)), layout.edge_array, array(out)
    p, given = array(alpha), array(g)
    ahead = ahead_of(p)

    def work(low: int, high: int) -> None:
        loop(low, high, begin, end, edge, ahead, p, given, result, np.empty(heads, result.dtype))

    share(work, begin, end, 4 * heads)
    return out


def softmax_sum(layout: CsrLayout, a: Tensor, b: Tensor, slope: float) -> Tensor:
    """Compute ``ops.softmax_sum`` with numba loops."""
    begin, end = bounds(layout)
    heads = a.size(1)
    out = a.new_empty(layout.edges, heads)
    loop, column, edge = _of_sums(known(heads)), layout.arrays.column, layout.edge_array
    mine, its, result = array(a), array(b), array(out)
    bend = result.dtype.type(slope)

    def work(low: int, high: int) -> None:
        room = room_for(begin, end, low, high, result)
        loop(low, high, begin, end, column, edge, mine, its, bend, result, *room)

    share(work, begin, end, COST * heads)
    return out


def softmax_sum_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float, alpha: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.softmax_sum_back`` with numba loops."""
    layout = structure.by_target
    begin, end = bounds(layout)
    heads = a.size(1)
    ga, gz = a.new_empty(a.shape), alpha.new_empty(alpha.shape)
    loop, column, edge = _sums_back(known(heads)), layout.arrays.column, layout.edge_array
    mine, its, p, given, of_z, of_a = (array(t) for t in (a, b, alpha, g, gz, ga))
    bend, ahead = of_z.dtype.type(slope), ahead_of(p)

    def work(low: int, high: int) -> None:
        total = np.empty(heads, of_z.dtype)
        loop(low, high, begin, end, column, edge, mine, its, bend, ahead, p, given, of_z, of_a, total)

    share(work, begin, end, 4 * heads)
    return ga, sum_edges(structure.by_source, gz)
