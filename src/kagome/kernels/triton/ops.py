"""GPU kernels: the launch functions of the Triton kernels for CUDA tensors.

Where it sits: ``kernels.ops`` imports it for the first CUDA tensor if Triton is installed, which torch's CUDA
builds bring along. Values are summed in float32, and in float64 if they are float64.

Each sum over a row's entries is cut at ``segments.SPLIT`` of them, so that hubs are shared by programs. The
results are the same on every run. ``benchmarks/gpu`` holds the kernels' measured rates on an H200.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from kagome.kernels.base.csr import CsrLayout, Structure

# Four of them run in plain PyTorch on a GPU too.
from kagome.kernels.base.reference import (  # noqa: F401
    TINY,
    Span,
    add_rows,
    count_of,
    extreme_edges_back,
    gather,
    join_edges,
)
from kagome.kernels.triton import heads as gpu_heads, rows as gpu_rows, sums as gpu_sums
from kagome.kernels.triton.segments import Segments, bounds, row_of_entries, rows_by_length, segments_of

BLOCK = 128
"""Largest number of columns of one program."""
TILE = 1024
"""Numbers of a tile of entries, heads and columns: 32 for each lane of a warp."""
PROGRAMS = 4096
"""Programs that add up over rows. Each keeps its own sum, and the sums are added in a fixed order."""


def _wide(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _tile(x: Tensor) -> tuple[int, int]:
    """Return the number of columns of a row, and of one program."""
    columns = prod(x.shape[1:])
    return columns, min(BLOCK, triton.next_power_of_2(max(columns, 1)))


def _power(number: int) -> int:
    return int(triton.next_power_of_2(max(number, 1)))


def _blocks(heads: int, width: int) -> tuple[int, int, int, int]:
    """Return the heads and columns of one program, the number of blocks of columns, and of all blocks."""
    # Wide heads are cut into blocks of columns; narrow heads share a program.
    columns = min(BLOCK, _power(width))
    several = min(_power(heads), max(BLOCK // columns, 1))
    across = triton.cdiv(width, columns)
    return several, columns, across, across * triton.cdiv(heads, several)


def _by_row(kernel: Any, x: Tensor, rows: int, *arguments: Any, **constants: Any) -> None:
    """Launch one program per row and block of x's columns."""
    columns, block = _tile(x)
    if rows and columns:
        # One program walks all entries of its row, also of a hub: these kernels have no segments.
        grid = (rows, triton.cdiv(columns, block))
        kernel[grid](*arguments, **constants, WIDE=_wide(x), BLOCK=block)


