"""Exact norms: batch and instance norm over vertices, with the statistics of all ranks' rows.

Where it sits: part of the handlers of ``handlers``. On one rank torch's own functions run.

::

    forward    mean = sum x / N,  var = sum (x - mean)^2 / N     two sums over ranks, one pass: x a + d
    backward   gx = a (g - sum g / N - xhat sum g xhat / N)      one sum over ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.model.exact.scope import Args, Func, Handler, Kwargs, Scope, argument

Sum = Callable[[Tensor], Tensor]


def _batch_norm(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    args, kwargs = _as_functional(func, args, kwargs)
    x: Tensor = args[0]
    # In evaluation a norm uses its buffers, which are equal on all ranks.
    if not argument(args, kwargs, 5, "training", False) or scope.size == 1:
        return NotImplemented
    axis = scope.axes.of(x)
    # Where vertices are channels, or all ranks have the same rows, torch's own norm is right on each rank.
    if axis == 1 or (axis is None and scope.ranks.have_equal(x)):
        return NotImplemented
    return _normalise(scope, x, args, kwargs, tuple(d for d in range(x.dim()) if d != 1))


def _as_functional(func: Func, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return arguments in the order of ``F.batch_norm(x, mean, var, weight, bias, ...)``.

    The native function takes weight and bias before mean and variance.
    """
    if getattr(func, "__module__", "") != torch.nn.functional.__name__ and len(args) > 4:
        args = (args[0], *args[3:5], *args[1:3], *args[5:])
    return (args, kwargs) if args else ((kwargs["input"],), kwargs)


