"""Timeout: a call that may block for ever inside a library, abandoned after some seconds.

Where it sits: ``rendezvous`` and ``comm.watchdog`` call stores through it. A client of torch's TCPStore has
no time limit if the host does not answer or the link is broken: the system gives up after a quarter of an
hour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class SilentError(RuntimeError):
    """A call that has not returned in time."""


class _Asked(Generic[Answer]):
    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.errors: list[BaseException] = []


def within(seconds: float, call: Callable[[], Answer], what: str) -> Answer:
    """Return the result of a call if it comes in time; otherwise abandon the call in a thread of its own.

    Args:
        seconds: The time limit.
        call: The function; it must not depend on the thread in which it runs.
        what: Name of the callee, for the error message.

    Raises:
        SilentError: If the call did not return in time.
        BaseException: Whatever the call raised.

    Cost:
        One thread, for as long as the call takes.
    """
    asked: _Asked[Answer] = _Asked()

    def run() -> None:
        try:
            asked.answers.append(call())
        except BaseException as error:
            asked.errors.append(error)

    # A daemon: a thread that hangs in the library cannot be ended, and must not keep the process alive.
    thread = threading.Thread(target=run, name=f"kagome-{what}", daemon=True)
    thread.start()
    thread.join(seconds)
    # Lists, so that the caller can tell an answer of None from a missing one.
    if asked.errors:
        raise asked.errors[0]
    if not asked.answers:
        raise SilentError(f"{what}: no answer within {seconds:g} s")
    return asked.answers[0]
