"""Leaving: what nobody holds any more is closed by the thread that opened it.

Where it sits: ``train.trainer`` leaves its ranks by it; ``comm.mesh`` closes what waits before it opens anew.

Python's garbage collector runs in whichever thread makes the next object. What leaves a process group from
there would wait for peers, or take the group away from an exchange that the main thread is in::

    the thread that opened it ──gone──> closed there and then
    any other thread ───────────gone──> files closed; the rest waits ──> the next mesh, or the exit
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

_WAITING: Final[list[weakref.finalize[Any, threading.Thread]]] = []
"""What is to be closed, each by its thread; at exit all of it is."""


class Finalizer:
    """Closes what a thread has opened, once, whoever lets go of it.

    Args:
        close: Leaves the ranks; only for the thread that made this.
        files: Closes what any thread may close, and may be called twice.
    """

    def __init__(self, close: Callable[[], object], files: Callable[[], object]) -> None:
        self._opener, self._close, self._files = threading.current_thread(), close, files

    def __call__(self) -> None:
        """Close it, or leave that to its thread."""
        if threading.current_thread() is self._opener or not self._opener.is_alive():
            self._close()
            return
        self._files()
        # Of the thread, so that it is closed at the latest when that has ended, or at exit.
        _WAITING.append(weakref.finalize(self._opener, self._close))


def close_waiting() -> None:
    """Close what waits for this thread."""
    mine = threading.current_thread()
    for waiting in list(_WAITING):
        held = waiting.peek()
        if held is None or held[0] is mine:
            _WAITING.remove(waiting)
            waiting()
