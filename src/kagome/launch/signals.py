"""Signals: those that end a run are remembered until the epoch is done, so that it can be saved first.

Where it sits: ``train.trainer`` runs its epochs inside :func:`asked_to_stop`.
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
"""Signals of Ctrl-C, a batch system's end, and a terminal that was closed."""
AT_ONCE: Final = 1.0
"""Seconds after which another Ctrl-C ends the run without waiting for the epoch. A single Ctrl-C may arrive
twice: from the terminal, and from the process that started the ranks."""


@contextmanager
def asked_to_stop(can_save: bool) -> Iterator[list[int]]:
    """Collect signals that end a run inside the block, and restore the earlier handlers afterwards.

    A signal that was ignored before stays ignored (``nohup``). The exception is Ctrl-C in a rank that
    ``kagome`` started: such a rank ignores it only until its epochs begin.

    Args:
        can_save: Whether there is a folder to save to. If not, or outside the main thread, signals keep their
            handlers.

    Yields:
        A list that is empty until a signal arrives.

    Raises:
        KeyboardInterrupt: At a second Ctrl-C, if it comes later than :data:`AT_ONCE`.
    """
    asked: list[int] = []
    # Without a checkpoint to write, waiting for the end of the epoch would only cost time.
    if not can_save or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    first: list[float] = []

    def note(number: int, _frame: FrameType | None) -> None:
        # Measured from the first Ctrl-C, so that any later one ends the run, however slow the user is.
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
            # None stands for a handler that was not set by Python, which cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def ended_by(number: int, ranks: int) -> BaseException:
    """Return the exception of a run that a signal ended: KeyboardInterrupt or SystemExit(128 + number)."""
    # Several ranks are processes of a launcher, which turns their exit code into KeyboardInterrupt.
    if number == signal.SIGINT and ranks == 1:
        return KeyboardInterrupt()
    return SystemExit(128 + number)


def _heard(number: int) -> bool:
    ours = number == signal.SIGINT and LAUNCHED in os.environ
    return ours or signal.getsignal(number) is not signal.SIG_IGN
