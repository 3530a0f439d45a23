"""Triton kernels for one row with all its heads: edge dot products, edge softmax and GATv2's logits.

Where it sits: ``ops`` launches them. A program handles one row of the layout, or several in succession where
it adds up over rows. Tiles are heads by columns, padded to powers of two. No atomics are used, so results are
the same on every run.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# Triton reads annotations, so kernel arguments have none except for compile-time constants.

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def dot_kernel(
    begin,
    end,
    column,
    edge,
    a,
    b,
    att,
    out,
    offset,
    heads,
    width,
    LEAKY: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """``out[edge] = <a[i], b[column - offset]>``, or with LEAKY ``<att, leaky_relu(a[i] + b[column])>``."""
    i = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)
    c = tl.arange(0, WIDTH)
    inside = (h[:, None] < heads) & (c[None, :] < width)
    place = h[:, None] * width + c[None, :]
    mine = tl.load(a + i * heads * width + place, mask=inside, other=0).to(WIDE)
    if LEAKY:
        factor = tl.load(att + place, mask=inside, other=0).to(WIDE)
    for k in range(tl.load(begin + i), tl.load(end + i)):
        u = tl.load(column + k).to(tl.int64) - offset
        e = tl.load(edge + k).to(tl.int64)
        its = tl.load(b + u * heads * width + place, mask=inside, other=0).to(WIDE)
        if LEAKY:
            z = mine + its
            v = factor * tl.where(z > 0, z, z * SLOPE)
        else:
            v = mine * its
        tl.store(out + e * heads + h, tl.sum(v, 1).to(out.dtype.element_ty), mask=h < heads)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def leaky_back_kernel(
    begin,
    end,
    column,
    edge,
    mine,
    its,
    att,
    g,
    out,
    tally,
    rows,
    share,
    heads,
    width,
    TALLIED: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute the gradient of one end of ``share`` rows; with TALLIED also these rows' part of att's."""
    program = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)
    c = tl.arange(0, WIDTH)
    inside = (h[:, None] < heads) & (c[None, :] < width)
    place = h[:, None] * width + c[None, :]
    factor = tl.load(att + place, mask=inside, other=0).to(WIDE)
    part = tl.zeros((HEADS, WIDTH), WIDE)
    for i in range(program * share, tl.minimum(program * share + share, rows)):
        one = tl.load(mine + i * heads * width + place, mask=inside, other=0).to(WIDE)
        total = tl.zeros((HEADS, WIDTH), WIDE)
        for k in range(tl.load(begin + i), tl.load(end + i)):
            u = tl.load(column + k).to(tl.int64)
            e = tl.load(edge + k).to(tl.int64)
            z = one + tl.load(its + u * heads * width + place, mask=inside, other=0).to(WIDE)
            given = tl.load(g + e * heads + h, mask=h < heads, other=0).to(WIDE)[:, None]
            slant = tl.where(z > 0, given, given * SLOPE)
            total += slant
            if TALLIED:
                part += z * slant
        tl.store(out + i * heads * width + place, (total * factor).to(out.dtype.element_ty), mask=inside)
    if TALLIED:
        tl.store(tally + program * heads * width + place, part, mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def edge_softmax_kernel(
    begin,
    end,
    column,
    edge,
    logits,
    a,
    b,
    out,
    heads,
    SUMS: tl.constexpr,
    SLOPE: tl.constexpr,
    TINY: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Softmax over each row's edges, of logits, or with SUMS of ``leaky_relu(a[i] + b[column])``."""
    i = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)
    inside = h < heads
    first, last = tl.load(begin + i), tl.load(end + i)
    top = tl.full((HEADS,), float("-inf"), WIDE)
    total = tl.zeros((HEADS,), WIDE)
    if SUMS:
        mine = tl.load(a + i * heads + h, mask=inside, other=0).to(WIDE)
    for sweep in tl.static_range(3):  # sweeps: largest, total, result
        for k in range(first, last):
            e = tl.load(edge + k).to(tl.int64)
            if SUMS:
                u = tl.load(column + k).to(tl.int64)
                v = mine + tl.load(b + u * heads + h, mask=inside, other=0).to(WIDE)
                v = tl.where(v > 0, v, v * SLOPE)
            else:
                v = tl.load(logits + e * heads + h, mask=inside, other=0).to(WIDE)
            if sweep == 0:
                top = tl.where((v > top) | (v != v), v, top)
            elif sweep == 1:
                total += tl.exp(v - top)
            else:
                p = tl.exp(v - top) / (total + TINY)
                tl.store(out + e * heads + h, p.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def edge_softmax_back_kernel(
    begin,
    end,
    column,
    edge,
    a,
    b,
    alpha,
    g,
    gz,
    ga,
    heads,
    SUMS: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """``gz = alpha * (g - the row's sum of alpha * g)``; with SUMS through leaky_relu, and its sum in ga."""
    i = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)
    inside = h < heads
    first, last = tl.load(begin + i), tl.load(end + i)
    total = tl.zeros((HEADS,), WIDE)
    for k in range(first, last):
        place = tl.load(edge + k).to(tl.int64) * heads + h
        p = tl.load(alpha + place, mask=inside, other=0).to(WIDE)
        total += p * tl.load(g + place, mask=inside, other=0).to(WIDE)
    own = tl.zeros((HEADS,), WIDE)
    if SUMS:
        mine = tl.load(a + i * heads + h, mask=inside, other=0).to(WIDE)
    for k in range(first, last):
        place = tl.load(edge + k).to(tl.int64) * heads + h
        v = tl.load(alpha + place, mask=inside, other=0).to(WIDE)
        v *= tl.load(g + place, mask=inside, other=0).to(WIDE) - total
        if SUMS:
            u = tl.load(column + k).to(tl.int64)
            z = mine + tl.load(b + u * heads + h, mask=inside, other=0).to(WIDE)
            v = tl.where(z > 0, v, v * SLOPE)
            own += v
        tl.store(gz + place, v.to(gz.dtype.element_ty), mask=inside)
    if SUMS:
        tl.store(ga + i * heads + h, own.to(ga.dtype.element_ty), mask=inside)
