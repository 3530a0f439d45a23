"""Current: the interception that is running, where a rank has one a chunk.

Where it sits: hooks and rules are put on a model's modules once; they reach the running chunk through this.
Chunks in lockstep run in threads, so each thread has a current one of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from kagome.intercept.interceptor import Interceptor


class ActiveInterceptor:
    """Stands for the running interception: reads and writes of attributes go to it.

    Args:
        scopes: All interceptions; outside any block the first one is current.
    """

    def __init__(self, scopes: Sequence[Interceptor]) -> None:
        vars(self).update(
            _scopes=tuple(scopes), _first=scopes[0], _local=threading.local(), _several=len(set(scopes)) > 1
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.get(), name, value)

    @property
    def several(self) -> bool:
        """Whether it stands for more than one."""
        return bool(vars(self)["_several"])

    @property
    def scopes(self) -> Sequence[Interceptor]:
        """All that it may stand for."""
        return cast(tuple[Interceptor, ...], vars(self)["_scopes"])

    def get(self) -> Interceptor:
        """The one that is running."""
        mine: dict[str, Any] = vars(self)
        return cast(Interceptor, getattr(mine["_local"], "scope", mine["_first"]))

    @contextmanager
    def using(self, scope: Interceptor) -> Iterator[None]:
        """Make an interception current for a block, in this thread."""
        local, before = vars(self)["_local"], self.get()
        local.scope = scope
        try:
            yield
        finally:
            local.scope = before

    @property
    def scope(self) -> Interceptor:
        """Itself, where an interception is asked for."""
        return cast(Interceptor, self)
