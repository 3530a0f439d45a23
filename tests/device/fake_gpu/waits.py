"""Where the host waits for the device, by the function of Kagome that made it wait.

Where it sits: ``start`` comes after ``cuda.start``; the tests take what was counted in an epoch.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter

from fake_gpu.cuda import Library

PACKAGE = "/src/kagome/"


class Waits:
    """Counts waits of the host, ``file function: what`` each.

    Args:
        library: The fake device.
    """

    def __init__(self, library: Library) -> None:
        self._found: Counter[str] = Counter()
        self._lock = threading.Lock()
        library.watch(self._add)

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        with self._lock:
            found, self._found = dict(self._found), Counter()
        return found

    def _add(self, kind: str, name: str) -> None:
        with self._lock:
            self._found[f"{_place()}: {kind}, {name}"] += 1


def _place() -> str:
    """The innermost function of Kagome that is running; autograd's threads may run none."""
    frame = sys._getframe(1)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.partition(PACKAGE)
        if found:
            return f"{path} {frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
