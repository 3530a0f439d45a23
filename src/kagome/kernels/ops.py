"""Kernel operations: each runs in numba, Triton or plain PyTorch, by the tensors' device and type.

Where it sits: ``sparse_ops``, ``feature_parallel``, ``historical`` and ``halo.table_view`` call these.
The three backends agree up to rounding. Each backend gives the same bits at any number of threads.

[Note: second derivatives] Autograd runs a function's forward with gradients off. It runs the backward with
gradients on only if that backward is to be differentiated again (``create_graph=True``). In that case these
calls run in plain PyTorch, which records the gradient. So an autograd function can be differentiated any
number of times if its backward consists of these calls, of torch's own, of its inputs and of its outputs.

::

    layout         R rows, E entries; entry k of row i has column[k] and edge[k]
    span           which entries are walked: "all", "own" (before middle) or "halo" (from middle on)
    offset         subtracted from a column before x is read: a tensor of halo rows alone has offset = own
    rows           a slice of the layout's rows, or their numbers; the result's row 0 is the first of them
    into           a tensor that the result is added to (sums) or written into (edges), and returned
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from kagome.kernels.base import reference
from kagome.kernels.base.csr import CsrLayout, Structure
from kagome.kernels.base.reference import Span as Span

# numba has no half-precision numbers on a CPU: such tensors run in plain PyTorch there.
LOOPED = frozenset((torch.float32, torch.float64))
LAUNCHED = LOOPED | {torch.float16, torch.bfloat16}


def backend_of(x: Tensor) -> str:
    """Return ``numba``, ``triton`` or ``torch``: the backend that runs a kernel on this tensor."""
    found = _module(x.device.type, x.dtype)
    return "torch" if found is reference else "numba" if x.device.type == "cpu" else "triton"


@cache  # importable modules do not change within a process
def _module(device: str, dtype: torch.dtype) -> ModuleType:
    # A backend is imported with the first tensor that it serves, so a run on one device does not load the
    # compiler of the other.
    if device == "cpu" and dtype in LOOPED:
        return import_module("kagome.kernels.cpu.dispatch")
    if device == "cuda" and dtype in LAUNCHED and find_spec("triton") is not None:
        return import_module("kagome.kernels.triton.ops")
    return reference


def _way(x: Tensor, *others: Tensor | None) -> ModuleType:
    """Return the backend module for these tensors; see [Note: second derivatives]."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others)):
        return reference
    return _module(x.device.type, x.dtype)


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
    """``out[i] = scale[i] * sum over entries k of row i of weight[edge[k]] * x[column[k] - offset]``.

    Args:
        layout: The rows and their entries.
        x: The rows to sum.
        weight: One factor per edge, or one per edge and head.
        scale: One factor per row of the result.
        span: Which entries are walked.
        offset: Subtracted from each column.
        rows: The slice of the layout's rows to compute, or on a CPU their ascending numbers; all if None.
        into: A tensor to add the result to, in place; it is then returned.

    Shapes:
        ``x [*, F]`` with ``weight`` None or ``[E]``, or ``x [*, H, C]`` with ``weight`` None, ``[E]`` or
        ``[E, H]``; result ``[R, F]`` or ``[R, H, C]``. With ``x [*, 1, C]`` and ``weight [E, H]`` all heads
        read the same columns, and ``into`` must be None.

    Cost:
        Reads one row of x per edge; writes the result once.
    """
    way = _way(x, weight)
    if weight is not None and weight.dim() == 2 and x.size(1) < weight.size(1) and not _takes_shared(way):
        # Only the Triton kernels read columns that all heads share. Elsewhere each head is a sum of its own.
        every = []
        for w in weight.t():
            every.append(sum_rows(layout, x[:, 0], w, scale, span=span, offset=offset, rows=rows))
        return torch.stack(every, 1)
    out: Tensor = way.sum_rows(layout, x, weight, scale, span=span, offset=offset, rows=rows, into=into)
    return out


def _takes_shared(way: ModuleType) -> bool:
    """Return True if a backend's kernels read columns that all heads share."""
    return way.__name__.endswith("triton.ops")


def dot_edges(
    layout: CsrLayout,
    a: Tensor,
    b: Tensor,
    *,
    span: Span = "all",
    offset: int = 0,
    into: Tensor | None = None,
) -> Tensor:
    """``out[edge[k], h] = <a[i, h], b[column[k] - offset, h]>`` for the entries k of each row i.

    Args:
        layout: The rows and their entries.
        a: One row for each row of the layout.
        b: The rows that the columns name.
        span: Which entries are walked; the others keep the value in ``into``, or are 0 without it.
        offset: Subtracted from each column.
        into: A tensor to write the result into, in place; it is then returned.

    Shapes:
        ``a [R, H, C]``, ``b [*, H, C]``; result ``[E, H]``. With ``b [*, 1, C]`` all heads read the same
        columns, and ``into`` must be None.
    """
    way = _way(a, b)
    if b.size(1) < a.size(1) and not _takes_shared(way):
        heads = (dot_edges(layout, head, b, span=span, offset=offset) for head in a.split(1, 1))
        return torch.cat([out.contiguous() for out in heads], 1)
    out: Tensor = way.dot_edges(layout, a, b, span=span, offset=offset, into=into)
    return out