def _instance_norm(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    args, kwargs = _as_functional(func, args, kwargs)
    x: Tensor = args[0]
    axis, buffer = scope.axes.of(x), argument(args, kwargs, 1, "running_mean")
    if not argument(args, kwargs, 5, "use_input_stats", True) or scope.size == 1:
        return NotImplemented
    # A vertex that is an instance or a channel has statistics of its own.
    if axis in (None, 1) or (axis == 0 and buffer is None):
        return NotImplemented
    if axis == 0:
        return _normalise_each(scope, x, args, kwargs)
    # [1, columns, vertices] is PyG's way to normalise all rows of one graph.
    return _normalise(scope, x, args, kwargs, tuple(range(2, x.dim())))


def _normalise_each(scope: Scope, x: Tensor, args: Args, kwargs: Kwargs) -> Tensor:
    """Normalise each row by itself, and update the running buffers with the means over all ranks' rows."""
    eps = float(argument(args, kwargs, 7, "eps", 1e-5))
    affine = argument(args, kwargs, 3, "weight"), argument(args, kwargs, 4, "bias")
    out = torch.nn.functional.instance_norm(x, None, None, *affine, eps=eps)
    var, mean = torch.var_mean(x.detach().double(), tuple(range(2, x.dim())), correction=1)
    counted = torch.stack([mean, var, torch.ones_like(mean)]).sum(1)
    sums = scope.ranks.total(counted)
    _note(scope, args, kwargs, sums[0] / sums[2], sums[1] / sums[2])
    return scope.axes.like(out, x)


def _normalise(scope: Scope, x: Tensor, args: Args, kwargs: Kwargs, dims: tuple[int, ...]) -> Tensor:
    """Normalise with the statistics of all ranks' rows, and update the running buffers with them."""
    weight, bias = argument(args, kwargs, 3, "weight"), argument(args, kwargs, 4, "bias")
    eps = float(argument(args, kwargs, 7, "eps", 1e-5))
    seen: list[Tensor] = []
    # As torch's own norms: statistics of half precision in float32.
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    out = scope.ranks.summing(
        partial(_there, dims, eps, seen), partial(_back, dims), (wide, weight, bias), "norm"
    )
    mean, var, count = seen
    if not scope.axes.of_each_vertex(x) and float(count) == 1:
        raise ModelError(
            "more than one value per channel for a norm in training",
            "one in the rows of all ranks, which torch refuses, too",
            where=scope.where(),
            hint="leave the norm out where a mask keeps a single row",
        )
    # The unbiased variance, N / (N - 1) var; several instances move the buffers by their mean.
    _note(scope, args, kwargs, mean.mean(0), var.mean(0) * (count / (count - 1).clamp(min=1)))
    return scope.axes.like(out.to(x.dtype), x)


def _note(scope: Scope, args: Args, kwargs: Kwargs, mean: Tensor, var: Tensor) -> None:
    """Move the running buffers towards the mean and (unbiased) variance of this forward pass."""
    mean_buffer = argument(args, kwargs, 1, "running_mean")
    var_buffer = argument(args, kwargs, 2, "running_var")
    momentum = argument(args, kwargs, 6, "momentum", 0.1)
    if mean_buffer is None:
        return
    if scope.within_once and torch.is_grad_enabled():
        # ``run_once`` runs the function a single time and would move the buffers once.
        raise ModelError(
            "a batch norm to move its running statistics once in each epoch",
            "one in a function that is checkpointed, or in a reversible block, which runs again in backward: "
            "plain PyG moves them twice",
            where=scope.where(),
            hint="take the norm out of it, or give it track_running_stats=False",
        )
    with torch.no_grad():
        # running <- (1 - momentum) running + momentum * new
        mean_buffer.mul_(1 - momentum).add_(mean.reshape(-1).to(mean_buffer.dtype), alpha=momentum)
        var_buffer.mul_(1 - momentum).add_(var.reshape(-1).to(var_buffer.dtype), alpha=momentum)


def _there(
    dims: tuple[int, ...],
    eps: float,
    seen: list[Tensor],
    total: Sum,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the norm, and what backward needs: x, mean, 1 / deviation, weight, bias, number of entries."""
    local = math.prod(x.size(d) for d in dims)
    if local:
        # Squares around the part's own mean, [1, columns, 1, ..]: one pass over x, and no digits cancel.
        m2, mean_here = torch.var_mean(x, dims, correction=0, keepdim=True)
        m2 = m2 * local
    else:
        mean_here = x.sum(dims, keepdim=True)
        m2 = torch.zeros_like(mean_here)
    # Sums over parts are taken in float64: they are few, and include the number of entries.
    number = torch.full((1,), float(local), dtype=torch.float64, device=x.device)
    sums = total(torch.cat([number, mean_here.reshape(-1).double() * local]))
    count = sums[0]
    exact = sums[1:] / count
    mean = exact.to(x.dtype).view(mean_here.shape)
    # The squares here are around the local mean: its distance from the global mean adds to the variance.
    apart = m2.double() + local * (mean_here.double() - exact.view(mean_here.shape)).square()
    var = (total(apart.reshape(-1)) / count).to(x.dtype).view(mean_here.shape)
    seen[:] = [mean, var, count.to(x.dtype)]
    rstd = (var + eps).rsqrt()
    column = [1, -1] + [1] * (x.dim() - 2)
    # out = (x - mean) rstd weight + bias = x a + d, in one pass
    a = rstd if weight is None else rstd * weight.view(column).to(x.dtype)
    d = -mean * a if bias is None else bias.view(column).to(x.dtype) - mean * a
    # An empty tensor stands for a missing weight or bias: backward gets tensors alone.
    nothing = x.new_empty(0)
    kept = (x, mean, rstd, nothing if weight is None else weight, nothing if bias is None else bias, count)
    return torch.addcmul(d, x, a), kept


def _back(
    dims: tuple[int, ...],
    total: Sum,
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    count: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradient of x, and this rank's share of the gradients of weight and bias."""
    column = [1, -1] + [1] * (x.dim() - 2)
    a = rstd if weight.numel() == 0 else rstd * weight.view(column).to(x.dtype)
    # Per column: sum g, and sum g xhat with xhat = (x - mean) rstd, both over own rows.
    here = g.sum(dims, keepdim=True)
    along = ((g * x).sum(dims, keepdim=True) - mean * here) * rstd
    both = total(torch.cat([here.reshape(-1), along.reshape(-1)]).double()) / count
    far, slope = both.to(x.dtype).view(2, *here.shape).unbind(0)
    # a (g - far - (x - mean) rstd slope), in two passes.
    step = rstd * slope
    g_x = torch.addcmul(mean * step - far, x, -step).add_(g).mul_(a)
    # Shares of this rank alone: ``components.gradients`` sums the gradients of weights over the ranks.
    flat = [d for d in range(x.dim()) if d != 1]
    g_weight = None if weight.numel() == 0 else along.sum(flat).to(weight.dtype)
    g_bias = None if bias.numel() == 0 else here.sum(flat).to(bias.dtype)
    return g_x, g_weight, g_bias


NORMS: Mapping[str, Handler] = {"batch_norm": _batch_norm, "instance_norm": _instance_norm}
