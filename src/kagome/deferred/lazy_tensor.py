"""Lazy tensor: a tensor that has not been computed yet.

Where it sits: ``message`` has the expressions that one may stand for. ``intercept.interceptor`` makes sure
that no code receives one unprepared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.halo.forward_pass import RunningForward


class EscapeError(ModelError):
    """A message reached code whose calls torch does not show; the model runs without fast paths."""


def changed_in_place() -> EscapeError:
    """Return the error for a tensor that was written to before a deferred call had read it."""
    return EscapeError(
        "rows, weights and edge features to stay as they are until a layer has summed its messages",
        "one that was changed in place in between",
        hint="--model.no-fast",
    )


class Expression(Protocol):
    """The expression that a :class:`LazyTensor` stands for."""

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the tensor."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from, which determine its type, device and gradient."""

    def compute(self) -> Tensor:
        """Compute and return the tensor."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Versioned:
    """An expression that refuses to be computed once a tensor it reads was written to in place.

    Args:
        versions: Tensors that it reads, each with its version at the time of the user's call.
    """

    versions: tuple[tuple[Tensor, int], ...] = ()

    def __post_init__(self) -> None:
        """Note the versions of tensors that were given to it now; others keep what was noted before."""
        # ``dataclasses.replace`` runs this again. Versions noted before must stay, or a write in between
        # would be missed.
        there = {id(tensor) for tensor, _ in self.versions}
        new = [tensor for tensor in self.noted() if tensor is not None and id(tensor) not in there]
        object.__setattr__(
            self, "versions", self.versions + tuple((tensor, version_of(tensor)) for tensor in new)
        )

    def noted(self) -> Sequence[Tensor | None]:
        """Return the tensors whose versions are noted; each expression has its own."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse tensors that were written to since: their earlier values are lost."""
        if any(version_of(tensor) != version for tensor, version in self.versions):
            raise changed_in_place()


class LazyTensor(Tensor):
    """A tensor that has not been computed yet: its shape and type are known, its values are not."""

    expr: Any
    value: Tensor | None
    written: int
    """The version of ``value`` when it was computed; a write to the lazy tensor raises it."""
    # The interceptor is a mode and sees each call first. Torch's default would wrap the results of all calls
    # in this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, expr: Expression) -> LazyTensor:
        """Make a stand-in for the result of an expression."""
        first = expr.parts[0]
        grad = torch.is_grad_enabled() and any(part.requires_grad for part in expr.parts)
        # A wrapper has no storage, so a call that reaches the dispatcher cannot read wrong numbers: see
        # ``__torch_dispatch__``.
        self: LazyTensor = Tensor._make_wrapper_subclass(
            cls, tuple(expr.shape), dtype=first.dtype, device=first.device, requires_grad=grad
        )
        self.expr, self.value, self.written = expr, None, 0
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse every call that arrives here, because it would bypass the gradient."""
        raise EscapeError(
            "fast paths to see each torch call of a model",
            f"{func}, which was reached through code that torch does not show",
            hint="--model.no-fast",
        )

    def now(self) -> Tensor:
        """Return the tensor, computed at the first call."""
        if self.value is None:
            with torch._C.DisableTorchFunction():  # this is not the user's computation
                return self.keep(self.expr.compute())
        return self.value

    def keep(self, value: Tensor) -> Tensor:
        """Take a tensor as the computed value, and return it."""
        self.value, self.written = value, value._version
        return value


def version_of(tensor: Tensor) -> int:
    """Return a number that a write to the tensor in place changes; computing a lazy one does not."""
    if not isinstance(tensor, LazyTensor):
        return tensor._version
    return 0 if tensor.value is None else tensor.value._version - tensor.written


def now(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the computed value of a lazy one."""
    return tensor.now() if isinstance(tensor, LazyTensor) else tensor


def supports(rows: Tensor) -> bool:
    """Return True if the kernels take rows of this type and device. Others run as PyG runs them."""
    return rows.is_floating_point() and (rows.is_cuda or rows.dtype in (torch.float32, torch.float64))


def refuse_in_function(args: tuple[Any, ...]) -> None:
    """Refuse a lazy tensor inside a user's autograd function, where its gradient would be lost."""
    # Autograd runs the forward of a user's function with gradients off. Only then is the stack worth a walk.
    if torch.is_grad_enabled() or not any(isinstance(v, LazyTensor) and v.requires_grad for v in args):
        return
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_filename.endswith("torch/utils/checkpoint.py"):
            return  # a checkpointed layer that runs again: the frames below are backward
        if code.co_name == "apply" and code.co_filename.endswith("torch/autograd/function.py"):
            raise EscapeError(
                "fast paths to see each torch call of a model",
                "a message given to an autograd function of its own",
                hint="--model.no-fast",
            )


class _Seer(Protocol):
    """The interface of the running interceptor that :func:`refuse_transform` uses."""

    forward: RunningForward
    parted: bool
    size: int


def refuse_transform(scope: _Seer) -> None:
    """Refuse a transform of ``torch.func``, unless one rank has all rows and runs without fast paths.

    Raises:
        EscapeError: If one rank has all rows and takes fast paths.
        ModelError: If rows are split over parts.
    """
    split = scope.parted or scope.size > 1
    if not scope.forward.fast and not split:
        return
    kind = ModelError if split else EscapeError
    raise kind(
        "each call inside forward to be visible to Kagome, on several ranks",
        "a transform of torch.func (grad, vjp, jacrev, vmap), which hides its calls",
        where=scope.forward.where(),
        hint="torch.autograd.grad(..., create_graph=True) for derivatives, calls over all rows for vmap; "
        "or train on one rank",
    )
