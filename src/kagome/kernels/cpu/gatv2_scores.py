"""Loops for GATv2's attention scores, ``<att, leaky_relu(a + b)>`` of each edge, and their gradients.

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

from kagome.kernels.base.csr import CsrLayout, Structure
from kagome.kernels.base.thread_pool import array, compiled, cuts_of, each, flat, share
from kagome.kernels.cpu.prefetch import ahead_of, fetch
from kagome.kernels.cpu.simd import add_bent, bent_dot
from kagome.kernels.cpu.spmm import bounds, known


@cache
def _dots(width: int) -> Callable[..., None]:
    """Return the loop for the logits with ``width`` columns per head; 0 stands for any number."""

    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        edge: Any,
        ahead: int,
        a: Any,
        b: Any,
        att: Any,
        slope: Any,
        out: Any,
    ) -> None:
        heads = out.shape[1]
        size = att.size // heads
        for i in range(low, high):
            mine = a[i]
            for k in range(begin[i], end[i]):
                fetch(b, column, k, ahead, 0)
                its, result = b[column[k]], out[edge[k]]
                for h in range(heads):
                    if width > 0:
                        result[h] = bent_dot(width, mine, h * width, its, att, slope)
                    else:
                        # A width without a loop of its own: four columns at a time, then single ones.
                        f, stop, total = h * size, h * size + size, out.dtype.type(0)
                        while f + 4 <= stop:
                            total += bent_dot(4, mine, f, its, att, slope)
                            f += 4
                        while f < stop:
                            total += bent_dot(1, mine, f, its, att, slope)
                            f += 1
                        result[h] = total

    return loop


@cache
def _back(width: int) -> Callable[..., None]:
    """Return the loop for the gradient of one end, and of att if ``tally`` is not empty."""

    @compiled
    def loop(
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
        att: Any,
        slope: Any,
        g: Any,
        out: Any,
        tally: Any,
    ) -> None:
        heads, columns, tallied = g.shape[1], att.size, tally.size > 0
        size = columns // heads
        for i in range(low, high):
            row, one = out[i], mine[i]
            row[:] = 0
            for k in range(begin[i], end[i]):
                fetch(its, column, k, ahead, 0)
                fetch(g, edge, k, near, 0)
                two, given = its[column[k]], g[edge[k]]
                for h in range(heads):
                    # The gradient of z = a_i + b_j is g * att * (1 or slope). The factor att is the same for
                    # all entries of the row and multiplies their sum below. leaky_relu(z) * g, which is
                    # summed in tally, is z times this same gradient without att, because leaky_relu is linear
                    # on either side of 0.
                    steep = given[h]
                    gentle = steep * slope
                    if width > 0:
                        add_bent(width, row, h * width, one, two, steep, gentle, tally, tallied)
                    else:
                        f, stop = h * size, h * size + size
                        while f + 4 <= stop:
                            add_bent(4, row, f, one, two, steep, gentle, tally, tallied)
                            f += 4
                        while f < stop:
                            add_bent(1, row, f, one, two, steep, gentle, tally, tallied)
                            f += 1
            for f in range(columns):
                row[f] *= att[f]

    return loop


def leaky_dots(layout: CsrLayout, a: Tensor, b: Tensor, att: Tensor, slope: float) -> Tensor:
    """Compute ``ops.leaky_dots`` with numba loops."""
    begin, end = bounds(layout)
    heads, width = a.shape[1:]
    out = a.new_empty(layout.edges, heads)
    loop, column, edge = _dots(known(width)), layout.arrays.column, layout.edge_array
    one, two, factor, result = flat(a), flat(b), array(att).reshape(-1), array(out)
    bend, ahead = result.dtype.type(slope), ahead_of(two)
    share(
        lambda low, high: loop(low, high, begin, end, column, edge, ahead, one, two, factor, bend, result),
        begin,
        end,
        2 * heads * width,
    )
    return out


def leaky_dots_back(
    structure: Structure, a: Tensor, b: Tensor, att: Tensor, slope: float, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``ops.leaky_dots_back`` with numba loops."""
    ga, gb = a.new_empty(a.shape), b.new_empty(b.shape)
    one, two, factor, given = flat(a), flat(b), array(att).reshape(-1), array(g)
    loop, bend = _back(known(a.size(2))), given.dtype.type(slope)
    near, ahead = ahead_of(given), ahead_of(two)

    layout = structure.by_target
    begin, end = bounds(layout)
    column, edge, result = layout.arrays.column, layout.edge_array, flat(ga)
    # The gradient of att is a sum over all edges. Each range of rows has a partial sum of its own, and the
    # number of ranges is fixed: the result has the same bits with any number of threads.
    cuts = cuts_of(begin, end, 4 * factor.size)
    # [ranges, heads * columns]
    tally = np.zeros((cuts.size - 1, factor.size), given.dtype)

    def forward(k: int) -> None:
        low, high, part = cuts[k], cuts[k + 1], tally[k]
        loop(low, high, begin, end, column, edge, near, ahead, one, two, factor, bend, given, result, part)

    each(forward, cuts.size - 1)

    layout = structure.by_source
    first, last = bounds(layout)
    other, which, turned = layout.arrays.column, layout.edge_array, flat(gb)

    def backward(low: int, high: int) -> None:
        # The gradient of att is complete after the first pass. An empty tally turns it off here.
        none = factor[:0]
        loop(low, high, first, last, other, which, near, ahead, two, one, factor, bend, given, turned, none)

    share(backward, first, last, 2 * factor.size)
    return ga, gb, torch.from_numpy(tally.sum(0)).view(att.shape)
