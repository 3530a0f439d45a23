"""Triton kernels of sums: of rows over each row's entries, and of a hub's segments.

Where it sits: ``ops`` launches them. A program sums a segment (see ``segments``) for a block of heads and
columns. It adds to a tile of entries, heads and columns, whose loads do not wait for each other, and sums the
tile's entries at the end. No atomics are used, so results are the same on every run.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# Triton reads annotations, so kernel arguments have none except for compile-time constants.

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _finish(total, i, spot, inside, scale, SCALED: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr):
    """Scale a row's total, add the value stored in its place if asked, and store it."""
    if SCALED:
        total *= tl.load(scale + i).to(WIDE)
    if ADD:
        total += tl.load(spot, mask=inside, other=0).to(WIDE)
    tl.store(spot, total.to(spot.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def sum_kernel(
    row,
    begin,
    end,
    slot,
    index,
    edge,
    x,
    weight,
    scale,
    out,
    scratch,
    offset,
    heads,
    width,
    blocks,
    row_stride,
    head_stride,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
    EDGES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """``out[i] (+)= scale[i] * sum of weight[edge] * x[index - offset]``, or a part of a hub in scratch.

    A head's columns of ``x`` begin ``head_stride`` after those of the head before: 0 if heads share them.
    """
    # Program (s, b) has segment s and, as number b, one of ``blocks`` blocks of columns of a block of heads.
    s = tl.program_id(0)
    i = tl.load(row + s)
    first, last, place = tl.load(begin + s), tl.load(end + s), tl.load(slot + s)
    h = (tl.program_id(1) // blocks) * HEADS + tl.arange(0, HEADS)
    c = (tl.program_id(1) % blocks) * WIDTH + tl.arange(0, WIDTH)
    inside = (h[:, None] < heads) & (c[None, :] < width)
    at = h[:, None] * width + c[None, :]
    columns = heads * width
    read = h[:, None] * head_stride + c[None, :]
    lane = tl.arange(0, EDGES)
    # Entries are added to separate slots of the tile and joined once after the loop: a sum over entries
    # inside the loop would make the threads of a warp exchange numbers in each step.
    tile = tl.zeros((EDGES, HEADS, WIDTH), WIDE)
    for k in range(first, last, EDGES):
        live = k + lane < last
        # int64, because a row's number times the row stride may exceed 2^31.
        u = tl.load(index + k + lane, mask=live, other=0).to(tl.int64) - offset
        mask = live[:, None, None] & inside[None, :, :]
        v = tl.load(x + (u * row_stride)[:, None, None] + read[None, :, :], mask=mask, other=0).to(WIDE)
        if WEIGHTED:
            e = tl.load(edge + k + lane, mask=live, other=0).to(tl.int64)
            known = live[:, None] & (h[None, :] < heads)
            w = tl.load(weight + e[:, None] * heads + h[None, :], mask=known, other=0).to(WIDE)
            v *= w[:, :, None]
        tile += v
    total = tl.sum(tile, 0)
    # A hub's segment leaves its part in scratch; join_kernel adds the parts and applies scale and ``into``.
    if place >= 0:
        tl.store(scratch + place * columns + at, total, mask=inside)
    else:
        _finish(total, i, out + i * columns + at, inside, scale, SCALED, ADD, WIDE)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def join_kernel(
    hubs,
    begin,
    end,
    scratch,
    scale,
    out,
    columns,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``out[hub] (+)= scale[hub] * sum of the hub's slots``."""
    i = tl.load(hubs + tl.program_id(0))
    first, last = tl.load(begin + tl.program_id(0)), tl.load(end + tl.program_id(0))
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    lane = tl.arange(0, PARTS)
    tile = tl.zeros((PARTS, BLOCK), WIDE)
    for k in range(first, last, PARTS):
        mask = (k + lane < last)[:, None] & inside[None, :]
        tile += tl.load(scratch + (k + lane)[:, None] * columns + c[None, :], mask=mask, other=0)
    total = tl.sum(tile, 0)
    _finish(total, i, out + i * columns + c, inside, scale, SCALED, ADD, WIDE)
