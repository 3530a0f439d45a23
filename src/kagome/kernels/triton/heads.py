"""Triton kernels of attention: edge dot products, edge softmax and GATv2's logits, for all heads of an edge.

Where it sits: ``ops`` launches them. Dot products are taken by tiles of entries, whichever row they belong
to. Softmaxes are taken by rows, a tile of entries at a time. No atomics are used, so results are the same on
every run.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# Triton reads annotations, so kernel arguments have none except for compile-time constants.

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def dot_kernel(
    row,
    middle,
    column,
    edge,
    a,
    b,
    att,
    out,
    offset,
    entries,
    heads,
    width,
    row_stride,
    head_stride,
    OWN: tl.constexpr,
    HALO: tl.constexpr,
    LEAKY: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
    EDGES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """``out[edge] = <a[i], b[column - offset]>``, or with LEAKY ``<att, leaky_relu(a[i] + b[column])>``.

    A head's columns of ``b`` begin ``head_stride`` after those of the head before: 0 if heads share them.
    """
    k = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = k < entries
    # The dot product of an entry needs no other entry of its row, so programs cut the list of all entries
    # into equal tiles. ``row`` says which row each entry belongs to.
    i = tl.load(row + k, mask=live, other=0).to(tl.int64)
    # A span masks the other entries of the tile: entries that read own rows end at the row's middle.
    if OWN:
        live = live & (k < tl.load(middle + i, mask=live, other=0))
    if HALO:
        live = live & (k >= tl.load(middle + i, mask=live, other=0))
    u = tl.load(column + k, mask=live, other=0).to(tl.int64) - offset
    e = tl.load(edge + k, mask=live, other=0).to(tl.int64)
    known = live[:, None] & (h[None, :] < heads)
    total = tl.zeros((EDGES, HEADS), WIDE)
    for start in range(0, width, WIDTH):
        c = start + tl.arange(0, WIDTH)
        inside = known[:, :, None] & (c[None, None, :] < width)
        # Positions within a row of a and att [HEADS, WIDTH]; b has strides of its own, in ``read``.
        at = h[:, None] * width + c[None, :]
        mine = tl.load(a + (i * heads * width)[:, None, None] + at[None, :, :], mask=inside, other=0).to(WIDE)
        read = h[:, None] * head_stride + c[None, :]
        its = tl.load(b + (u * row_stride)[:, None, None] + read[None, :, :], mask=inside, other=0).to(WIDE)
        if LEAKY:
            z = mine + its
            there = (h[:, None] < heads) & (c[None, :] < width)
            factor = tl.load(att + at, mask=there, other=0).to(WIDE)
            v = factor[None, :, :] * tl.where(z > 0, z, z * SLOPE)
        else:
            v = mine * its
        total += tl.sum(v, 2)
    tl.store(out + e[:, None] * heads + h[None, :], total.to(out.dtype.element_ty), mask=known)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def leaky_back_kernel(
    row,
    begin,
    end,
    slot,
    column,
    edge,
    mine,
    its,
    att,
    g,
    out,
    scratch,
    tally,
    segments,
    programs,
    heads,
    width,
    blocks,
    TALLIED: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
    EDGES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute the gradient of one end of some segments; with TALLIED also their part of att's gradient."""
    h = (tl.program_id(1) // blocks) * HEADS + tl.arange(0, HEADS)
    c = (tl.program_id(1) % blocks) * WIDTH + tl.arange(0, WIDTH)
    inside = (h[:, None] < heads) & (c[None, :] < width)
    at = h[:, None] * width + c[None, :]
    columns = heads * width
    lane = tl.arange(0, EDGES)
    factor = tl.load(att + at, mask=inside, other=0).to(WIDE)
    part = tl.zeros((EDGES, HEADS, WIDTH), WIDE)
    # Without TALLIED there are as many programs as segments. With it there may be fewer: each walks every
    # ``programs``-th segment and keeps its part of att's gradient in registers until the end.
    for s in range(tl.program_id(0), segments, programs):
        i = tl.load(row + s)
        first, last, place = tl.load(begin + s), tl.load(end + s), tl.load(slot + s)
        one = tl.load(mine + i * columns + at, mask=inside, other=0).to(WIDE)
        tile = tl.zeros((EDGES, HEADS, WIDTH), WIDE)
        for k in range(first, last, EDGES):
            live = k + lane < last
            u = tl.load(column + k + lane, mask=live, other=0).to(tl.int64)
            e = tl.load(edge + k + lane, mask=live, other=0).to(tl.int64)
            mask = live[:, None, None] & inside[None, :, :]
            two = tl.load(its + (u * columns)[:, None, None] + at[None, :, :], mask=mask, other=0).to(WIDE)
            known = live[:, None] & (h[None, :] < heads)
            given = tl.load(g + e[:, None] * heads + h[None, :], mask=known, other=0).to(WIDE)[:, :, None]
            z = one[None, :, :] + two
            # ``slant`` is the gradient of z without the factor att, which multiplies the row's total. att's
            # own gradient is the sum of leaky_relu(z) * given, which equals z * slant.
            slant = tl.where(z > 0, given, given * SLOPE)
            tile += slant
            if TALLIED:
                part += z * slant
        total = tl.sum(tile, 0) * factor
        if place >= 0:
            tl.store(scratch + place * columns + at, total, mask=inside)
        else:
            tl.store(out + i * columns + at, total.to(out.dtype.element_ty), mask=inside)
    if TALLIED:
        tl.store(tally + tl.program_id(0).to(tl.int64) * columns + at, tl.sum(part, 0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def edge_softmax_kernel(
    rows,
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
    EDGES: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Softmax over each row's edges, of logits, or with SUMS of ``leaky_relu(a[i] + b[column])``."""
    i = tl.load(rows + tl.program_id(0))
    h = tl.arange(0, HEADS)
    lane = tl.arange(0, EDGES)
    first, last = tl.load(begin + i), tl.load(end + i)
    top = tl.full((HEADS,), float("-inf"), WIDE)
    total = tl.zeros((HEADS,), WIDE)
    if SUMS:
        mine = tl.load(a + i * heads + h, mask=h < heads, other=0).to(WIDE)
    for sweep in tl.static_range(2):  # sweeps: largest and total, result
        for k in range(first, last, EDGES):
            live = k + lane < last
            mask = live[:, None] & (h[None, :] < heads)
            e = tl.load(edge + k + lane, mask=live, other=0).to(tl.int64)
            if SUMS:
                u = tl.load(column + k + lane, mask=live, other=0).to(tl.int64)
                its = tl.load(b + u[:, None] * heads + h[None, :], mask=mask, other=0).to(WIDE)
                v = mine[None, :] + its
                v = tl.where(v > 0, v, v * SLOPE)
            else:
                v = tl.load(logits + e[:, None] * heads + h[None, :], mask=mask, other=0).to(WIDE)
            v = tl.where(live[:, None], v, float("-inf"))
            if sweep == 0:
                # Online softmax: where a tile raises the largest logit, the total so far is scaled by exp(old
                # - new). One sweep then finds both the largest logit and the total.
                most = tl.maximum(top, tl.max(v, 0))
                base = tl.where(most == float("-inf"), 0.0, most)  # so that -inf minus -inf does not arise
                before = tl.where(top == float("-inf"), 0.0, tl.exp(top - base))
                total = total * before + tl.sum(tl.exp(v - base[None, :]), 0)
                top = most
            else:
                p = tl.exp(v - top[None, :]) / (total[None, :] + TINY)
                tl.store(out + e[:, None] * heads + h[None, :], p.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def edge_softmax_back_kernel(
    rows,
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
    EDGES: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """``gz = alpha * (g - the row's sum of alpha * g)``; with SUMS through leaky_relu, and its sum in ga."""
    i = tl.load(rows + tl.program_id(0))
    h = tl.arange(0, HEADS)
    lane = tl.arange(0, EDGES)
    first, last = tl.load(begin + i), tl.load(end + i)
    # First sweep: the row's sum of alpha * g, in one slot for each entry of the tile.
    total = tl.zeros((EDGES, HEADS), WIDE)
    for k in range(first, last, EDGES):
        live = k + lane < last
        mask = live[:, None] & (h[None, :] < heads)
        e = tl.load(edge + k + lane, mask=live, other=0).to(tl.int64)
        at = e[:, None] * heads + h[None, :]
        p = tl.load(alpha + at, mask=mask, other=0).to(WIDE)
        total += p * tl.load(g + at, mask=mask, other=0).to(WIDE)
    mean = tl.sum(total, 0)
    own = tl.zeros((EDGES, HEADS), WIDE)
    if SUMS:
        mine = tl.load(a + i * heads + h, mask=h < heads, other=0).to(WIDE)
    for k in range(first, last, EDGES):
        live = k + lane < last
        mask = live[:, None] & (h[None, :] < heads)
        e = tl.load(edge + k + lane, mask=live, other=0).to(tl.int64)
        at = e[:, None] * heads + h[None, :]
        v = tl.load(alpha + at, mask=mask, other=0).to(WIDE)
        v *= tl.load(g + at, mask=mask, other=0).to(WIDE) - mean[None, :]
        if SUMS:
            u = tl.load(column + k + lane, mask=live, other=0).to(tl.int64)
            z = mine[None, :] + tl.load(b + u[:, None] * heads + h[None, :], mask=mask, other=0).to(WIDE)
            v = tl.where(z > 0, v, v * SLOPE)
            # The gradient of a_i is the sum over its row. The gradient of b_j needs the edges by source: see
            # ``softmax_sum_back``.
            own += tl.where(mask, v, 0.0)
        tl.store(gz + at, v.to(gz.dtype.element_ty), mask=mask)
    if SUMS:
        tl.store(ga + i * heads + h, tl.sum(own, 0).to(ga.dtype.element_ty), mask=h < heads)
