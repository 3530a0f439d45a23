"""GPU kernels: the launch functions of the Triton kernels for CUDA tensors.

Where it sits: ``kernels.ops`` imports it for the first CUDA tensor if Triton is installed, which torch's CUDA
builds bring along. Values are summed in float32, and in float64 if they are float64.

Checked so far: every kernel passes the tests of the numba loops in Triton's interpreter on a CPU
(``TRITON_INTERPRET=1``), and all compile for compute capability 9.0. None has been run or timed on a GPU. One
program walks a whole row, which will be slow on graphs with very large hubs.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from kagome.kernels.base.csr import CsrLayout, Structure
from kagome.kernels.base.reference import (
    TINY,
    Span,
    add_rows,
    count_of,
    extreme_edges_back,
    gather,
    join_edges,
)
from kagome.kernels.triton import heads as gpu_heads, rows as gpu_rows

__all__ = [
    "add_rows",
    "column_softmax",
    "column_softmax_back",
    "dot_edges",
    "extreme_back",
    "extreme_edges",
    "extreme_edges_back",
    "extreme_rows",
    "gather",
    "join_edges",
    "join_edges_back",
    "leaky_dots",
    "leaky_dots_back",
    "softmax_edges",
    "softmax_edges_back",
    "softmax_sum",
    "softmax_sum_back",
    "sum_edges",
    "sum_rows",
]

BLOCK = 128
"""Most columns that a program takes."""
PROGRAMS = 1024
"""Programs that add up over rows. Each keeps a sum of its own, and the sums are added in a fixed order."""


def _wide(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _tile(x: Tensor) -> tuple[int, int]:
    """Return the number of columns of a row, and how many a program takes."""
    columns = prod(x.shape[1:])
    return columns, min(BLOCK, triton.next_power_of_2(max(columns, 1)))


def _bounds(layout: CsrLayout, span: Span = "all", rows: slice | None = None) -> tuple[Tensor, Tensor]:
    kept = slice(None) if rows is None else rows
    begin = layout.middle if span == "halo" else layout.pointer[:-1]
    end = layout.middle if span == "own" else layout.pointer[1:]
    return begin[kept].contiguous(), end[kept].contiguous()


def _by_row(kernel: Any, x: Tensor, rows: int, *arguments: Any, **constants: Any) -> None:
    """Launch one program per row and block of x's columns."""
    columns, block = _tile(x)
    if rows and columns:
        grid = (rows, triton.cdiv(columns, block))
        kernel[grid](*arguments, **constants, WIDE=_wide(x), BLOCK=block)


