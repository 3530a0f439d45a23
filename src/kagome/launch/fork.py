"""Fork server hooks: how it and its forks end if memory runs out during their start, and how it ends.

Where it sits: ``launcher`` has it loaded first, by the process from which ranks are forked.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

import psutil  # noqa: F401  # while there is memory for it: available_bytes needs it

from kagome.launch.host_memory import available_bytes
from kagome.launch.os_errors import STARVED, refused

LITTLE = 64 * 2**20
"""Bytes of free memory below which any failure is taken for a lack of memory, whatever its message."""


def _starved(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exit with a code that the launcher can explain; show any other error as usual."""
    left = available_bytes()
    if refused(error) is not None or (left is not None and left < LITTLE):
        # Not SystemExit: with no memory left, Python's own shutdown may fail.
        os._exit(STARVED)
    sys.__excepthook__(kind, error, trace)


def _leave() -> None:
    """End without freeing each object of torch and PyG one by one, which takes a second of a core."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


sys.excepthook = _starved
# Forks end by os._exit themselves. Elsewhere, as in tests, this module changes no process's end.
if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    atexit.register(_leave)
