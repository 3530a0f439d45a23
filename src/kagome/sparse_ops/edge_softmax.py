"""Edge softmax: differentiable attention scores and softmaxes over a part's edges, by edge and head.

Where it sits: beside ``edge_sum``, for layers that weigh their neighbours; the loops are in
``kagome.kernels``. A tensor with a row for each edge and a column for each feature is computed where it is
used and never stored. Each function keeps its inputs and outputs alone, so that its backward can be
differentiated: see [Note: second derivatives] in ``kernels.ops``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kagome.kernels import ops
from kagome.kernels.base.csr import Structure


def dots(own: Tensor, with_halo: Tensor, edges: Structure) -> Tensor:
    """Return ``<own[target], with_halo[source]>`` for each edge and head: dot-product attention scores.

    Shapes:
        own ``[own, H, C]``, with_halo ``[num_sources, H, C]`` -> ``[E, H]``.
    """
    out: Tensor = _Dots.apply(own.contiguous(), with_halo.contiguous(), edges)  # type: ignore[no-untyped-call]
    return out


def leaky_dots(own: Tensor, with_halo: Tensor, att: Tensor, slope: float, edges: Structure) -> Tensor:
    """Return ``<att, leaky_relu(own[target] + with_halo[source])>`` for each edge and head.

    Shapes:
        own ``[own, H, C]``, with_halo ``[num_sources, H, C]``, att ``[H, C]`` -> ``[E, H]``.

    Source: Brody et al., How Attentive are Graph Attention Networks?, ICLR 2022, equation 7.
    """
    out: Tensor = _LeakyDots.apply(  # type: ignore[no-untyped-call]
        own.contiguous(), with_halo.contiguous(), att.contiguous(), slope, edges
    )
    return out


def edge_softmax(logits: Tensor, edges: Structure) -> Tensor:
    """Return the softmax of scores over each row's in-edges.

    Shapes:
        ``[E, H]`` -> ``[E, H]``.
    """
    out: Tensor = _EdgeSoftmax.apply(logits, edges)  # type: ignore[no-untyped-call]
    return out


def joint_softmax(own: Tensor, with_halo: Tensor, slope: float, edges: Structure) -> Tensor:
    """Return the softmax over in-edges of ``leaky_relu(own[target] + with_halo[source])``, never stored.

    Shapes:
        own ``[own, H]``, with_halo ``[num_sources, H]`` -> ``[E, H]``.

    Source: Velickovic et al., Graph Attention Networks, ICLR 2018, equation 3.
    """
    out: Tensor = _JointSoftmax.apply(  # type: ignore[no-untyped-call]
        own.contiguous(), with_halo.contiguous(), slope, edges
    )
    return out


def attention_sum(own: Tensor, with_halo: Tensor, rows: Tensor, slope: float, edges: Structure) -> Tensor:
    """Return the sums of neighbours' rows, each times :func:`joint_softmax` of its edge.

    Shapes:
        own ``[own, H]``, with_halo ``[num_sources, H]``, rows ``[num_sources, H, C]`` -> ``[own, H, C]``.

    Cost:
        Keeps the inputs. On a CPU no number for each edge is stored, forward or backward.
    """
    out: Tensor = _AttentionSum.apply(  # type: ignore[no-untyped-call]
        own.contiguous(), with_halo.contiguous(), rows.contiguous(), slope, edges
    )
    return out


def join(own: Tensor, with_halo: Tensor, slope: float | None, edges: Structure) -> Tensor:
    """Return ``own[target] + with_halo[source]``, through a leaky ReLU if a slope is given.

    Shapes:
        own ``[own, ...]``, with_halo ``[num_sources, ...]`` -> ``[E, ...]``.

    Cost:
        Keeps own and with_halo for backward, and no tensor with a row for each edge.
    """
    out: Tensor = _Join.apply(  # type: ignore[no-untyped-call]
        own.contiguous(), with_halo.contiguous(), slope, edges
    )
    return out


def column_softmax(z: Tensor, m: Tensor, edges: Structure) -> Tensor:
    """Return ``sum of softmax(z)[source] * m[source]`` over in-edges, with a softmax for each column.

    Shapes:
        z and m ``[num_sources, F]`` -> ``[own, F]``.

    Source: Li et al., DeeperGCN: All You Need to Train Deeper GCNs, 2020, definition 3.
    """
    out: Tensor = _ColumnSoftmax.apply(z.contiguous(), m.contiguous(), edges)  # type: ignore[no-untyped-call]
    return out


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, with_halo: Tensor, edges: Structure) -> Tensor:
        ctx.edges = edges
        ctx.save_for_backward(own, with_halo)
        return ops.dot_edges(edges.by_target, own, with_halo)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own, with_halo = ctx.saved_tensors
        g = grads[0].contiguous()
        g_own = ops.sum_rows(ctx.edges.by_target, with_halo, g) if ctx.needs_input_grad[0] else None
        g_whole = ops.sum_rows(ctx.edges.by_source, own, g) if ctx.needs_input_grad[1] else None
        return g_own, g_whole, None


class _LeakyDots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, with_halo: Tensor, att: Tensor, slope: float, edges: Structure
    ) -> Tensor:
        ctx.edges, ctx.slope = edges, slope
        ctx.save_for_backward(own, with_halo, att)
        return ops.leaky_dots(edges.by_target, own, with_halo, att, slope)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own, with_halo, att = ctx.saved_tensors
        back = ops.leaky_dots_back(ctx.edges, own, with_halo, att, ctx.slope, grads[0].contiguous())
        return (*back, None, None)


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, edges: Structure) -> Tensor:
        ctx.edges = edges
        alpha = ops.softmax_edges(edges.by_target, logits.contiguous())
        ctx.save_for_backward(alpha)
        return alpha

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (alpha,) = ctx.saved_tensors
        return ops.softmax_edges_back(ctx.edges.by_target, alpha, grads[0].contiguous()), None


class _JointSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, with_halo: Tensor, slope: float, edges: Structure) -> Tensor:
        ctx.edges, ctx.slope = edges, slope
        alpha = ops.softmax_sum(edges.by_target, own, with_halo, slope)
        ctx.save_for_backward(own, with_halo, alpha)
        return alpha

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own, with_halo, alpha = ctx.saved_tensors
        back = ops.softmax_sum_back(ctx.edges, own, with_halo, ctx.slope, alpha, grads[0].contiguous())
        return (*back, None, None)


class _AttentionSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, with_halo: Tensor, rows: Tensor, slope: float, edges: Structure
    ) -> Tensor:
        ctx.edges, ctx.slope = edges, slope
        ctx.save_for_backward(own, with_halo, rows)
        return ops.attention_sum(edges.by_target, own, with_halo, slope, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own, with_halo, rows = ctx.saved_tensors
        back = ops.attention_sum_back(ctx.edges, own, with_halo, ctx.slope, rows, grads[0].contiguous())
        return (*back, None, None)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, with_halo: Tensor, slope: float | None, edges: Structure) -> Tensor:
        ctx.edges, ctx.slope = edges, slope
        # Without a slope the gradient does not depend on the rows, so they need not be kept.
        ctx.save_for_backward(*((own, with_halo) if slope is not None else (None, None)))
        ctx.shapes = own.shape, with_halo.shape
        return ops.join_edges(edges, own, with_halo, slope)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g = grads[0].contiguous()
        if ctx.slope is None:
            g_own = ops.sum_edges(ctx.edges.by_target, g).view(ctx.shapes[0])
            return g_own, ops.sum_edges(ctx.edges.by_source, g).view(ctx.shapes[1]), None, None
        own, with_halo = ctx.saved_tensors
        return (*ops.join_edges_back(ctx.edges, own, with_halo, ctx.slope, g), None, None)


class _ColumnSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, m: Tensor, edges: Structure) -> Tensor:
        ctx.edges = edges
        out, top, total = ops.column_softmax(edges.by_target, z, m)
        ctx.save_for_backward(z, m, out, top, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, m, out, top, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            # This backward is differentiated again, so the maximum and the total must depend on z here.
            # The saved ones are no outputs of forward and have no gradient.
            out, top, total = ops.column_softmax(ctx.edges.by_target, z, m)
        back = ops.column_softmax_back(ctx.edges.by_source, z, m, out, top, total, grads[0].contiguous())
        return (*back, None)
