"""Edge sum: differentiable sums and extremes over a part's edges, without a tensor of a row for each edge.

Where it sits: ``deferred.reduce`` calls it where a layer's messages have a form known here. The loops
themselves are in ``kagome.kernels``, the exchanges with the peers in ``halo.exchange``, and attention in
``edge_softmax``.

::

    forward    out[i] = sum over in-edges e of i   w[e] * x[source[e]]      the edges by target
    backward   gx[u]  = sum over out-edges e of u  w[e] * g[target[e]]      the edges by source, kept
               gw[e]  = <g[target[e]], x[source[e]]>

[Note: overlap] A sum is linear. Own rows can therefore be summed while halo rows are exchanged, and in
backward the gradients of halo rows are sent before own rows are summed. Own and halo rows are never put into
one tensor::

    forward    send own rows ──────> sum over own sources ──────> receive halo rows, add the sum over them
    backward   sum on halo rows, send it ──────> sum on own rows ──────> receive the peers' sums, add them
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor

from kagome.halo.exchange import HaloSums, HaloWork
from kagome.halo.forward_pass import ForwardPass, inside
from kagome.halo.table_view import TableView
from kagome.kernels import ops
from kagome.kernels.base.csr import Structure


def neighbor_sum(
    rows: Tensor,
    edges: Structure,
    *,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    factor: Tensor | None = None,
    halo_work: HaloWork | None = None,
    forward_pass: ForwardPass | None = None,
) -> Tensor:
    """Return for each row the sum of its neighbours' rows over its in-edges, each times its edge's weight.

    A weight that is a product of a number at each end is passed as ``factor`` and ``scale`` instead: see
    [Note: root] in ``sparse_ops.factored_weights``.

    Args:
        rows: Own rows if ``halo_work`` is given, else all rows that edges read.
        edges: The edges.
        weight: One number per edge, or one per edge and head; None for a sum without weights.
        scale: A factor for each row of the result, for a mean; None for 1.
        factor: A factor for each row that edges read; None for 1.
        halo_work: The exchange of halo rows: see [Note: overlap].
        forward_pass: The forward pass whose token is passed along; needed with ``halo_work``.

    Shapes:
        rows ``[own or num_sources, F]`` and weight ``[E]``, or rows ``[.., H, C]`` and weight ``[E, H]``;
        scale ``[own]``; factor ``[num_sources]``; result ``[own, F]`` or ``[own, H, C]``.

    Cost:
        Keeps ``weight``, and the rows too if the weight has a gradient. Sends the rows of ``halo_work``.
    """
    out: Tensor
    if halo_work is None or forward_pass is None:
        out = _Sum.apply(rows, weight, scale, factor, edges)  # type: ignore[no-untyped-call]
        return out
    given = forward_pass.token
    out, token = _SumOverHalo.apply(  # type: ignore[no-untyped-call]
        rows, weight, scale, factor, given, edges, halo_work, forward_pass
    )
    # Only a site that backward visits joins the chain of tokens. All ranks agree on that: the header compares
    # it.
    if halo_work.site.grad:
        forward_pass.token = token
    return out


def gather(rows: Tensor, edges: Structure, end: Literal["source", "target"]) -> Tensor:
    """Return ``rows[end of each edge]``; backward sums over the edges by that end, without ``index_add``.

    Shapes:
        ``[own or num_sources, ...]`` -> ``[E, ...]``.
    """
    out: Tensor = _Gather.apply(rows, edges, end)  # type: ignore[no-untyped-call]
    return out


def edge_sum(values: Tensor, edges: Structure) -> Tensor:
    """Return for each row the sum of edge values over its in-edges.

    Shapes:
        ``[E, ...]`` -> ``[own, ...]``.
    """
    out: Tensor = _EdgeSum.apply(values, edges)  # type: ignore[no-untyped-call]
    return out


def edge_extreme(values: Tensor, edges: Structure, sign: int) -> Tensor:
    """Return the maximum (sign 1) or minimum (-1) of edge values over each row's in-edges; zeros without any.

    Shapes:
        ``[E, F]`` -> ``[own, F]``.

    Cost:
        Keeps the values and two numbers an entry of the result; equal values share a gradient.
    """
    out: Tensor = _EdgeExtreme.apply(values, edges, sign)  # type: ignore[no-untyped-call]
    return out


def neighbor_extreme(with_halo: Tensor, edges: Structure, sign: int) -> Tensor:
    """Return the maximum (sign 1) or minimum (-1) of neighbours' rows by column; zeros without any.

    Shapes:
        ``[num_sources, F]`` -> ``[own, F]``.

    Cost:
        Keeps the rows and two numbers an entry of the result; equal values share a gradient.
    """
    out: Tensor = _NeighborExtreme.apply(with_halo, edges, sign)  # type: ignore[no-untyped-call]
    return out


# [Note: two spans] The edges of each row are sorted so that those from own sources come first. ``span="own"``
# and ``span="halo"`` are the two halves of every row, so that one layout serves both sums and ``into`` adds
# the second to the first:
#
#     row i of by_target     | own sources .... | halo sources .. |
#                            pointer[i]       middle[i]      pointer[i + 1]
#
#     [1]              own rows start to travel
#     [2] span="own"   out[i]  = sum over the first half      while they travel
#     [3]              the halo rows have arrived, and are borrowed for the block
#     [4] span="halo"  out[i] += sum over the second half
#
# Backward is the mirror image: [4] sums the gradients at halo rows first, because they have to travel, and
# [2] follows while they do. Under history the halo is a ``TableView``. Its rows lie in the site's table at
# places that change each epoch, so the sum reads them there through an index in place of [3], which would
# copy them.
#
# A gradient of the edge weights needs the rows again in backward. Then the halo is copied and kept,
# because borrowed rows are valid inside the block only.


def _column(scale: Tensor, like: Tensor) -> Tensor:
    scale = scale if scale.dtype == like.dtype else scale.to(like.dtype)
    return scale.unsqueeze(-1) if like.dim() == 2 else scale.view(-1, *[1] * (like.dim() - 1))


def _times(rows: Tensor, factor: Tensor | None) -> Tensor:
    return rows if factor is None else rows * _column(factor, rows)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        scale: Tensor | None,
        factor: Tensor | None,
        edges: Structure,
    ) -> Tensor:
        ctx.edges, ctx.scale, ctx.factor = edges, scale, factor
        ctx.save_for_backward(weight, rows if ctx.needs_input_grad[1] else None)
        return ops.sum_rows(edges.by_target, _times(rows, factor), weight, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows = ctx.saved_tensors
        # The transpose exchanges the roles of the two row factors: ``scale`` multiplies what is read here,
        # and ``factor`` the result.
        g = _times(grads[0], ctx.scale).contiguous()
        g_rows = None
        if ctx.needs_input_grad[0]:
            g_rows = ops.sum_rows(ctx.edges.by_source, g, weight, ctx.factor)
        g_weight = None
        if ctx.needs_input_grad[1]:
            rows = _times(rows, ctx.factor)
            g_weight = ops.dot_edges(ctx.edges.by_target, *_headed(weight, g, rows)).view_as(weight)
        return g_rows, g_weight, None, None, None


class _SumOverHalo(torch.autograd.Function):
    """Own rows in, own sums out, the exchange inside; see [Note: token] in ``halo.exchange``."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        scale: Tensor | None,
        factor: Tensor | None,
        token: Tensor,
        edges: Structure,
        halo_work: HaloWork,
        forward_pass: ForwardPass,
    ) -> tuple[Tensor, Tensor]:
        work = halo_work.start_gather(rows)
        own_factor, halo_factor = (
            (None, None) if factor is None else (factor[: edges.first_halo], factor[edges.first_halo :])
        )
        given, rows = rows, _times(rows, own_factor)
        out = ops.sum_rows(edges.by_target, rows, weight, scale, span="own")
        keep = ctx.needs_input_grad[1]
        halo = work.wait().view(-1, *rows.shape[1:]) if keep else None
        # The halo lies in a history table: sum over the table's rows in place. See [Note: two spans].
        if isinstance(work, TableView) and halo is None and rows.dim() == 2:
            if factor is None:
                layout, each = work.where.layout(edges), weight
            else:
                layout, each = work.weighted(factor, edges)
            ops.sum_rows(layout, work.table(), each, scale, into=out)
        else:
            with work.borrow() if halo is None else nullcontext(halo) as received:
                received = _times(received.view(-1, *rows.shape[1:]), halo_factor)
                ops.sum_rows(
                    edges.by_target, received, weight, scale, span="halo", offset=edges.first_halo, into=out
                )
        # A weak reference, because the forward pass holds the token, whose graph holds this context. Python's
        # collector does not see a cycle through autograd.
        ctx.edges, ctx.scale, ctx.factor, ctx.halo_work, ctx.forward_pass = (
            edges,
            scale,
            factor,
            halo_work,
            ref(forward_pass),
        )
        ctx.save_for_backward(weight, given if keep else None, halo if keep else None)
        return out, torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forward_pass = inside(ctx.forward_pass)
        if forward_pass is not None and torch.is_grad_enabled():
            g_rows, g_weight = _SumOverHalo.differentiable_backward(ctx, forward_pass, grads[0])
            return g_rows, g_weight, None, None, torch.zeros_like(grads[1]), None, None, None
        weight, rows, halo = ctx.saved_tensors
        edges, halo_work, g_rows, g_weight = ctx.edges, ctx.halo_work, None, None
        own_factor, halo_factor = (
            (None, None)
            if ctx.factor is None
            else (ctx.factor[: edges.first_halo], ctx.factor[edges.first_halo :])
        )
        g = _times(grads[0], ctx.scale).contiguous()
        if ctx.needs_input_grad[0]:
            # Gradients on halo rows first: their owners wait for them, and they travel while own rows are
            # summed.
            work = halo_work.start_reduce(HaloSums(edges, g, weight, halo_factor))
            g_rows = ops.sum_rows(edges.by_source, g, weight, own_factor, rows=slice(0, edges.first_halo))
        if ctx.needs_input_grad[1]:
            g3, own3 = _headed(weight, g, _times(rows, own_factor))
            g_weight = ops.dot_edges(edges.by_target, g3, own3, span="own")
            _, halo3 = _headed(weight, g, halo)
            ops.dot_edges(edges.by_target, g3, halo3, span="halo", offset=edges.first_halo, into=g_weight)
            g_weight = g_weight.view_as(weight)
        if g_rows is not None:
            with work.borrow() as received:
                halo_work.add(received, g_rows)
        return g_rows, g_weight, None, None, torch.zeros_like(grads[1]), None, None, None

    @staticmethod
    def differentiable_backward(
        ctx: Any, forward_pass: ForwardPass, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute a backward that can be differentiated, with separate exchange and sum.

        See [Note: again] in ``halo.exchange``.
        """
        weight, rows, _ = ctx.saved_tensors
        edges, halo_work, g_rows, g_weight = ctx.edges, ctx.halo_work, None, None
        g = _times(grad, ctx.scale).contiguous()
        if ctx.needs_input_grad[0]:
            both_grad = ops.sum_rows(edges.by_source, g, weight, ctx.factor, rows=slice(0, edges.num_sources))
            own = halo_work.exchange.reduced(
                both_grad.reshape(both_grad.size(0), _width(both_grad)), forward_pass, halo_work.site
            )
            g_rows = own.view(-1, *both_grad.shape[1:])
        if ctx.needs_input_grad[1]:
            with_halo = halo_work.exchange.gathered(
                rows.reshape(rows.size(0), _width(rows)), forward_pass, halo_work.site
            )
            with_halo = _times(with_halo.view(-1, *rows.shape[1:]), ctx.factor)
            g_weight = ops.dot_edges(edges.by_target, *_headed(weight, g, with_halo)).view_as(weight)
        return g_rows, g_weight


def _headed(weight: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """Return rows as ``[.., H, C]`` with as many heads as the weight."""
    if weight.dim() == 2:
        return rows
    return tuple(r.reshape(r.size(0), 1, _width(r)) for r in rows)


def _width(rows: Tensor) -> int:
    width = 1
    for size in rows.shape[1:]:
        width *= size
    return width


class _Gather(torch.autograd.Function):
    """``rows[index]`` for one end of the edges; backward sums over the edges by that end."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, edges: Structure, end: str) -> Tensor:
        ctx.edges, ctx.end, ctx.shape = edges, end, rows.shape
        index = edges.target if end == "target" else edges.source
        flat = rows.reshape(rows.size(0), _width(rows))
        out = ops.gather(index, flat)
        # Not a view, because the caller may write to the result in place.
        return torch.ops.aten._unsafe_view(out, [index.numel(), *rows.shape[1:]])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layout = ctx.edges.by_target if ctx.end == "target" else ctx.edges.by_source
        return ops.sum_edges(layout, grads[0].contiguous()).view(ctx.shape), None, None


class _EdgeSum(torch.autograd.Function):
    """The sum of edge values over each row's in-edges."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, edges: Structure) -> Tensor:
        ctx.edges = edges
        return ops.sum_edges(edges.by_target, values.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g = grads[0].contiguous()
        target, flat = ctx.edges.target, g.view(g.size(0), _width(g))
        return ops.gather(target, flat).view(target.numel(), *g.shape[1:]), None


class _EdgeExtreme(torch.autograd.Function):
    """The maximum or minimum of edge values over in-edges; equal values share a gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, edges: Structure, sign: int) -> Tensor:
        ctx.edges = edges
        best, ties = ops.extreme_edges(edges.by_target, values, sign)
        ctx.save_for_backward(values, best, ties)
        return best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, best, ties = ctx.saved_tensors
        g = grads[0].contiguous()
        return ops.extreme_edges_back(ctx.edges.by_target, values, best, ties, g), None, None


class _NeighborExtreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, with_halo: Tensor, edges: Structure, sign: int) -> Tensor:
        ctx.edges = edges
        best, ties = ops.extreme_rows(edges.by_target, with_halo, sign)
        ctx.save_for_backward(with_halo, best, ties)
        return best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with_halo, best, ties = ctx.saved_tensors
        g = grads[0].contiguous()
        return ops.extreme_back(ctx.edges.by_source, with_halo, best, ties, g), None, None
