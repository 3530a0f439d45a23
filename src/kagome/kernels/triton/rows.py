"""Triton kernels by row and block of columns: minimum and maximum, and softmax by column.

Where it sits: ``ops`` launches them. A program handles one row of the layout and a block of columns. It walks
the row's entries one after another and uses no atomics, so results are the same on every run.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# Triton reads annotations, so kernel arguments have none except for compile-time constants.

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def extreme_kernel(
    begin,
    end,
    index,
    x,
    best,
    ties,
    columns,
    SIGN: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the largest (or smallest) of each column, and how many equal it; NaN wins over every number."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    first, last = tl.load(begin + i), tl.load(end + i)
    top = tl.full((BLOCK,), float("-inf"), WIDE)
    same = tl.zeros((BLOCK,), WIDE)
    for k in range(first, last):
        u = tl.load(index + k).to(tl.int64)
        v = tl.load(x + u * columns + c, mask=inside, other=0).to(WIDE) * SIGN
        # NaN compares false with every number, so it needs a test of its own, and no number beats it
        # afterwards.
        beats = (v > top) | (v != v)
        same = tl.where(beats, 1.0, same + tl.where(v == top, 1.0, 0.0))
        top = tl.where(beats, v, top)
    top = tl.where(last > first, top * SIGN, 0.0)
    tl.store(best + i * columns + c, top.to(best.dtype.element_ty), mask=inside)
    tl.store(ties + i * columns + c, same.to(ties.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def extreme_back_kernel(
    begin,
    end,
    column,
    x,
    best,
    part,
    out,
    columns,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``out[u] = sum over its targets of part where x[u] is the best``."""
    u = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    mine = tl.load(x + u * columns + c, mask=inside, other=0)
    total = tl.zeros((BLOCK,), WIDE)
    # u is a source: its entries are its out-edges, and ``column`` names their targets.
    for k in range(tl.load(begin + u), tl.load(end + u)):
        i = tl.load(column + k).to(tl.int64)
        top = tl.load(best + i * columns + c, mask=inside, other=0)
        given = tl.load(part + i * columns + c, mask=inside, other=0).to(WIDE)
        total += tl.where(mine == top, given, 0.0)
    tl.store(out + u * columns + c, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def softmax_kernel(
    begin,
    end,
    column,
    z,
    m,
    out,
    top,
    total,
    columns,
    TINY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute sums of m weighted by a softmax of z, column by column."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    first, last = tl.load(begin + i), tl.load(end + i)
    most = tl.full((BLOCK,), float("-inf"), WIDE)
    for k in range(first, last):
        u = tl.load(column + k).to(tl.int64)
        v = tl.load(z + u * columns + c, mask=inside, other=0).to(WIDE)
        most = tl.where((v > most) | (v != v), v, most)
    # A second pass over the entries, which now knows the largest logit: exp(z - most) cannot overflow.
    whole = tl.zeros((BLOCK,), WIDE)
    sums = tl.zeros((BLOCK,), WIDE)
    for k in range(first, last):
        u = tl.load(column + k).to(tl.int64)
        p = tl.exp(tl.load(z + u * columns + c, mask=inside, other=0).to(WIDE) - most)
        whole += p
        sums += p * tl.load(m + u * columns + c, mask=inside, other=0).to(WIDE)
    place = i * columns + c
    most = tl.where(last > first, most, 0.0)
    tl.store(out + place, (sums / (whole + TINY)).to(out.dtype.element_ty), mask=inside)
    tl.store(top + place, most.to(top.dtype.element_ty), mask=inside)
    tl.store(total + place, whole.to(total.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def softmax_back_kernel(
    begin,
    end,
    column,
    z,
    m,
    out,
    top,
    part,
    gz,
    gm,
    columns,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the gradients of those sums by z and m; ``part`` is the gradient divided by the total."""
    u = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    mine = tl.load(z + u * columns + c, mask=inside, other=0).to(WIDE)
    read = tl.load(m + u * columns + c, mask=inside, other=0).to(WIDE)
    of_z = tl.zeros((BLOCK,), WIDE)
    of_m = tl.zeros((BLOCK,), WIDE)
    # p = exp(z[u] - top[i]); d m[u] = sum of p * part[i]; d z[u] = sum of p * part[i] * (m[u] - out[i]).
    for k in range(tl.load(begin + u), tl.load(end + u)):
        place = tl.load(column + k).to(tl.int64) * columns + c
        p = tl.exp(mine - tl.load(top + place, mask=inside, other=0).to(WIDE))
        p *= tl.load(part + place, mask=inside, other=0).to(WIDE)
        of_m += p
        of_z += p * (read - tl.load(out + place, mask=inside, other=0).to(WIDE))
    tl.store(gz + u * columns + c, of_z.to(gz.dtype.element_ty), mask=inside)
    tl.store(gm + u * columns + c, of_m.to(gm.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def join_back_kernel(
    begin,
    end,
    column,
    edge,
    mine,
    its,
    g,
    out,
    columns,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``out[i] = sum of g[edge], times the slope where mine[i] + its[column] is not positive``."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    one = tl.load(mine + i * columns + c, mask=inside, other=0)
    total = tl.zeros((BLOCK,), WIDE)
    for k in range(tl.load(begin + i), tl.load(end + i)):
        u, e = tl.load(column + k).to(tl.int64), tl.load(edge + k).to(tl.int64)
        two = tl.load(its + u * columns + c, mask=inside, other=0)
        given = tl.load(g + e * columns + c, mask=inside, other=0).to(WIDE)
        total += tl.where(one + two > 0, given, given * SLOPE)
    tl.store(out + i * columns + c, total.to(out.dtype.element_ty), mask=inside)
