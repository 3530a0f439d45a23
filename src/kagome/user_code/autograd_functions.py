"""Autograd functions: checks the backward of a user's autograd functions and of modules' backward hooks.

Where it sits: ``intercept.hooks`` installs it with a model's hooks; ``in_backward`` does the checks. No torch
call shows that such a function is applied or such a hook run, so torch's internals for both are replaced.
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
from kagome.halo.forward_pass import transformed
from kagome.placement.placement import Placements
from kagome.user_code import opaque_calls
from kagome.user_code.in_backward import BackwardCode, behind

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
# One entry for each model that is on its part: ranks may be threads of one process.
_USERS: Final[list[None]] = []
_COMPILED: Final[list[Callable[[], None]]] = []


def watch() -> Callable[[], None]:
    """Check what users' functions and modules' hooks do in backward, where a part runs.

    Returns:
        A function that removes it, once everyone who installed it has called theirs.
    """
    with _LOCK:
        if not _USERS:
            # Below Function.apply, which users bind at import: ``reverse = Reverse.apply``.
            _SingleLevelFunction.apply = classmethod(_applied)  # type: ignore[attr-defined]
            modules.BackwardHook = _Hooks  # type: ignore[attr-defined]
            _COMPILED.append(opaque_calls.watch(_running))
        _USERS.append(None)

    def remove() -> None:
        with _LOCK:
            _USERS.pop()
            if not _USERS:
                # The inherited ``apply`` of torch's C base class shows again.
                del _SingleLevelFunction.apply  # type: ignore[attr-defined]
                modules.BackwardHook = BackwardHook  # type: ignore[attr-defined]
                _COMPILED.pop()()

    return remove


def refuse_old_hooks(scope: Any, module: nn.Module) -> None:
    """Refuse a module's hook that torch runs with the gradients of its last operation alone.

    Raises:
        ModelError: If a part runs the module and it has such a hook.
    """
    if module._backward_hooks and module._is_full_backward_hook is False and scope.parted:
        raise ModelError(
            "a module's backward hook to be given the gradients of its inputs and outputs",
            f"one of {type(module).__name__} by register_backward_hook",
            where=scope.where(),
            hint="register_full_backward_hook, or train on one rank",
        )


def _running() -> Any:
    """Return the interceptor under which a part runs in this thread; None if there is none."""
    # Tensors inside torch.func have no placements.
    if transformed():
        return None
    # A mode with placements is an interceptor. Out of a forward pass it has nothing to check.
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(getattr(mode, "placements", None), Placements):
            return mode if mode.parted and mode.forward.forward_pass.running else None
    return None


# Functions ---------------------------------------------------------------------------------------


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement for ``Function.apply`` that records the placements of inputs and outputs."""
    out = super(_SingleLevelFunction, cls).apply(*args, **kwargs)
    # Only functions of user code are checked.
    scope = None if cls.__module__.partition(".")[0] in _LIBRARIES else _running()
    if scope is not None:
        with torch._C.DisableTorchFunction():
            _note(scope, cls, args, out if isinstance(out, (tuple, list)) else (out,))
    return out


def _note(scope: Any, cls: Any, args: Sequence[Any], outs: Sequence[Any]) -> None:
    nodes = [out.grad_fn for out in outs if isinstance(out, Tensor) and out.grad_fn is not None]
    if not nodes:
        return
    # The node that autograd made for this call of the function. An in-place write into a view puts another
    # node (CopySlices) before it, behind which it cannot be found.
    node: Any = next((each for each in nodes if isinstance(each, cls._backward_cls)), None)
    what = f"backward of {cls.__name__}"
    if node is None:
        raise ModelError(
            "what a model computes in backward to be visible",
            f"a hidden {what}: its forward writes in place into a part of a tensor",
            where=scope.where(),
            hint="clone() the tensor before it, or train on one rank",
        )
    # The node looks up ``backward`` there, so this call is checked and the class stays unchanged.
    node._forward_cls = _Seen(cls, behind(scope, what, outs, args))


class _Seen:
    """Stand-in for an autograd function where its backward is run.

    Args:
        cls: The user's class.
        behind: The placements of its inputs and outputs.
    """

    def __init__(self, cls: Any, behind: BackwardCode) -> None:
        self._cls, self._behind = cls, behind

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cls, name)
        # Torch tells by identity with Function's own which of the two the user wrote.
        if name in ("backward", "vjp") and found is not getattr(Function, name):
            return partial(self._run, found)
        return found

    def _run(self, backward: Callable[..., Any], ctx: Any, *grads: Any) -> Any:
        # With ``boxed_grads_call`` torch passes all gradients as one list.
        boxed = len(grads) == 1 and isinstance(grads[0], list)
        return self._behind.run(backward, (ctx, *grads), grads[0] if boxed else grads)


# Modules -----------------------------------------------------------------------------------------


class _Flow:
    """A module's inputs and outputs, as far as they have been seen."""

    def __init__(self, scope: Any, module: nn.Module) -> None:
        self.what = f"a backward hook of {type(module).__name__}"
        self.inputs = self.outputs = behind(scope, self.what, (), ())

    def full(self, hook: Callable[..., Any], module: nn.Module, back: Any, given: Any) -> Any:
        """Run a hook on the gradients of inputs and outputs, and check it."""
        # The hook is given gradients of inputs and of outputs, and returns those of inputs.
        placements = self.inputs.given + self.outputs.given
        sizes = self.inputs.sizes + self.outputs.sizes
        one = self.inputs
        seen = BackwardCode(one.scope, one.what, one.where, placements, one.given, sizes)
        # Torch may give fewer gradients than there are inputs.
        found = [*_padded(back, len(one.given)), *(given or ())]
        return seen.run(hook, (module, back, given), found)

    def before(self, hook: Callable[..., Any], module: nn.Module, given: Any) -> Any:
        """Run a hook on the gradients of outputs, and check it."""
        return self.outputs.run(hook, (module, given), given or ())


def _padded(values: Any, count: int) -> list[Any]:
    found = list(values or ())
    return found + [None] * (count - len(found))


class _Hooks(BackwardHook):
    """Replacement for torch's ``BackwardHook`` of one module call, whose hooks are checked."""

    def __init__(self, module: nn.Module, user_hooks: Any, user_pre_hooks: Any) -> None:
        self._scope, self._flow = _running(), None
        if self._scope is not None:
            self._flow = flow = _Flow(self._scope, module)
            user_hooks = [partial(flow.full, hook) for hook in user_hooks]
            user_pre_hooks = [partial(flow.before, hook) for hook in user_pre_hooks]
        super().__init__(module, user_hooks, user_pre_hooks)

    def setup_input_hook(self, args: Any) -> Any:
        """Record what a module is given."""
        if self._flow is not None:
            self._flow.inputs = behind(self._scope, self._flow.what, args, args)
        return super().setup_input_hook(args)  # type: ignore[no-untyped-call]

    def setup_output_hook(self, args: Any) -> Any:
        """Record what a module returns. Drop the interceptor, which may die before backward runs."""
        if self._flow is not None:
            outs = args if isinstance(args, tuple) else (args,)
            self._flow.outputs = behind(self._scope, self._flow.what, outs, outs)
            self._scope = None
        return super().setup_output_hook(args)  # type: ignore[no-untyped-call]
