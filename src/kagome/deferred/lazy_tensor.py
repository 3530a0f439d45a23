"""Lazy: a tensor that is not there yet.

Where it sits: ``message`` holds what one may stand for; ``intercept.interceptor`` sees that no code meets one
unprepared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kagome.errors import ModelError


class EscapeError(ModelError):
    """A message reached code that torch does not show; the model runs without fast paths."""


def changed_in_place() -> EscapeError:
    """The error for rows that were written to before what was put off had read them."""
    return EscapeError(
        "rows stay as they are until their neighbours have read them",
        "they were changed in place in between",
        hint="--model.no-fast",
    )


class Expression(Protocol):
    """What a :class:`LazyTensor` stands for."""

    @property
    def shape(self) -> Sequence[int]:
        """The tensor's shape."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """Tensors it is made from: type, device and gradient follow from them."""

    def compute(self) -> Tensor:
        """The tensor."""


class LazyTensor(Tensor):
    """A tensor that is not there yet: shape and type are known, its numbers are not."""

    expr: Any
    value: Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, expr: Expression) -> LazyTensor:
        """A stand-in for what an expression will give."""
        first = expr.parts[0]
        grad = torch.is_grad_enabled() and any(part.requires_grad for part in expr.parts)
        self: LazyTensor = Tensor._make_wrapper_subclass(
            cls, tuple(expr.shape), dtype=first.dtype, device=first.device, requires_grad=grad
        )
        self.expr, self.value = expr, None
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Nothing may come here: it would pass the gradient by."""
        raise EscapeError(
            "fast paths see each torch call of a model",
            f"{func} was reached through code that torch does not show",
            hint="--model.no-fast",
        )

    def now(self) -> Tensor:
        """The tensor, computed at the first call."""
        if self.value is None:
            with torch._C.DisableTorchFunction():  # it is not the user's computation
                self.value = self.expr.compute()
        return self.value


def now(tensor: Tensor) -> Tensor:
    """The tensor itself, or what a lazy one stands for."""
    return tensor.now() if isinstance(tensor, LazyTensor) else tensor


def supports(rows: Tensor) -> bool:
    """Whether the kernels take rows of this type on this device; others run as PyG runs them."""
    return rows.is_floating_point() and (rows.is_cuda or rows.dtype in (torch.float32, torch.float64))


def refuse_in_function(args: tuple[Any, ...]) -> None:
    """Refuse a lazy tensor inside an autograd function of the user's: its gradient would end there."""
    if torch.is_grad_enabled() or not any(isinstance(v, LazyTensor) and v.requires_grad for v in args):
        return
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_filename.endswith("torch/utils/checkpoint.py"):
            return  # a layer that runs again: what lies below is backward
        if code.co_name == "apply" and code.co_filename.endswith("torch/autograd/function.py"):
            raise EscapeError(
                "fast paths see each torch call of a model",
                "a message was given to an autograd function of its own",
                hint="--model.no-fast",
            )


class _Seer(Protocol):
    """What :func:`refuse_transform` asks of the running interception."""

    fast: bool
    parted: bool

    @property
    def size(self) -> int:
        """Ranks that share the graph."""

    def where(self) -> str:
        """The running module."""


def refuse_transform(scope: _Seer) -> None:
    """A transform of ``torch.func`` runs where one rank has all rows, and as PyG runs it.

    Raises:
        EscapeError: If one rank has all rows and takes fast paths.
        ModelError: If rows lie apart.
    """
    apart = scope.parted or scope.size > 1
    if not scope.fast and not apart:
        return
    kind = ModelError if apart else EscapeError
    raise kind(
        "on several ranks each call inside forward is looked at",
        "a transform of torch.func (grad, vjp, jacrev, vmap) hides its calls",
        where=scope.where(),
        hint="torch.autograd.grad(..., create_graph=True) for derivatives, calls over all rows for vmap; "
        "or train on one rank",
    )
