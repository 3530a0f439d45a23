"""Attachment: what a run sets on the user's model, present while the run needs it and removed in between.

Where it sits: ``train.graph_engine`` and ``pipelining.chunk_engine`` have one each; ``train.trainer`` keeps
it on for all epochs of a ``fit``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Attachment:
    """Hooks, wrappers and rules on a model: on inside ``with`` blocks, which may be nested.

    Between two calls of a trainer the model belongs to the user, who may call it on a whole graph, copy it,
    pickle it, or train it in another trainer.

    Args:
        put_on: Makes the context in which they are on. It is entered once here, so that an unsupported model
            is refused now.
        tell: Called with an error that ends such a block, to report it to the other ranks.

    Raises:
        ModelError: For a layer that no split supports.
    """

    def __init__(
        self, put_on: Callable[[], AbstractContextManager[None]], tell: Callable[[BaseException], None]
    ) -> None:
        self._put_on, self._tell, self._depth = put_on, tell, 0
        self._on: AbstractContextManager[None] | None = None
        with self:
            pass

    def __enter__(self) -> None:
        if self._on is None:
            on = self._put_on()
            on.__enter__()
            self._on = on
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._tell(error)
        self._depth -= 1
        if self._depth == 0 and self._on is not None:
            on, self._on = self._on, None
            on.__exit__(None, None, None)


class HasAttachment(Protocol):
    """An engine that has an attachment."""

    installed: Attachment


E = TypeVar("E", bound=HasAttachment)
P = ParamSpec("P")
T = TypeVar("T")


def while_installed(method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """Decorate an engine's method that runs the model: the attachment is on during the call."""

    @wraps(method)
    def on(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.installed:
            return method(self, *args, **kwargs)

    return on
