"""Plain loops in place of the LLVM vector steps: what numba makes of a loop over columns.

Where it sits: ``switches.py`` puts these functions in the place of those of ``kernels.cpu.simd``, before any
loop is compiled. Each has the arguments of the one it stands for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from kagome.kernels.quantize.ops import FIRST, SECOND

U1, U2 = np.uint32(FIRST), np.uint32(SECOND)
HALF, LOW = np.uint32(15), np.uint32(8)
STEP, ONE, INFINITE = np.float32(2.0**-24), np.float32(1), np.float32(np.inf)
ANY_ORDER = {"contract", "reassoc", "nsz"}
"""A sum over columns becomes vectors only if its order is free; that of the vector steps is free too."""


@register_jitable(forceinline=True)
def add_two(width: int, out: Any, at: int, a: Any, p: Any, b: Any, q: Any) -> None:
    row, one, two = out[at : at + width], a[at : at + width], b[at : at + width]
    for f in range(width):
        row[f] += p * one[f] + q * two[f]


@register_jitable(forceinline=True)
def add_one(width: int, out: Any, at: int, a: Any, factor: Any) -> None:
    row, one = out[at : at + width], a[at : at + width]
    for f in range(width):
        row[f] += factor * one[f]


@register_jitable(forceinline=True)
def add_four(width: int, out: Any, at: int, a: Any, b: Any, c: Any, d: Any, factor: Any) -> None:
    row, one, two = out[at : at + width], a[at : at + width], b[at : at + width]
    three, four = c[at : at + width], d[at : at + width]
    for f in range(width):
        row[f] += factor * ((one[f] + two[f]) + (three[f] + four[f]))


@register_jitable(forceinline=True)
def add_products(
    width: int, out: Any, at: int, a: Any, p: Any, b: Any, q: Any, c: Any, r: Any, d: Any, s: Any
) -> None:
    row, one, two = out[at : at + width], a[at : at + width], b[at : at + width]
    three, four = c[at : at + width], d[at : at + width]
    for f in range(width):
        row[f] += (p * one[f] + q * two[f]) + (r * three[f] + s * four[f])


@register_jitable(forceinline=True, fastmath=ANY_ORDER)
def dot(width: int, a: Any, at: int, b: Any) -> Any:
    one, two, total = a[at : at + width], b[at : at + width], a.dtype.type(0)
    for f in range(width):
        total += one[f] * two[f]
    return total


@register_jitable(forceinline=True, fastmath=ANY_ORDER)
def bent_dot(width: int, a: Any, at: int, b: Any, factor: Any, slope: Any) -> Any:
    one, two, share = a[at : at + width], b[at : at + width], factor[at : at + width]
    total = a.dtype.type(0)
    for f in range(width):
        z = one[f] + two[f]
        total += share[f] * (z if z > 0 else z * slope)
    return total


@register_jitable(forceinline=True)
def add_bent(
    width: int, out: Any, at: int, a: Any, b: Any, steep: Any, gentle: Any, tally: Any, kept: Any
) -> None:
    row, one, two = out[at : at + width], a[at : at + width], b[at : at + width]
    if kept:
        sums = tally[at : at + width]
        for f in range(width):
            z = one[f] + two[f]
            d = steep if z > 0 else gentle
            row[f] += d
            sums[f] += z * d
    else:
        for f in range(width):
            row[f] += steep if one[f] + two[f] > 0 else gentle
