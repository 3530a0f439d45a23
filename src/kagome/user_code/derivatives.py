"""Derivatives: ``torch.autograd.grad`` inside forward, as models of energies and forces use it.

Where it sits: one of the handlers of ``intercept.gather_scatter``. It runs the backward of ``halo.exchange``
and of the kernels inside the user's forward. On one rank torch's own function runs. On several::

    energy   equal on all ranks: a sum over all of them       each rank seeds its share of 1
    rows     one number per vertex or edge                    seeded as on one rank
    with respect to rows             each rank has its own; halo shares arrive by the exchanges' backward
    with respect to replicated data  a weight, a cell: the ranks' shares are summed

A backward that is to be differentiated again keeps a graph: see [Note: again] in ``halo.exchange`` for what
is sent, and [Note: second derivatives] in ``kernels.ops`` for what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import EscapeError, LazyTensor, now
from kagome.errors import ModelError
from kagome.halo.forward_pass import RunningForward
from kagome.placement.torch_calls import Args, Func, Kwargs
from kagome.scope.exchanges import RankSums
from kagome.scope.rows import Axes

_SIGNATURE = signature(torch.autograd.grad)


class DerivativeScope(Protocol):
    """The interface of the running interceptor that derivatives use."""

    forward: RunningForward
    axes: Axes
    ranks: RankSums
    size: int

    def where(self) -> str:
        """Return the path of the running module."""


def _grad(scope: DerivativeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``torch.autograd.grad`` with the derivative over the whole graph."""
    if func is not torch.autograd.grad:
        return NotImplemented
    # By name, since all arguments may be positional.
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    inputs = _listed(given["inputs"])
    # A value that is not computed yet is not in autograd's graph. The model runs again without fast paths.
    if any(isinstance(each, LazyTensor) for each in inputs):
        raise EscapeError(
            "fast paths to see each torch call of a model",
            "a derivative by a value that they compute only where it is used",
            hint="--model.no-fast",
        )
    if scope.size == 1:
        return NotImplemented
    loose = scope.ranks.loose()
    if loose:
        raise _refused("torch.autograd.grad", scope, f"with {loose} its exchanges cannot be differentiated")
    if given.get("is_grads_batched"):
        raise _refused("torch.autograd.grad", scope, "is_grads_batched=True is not served")
    # Values of deferred messages are computed before they are differentiated.
    outputs = list(map(now, _listed(given["outputs"])))
    seeds = _listed(given.get("grad_outputs")) or [None] * len(outputs)
    given["outputs"], given["inputs"] = outputs, inputs
    given["grad_outputs"] = [_seed(scope, out, seed) for out, seed in zip(outputs, seeds, strict=True)]
    keeps = bool(given.get("create_graph")) and torch.is_grad_enabled()
    given["retain_graph"] = True  # the token of the whole forward passes through the same exchanges
    with scope.forward.forward_pass.differentiating():
        found = func(**given)
        # The sum over ranks is part of the derivative's graph only under ``create_graph``.
        with torch.set_grad_enabled(keeps):
            return tuple(map(_whole, [scope] * len(inputs), inputs, found))


def _listed(values: Any) -> list[Any]:
    if values is None:
        return []
    return list(values) if isinstance(values, Sequence) else [values]


def _seed(scope: DerivativeScope, out: Tensor, seed: Tensor | None) -> Tensor | None:
    """Return the gradient that seeds an output: of a value that all ranks have, each seeds its share."""
    # Rows are on one rank each. A replicated value is on ``size`` ranks, whose derivatives are summed, so
    # each rank seeds 1 / size.
    if scope.axes.of(out) is not None:
        return seed
    return (torch.ones_like(out) if seed is None else seed) / scope.size


def _whole(scope: DerivativeScope, of: Tensor, found: Tensor | None) -> Tensor | None:
    """Return a gradient with respect to rows as it is, and one of replicated data summed over ranks."""
    if found is None:
        return None
    return scope.ranks.total(found) if scope.axes.of(of) is None else scope.axes.like(found, of)


def _backward(scope: DerivativeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Refuse ``backward()`` inside forward: it adds to gradients that ranks sum after the loss."""
    if scope.size == 1:
        return NotImplemented
    raise _refused("backward()", scope, "it adds to gradients that are summed over ranks after the loss")


def _refused(what: str, scope: DerivativeScope, why: str) -> ModelError:
    return ModelError(
        "a derivative inside forward to be one of the whole graph's",
        f"a call of {what} there: {why}",
        where=scope.where(),
        hint="torch.autograd.grad(..., create_graph=True) where rows cross exactly, or train on one rank",
    )


DERIVATIVES: dict[str, Callable[..., Any]] = {"grad": _grad, "backward": _backward}
