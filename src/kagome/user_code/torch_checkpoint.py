"""Checkpoints: a user's ``torch.utils.checkpoint`` on a part keeps what it computes.

Where it sits: ``intercept.hooks`` puts it on with a model's hooks. A function that ran again in backward
would ask its peers again, draw again, and count sites twice; run once, it gives the same numbers.
``recompute.checkpoint`` saves the memory that is meant: it runs layers again without their exchanges.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.utils.checkpoint as torchs
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

REENTRANT: Final = "CheckpointFunction"
ONCE: Final = "_checkpoint_without_reentrant_generator"
"""What ``torch.utils.checkpoint.checkpoint`` calls by these names, whoever has imported it from where."""


def once() -> Callable[[], None]:
    """Let functions that a user checkpoints run once, under a mode that says so (``runs_once``).

    Returns:
        A function that takes it off again, once all who have put it on have.
    """
    with _LOCK:
        for name, made in ((REENTRANT, _Reentrant), (ONCE, _Once)):
            there = getattr(torchs, name)
            seen = there if isinstance(there, _Seen) else made(there)
            seen.users += 1
            setattr(torchs, name, seen)

    def remove() -> None:
        with _LOCK:
            for name in (REENTRANT, ONCE):
                seen = getattr(torchs, name)
                seen.users -= 1
                if not seen.users:
                    setattr(torchs, name, seen.original)

    return remove


_LOCK: Final = threading.Lock()


class _Seen:
    """Stands for a function of torch's.

    Args:
        original: That function.
    """

    def __init__(self, original: Any) -> None:
        self.original, self.users = original, 0

    def scope(self, function: Callable[..., Any]) -> Any:
        """The mode under which what a function computes is kept; None for torch's own way."""
        if str(getattr(function, "__module__", "")).startswith("kagome."):
            return None  # a layer that runs again without its exchanges
        modes = _get_current_function_mode_stack()
        return next((mode for mode in modes if getattr(mode, "runs_once", False)), None)


class _Reentrant(_Seen):
    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """As torch's autograd function."""
        scope = self.scope(function)
        if scope is None:
            return self.original.apply(function, preserve, *args)
        torchs.check_backward_validity(args)  # without a gradient to give, torch's has none inside
        grad = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(grad), scope.run_once():
            return function(*args)


class _Once(_Seen):
    def __call__(self, function: Callable[..., Any], *settings: Any, **kwargs: Any) -> Iterator[None]:
        """As torch's generator: what comes before the function runs, and what comes after."""
        scope = self.scope(function)
        return self.original(function, *settings, **kwargs) if scope is None else _around(scope)


def _around(scope: Any) -> Iterator[None]:
    with scope.run_once():
        yield
