"""In backward: checks, call by call, what a user's hooks and autograd functions compute from gradients.

Where it sits: ``intercept.gather_scatter`` has the hooks of tensors, ``autograd_functions`` those of modules
and autograd functions. ``halo.exchange`` and ``halo.forward_pass`` ask here before any exchange. Ranks may
reach the steps of backward in different orders, so no user code may exchange anything there.

::

    gradient of rows            clamp, -0.5 * g, g / g.norm(dim=1)          ROWS, as in forward
                                g.sum(0), x.t() @ g                         a share
                                g.norm(), g - g.mean(0), g.sort(0)          refused
    gradient of what all ranks  each rank has a share, which ranks sum:
    have (a mean, a weight)     -0.5 * g, g * mask, g @ w                   a share
                                clamp, g / g.norm(), a share with a row     refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kagome.deferred.lazy_tensor import now
from kagome.deferred.rewrite_rules import asks
from kagome.errors import ModelError
from kagome.halo.forward_pass import RunningForward, transformed
from kagome.placement.axis_rules import attribute
from kagome.placement.placement import ALIGNED, VERTICES, Placement, PlacementKind, Placements, tensors
from kagome.placement.torch_calls import Args, Func, Kwargs
from kagome.placement.weak_map import WeakTensorMap
from kagome.user_frame import by_user_itself, user_line

_SUMS: Final = frozenset(["sum", "matmul", "mm", "bmm", "__matmul__", "__rmatmul__", "mv", "dot", "einsum"])
"""Calls that sum over rows: a rank's result is its share of the total."""
_KEEP: Final = frozenset(
    [
        "t",
        "transpose",
        "permute",
        "view",
        "reshape",
        "view_as",
        "flatten",
        "unflatten",
        "contiguous",
        "clone",
        "detach",
        "neg",
        "negative",
        "squeeze",
        "unsqueeze",
        "expand",
        "expand_as",
        "repeat",
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "cpu",
        "cuda",
        "sum",
        "cumsum",
        "flip",
        "getitem",
        "select",
        "narrow",
        "split",
        "chunk",
        "unbind",
        "index_select",
        "zeros_like",
        "new_zeros",
        "alias",
        "zero",
        "tril",
        "triu",
        "diag",
        "diagonal",
        "movedim",
        "swapaxes",
        "requires_grad",
        "T",
        "mT",
        "data",
        "mean",
    ]
)
"""Calls whose result is linear in their first argument."""
_TIMES: Final = frozenset(["mul", "matmul", "mm", "bmm", "mv", "dot", "outer", "einsum", "linear"])
"""Calls that are linear in each of their tensors."""
_PLUS: Final = frozenset(["add", "sub", "cat", "stack", "copy"])
"""Calls that are linear in all their tensors together."""
# radd, isub, ...: operators by the name of their function.
_NAMES: Final = {
    **{f"{way}{name}": name for name in ("add", "sub", "mul", "matmul") for way in "ri"},
    **dict.fromkeys(("truediv", "true_divide", "divide", "itruediv", "idiv"), "div"),
    "multiply": "mul",
    "subtract": "sub",
    "concat": "cat",
    "concatenate": "cat",
}
_EXPECTED: Final = "what a model computes in backward to be done to each row of a gradient by itself"
_HINT: Final = (
    "calls that change each entry or row by itself (clamp, a number times it, g.norm(dim=-1)), a hook of "
    "the weights (parameter.register_hook) for what all rows decide, or train on one rank"
)


