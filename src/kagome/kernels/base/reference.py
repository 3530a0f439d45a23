"""Reference kernels in plain PyTorch, also used on devices and data types that have no compiled kernel.

Where it sits: ``ops`` falls back to this module where neither the numba loops nor Triton apply, and tests
compare them with it. It builds tensors with one row per edge, which the compiled kernels avoid.
Half-precision values are summed in float32.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kagome.kernels.base.csr import CsrLayout, Structure
from kagome.kernels.base.ordered_sums import add_at, take

Span = Literal["all", "own", "halo"]
"""Which entries of each row to walk: all, those that read own rows, or those that read halo rows."""

TINY = 1e-16
"""Constant added to the total of a softmax, as in PyG."""


def entries(
    layout: CsrLayout, span: Span = "all", rows: slice | Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (row of the result, column, edge) of each entry in the span, as int64."""
    kept = slice(None) if rows is None else rows
    begin = (layout.middle if span == "halo" else layout.pointer[:-1])[kept]
    end = (layout.middle if span == "own" else layout.pointer[1:])[kept]
    count = end - begin
    if isinstance(rows, Tensor):
        total = int(count.sum())
    else:  # known from the second call on: a GPU is then not waited for
        key = ("entries", span, None if rows is None else (rows.start, rows.stop, rows.step))
        if key not in layout.prepared:
            layout.prepared[key] = int(count.sum())
        total = layout.prepared[key]
    numbers = torch.arange(count.numel(), device=count.device)
    row = torch.repeat_interleave(numbers, count, output_size=total)
    # Entry p of the result belongs to entry p - (entries of earlier rows) + begin[row] of the layout.
    first = begin - (count.cumsum(0) - count)
    place = first.index_select(0, row) + torch.arange(row.numel(), device=row.device)
    return row, layout.column.index_select(0, place).long(), layout.edge.index_select(0, place).long()


def count_of(layout: CsrLayout, rows: slice | Tensor | None) -> int:
    """Return the number of rows of the result."""
    if isinstance(rows, Tensor):
        return rows.numel()
    return layout.rows if rows is None else len(range(*rows.indices(layout.rows)))


def _aligned(small: Tensor, big: Tensor) -> Tensor:
    """Append axes of size 1 to ``small`` until it has as many axes as ``big``."""
    return small.reshape(*small.shape, *[1] * (big.dim() - small.dim()))


def _summed(index: Tensor, values: Tensor, rows: int) -> Tensor:
    # The sum rounds after every addition, so a sum of half-precision numbers would lose small terms.
    half = values.dtype in (torch.float16, torch.bfloat16)
    wide = values.float() if half else values
    return add_at(wide.new_zeros(rows, *values.shape[1:]), index, wide).to(values.dtype)


def _greatest(index: Tensor, values: Tensor, rows: int) -> Tensor:
    """Return the largest value of each row, or minus infinity for a row without entries."""
    out = values.new_full((rows, *values.shape[1:]), -torch.inf)
    return out.scatter_reduce_(0, _aligned(index, values).expand_as(values), values, "amax")


