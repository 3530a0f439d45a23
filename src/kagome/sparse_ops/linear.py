"""Linear: rows times a weight, computed by oneDNN on a CPU.

Where it sits: ``intercept.gather_scatter``, ``deferred.rewrite_rules`` and ``deferred.reduce`` call it for
``F.linear``. PyTorch gives float32 products to MKL, which on processors of other makers than Intel reaches
less than half the rate of oneDNN. On two cores with AVX-512, 100,000 x 128 by 128 x 128 takes 19 against 8
ms; a weight's gradient takes 37 against 25 ms on one core. Both compute in float32 throughout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kagome.sparse_ops.sparse_features import SparseFeatures

LEAST = 64
"""Fewest rows for which the overhead of the call does not show."""
BLOCK = 4096
"""Rows in a block of a weight's gradient: what oneDNN transposes stays in a core's cache."""


def linear(x: Tensor | SparseFeatures, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b``, as ``F.linear`` does.

    Shapes:
        x ``[n, F]``, weight ``[G, F]``, bias ``[G]`` -> ``[n, G]``.
    """
    if isinstance(x, SparseFeatures):
        return x.linear(weight, bias)
    if not suits(x, weight):
        return functional.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def suits(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN can compute this product."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    if x.dim() != 2 or weight.dim() != 2 or x.size(0) < LEAST or 0 in (*x.shape, *weight.shape):
        return False
    # The operator is private to torch, and builds without oneDNN lack it.
    built = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()
    return built and bool(torch.backends.mkldnn.enabled)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, fast_layout(weight), bias, "none", [], "")
    return out


def fast_layout(weight: Tensor) -> Tensor:
    """Return a weight that oneDNN has fast code for.

    Some columns of a wider weight, taken as they are, need 600 times as long.
    """
    return weight if weight.is_contiguous() or weight.t().is_contiguous() else weight.contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g = grads[0]
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: oneDNN's product has no gradient
            g_x = g @ weight if ctx.needs_input_grad[0] else None
            g_weight = g.t() @ x if ctx.needs_input_grad[1] else None
            return g_x, g_weight, g.sum(0) if ctx.needs_input_grad[2] else None
        g_x = _product(g.contiguous(), weight.t().contiguous(), None) if ctx.needs_input_grad[0] else None
        g_weight = _of_weight(g, x) if ctx.needs_input_grad[1] else None
        return g_x, g_weight, g.sum(0) if ctx.needs_input_grad[2] else None


def _of_weight(g: Tensor, x: Tensor) -> Tensor:
    """Return ``g^T x``, computed block by block with the same product: columns of g times columns of x."""
    out: Tensor | None = None
    for low in range(0, g.size(0), BLOCK):
        # oneDNN computes x W^T. With g^T in place of x, and x^T in place of W, that is g^T x.
        part = _product(g[low : low + BLOCK].t().contiguous(), x[low : low + BLOCK].t(), None)
        out = part if out is None else out.add_(part)
    assert out is not None  # at least LEAST rows
    return out
