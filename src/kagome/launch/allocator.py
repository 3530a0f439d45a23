"""Allocator settings: freed memory stays with the process, so that the next tensor needs no fresh pages.

Where it sits: ``comm.mesh`` calls it once, before the first large tensor. glibc returns blocks above 32 MiB
to the system when they are freed, and the next tensor of that size then costs a page fault every 4 KiB. That
is 20 ms for 51 MB, ten times the cost of writing to present pages. An epoch frees and allocates the same
sizes again and again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Names of ``mallopt``'s settings (malloc.h)."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep the memory that it frees, unless its user chose otherwise.

    Args:
        environment: The environment; ``MALLOC_...``, ``GLIBC_TUNABLES`` and ``LD_PRELOAD`` in it are a user's
            own choice.

    Returns:
        Whether it was done; possible on Linux with glibc.

    Cost:
        The process does not shrink below its peak until it ends.
    """
    # LD_PRELOAD may bring another allocator (jemalloc, tcmalloc),
    # whose mallopt does something else or nothing.
    chosen = any(name.startswith("MALLOC_") for name in environment)
    chosen = chosen or bool({"GLIBC_TUNABLES", "LD_PRELOAD"} & set(environment))
    if chosen or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # Allocate no block with mmap, and return no free block at the heap's end.
    return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, 2**31 - 1))