def sum_rows(
    layout: CsrLayout,
    x: Tensor,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    span: Span = "all",
    offset: int = 0,
    rows: slice | Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Compute ``ops.sum_rows`` in plain PyTorch."""
    row, column, edge = entries(layout, span, rows)
    messages = take(x, column - offset)
    if weight is not None:
        messages = messages * _aligned(take(weight, edge), messages)
    out = _summed(row, messages, count_of(layout, rows))
    if scale is not None:
        out = out * _aligned(scale.to(out.dtype), out)
    return out if into is None else into.add_(out)


def dot_edges(
    layout: CsrLayout,
    a: Tensor,
    b: Tensor,
    *,
    span: Span = "all",
    offset: int = 0,
    into: Tensor | None = None,
) -> Tensor:
    """Compute ``ops.dot_edges`` in plain PyTorch."""
    row, column, edge = entries(layout, span)
    out = a.new_zeros(layout.edges, a.size(1)) if into is None else into
    out[edge] = (take(a, row) * take(b, column - offset)).sum(-1)
    return out


def extreme_rows(layout: CsrLayout, x: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Compute ``ops.extreme_rows`` in plain PyTorch."""
    row, column, _ = entries(layout)
    return _extreme(layout, row, take(x, column), sign)


def extreme_edges(layout: CsrLayout, values: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Compute ``ops.extreme_edges`` in plain PyTorch."""
    row, _, edge = entries(layout)
    return _extreme(layout, row, take(values, edge), sign)


def _extreme(layout: CsrLayout, row: Tensor, values: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    best = _greatest(row, values * sign, layout.rows) * sign
    # A row without entries gives 0, as in PyG, in place of an infinity.
    best = torch.where(_aligned(layout.pointer.diff() == 0, best), torch.zeros_like(best), best)
    return best, _summed(row, (values == take(best, row)).to(values.dtype), layout.rows)


def extreme_back(layout: CsrLayout, x: Tensor, best: Tensor, ties: Tensor, g: Tensor) -> Tensor:
    """Compute ``ops.extreme_back`` in plain PyTorch."""
    # The layout is by source here: ``row`` is the source and ``column`` the target of each edge.
    row, column, _ = entries(layout)
    share = take(g / ties.clamp(min=1), column)
    same = take(x, row) == take(best, column)
    return _summed(row, share * same, layout.rows)


def extreme_edges_back(layout: CsrLayout, values: Tensor, best: Tensor, ties: Tensor, g: Tensor) -> Tensor:
    """Compute ``ops.extreme_edges_back`` in plain PyTorch."""
    row, _, edge = entries(layout)
    same = take(values, edge) == take(best, row)
    out = torch.empty_like(values)
    out[edge] = take(g / ties.clamp(min=1), row) * same
    return out


def softmax_edges(layout: CsrLayout, logits: Tensor) -> Tensor:
    """Compute ``ops.softmax_edges`` in plain PyTorch."""
    row, _, edge = entries(layout)
    z = take(logits, edge)
    # Subtracting the row's maximum keeps exp from overflowing, as in PyG.
    p = (z - take(_greatest(row, z, layout.rows), row)).exp()
    out = torch.empty_like(logits)
    out[edge] = p / take(_summed(row, p, layout.rows) + TINY, row)
    return out


def softmax_edges_back(layout: CsrLayout, alpha: Tensor, g: Tensor) -> Tensor:
    """Compute ``ops.softmax_edges_back`` in plain PyTorch."""
    row, _, edge = entries(layout)
    total = _summed(row, take(alpha * g, edge), layout.rows)
    # From a total per row to one per edge, in the order of the edge list.
    spread = torch.empty_like(alpha)
    spread[edge] = take(total, row)
    return alpha * (g - spread)


def softmax_sum(layout: CsrLayout, a: Tensor, b: Tensor, slope: float) -> Tensor:
    """Compute ``ops.softmax_sum`` in plain PyTorch."""
    row, column, edge = entries(layout)
    logits = a.new_empty(layout.edges, a.size(1))
    logits[edge] = _leaky(take(a, row) + take(b, column), slope)
    return softmax_edges(layout, logits)


def softmax_sum_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float, alpha: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.softmax_sum_back`` in plain PyTorch."""
    gz = softmax_edges_back(structure.by_target, alpha, g)
    return join_edges_back(structure, a, b, slope, gz)


def leaky_dots(layout: CsrLayout, a: Tensor, b: Tensor, att: Tensor, slope: float) -> Tensor:
    """Compute ``ops.leaky_dots`` in plain PyTorch."""
    row, column, edge = entries(layout)
    out = a.new_empty(layout.edges, a.size(1))
    out[edge] = (_leaky(take(a, row) + take(b, column), slope) * att).sum(-1)
    return out


def leaky_dots_back(
    structure: Structure, a: Tensor, b: Tensor, att: Tensor, slope: float, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``ops.leaky_dots_back`` in plain PyTorch."""
    gatt = (join_edges(structure, a, b, slope) * g.unsqueeze(-1)).sum(0)
    # [E, H, 1] * [H, C]: the gradient of leaky_relu(a + b).
    ga, gb = join_edges_back(structure, a, b, slope, g.unsqueeze(-1) * att)
    return ga, gb, gatt


def gather(index: Tensor, x: Tensor) -> Tensor:
    """Compute ``ops.gather`` in plain PyTorch."""
    return take(x, index)


def add_rows(table: Tensor, place: Tensor, rows: Tensor, which: Tensor, scale: Tensor) -> None:
    """Compute ``ops.add_rows`` in plain PyTorch."""
    # Places are distinct, so that each row of the table gets one summand.
    table.index_add_(0, place, take(rows, which) * scale.view(-1, *[1] * (rows.dim() - 1)))


def sum_edges(layout: CsrLayout, values: Tensor, rows: slice | None = None) -> Tensor:
    """Compute ``ops.sum_edges`` in plain PyTorch."""
    row, _, edge = entries(layout, "all", rows)
    return _summed(row, take(values, edge), count_of(layout, rows))


def column_softmax(layout: CsrLayout, z: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``ops.column_softmax`` in plain PyTorch."""
    row, column, _ = entries(layout)
    zs = take(z, column)
    top = _greatest(row, zs, layout.rows)
    top = torch.where((layout.pointer.diff() == 0).unsqueeze(-1), torch.zeros_like(top), top)
    p = (zs - take(top, row)).exp()
    total = _summed(row, p, layout.rows)
    p = p / take(total + TINY, row)
    return _summed(row, p * take(m, column), layout.rows), top, total


def column_softmax_back(
    layout: CsrLayout, z: Tensor, m: Tensor, out: Tensor, top: Tensor, total: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.column_softmax_back`` in plain PyTorch."""
    # The layout is by source here, as in ``extreme_back``. The softmax is computed again from z, its maximum
    # and its total: p[e] = exp(z[source] - top[target]) / (total[target] + TINY).
    row, column, _ = entries(layout)
    p = (take(z, row) - take(top, column)).exp()
    pg = p / take(total + TINY, column) * take(g, column)
    gm = _summed(row, pg, layout.rows)
    gz = _summed(row, pg * (take(m, row) - take(out, column)), layout.rows)
    return gz, gm


def join_edges(structure: Structure, a: Tensor, b: Tensor, slope: float | None) -> Tensor:
    """Compute ``ops.join_edges`` in plain PyTorch."""
    z = take(a, structure.target) + take(b, structure.source)
    return z if slope is None else _leaky(z, slope)


def join_edges_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float | None, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.join_edges_back`` in plain PyTorch."""
    if slope is not None:
        z = take(a, structure.target) + take(b, structure.source)
        g = torch.where(z > 0, g, g * slope)
    return sum_edges(structure.by_target, g), sum_edges(structure.by_source, g)


def _leaky(z: Tensor, slope: float) -> Tensor:
    return torch.nn.functional.leaky_relu(z, slope)
