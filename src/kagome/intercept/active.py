"""Active interceptor: stands for the interceptor that is running, where a rank has one per chunk.

Where it sits: hooks and rules are installed on a model's modules once. They reach the interceptor of the
running chunk through this object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from kagome.intercept.interceptor import Interceptor


class ActiveInterceptor:
    """Proxy of the running interceptor: attribute reads and writes go to it.

    Args:
        scopes: All interceptors of this rank. Outside any ``using`` block the first one is active.
    """

    def __init__(self, scopes: Sequence[Interceptor]) -> None:
        # Through ``vars``, because ``__setattr__`` passes every other write on to the running interceptor.
        vars(self).update(_scopes=tuple(scopes), _running=scopes[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.get(), name, value)

    @property
    def scopes(self) -> Sequence[Interceptor]:
        """All interceptors that this may stand for."""
        return cast(tuple[Interceptor, ...], vars(self)["_scopes"])

    def get(self) -> Interceptor:
        """Return the interceptor that is running; the first one outside any ``using`` block."""
        return cast(Interceptor, vars(self)["_running"])

    @contextmanager
    def using(self, scope: Interceptor) -> Iterator[None]:
        """Make one interceptor active for the length of a block."""
        mine, before = vars(self), self.get()
        mine["_running"] = scope
        try:
            yield
        finally:
            mine["_running"] = before

    @property
    def scope(self) -> Interceptor:
        """The proxy itself, for callers that ask it for an interceptor."""
        return cast(Interceptor, self)
