"""Finalizer: an object without references is closed by the thread that opened it.

Where it sits: ``train.trainer`` leaves its ranks through it; ``comm.mesh`` closes what is pending before it
opens a new mesh.

Python's garbage collector runs in whichever thread creates the next object. Leaving a process group from that
thread would wait for peers, or end the group during an exchange of the main thread::

    the thread that opened it ──gone──> closed at once
    any other thread ───────────gone──> files closed; the rest waits ──> the next mesh, or the exit
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

_WAITING: Final[list[weakref.finalize[Any, threading.Thread]]] = []
"""Pending closes, each for its thread; at exit all of them run."""


class Finalizer:
    """Closes once what a thread has opened, in whichever thread the last reference is dropped.

    Args:
        close: Leaves the ranks; may run only in the thread that created this object.
        files: Closes what any thread may close; may be called twice.
    """

    def __init__(self, close: Callable[[], object], files: Callable[[], object]) -> None:
        self._opener, self._close, self._files = threading.current_thread(), close, files

    def __call__(self) -> None:
        """Close everything, or leave that to the thread that opened it."""
        if threading.current_thread() is self._opener or not self._opener.is_alive():
            self._close()
            return
        # Descriptors and shared memory can be closed by any thread,
        # and peers see by it that the rank is gone.
        self._files()
        # Attached to the thread object, so that it is closed at the latest when the thread ends, or at exit.
        _WAITING.append(weakref.finalize(self._opener, self._close))


def close_waiting() -> None:
    """Run the pending closes of this thread."""
    mine = threading.current_thread()
    for waiting in list(_WAITING):
        # None if it has run already, when its thread ended.
        held = waiting.peek()
        if held is None or held[0] is mine:
            _WAITING.remove(waiting)
            waiting()
