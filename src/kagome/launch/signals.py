"""Stop: signals that end a run are remembered until the epoch is done, so that it can be saved first.

Where it sits: ``train.trainer`` runs its epochs inside.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from kagome.launch.threads import LAUNCHED

ENDING: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Ctrl-C, a batch system's end, a terminal that was closed."""
AT_ONCE: Final = 1.0
"""Seconds after which another Ctrl-C does not wait for the epoch. One Ctrl-C may arrive twice: from the
terminal, and from whoever has started the ranks."""


@contextmanager
def asked_to_stop(can_save: bool) -> Iterator[list[int]]:
    """Collect signals that end a run while inside; what was set before is set again afterwards.

    One that was ignored before stays ignored (``nohup``), but for a Ctrl-C to a rank that ``kagome`` has
    started: it ignores that one only until its epochs begin.

    Args:
        can_save: Without a folder to save to, or outside the main thread, signals do what they always did.

    Yields:
        A list that is empty until a signal came.

    Raises:
        KeyboardInterrupt: At a second Ctrl-C, if it comes later than :data:`AT_ONCE`.
    """
    asked: list[int] = []
    if not can_save or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    first: list[float] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            first.append(time.monotonic())
            if first[-1] - first[0] > AT_ONCE:
                raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, note) for number in ENDING if _heard(number)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def ended_by(number: int, ranks: int) -> BaseException:
    """What a run raises that a signal has ended: as Python would, or an exit code of 128 and its number."""
    if number == signal.SIGINT and ranks == 1:
        return KeyboardInterrupt()
    return SystemExit(128 + number)


def _heard(number: int) -> bool:
    ours = number == signal.SIGINT and LAUNCHED in os.environ
    return ours or signal.getsignal(number) is not signal.SIG_IGN
