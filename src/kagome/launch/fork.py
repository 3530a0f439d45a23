"""Forked: how a process ends that memory runs out for while it is started, before it runs any of our code.

Where it sits: ``launcher`` has it loaded first, by the process that ranks are forked of.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from kagome.launch.host_memory import available_bytes
from kagome.launch.os_errors import STARVED, refused

LITTLE = 64 * 2**20
"""Bytes: with less left, whatever fails fails for want of memory, in whatever words."""


def _starved(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Leave with a code that the launcher has words for; anything else is shown as ever."""
    left = available_bytes()
    if refused(error) is not None or (left is not None and left < LITTLE):
        os._exit(STARVED)
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _starved
