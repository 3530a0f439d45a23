"""User functions: a user's autograd functions and modules' backward hooks, whose backward is looked at.

Where it sits: ``install`` puts it on with a model's hooks; ``in_backward`` looks. Torch shows no call by
which such a function is applied or such a hook is run, so what torch itself calls then is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.modules.module as modules
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import _get_current_function_mode_stack
from torch.utils.hooks import BackwardHook

from kagome.errors import ModelError
from kagome.neighbors import compiled
from kagome.neighbors.in_backward import Behind, behind
from kagome.neighbors.marks import Marks
from kagome.neighbors.turn import transformed

_LIBRARIES: Final = frozenset(
    [
        "kagome",
        "torch",
        "torch_geometric",
        "torch_scatter",
        "torch_sparse",
        "torch_cluster",
        "torch_spline_conv",
        "pyg_lib",
    ]
)
_LOCK: Final = threading.Lock()
_USERS: Final[list[None]] = []
_COMPILED: Final[list[Callable[[], None]]] = []


def watch() -> Callable[[], None]:
    """Look at what users' functions and modules' hooks do in backward, where a part runs.

    Returns:
        A function that takes it off again, once all who have put it on have.
    """
    with _LOCK:
        if not _USERS:
            # Below Function.apply, which users bind when they import: ``reverse = Reverse.apply``.
            _SingleLevelFunction.apply = classmethod(_applied)  # type: ignore[attr-defined]
            modules.BackwardHook = _Hooks  # type: ignore[attr-defined]
            _COMPILED.append(compiled.watch(_running))
        _USERS.append(None)

    def remove() -> None:
        with _LOCK:
            _USERS.pop()
            if not _USERS:
                del _SingleLevelFunction.apply  # type: ignore[attr-defined]
                modules.BackwardHook = BackwardHook  # type: ignore[attr-defined]
                _COMPILED.pop()()

    return remove


def refuse_old_hooks(scope: Any, module: nn.Module) -> None:
    """Refuse a hook of a module that torch runs with the gradients of its last operation alone.

    Raises:
        ModelError: If a part runs the module and it has one.
    """
    if module._backward_hooks and module._is_full_backward_hook is False and scope.parted:
        raise ModelError(
            "a module's backward hook is given the gradients of its inputs and outputs",
            f"{type(module).__name__} has one by register_backward_hook",
            where=scope.where(),
            hint="register_full_backward_hook, or train on one rank",
        )


def _running() -> Any:
    """The interception under which a part runs here; None if there is none."""
    if transformed():
        return None
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(getattr(mode, "marks", None), Marks):
            return mode if mode.parted and mode.turn.running else None
    return None


# Functions ---------------------------------------------------------------------------------------


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function as torch does, and note what a part must know of its backward."""
    out = super(_SingleLevelFunction, cls).apply(*args, **kwargs)
    scope = None if cls.__module__.partition(".")[0] in _LIBRARIES else _running()
    if scope is not None:
        with torch._C.DisableTorchFunction():
            _note(scope, cls, args, out if isinstance(out, (tuple, list)) else (out,))
    return out


def _note(scope: Any, cls: Any, args: Sequence[Any], outs: Sequence[Any]) -> None:
    nodes = [out.grad_fn for out in outs if isinstance(out, Tensor) and out.grad_fn is not None]
    if not nodes:
        return
    node: Any = next((each for each in nodes if isinstance(each, cls._backward_cls)), None)
    what = f"backward of {cls.__name__}"
    if node is None:
        raise ModelError(
            "what a model computes in backward is looked at",
            f"{what} is hidden: its forward writes in place into a part of a tensor",
            where=scope.where(),
            hint="clone() the tensor before it, or train on one rank",
        )
    node._forward_cls = _Seen(cls, behind(scope, what, outs, args))


class _Seen:
    """Stands for a function where its backward is run.

    Args:
        cls: The user's class.
        behind: What is known of its inputs and outputs.
    """

    def __init__(self, cls: Any, behind: Behind) -> None:
        self._cls, self._behind = cls, behind

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cls, name)
        if name in ("backward", "vjp") and found is not getattr(Function, name):
            return partial(self._run, found)
        return found

    def _run(self, backward: Callable[..., Any], ctx: Any, *grads: Any) -> Any:
        boxed = len(grads) == 1 and isinstance(grads[0], list)
        return self._behind.run(backward, (ctx, *grads), grads[0] if boxed else grads)


# Modules -----------------------------------------------------------------------------------------


class _Flow:
    """A module's inputs and outputs, as far as they have been met."""

    def __init__(self, scope: Any, module: nn.Module) -> None:
        self.what = f"a backward hook of {type(module).__name__}"
        self.inputs = self.outputs = behind(scope, self.what, (), ())

    def full(self, hook: Callable[..., Any], module: nn.Module, back: Any, given: Any) -> Any:
        """A hook on the gradients of inputs and outputs."""
        marks = self.inputs.given + self.outputs.given
        sizes = self.inputs.sizes + self.outputs.sizes
        one = self.inputs
        seen = Behind(one.scope, one.what, one.where, marks, one.given, sizes)
        found = [*_padded(back, len(one.given)), *(given or ())]
        return seen.run(hook, (module, back, given), found)

    def before(self, hook: Callable[..., Any], module: nn.Module, given: Any) -> Any:
        """A hook on the gradients of outputs."""
        return self.outputs.run(hook, (module, given), given or ())


def _padded(values: Any, count: int) -> list[Any]:
    found = list(values or ())
    return found + [None] * (count - len(found))


class _Hooks(BackwardHook):
    """As torch's, of the hooks of one call of a module."""

    def __init__(self, module: nn.Module, user_hooks: Any, user_pre_hooks: Any) -> None:
        self._scope, self._flow = _running(), None
        if self._scope is not None:
            self._flow = flow = _Flow(self._scope, module)
            user_hooks = [partial(flow.full, hook) for hook in user_hooks]
            user_pre_hooks = [partial(flow.before, hook) for hook in user_pre_hooks]
        super().__init__(module, user_hooks, user_pre_hooks)

    def setup_input_hook(self, args: Any) -> Any:
        """Note what a module is given."""
        if self._flow is not None:
            self._flow.inputs = behind(self._scope, self._flow.what, args, args)
        return super().setup_input_hook(args)  # type: ignore[no-untyped-call]

    def setup_output_hook(self, args: Any) -> Any:
        """Note what a module gives; the interception may go before its backward has."""
        if self._flow is not None:
            outs = args if isinstance(args, tuple) else (args,)
            self._flow.outputs = behind(self._scope, self._flow.what, outs, outs)
            self._scope = None
        return super().setup_output_hook(args)  # type: ignore[no-untyped-call]