def extreme_rows(layout: CsrLayout, x: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Return the column-wise largest (sign +1) or smallest (-1) neighbour of each row, and how many equal it.

    A row without entries gives 0 and 0.

    Shapes:
        ``x [*, F]``; results ``[R, F]``, both of x's type.
    """
    best, ties = _way(x).extreme_rows(layout, x, sign)
    return best, ties


def extreme_back(layout: CsrLayout, x: Tensor, best: Tensor, ties: Tensor, g: Tensor) -> Tensor:
    """``gx[u] = sum over out-edges u -> i of g[i] / ties[i] where x[u] == best[i]``.

    Args:
        layout: The structure's ``by_source``.
        x: The rows that ``extreme_rows`` read.
        best: The extreme values from ``extreme_rows``.
        ties: The number of equal values from ``extreme_rows``.
        g: The gradient of ``best``.

    Shapes:
        ``x [num_sources, F]``; the others ``[own, F]``; result ``[num_sources, F]``.
    """
    out: Tensor = _way(x, g).extreme_back(layout, x, best, ties, g)
    return out


def extreme_edges(layout: CsrLayout, values: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Compute ``extreme_rows`` of values that belong to edges instead of rows.

    Shapes:
        ``values [E, F]``; results ``[R, F]``.
    """
    best, ties = _way(values).extreme_edges(layout, values, sign)
    return best, ties


def extreme_edges_back(layout: CsrLayout, values: Tensor, best: Tensor, ties: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of ``extreme_edges`` by its values; equal values share it evenly.

    Shapes:
        ``values [E, F]``, the others ``[R, F]``; result ``[E, F]``.
    """
    out: Tensor = _way(values, g).extreme_edges_back(layout, values, best, ties, g)
    return out


def softmax_edges(layout: CsrLayout, logits: Tensor) -> Tensor:
    """``exp(logit - largest) / (total + 1e-16)`` within each row of the layout, separately for each head.

    Shapes:
        ``logits [E, H]``; result ``[E, H]``, both in the order of the edge list.
    """
    out: Tensor = _way(logits).softmax_edges(layout, logits)
    return out


def softmax_edges_back(layout: CsrLayout, alpha: Tensor, g: Tensor) -> Tensor:
    """``alpha * (g - the row's sum of alpha * g)``: the gradient of ``softmax_edges`` by its logits.

    Shapes:
        All ``[E, H]``.
    """
    out: Tensor = _way(alpha, g).softmax_edges_back(layout, alpha, g)
    return out


def softmax_sum(layout: CsrLayout, a: Tensor, b: Tensor, slope: float) -> Tensor:
    """GAT's attention: softmax over each row's edges of ``leaky_relu(a[i] + b[column])``, never stored.

    Shapes:
        ``a [R, H]``, ``b [*, H]``; result ``[E, H]``.
    """
    out: Tensor = _way(a, b).softmax_sum(layout, a, b, slope)
    return out


def softmax_sum_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float, alpha: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``softmax_sum`` by ``a`` and ``b``.

    Shapes:
        ``a [own, H]``, ``b [num_sources, H]``, ``alpha [E, H]``, ``g [E, H]``; results like a and b.
    """
    ga, gb = _way(a, b, alpha, g).softmax_sum_back(structure, a, b, slope, alpha, g)
    return ga, gb


def fuses_attention(x: Tensor) -> bool:
    """Return whether :func:`attention_sum` of such rows stores no number for an edge."""
    return _fuses(_module(x.device.type, x.dtype), x)


def _fuses(way: ModuleType, x: Tensor) -> bool:
    return way.__name__.endswith("cpu.dispatch") and bool(way.fuses(*x.shape[1:]))


def attention_sum(layout: CsrLayout, a: Tensor, b: Tensor, slope: float, x: Tensor) -> Tensor:
    """``out[i, h] = sum over entries k of row i of softmax_sum(a, b)[k, h] * x[column[k], h]``.

    Shapes:
        ``a [R, H]``, ``b [*, H]``, ``x [*, H, C]``; result ``[R, H, C]``.
    """
    way = _way(a, b, x)
    if _fuses(way, x):
        out: Tensor = way.attention_sum(layout, a, b, slope, x)
        return out
    return sum_rows(layout, x, softmax_sum(layout, a, b, slope))


def attention_sum_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float, x: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``attention_sum`` by ``a``, ``b`` and ``x``.

    Shapes:
        ``a [own, H]``, ``b [num_sources, H]``, ``x [num_sources, H, C]``, ``g [own, H, C]``; results like the
        first three.
    """
    way = _way(a, b, x, g)
    if _fuses(way, x):
        ga, gb, gx = way.attention_sum_back(structure, a, b, slope, x, g)
        return ga, gb, gx
    alpha = softmax_sum(structure.by_target, a, b, slope)
    along = dot_edges(structure.by_target, g, x)
    ga, gb = softmax_sum_back(structure, a, b, slope, alpha, along)
    return ga, gb, sum_rows(structure.by_source, g, alpha)


def leaky_dots(layout: CsrLayout, a: Tensor, b: Tensor, att: Tensor, slope: float) -> Tensor:
    """``sum over c of att[h, c] * leaky_relu(a[i, h, c] + b[column, h, c])``: GATv2's logits.

    Shapes:
        ``a [R, H, C]``, ``b [*, H, C]``, ``att [H, C]``; result ``[E, H]``.
    """
    out: Tensor = _way(a, b, att).leaky_dots(layout, a, b, att, slope)
    return out


def leaky_dots_back(
    structure: Structure, a: Tensor, b: Tensor, att: Tensor, slope: float, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``leaky_dots`` by ``a``, ``b`` and ``att``.

    Shapes:
        ``a [own, H, C]``, ``b [num_sources, H, C]``, ``att [H, C]``, ``g [E, H]``; results like the
        first three.
    """
    ga, gb, gatt = _way(a, b, att, g).leaky_dots_back(structure, a, b, att, slope, g)
    return ga, gb, gatt


def gather(index: Tensor, x: Tensor) -> Tensor:
    """Return the rows of ``x`` that ``index`` names: ``x.index_select(0, index)``.

    Shapes:
        ``index [E]`` int32 or int64, ``x [*, ...]``; result ``[E, ...]``.
    """
    out: Tensor = _way(x).gather(index, x)
    return out


def add_rows(table: Tensor, place: Tensor, rows: Tensor, which: Tensor, scale: Tensor) -> None:
    """``table[place[e]] += scale[e] * rows[which[e]]``, in place; places are distinct.

    Shapes:
        ``table [T, ...]``, ``rows [*, ...]``, ``place [E]`` and ``which [E]`` integers, ``scale [E]`` of the
        table's type.
    """
    _way(table).add_rows(table, place, rows, which, scale)


def sum_edges(layout: CsrLayout, values: Tensor, rows: slice | None = None) -> Tensor:
    """``out[i] = sum over entries k of row i of values[edge[k]]``: the transpose of ``gather``.

    Shapes:
        ``values [E, ...]``; result ``[R, ...]``.
    """
    out: Tensor = _way(values).sum_edges(layout, values, rows)
    return out


def column_softmax(layout: CsrLayout, z: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of ``m[column]`` weighted by a softmax of ``z[column]`` over each row, column by column.

    Returns:
        The sums, each row's largest z, and its total of ``exp(z - largest)``; 0 for rows without entries.

    Shapes:
        ``z [*, F]``, ``m [*, F]``; results ``[R, F]``.
    """
    out, top, total = _way(z, m).column_softmax(layout, z, m)
    return out, top, total


def column_softmax_back(
    layout: CsrLayout, z: Tensor, m: Tensor, out: Tensor, top: Tensor, total: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sums of ``column_softmax`` by ``z`` and ``m``.

    Args:
        layout: The structure's ``by_source``.
        z: The logits given to ``column_softmax``.
        m: The values given to ``column_softmax``.
        out: The sums it returned.
        top: The largest logits it returned.
        total: The totals it returned.
        g: The gradient of the sums.

    Shapes:
        ``z`` and ``m`` ``[num_sources, F]``, the others ``[own, F]``; results ``[num_sources, F]``.
    """
    gz, gm = _way(z, m, out, g).column_softmax_back(layout, z, m, out, top, total, g)
    return gz, gm


def join_edges(structure: Structure, a: Tensor, b: Tensor, slope: float | None) -> Tensor:
    """``a[target] + b[source]`` for every edge, passed through leaky_relu if a slope is given.

    Shapes:
        ``a [own, ...]``, ``b [num_sources, ...]``; result ``[E, ...]``.
    """
    out: Tensor = _way(a, b).join_edges(structure, a, b, slope)
    return out


def join_edges_back(
    structure: Structure, a: Tensor, b: Tensor, slope: float | None, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``join_edges`` by ``a`` and ``b``.

    Shapes:
        ``g [E, ...]``; results like a and b.
    """
    ga, gb = _way(a, b, g).join_edges_back(structure, a, b, slope, g)
    return ga, gb
