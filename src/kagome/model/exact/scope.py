"""Handler scope: the interface of the running interceptor that the handlers of this package may use.

Where it sits: ``intercept.interceptor.Interceptor`` is one; this package does not import that class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from kagome.deferred.deferral import Deferral
from kagome.halo.forward_pass import RunningForward
from kagome.placement.torch_calls import Args as Args, Func as Func, Kwargs as Kwargs
from kagome.placement.vertex_sets import VertexSets
from kagome.scope.exchanges import NeighborReads, RankSums
from kagome.scope.rows import Axes, VertexIds


class Scope(Protocol):
    """The running interceptor as a handler sees it."""

    axes: Axes
    ids: VertexIds
    ranks: RankSums
    reads: NeighborReads
    forward: RunningForward
    deferral: Deferral
    size: int
    sets: VertexSets
    seed: int
    parted: bool
    within_once: int

    def where(self) -> str:
        """Return the path of the running module, as in ``named_modules``."""

    def within(self, function: Callable[[], Any]) -> Any:
        """Run a function whose torch calls are intercepted one by one."""

    def made(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return what ``torch.zeros`` or the like makes for a counted number of rows; else None."""


Handler = Callable[[Any, str, Func, Args, Kwargs], Any]
"""Answers a torch call, or returns NotImplemented where it does not apply."""


def argument(args: Args, kwargs: Kwargs, place: int, name: str, default: Any = None) -> Any:
    """Return an argument given by position or by name."""
    return kwargs.get(name, args[place] if len(args) > place else default)
