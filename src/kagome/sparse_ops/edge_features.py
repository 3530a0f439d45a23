"""Edge features: differentiable products and sums of the graph's edge features by target and head.

Where it sits: beside ``edge_softmax``, for attention that adds ``W e`` to keys and values. The features
``e`` have few columns, and ``W e`` as many as a row. Neither function stores a row of that width per edge.
Each is the gradient of the other, so both can be differentiated any number of times:

::

    dots(own, x)     out[e, h]    = <own[target[e], h], x[e]>
                     backward       d own = sums(g, x), d x = spread(g, own)
    sums(w, x)       out[i, h, k] = sum over in-edges e of i of w[e, h] x[e, k]
                     backward       d w = dots(g, x), d x = spread(w, g)
    spread(w, own)   out[e, k]    = sum over heads of w[e, h] own[target[e], h, k]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kagome.kernels import ops
from kagome.kernels.base.csr import Structure
from kagome.sparse_ops import edge_sum


def dots(own: Tensor, x: Tensor, edges: Structure) -> Tensor:
    """Return ``<own[target], x>`` for each edge and head.

    Shapes:
        own ``[own, H, K]``, x ``[E, K]`` -> ``[E, H]``.

    Cost:
        Reads x once on a GPU and once per head on a CPU; keeps own and x for backward.
    """
    out: Tensor = _Dots.apply(own.contiguous(), x.contiguous(), edges)  # type: ignore[no-untyped-call]
    return out


def sums(weight: Tensor, x: Tensor, edges: Structure) -> Tensor:
    """Return for each row and head the sum of edge features over its in-edges, each times its weight.

    Shapes:
        weight ``[E, H]``, x ``[E, K]`` -> ``[own, H, K]``.

    Cost:
        Reads x once on a GPU and once per head on a CPU; keeps weight and x for backward.
    """
    out: Tensor = _Sums.apply(weight.contiguous(), x.contiguous(), edges)  # type: ignore[no-untyped-call]
    return out


def _spread(weight: Tensor, own: Tensor, edges: Structure) -> Tensor:
    """Return ``sum over heads of weight[e, h] own[target[e], h]``, the gradient of x in both functions."""
    return torch.einsum("eh,ehk->ek", weight, edge_sum.gather(own, edges, "target"))


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, x: Tensor, edges: Structure) -> Tensor:
        ctx.edges = edges
        ctx.save_for_backward(own, x)
        # ``by_edge`` reads row e of x for edge e, in place of a row at its source. The axis of size 1 says
        # that all heads share the features: [E, 1, K].
        return ops.dot_edges(edges.by_target.by_edge, own, x.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own, x = ctx.saved_tensors
        g = grads[0]
        g_own = sums(g, x, ctx.edges) if ctx.needs_input_grad[0] else None
        return g_own, _spread(g, own, ctx.edges) if ctx.needs_input_grad[1] else None, None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, edges: Structure) -> Tensor:
        ctx.edges = edges
        ctx.save_for_backward(weight, x)
        return ops.sum_rows(edges.by_target.by_edge, x.unsqueeze(1), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors
        g = grads[0]
        g_weight = dots(g, x, ctx.edges) if ctx.needs_input_grad[0] else None
        return g_weight, _spread(weight, g, ctx.edges) if ctx.needs_input_grad[1] else None, None
