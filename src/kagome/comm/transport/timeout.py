"""Within: a call that may block for ever inside a library, given up after some seconds.

Where it sits: ``comm.mesh`` and ``comm.watchdog`` ask stores by it. A client of torch's TCPStore has no limit
for a host that is there and says nothing, or whose link is gone: the system gives up after a quarter of an
hour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class SilentError(RuntimeError):
    """A call has not come back in time."""


class _Asked(Generic[Answer]):
    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.errors: list[BaseException] = []


def within(seconds: float, call: Callable[[], Answer], what: str) -> Answer:
    """What a call gives, if it does so in time; else it is left alone in a thread of its own.

    Args:
        seconds: The limit.
        call: Must not depend on the thread that it runs in.
        what: For the error.

    Raises:
        SilentError: If it did not come back.
        BaseException: What it raised.

    Cost:
        One thread, for as long as the call takes.
    """
    asked: _Asked[Answer] = _Asked()

    def run() -> None:
        try:
            asked.answers.append(call())
        except BaseException as error:
            asked.errors.append(error)

    thread = threading.Thread(target=run, name=f"kagome-{what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if asked.errors:
        raise asked.errors[0]
    if not asked.answers:
        raise SilentError(f"{what}: no answer within {seconds:g} s")
    return asked.answers[0]