def _by_heads(kernel: Any, x: Tensor, programs: int, heads: int, *arguments: Any, **constants: Any) -> None:
    """Launch one program per row, with all its heads."""
    if programs and heads:
        kernel[(programs,)](*arguments, **constants, WIDE=_wide(x), HEADS=triton.next_power_of_2(heads))


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
    begin, end = _bounds(layout, span, rows)
    direct = into is not None and into.is_contiguous()
    count = count_of(layout, rows)
    out = into if into is not None and direct else x.new_empty(count, *x.shape[1:])
    columns, _ = _tile(x)
    heads = 1 if weight is None else weight.numel() // max(weight.size(0), 1)
    x = x.contiguous()
    arguments = (
        begin,
        end,
        layout.column,
        layout.edge,
        x,
        x if weight is None else weight.contiguous(),
        x if scale is None else scale.contiguous(),
        out,
        offset,
        columns,
        heads,
        max(columns // max(heads, 1), 1),
    )
    chosen = {"WEIGHTED": weight is not None, "SCALED": scale is not None, "ADD": direct}
    _by_row(gpu_rows.sum_kernel, x, count, *arguments, **chosen)
    return out if into is None or direct else into.add_(out)


def sum_edges(layout: CsrLayout, values: Tensor, rows: slice | None = None) -> Tensor:
    """Compute ``ops.sum_edges`` with Triton kernels."""
    by_edge = CsrLayout(layout.pointer, layout.middle, layout.edge, layout.edge)
    return sum_rows(by_edge, values, rows=rows)


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
    a, b = a.contiguous(), b.contiguous()
    factor = a if att is None else att.contiguous()
    ends = (*_bounds(layout, span), layout.column, layout.edge)
    chosen = {"LEAKY": att is not None, "SLOPE": slope, "WIDTH": triton.next_power_of_2(max(width, 1))}
    _by_heads(
        gpu_heads.dot_kernel, a, layout.rows, heads, *ends, a, b, factor, out, offset, heads, width, **chosen
    )


def leaky_dots_back(
    structure: Structure, a: Tensor, b: Tensor, att: Tensor, slope: float, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``ops.leaky_dots_back`` with Triton kernels."""
    heads, width = a.shape[1:]
    a, b, att, g = a.contiguous(), b.contiguous(), att.contiguous(), g.contiguous()
    ga, gb = torch.empty_like(a), torch.empty_like(b)
    rows = structure.own
    share = triton.cdiv(max(rows, 1), PROGRAMS)
    programs = triton.cdiv(rows, share)
    kind = torch.float64 if a.dtype == torch.float64 else torch.float32
    tally = a.new_zeros(max(programs, 1), heads, width, dtype=kind)
    fixed = {"SLOPE": slope, "WIDTH": triton.next_power_of_2(max(width, 1))}
    for layout, mine, its, out, count, each, tallied in (
        (structure.by_target, a, b, ga, programs, share, True),
        (structure.by_source, b, a, gb, structure.whole, 1, False),
    ):
        ends = (*_bounds(layout), layout.column, layout.edge)
        sizes = (layout.rows, each, heads, width)
        _by_heads(
            gpu_heads.leaky_back_kernel,
            a,
            count,
            heads,
            *ends,
            mine,
            its,
            att,
            g,
            out,
            tally,
            *sizes,
            TALLIED=tallied,
            **fixed,
        )
    return ga, gb, tally.sum(0).to(att.dtype)


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
    heads = like.size(1)
    out = like.new_empty(layout.edges, heads)
    ends = (*_bounds(layout), layout.column, layout.edge)
    chosen = {"SUMS": slope is not None, "SLOPE": slope or 0.0, "TINY": TINY}
    _by_heads(
        gpu_heads.edge_softmax_kernel, like, layout.rows, heads, *ends, logits, a, b, out, heads, **chosen
    )
    return out


def softmax_edges_back(layout: CsrLayout, alpha: Tensor, g: Tensor) -> Tensor:
    """Compute ``ops.softmax_edges_back`` with Triton kernels."""
    alpha = alpha.contiguous()
    return _edge_softmax_back(layout, alpha, alpha, None, alpha, g.contiguous())[1]


def softmax_sum_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float, alpha: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.softmax_sum_back`` with Triton kernels."""
    a, b, alpha, g = a.contiguous(), b.contiguous(), alpha.contiguous(), g.contiguous()
    ga, gz = _edge_softmax_back(structure.by_target, a, b, slope, alpha, g)
    return ga, sum_edges(structure.by_source, gz)


def _edge_softmax_back(
    layout: CsrLayout, a: Tensor, b: Tensor, slope: float | None, alpha: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    heads = alpha.size(1)
    ga, gz = torch.empty_like(a), torch.empty_like(alpha)
    ends = (*_bounds(layout), layout.column, layout.edge)
    chosen = {"SUMS": slope is not None, "SLOPE": slope or 0.0}
    kernel = gpu_heads.edge_softmax_back_kernel
    _by_heads(kernel, alpha, layout.rows, heads, *ends, a, b, alpha, g, gz, ga, heads, **chosen)
    return ga, gz


def extreme_rows(layout: CsrLayout, x: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Compute ``ops.extreme_rows`` with Triton kernels."""
    return _extremes(layout, layout.column, x, sign)


def extreme_edges(layout: CsrLayout, values: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Compute ``ops.extreme_edges`` with Triton kernels."""
    return _extremes(layout, layout.edge, values, sign)


def _extremes(layout: CsrLayout, index: Tensor, x: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    best, ties = x.new_empty(layout.rows, *x.shape[1:]), x.new_empty(layout.rows, *x.shape[1:])
    arguments = (*_bounds(layout), index, x, best, ties, _tile(x)[0])
    _by_row(gpu_rows.extreme_kernel, x, layout.rows, *arguments, SIGN=sign)
    return best, ties


def extreme_back(layout: CsrLayout, x: Tensor, best: Tensor, ties: Tensor, g: Tensor) -> Tensor:
    """Compute ``ops.extreme_back`` with Triton kernels."""
    x, part = x.contiguous(), (g / ties.clamp(min=1)).contiguous()
    out = torch.empty_like(x)
    arguments = (*_bounds(layout), layout.column, x, best.contiguous(), part, out, _tile(x)[0])
    _by_row(gpu_rows.extreme_back_kernel, x, layout.rows, *arguments)
    return out


def column_softmax(layout: CsrLayout, z: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``ops.column_softmax`` with Triton kernels."""
    z, m = z.contiguous(), m.contiguous()
    out, top, total = (z.new_empty(layout.rows, *z.shape[1:]) for _ in range(3))
    arguments = (*_bounds(layout), layout.column, z, m, out, top, total, _tile(z)[0])
    _by_row(gpu_rows.softmax_kernel, z, layout.rows, *arguments, TINY=TINY)
    return out, top, total


def column_softmax_back(
    layout: CsrLayout, z: Tensor, m: Tensor, out: Tensor, top: Tensor, total: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.column_softmax_back`` with Triton kernels."""
    z, m, out, top = (t.contiguous() for t in (z, m, out, top))
    gz, gm, part = torch.empty_like(z), torch.empty_like(m), (g / (total + TINY)).contiguous()
    arguments = (*_bounds(layout), layout.column, z, m, out, top, part, gz, gm, _tile(z)[0])
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
        arguments = (*_bounds(layout), layout.column, layout.edge, mine, its, g, out, _tile(mine)[0])
        _by_row(gpu_rows.join_back_kernel, mine, layout.rows, *arguments, SLOPE=slope)
        made.append(out)
    return made[0], made[1]
