"""Torch checkpoint: on a part, a user's ``torch.utils.checkpoint`` keeps what it computes.

Where it sits: ``intercept.hooks`` installs it with a model's hooks. A function that ran again in backward
would exchange again, draw again, and count sites twice; run once, it gives the same numbers.
``recompute.checkpoint`` saves memory instead: it runs layers again without their exchanges.
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
"""Names in torch's module that ``checkpoint`` looks up, wherever it was imported from."""


def once() -> Callable[[], None]:
    """Make functions that a user checkpoints run once, under a mode with ``runs_once``.

    Returns:
        A function that removes it, once everyone who installed it has called theirs.
    """
    with _LOCK:
        for name, made in ((REENTRANT, _Reentrant), (ONCE, _Once)):
            there = getattr(torchs, name)
            # Several models may be on their parts: the first replaces torch's name, the last restores it.
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
    """Stand-in for one of torch's functions.

    Args:
        original: That function.
    """

    def __init__(self, original: Any) -> None:
        self.original, self.users = original, 0

    def scope(self, function: Callable[..., Any]) -> Any:
        """Return the mode under which results are kept; None to run torch's own checkpoint."""
        if str(getattr(function, "__module__", "")).startswith("kagome."):
            return None  # a layer that runs again without its exchanges
        # On a part the interceptor is among the modes, whatever the user put inside of it.
        modes = _get_current_function_mode_stack()
        return next((mode for mode in modes if getattr(mode, "runs_once", False)), None)


class _Reentrant(_Seen):
    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Replacement for ``apply`` of torch's autograd function; on a part it runs the function once."""
        scope = self.scope(function)
        if scope is None:
            return self.original.apply(function, preserve, *args)
        torchs.check_backward_validity(args)  # as in torch: a gradient inside needs one outside
        # The reentrant form gives a gradient if one of the inputs needs one, whatever weights do inside.
        grad = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(grad), scope.run_once():
            return function(*args)


class _Once(_Seen):
    def __call__(self, function: Callable[..., Any], *settings: Any, **kwargs: Any) -> Iterator[None]:
        """Replacement for torch's generator around the function; on a part it only marks the call."""
        scope = self.scope(function)
        return self.original(function, *settings, **kwargs) if scope is None else _around(scope)


def _around(scope: Any) -> Iterator[None]:
    # ``checkpoint`` advances this generator, calls the function, and advances it again.
    with scope.run_once():
        yield