def sum_rows(
    layout: CsrLayout,
    x: Tensor,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    span: Span = "all",
    offset: int = 0,
    rows: slice | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Compute ``ops.sum_rows`` with Triton kernels."""
    # The kernel adds to a contiguous ``into`` itself. Otherwise the sum is a tensor of its own, added below.
    direct = into is not None and into.is_contiguous()
    heads = 1 if weight is None or weight.dim() == 1 else weight.size(1)
    shared = heads > 1 and x.size(1) == 1
    trailing = (heads, *x.shape[2:]) if shared else x.shape[1:]
    out = into if into is not None and direct else x.new_empty(count_of(layout, rows), *trailing)
    columns = prod(trailing)
    if out.numel() and heads:
        held = segments_of(layout, span, rows)
        scratch = out.new_empty(held.slots, columns, dtype=_sums_in(x))
        scale = None if scale is None else scale.contiguous()
        chosen = {"SCALED": scale is not None, "ADD": direct, "WIDE": _wide(x)}
        width = columns // heads
        several, wide, across, blocks = _blocks(heads, width)
        # Entries of a tile: as many as TILE allows, but not more than an average row has, so that few lanes
        # idle.
        lanes = min(TILE // (several * wide), _power(held.mean), 64)
        gpu_sums.sum_kernel[(held.row.numel(), blocks)](
            held.row,
            held.begin,
            held.end,
            held.slot,
            layout.column,
            layout.edge,
            x.contiguous(),
            # A kernel takes a pointer for each argument. It reads none of the stand-ins for absent tensors.
            x if weight is None else weight.contiguous(),
            x if scale is None else scale,
            out,
            scratch,
            offset,
            heads,
            width,
            across,
            width if shared else columns,
            0 if shared else width,
            WEIGHTED=weight is not None,
            **chosen,
            EDGES=max(lanes, 2),
            HEADS=several,
            WIDTH=wide,
            num_warps=1,
        )
        _join(held, scratch, scale, out, columns, chosen)
    return out if into is None or direct else into.add_(out)


def _join(
    held: Segments, scratch: Tensor, scale: Tensor | None, out: Tensor, columns: int, chosen: dict[str, Any]
) -> None:
    """Add up the slots of hubs."""
    block = min(BLOCK, _power(columns))
    if held.slots:
        gpu_sums.join_kernel[(held.hubs.numel(), triton.cdiv(columns, block))](
            held.hubs,
            held.hub_begin,
            held.hub_end,
            scratch,
            scratch if scale is None else scale,
            out,
            columns,
            **chosen,
            PARTS=max(TILE // block, 1),
            BLOCK=block,
            num_warps=1,
        )


def _sums_in(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def sum_edges(layout: CsrLayout, values: Tensor, rows: slice | None = None) -> Tensor:
    """Compute ``ops.sum_edges`` with Triton kernels."""
    return sum_rows(layout.by_edge, values, rows=rows)


def dot_edges(
    layout: CsrLayout,
    a: Tensor,
    b: Tensor,
    *,
    span: Span = "all",
    offset: int = 0,
    into: Tensor | None = None,
) -> Tensor:
    """Compute ``ops.dot_edges`` with Triton kernels."""
    out = a.new_zeros(layout.edges, a.size(1)) if into is None else into
    kept = out.contiguous()
    _dots(layout, a, b, None, 0.0, kept, span, offset)
    return out if kept is out else out.copy_(kept)


def leaky_dots(layout: CsrLayout, a: Tensor, b: Tensor, att: Tensor, slope: float) -> Tensor:
    """Compute ``ops.leaky_dots`` with Triton kernels."""
    out = a.new_empty(layout.edges, a.size(1))
    _dots(layout, a, b, att, slope, out, "all", 0)
    return out


def _dots(
    layout: CsrLayout,
    a: Tensor,
    b: Tensor,
    att: Tensor | None,
    slope: float,
    out: Tensor,
    span: Span,
    offset: int,
) -> None:
    heads, width = a.shape[1:]
    if not (layout.edges and heads):
        return
    a, b = a.contiguous(), b.contiguous()
    columns = min(BLOCK, _power(width))
    several = min(_power(heads), max(BLOCK // columns, 1))
    lanes = 2 * TILE // (several * columns)
    gpu_heads.dot_kernel[(triton.cdiv(layout.edges, lanes), triton.cdiv(heads, several))](
        row_of_entries(layout),
        layout.middle,
        layout.column,
        layout.edge,
        a,
        b,
        a if att is None else att.contiguous(),
        out,
        offset,
        layout.edges,
        heads,
        width,
        prod(b.shape[1:]),
        0 if b.size(1) < heads else width,
        OWN=span == "own",
        HALO=span == "halo",
        LEAKY=att is not None,
        SLOPE=slope,
        WIDE=_wide(a),
        EDGES=lanes,
        HEADS=several,
        WIDTH=columns,
        num_warps=4,
    )


def leaky_dots_back(
    structure: Structure, a: Tensor, b: Tensor, att: Tensor, slope: float, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``ops.leaky_dots_back`` with Triton kernels."""
    heads, width = a.shape[1:]
    a, b, att, g = a.contiguous(), b.contiguous(), att.contiguous(), g.contiguous()
    ga, gb = torch.empty_like(a), torch.empty_like(b)
    held = segments_of(structure.by_target, "all")
    # [programs, H, C]: one partial sum per program, added in a fixed order below. Atomics would add them in
    # another order in each run.
    programs = min(held.row.numel(), PROGRAMS)
    tally = a.new_zeros(max(programs, 1), heads, width, dtype=_sums_in(a))
    _leaky_back(structure.by_target, a, b, att, slope, g, ga, tally)
    _leaky_back(structure.by_source, b, a, att, slope, g, gb, None)
    return ga, gb, tally.sum(0).to(att.dtype)


def _leaky_back(
    layout: CsrLayout,
    mine: Tensor,
    its: Tensor,
    att: Tensor,
    slope: float,
    g: Tensor,
    out: Tensor,
    tally: Tensor | None,
) -> None:
    """Compute the gradient of the rows of one end, and with ``tally`` of att."""
    heads, width = mine.shape[1:]
    if not out.numel():
        return
    held = segments_of(layout, "all")
    segments = held.row.numel()
    scratch = out.new_empty(held.slots, heads * width, dtype=_sums_in(mine))
    several, wide, across, blocks = _blocks(heads, width)
    programs = segments if tally is None else tally.size(0)
    gpu_heads.leaky_back_kernel[(programs, blocks)](
        held.row,
        held.begin,
        held.end,
        held.slot,
        layout.column,
        layout.edge,
        mine,
        its,
        att,
        g,
        out,
        scratch,
        scratch if tally is None else tally,
        segments,
        programs,
        heads,
        width,
        across,
        TALLIED=tally is not None,
        SLOPE=slope,
        WIDE=_wide(mine),
        EDGES=max(min(TILE // 2 // (several * wide), _power(held.mean)), 1),
        HEADS=several,
        WIDTH=wide,
        num_warps=1,
    )
    _join(held, scratch, None, out, heads * width, {"SCALED": False, "ADD": False, "WIDE": _wide(mine)})


def softmax_edges(layout: CsrLayout, logits: Tensor) -> Tensor:
    """Compute ``ops.softmax_edges`` with Triton kernels."""
    logits = logits.contiguous()
    return _edge_softmax(layout, logits, logits, logits, logits, None)


def softmax_sum(layout: CsrLayout, a: Tensor, b: Tensor, slope: float) -> Tensor:
    """Compute ``ops.softmax_sum`` with Triton kernels."""
    a, b = a.contiguous(), b.contiguous()
    return _edge_softmax(layout, a, a, a, b, slope)


def _edge_softmax(
    layout: CsrLayout, like: Tensor, logits: Tensor, a: Tensor, b: Tensor, slope: float | None
) -> Tensor:
    out = like.new_empty(layout.edges, like.size(1))
    given = (layout.column, layout.edge, logits, a, b, out, like.size(1))
    chosen = {"SUMS": slope is not None, "SLOPE": slope or 0.0, "TINY": TINY}
    _by_rows_of_heads(gpu_heads.edge_softmax_kernel, layout, like, given, chosen)
    return out


def _by_rows_of_heads(
    kernel: Any, layout: CsrLayout, like: Tensor, given: tuple[Any, ...], chosen: dict[str, Any]
) -> None:
    """Launch a program for each row: one warp with a small tile, or eight with a large one for a hub."""
    heads = _power(like.size(1))
    begin, end = bounds(layout)
    # A softmax needs the total of a row before its first result. So a hub is not cut into segments: one
    # program with eight warps walks all of it.
    for hubs, rows in enumerate(rows_by_length(layout)):
        lanes = max((8 * TILE if hubs else TILE // 2) // heads, 1)
        lanes = lanes if hubs else min(lanes, _power(segments_of(layout, "all").mean))
        if rows.numel() and like.size(1):
            kernel[(rows.numel(),)](
                rows,
                begin,
                end,
                *given,
                **chosen,
                WIDE=_wide(like),
                EDGES=lanes,
                HEADS=heads,
                num_warps=8 if hubs else 1,
            )


def softmax_edges_back(layout: CsrLayout, alpha: Tensor, g: Tensor) -> Tensor:
    """Compute ``ops.softmax_edges_back`` with Triton kernels."""
    alpha = alpha.contiguous()
    return _edge_softmax_back(layout, alpha, alpha, None, alpha, g.contiguous(), alpha)


def softmax_sum_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float, alpha: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.softmax_sum_back`` with Triton kernels."""
    a, b, alpha, g = a.contiguous(), b.contiguous(), alpha.contiguous(), g.contiguous()
    ga = torch.zeros_like(a)
    gz = _edge_softmax_back(structure.by_target, a, b, slope, alpha, g, ga)
    # The gradient of b sums that of the logits by source.
    return ga, sum_edges(structure.by_source, gz)


def _edge_softmax_back(
    layout: CsrLayout, a: Tensor, b: Tensor, slope: float | None, alpha: Tensor, g: Tensor, ga: Tensor
) -> Tensor:
    # Only the form with SUMS, which has a slope, writes to ga.
    gz = torch.empty_like(alpha)
    given = (layout.column, layout.edge, a, b, alpha, g, gz, ga, alpha.size(1))
    chosen = {"SUMS": slope is not None, "SLOPE": slope or 0.0}
    _by_rows_of_heads(gpu_heads.edge_softmax_back_kernel, layout, alpha, given, chosen)
    return gz


def extreme_rows(layout: CsrLayout, x: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Compute ``ops.extreme_rows`` with Triton kernels."""
    return _extremes(layout, layout.column, x, sign)


def extreme_edges(layout: CsrLayout, values: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Compute ``ops.extreme_edges`` with Triton kernels."""
    return _extremes(layout, layout.edge, values, sign)


def _extremes(layout: CsrLayout, index: Tensor, x: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    best, ties = x.new_empty(layout.rows, *x.shape[1:]), x.new_empty(layout.rows, *x.shape[1:])
    arguments = (*bounds(layout), index, x, best, ties, _tile(x)[0])
    _by_row(gpu_rows.extreme_kernel, x, layout.rows, *arguments, SIGN=sign)
    return best, ties


def extreme_back(layout: CsrLayout, x: Tensor, best: Tensor, ties: Tensor, g: Tensor) -> Tensor:
    """Compute ``ops.extreme_back`` with Triton kernels."""
    x, part = x.contiguous(), (g / ties.clamp(min=1)).contiguous()
    out = torch.empty_like(x)
    arguments = (*bounds(layout), layout.column, x, best.contiguous(), part, out, _tile(x)[0])
    _by_row(gpu_rows.extreme_back_kernel, x, layout.rows, *arguments)
    return out


def column_softmax(layout: CsrLayout, z: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``ops.column_softmax`` with Triton kernels."""
    z, m = z.contiguous(), m.contiguous()
    out, top = (z.new_empty(layout.rows, *z.shape[1:]) for _ in range(2))
    # A hub's total may be beyond the range of float16.
    total = torch.empty_like(out, dtype=_sums_in(z))
    arguments = (*bounds(layout), layout.column, z, m, out, top, total, _tile(z)[0])
    _by_row(gpu_rows.softmax_kernel, z, layout.rows, *arguments, TINY=TINY)
    return out, top, total


def column_softmax_back(
    layout: CsrLayout, z: Tensor, m: Tensor, out: Tensor, top: Tensor, total: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.column_softmax_back`` with Triton kernels."""
    z, m, out, top = (t.contiguous() for t in (z, m, out, top))
    gz, gm, part = torch.empty_like(z), torch.empty_like(m), (g / (total + TINY)).contiguous()
    arguments = (*bounds(layout), layout.column, z, m, out, top, part, gz, gm, _tile(z)[0])
    _by_row(gpu_rows.softmax_back_kernel, z, layout.rows, *arguments)
    return gz, gm


def join_edges_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float | None, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.join_edges_back`` with Triton kernels."""
    if slope is None:
        return sum_edges(structure.by_target, g), sum_edges(structure.by_source, g)
    a, b, g = a.contiguous(), b.contiguous(), g.contiguous()
    made = []
    for layout, mine, its in ((structure.by_target, a, b), (structure.by_source, b, a)):
        out = torch.empty_like(mine)
        arguments = (*bounds(layout), layout.column, layout.edge, mine, its, g, out, _tile(mine)[0])
        _by_row(gpu_rows.join_back_kernel, mine, layout.rows, *arguments, SLOPE=slope)
        made.append(out)
    return made[0], made[1]
