"""Loops for GATv2's logits: a dot product with the bent sum of an edge's two ends, and its gradients.

Where it sits: ``loops`` gathers these for ``ops``; ``crew`` shares their rows among threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kagome.kernels.crew import FIXED, array, compiled, cuts_of, each, flat, reordered, share
from kagome.kernels.loops_sum import bounds, known
from kagome.kernels.structure import Layout, Structure


@cache
def _dots(width: int) -> Callable[..., None]:
    """The logits for that many columns a head; 0: for any number."""

    @reordered
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        edge: Any,
        a: Any,
        b: Any,
        att: Any,
        slope: Any,
        out: Any,
    ) -> None:
        heads = out.shape[1]
        size = width if width > 0 else att.size // heads
        for i in range(low, high):
            for k in range(begin[i], end[i]):
                other, result = b[column[k]], out[edge[k]]
                for h in range(heads):
                    one, two, factor = a[i, h * size :], other[h * size :], att[h * size :]
                    total = out.dtype.type(0)
                    for f in range(size):
                        z = one[f] + two[f]
                        total += factor[f] * (z if z > 0 else z * slope)
                    result[h] = total

    return loop


@cache
def _back(width: int) -> Callable[..., None]:
    """The gradient of one end, and of att where ``tally`` has room for it."""

    @compiled
    def loop(
        low: int,
        high: int,
        begin: Any,
        end: Any,
        column: Any,
        edge: Any,
        mine: Any,
        its: Any,
        att: Any,
        slope: Any,
        g: Any,
        out: Any,
        tally: Any,
    ) -> None:
        heads = g.shape[1]
        size = width if width > 0 else att.size // heads
        tallied = tally.size > 0
        for i in range(low, high):
            out[i, :] = 0
            for k in range(begin[i], end[i]):
                other, given = its[column[k]], g[edge[k]]
                for h in range(heads):
                    row, one, two = out[i, h * size :], mine[i, h * size :], other[h * size :]
                    steep = given[h]
                    gentle = steep * slope
                    if tallied:
                        part = tally[h * size :]
                        for f in range(size):
                            z = one[f] + two[f]
                            slant = steep if z > 0 else gentle
                            row[f] += slant
                            part[f] += z * slant
                    else:
                        for f in range(size):
                            row[f] += steep if one[f] + two[f] > 0 else gentle
            for f in range(att.size):
                out[i, f] *= att[f]

    return loop


def leaky_dots(layout: Layout, a: Tensor, b: Tensor, att: Tensor, slope: float) -> Tensor:
    """See ``ops.leaky_dots``."""
    begin, end = bounds(layout)
    heads, width = a.shape[1:]
    out = a.new_empty(layout.edges, heads)
    loop, column, edge = _dots(known(width)), array(layout.column), array(layout.edge)
    one, two, factor, result = flat(a), flat(b), array(att).reshape(-1), array(out)
    bend = result.dtype.type(slope)
    share(
        lambda low, high: loop(low, high, begin, end, column, edge, one, two, factor, bend, result),
        begin,
        end,
        2 * heads * width,
    )
    return out


def leaky_dots_back(
    structure: Structure, a: Tensor, b: Tensor, att: Tensor, slope: float, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ops.leaky_dots_back``."""
    ga, gb = a.new_empty(a.shape), b.new_empty(b.shape)
    one, two, factor, given = flat(a), flat(b), array(att).reshape(-1), array(g)
    loop, bend = _back(known(a.size(2))), given.dtype.type(slope)

    layout = structure.by_target
    begin, end = bounds(layout)
    column, edge, result = array(layout.column), array(layout.edge), flat(ga)
    tally = np.zeros((FIXED, factor.size), given.dtype)
    cuts = cuts_of(begin, end, FIXED)

    def forward(k: int) -> None:
        loop(
            cuts[k], cuts[k + 1], begin, end, column, edge, one, two, factor, bend, given, result, tally[k]
        )

    each(forward, FIXED)

    layout = structure.by_source
    first, last = bounds(layout)
    other, which, turned = array(layout.column), array(layout.edge), flat(gb)
    none = tally[0, :0]
    share(
        lambda low, high: loop(
            low, high, first, last, other, which, two, one, factor, bend, given, turned, none
        ),
        first,
        last,
        2 * factor.size,
    )
    return ga, gb, torch.from_numpy(tally.sum(0)).view(att.shape)