class BackwardScope(Protocol):
    """The interface of the running interceptor that these checks use."""

    placements: Placements
    parted: bool
    forward: RunningForward

    def where(self) -> str:
        """Return the path of the module that the backward belongs to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = ..., kwargs: Any = ...) -> Any:
        """Answer one torch call of the forward."""


@dataclass(frozen=True)
class BackwardCode:
    """A user's function that runs in backward.

    Args:
        scope: Weak reference to the interceptor that saw it installed; it dies with its model.
        what: What the function is, for messages.
        where: The module that installed it.
        given: The placements of the tensors whose gradients it is given; None for replicated values.
        gives: The placements of the tensors whose gradients it returns.
        sizes: How many rows the tensors of some placements have.
    """

    scope: ref[Any]
    what: str
    where: str
    given: tuple[Placement | None, ...]
    gives: tuple[Placement | None, ...]
    sizes: tuple[tuple[Placement, int], ...] = ()

    def run(self, function: Callable[..., Any], args: Sequence[Any], grads: Sequence[Any]) -> Any:
        """Run the function, and check what it does.

        Args:
            function: The user's function.
            args: Its arguments.
            grads: The gradients among them, one for each of ``given``.

        Raises:
            ModelError: If it combines several rows.
        """
        scope = self.scope()
        # The model is gone, or torch.func runs it: there is nothing to check by.
        if scope is None or transformed():
            return function(*args)
        mode = InBackward(scope, self, function)
        # A hook may be given fewer gradients than tensors.
        for grad, placement in zip(grads, self.given, strict=False):
            if isinstance(grad, Tensor):
                mode.meet(grad, placement)
        with mode.running():
            result = function(*args)
        found = result if isinstance(result, (tuple, list)) else (result,)
        # Checking must not be taken for calls of the user's.
        with torch._C.DisableTorchFunction():
            for grad, placement in zip(found, self.gives, strict=False):
                if isinstance(grad, Tensor):
                    mode.accept(grad, placement)
        return result


def behind(scope: Any, what: str, given: Sequence[Any], gives: Sequence[Any]) -> BackwardCode:
    """Describe a function that runs in backward by the tensors whose gradients it is given and returns."""
    with torch._C.DisableTorchFunction():
        placements = [tuple(map(scope.placements.get, values)) for values in (given, gives)]
        rows = zip((*given, *gives), (*placements[0], *placements[1]), strict=True)
        # How many rows a gradient of each placement has: ``_adopt`` recognises saved tensors by it.
        sizes = tuple((m, t.size(m.axis)) for t, m in rows if m is not None and m.kind in ALIGNED)
    return BackwardCode(ref(scope), what, scope.where(), placements[0], placements[1], sizes)


@dataclass
class _State:
    # The call that is running; the tensors that are shares of a sum over ranks; results that are neither
    # shares nor rows.
    name: str = ""
    shares: WeakTensorMap[bool] = field(default_factory=WeakTensorMap)
    made: WeakTensorMap[bool] = field(default_factory=WeakTensorMap)


class InBackward(TorchFunctionMode):
    """The torch calls made by a user's function in backward.

    Args:
        scope: The interceptor whose forward it belongs to.
        behind: The function that runs.
        function: The user's function, whose line messages name.
    """

    def __init__(self, scope: BackwardScope, behind: BackwardCode, function: Callable[..., Any]) -> None:
        super().__init__()
        self._scope, self._behind, self._function = scope, behind, function
        self._held = _State()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surround the user's function, so that its torch calls are checked."""
        scope, forward_pass = self._scope, self._scope.forward.forward_pass
        # An exchange asks the forward pass first, and is refused while user code of backward runs.
        before, forward_pass.backward = forward_pass.backward, self
        path, scope.forward.path = scope.forward.path, [self._behind.where]
        try:
            with torch._C._EnableTorchFunction(), self:  # backward's caller may have turned them off
                yield
        finally:
            forward_pass.backward, scope.forward.path = before, path

    def meet(self, grad: Tensor, placement: Placement | None) -> None:
        """Record the placement of a gradient that the function is given."""
        if placement is not None and placement.kind in ALIGNED:
            self._scope.placements.put(grad, _rows(placement))
        else:
            # A weight's or a mean's gradient is complete only once the ranks have summed it.
            self._held.shares[grad] = True

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Answer one torch call, or refuse it."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        found = list(tensors(args, kwargs))
        with torch._C.DisableTorchFunction():
            for tensor in found:
                self._adopt(tensor)
        if any(tensor in self._held.shares for tensor in found):
            return self._of_shares(name, func, args, kwargs)
        placements = self._scope.placements
        rows = any(
            (placement := placements.get(tensor)) is not None and placement.kind in ALIGNED
            for tensor in found
        )
        # A call may make others inside it; ``summed`` judges by the innermost one.
        outer, self._held.name = self._held.name, name
        try:
            result = self._scope.__torch_function__(func, types, args, kwargs)
        finally:
            self._held.name = outer
        if not asks(name, func):
            for out in tensors((result,), {}):
                self._came(out, name, rows=rows)
        return result

    def _adopt(self, tensor: Tensor) -> None:
        """Place a saved output, a new tensor here: with as many rows as a gradient, it has the same rows."""
        held, placements = self._held, self._scope.placements
        if type(tensor) is nn.Parameter or tensor in held.shares or tensor in held.made:
            return
        if placements.get(tensor) is not None:
            return
        # With one row, any tensor that has an axis of size 1 would fit.
        for placement, size in self._behind.sizes:
            if size > 1 and tensor.dim() > placement.axis and tensor.size(placement.axis) == size:
                placements.put(tensor, _rows(placement))
                return

    def _came(self, out: Tensor, name: str, *, rows: bool) -> None:
        """Check the result of a call whose arguments include no share."""
        if out in self._held.shares:
            return
        placement = self._scope.placements.get(out)
        # Rows went in and no rows came out, as from g.norm(): the result is of this part alone.
        if (placement is not None and placement.kind is PlacementKind.LOST) or (
            placement is None and rows and not name.startswith("new_")
        ):
            raise self._looks(name)
        if placement is None:
            self._held.made[out] = True

    # What ranks sum afterwards -------------------------------------------------------------------

    def summed(self, part: Tensor) -> Tensor:
        """Record a sum over this rank's rows as its share of the total, which is unknown in backward."""
        if self._held.name not in _SUMS:
            raise self.refused()
        self._held.shares[part] = True
        return part

    def _of_shares(self, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call that was given a share if it is linear in the share; else refuse it."""
        if asks(name, func) or name in ("__set__", "__hash__"):
            return func(*args, **kwargs)
        # mul, mul_, __mul__ and __imul__ are one function.
        called = attribute(func) if name == "__get__" else name.strip("_")
        called = _NAMES.get(called, called)
        if called in ("grad_fn", "is_leaf", "_base", "retain_grad"):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            linear = self._linear(called, args, kwargs)
        if not linear:
            raise self._looks(name, share=True)
        result = func(*args, **kwargs)
        for out in tensors((result,), {}):
            self._held.shares[out] = True
        return result

    def _linear(self, name: str, args: Args, kwargs: Kwargs) -> bool:
        """Return True if a call on shares gives the share of its result on their sum."""
        # f may be applied to shares if the sum over ranks of f(share) is f(sum of shares).
        found = list(tensors(args, kwargs))
        shared = [tensor in self._held.shares for tensor in found]
        others = [tensor for tensor, share in zip(found, shared, strict=True) if not share]
        if any(self._scope.placements.get(tensor) is not None for tensor in others):
            return False  # combines a share with a value per row
        first = bool(found) and bool(args) and args[0] is found[0] and shared[0]
        if name in _KEEP:
            return first and sum(shared) == 1
        if name in _TIMES:
            return sum(shared) == 1 and (name != "linear" or len(found) == 2)
        # A share over a constant is linear, a constant over a share is not.
        if name == "div":
            return first and sum(shared) == 1
        if name in _PLUS:
            # share + 1 would add 1 once per rank. A number behind a list of tensors is an axis.
            return not others and (name in ("cat", "stack") or not any(_number(value) for value in args))
        if name in ("where", "masked_fill", "setitem", "index_fill"):
            # Selection between shares and zeros is linear, if the condition is the same on all ranks.
            at = 1 if name == "where" else 0
            ends = args[1:] if name == "where" else (args[0], args[-1])
            told = len(args) > 2 and not kwargs and all(map(self._is_share, ends))
            return told and (at == 0 or not self._is_share(args[0]))
        return False

    def _is_share(self, value: Any) -> bool:
        return value in self._held.shares if isinstance(value, Tensor) else _number(value) and value == 0

    # What comes out ------------------------------------------------------------------------------

    def accept(self, grad: Tensor, placement: Placement | None) -> None:
        """Check a gradient that the function returns.

        Raises:
            ModelError: If it is not known to have the rows of the tensor it belongs to.
        """
        have = self._scope.placements.get(grad)
        # A share fits what all ranks have. A gradient without placement fits nothing, unless it is zero.
        if grad in self._held.shares:
            right = placement is None or placement.kind not in ALIGNED
        elif have is None:
            right = not bool(grad.any())  # zero is a share of zero
        else:
            right = placement is None or _alike(have, placement)
        if not right:
            raise self._error(
                f"{self._behind.what}, whose result is not known to be made of the same rows", line=False
            )

    def refused(self) -> ModelError:
        """Return the error for a call that all ranks would have to make together."""
        return self._looks(self._held.name)

    def _looks(self, name: str, *, share: bool = False) -> ModelError:
        why = (
            " on what all rows make together, of which each rank has a share"
            if share
            else ", which needs more than each row by itself"
        )
        return self._error(f"a call of {name!r} in {self._behind.what}{why}")

    def _error(self, got: str, *, line: bool = True) -> ModelError:
        code = getattr(self._function, "__code__", None)
        at = user_line() if line or code is None else f"{code.co_filename.rpartition('/')[2]}, line "
        at += "" if line or code is None else str(code.co_firstlineno)
        return ModelError(
            _EXPECTED,
            got,
            where="; ".join(filter(None, (self._behind.where, at))),
            hint=_HINT,
        )


def _rows(placement: Placement) -> Placement:
    """Return the placement of a gradient: that of vertex numbers is an ordinary row."""
    return (
        replace(placement, kind=PlacementKind.ROWS) if placement.kind is PlacementKind.NUMBERS else placement
    )


def _alike(one: Placement, other: Placement) -> bool:
    """Return True if two placements describe the same rows."""
    if one.subset is not other.subset and not (one.subset is not None and one.subset.same(other.subset)):
        return False
    kinds = one.kind is other.kind or {one.kind, other.kind} <= set(VERTICES)
    return kinds and one.axis == other.axis and one.each == other.each


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Hooks of tensors --------------------------------------------------------------------------------


def register_hook(scope: BackwardScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``h.register_hook(hook)``: on a part, the hook's own calls are checked."""
    if not scope.parted or isinstance(args[0], nn.Parameter):
        return NotImplemented  # hooks of weights run on whole gradients
    tensor, hook = now(args[0]), kwargs.get("hook", args[1] if len(args) > 1 else None)
    if not callable(hook):
        return NotImplemented
    seen = behind(scope, "a hook of a gradient", (tensor,), (tensor,))

    def watched(grad: Tensor) -> Any:
        return seen.run(hook, (grad,), (grad,))

    return func(tensor, watched)


class _Node:
    """A step of backward shown to user code. It refuses hooks: the rows of its gradients are unknown.

    Args:
        node: Torch's own node.
        where: The module path.
    """

    def __init__(self, node: Any, where: str) -> None:
        self._node, self._where = node, where

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise ModelError(
                _EXPECTED,
                f"grad_fn.{name}, a hook on a step of backward, whose gradients may be of anything",
                where="; ".join(filter(None, (self._where, user_line()))),
                hint="a hook of the tensor (h.register_hook), or train on one rank",
            )
        return getattr(self._node, name)


def grad_fn(scope: BackwardScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``h.grad_fn`` where user code asks for it."""
    if attribute(func) != "grad_fn" or not by_user_itself():
        return NotImplemented
    node = func(now(args[0]))
    return None if node is None else _Node(node, scope.where())


HANDLERS: Final[dict[str, Callable[..., Any]]] = {"register_hook": register_hook, "__get__": grad_fn}
