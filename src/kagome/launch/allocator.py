"""Allocator: memory that a rank frees stays with it, so that the next tensor does not wait for fresh pages.

Where it sits: ``comm.mesh`` calls it once, before the first large tensor. glibc gives blocks above 32 MiB
back to the system when they are freed; the next tensor of that size then costs a page fault every 4 KiB:
20 ms for 51 MB, ten times what writing into pages that are there costs. An epoch frees and takes the same
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
    """Let this process keep what it frees, unless its user chose otherwise.

    Args:
        environment: ``MALLOC_...``, ``GLIBC_TUNABLES`` and ``LD_PRELOAD`` are a user's own choice.

    Returns:
        Whether it was done: on Linux with glibc.

    Cost:
        The process does not shrink below its peak until it ends.
    """
    chosen = any(name.startswith("MALLOC_") for name in environment)
    chosen = chosen or bool({"GLIBC_TUNABLES", "LD_PRELOAD"} & set(environment))
    if chosen or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # No block by mmap, and none at the heap's end given back.
    return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, 2**31 - 1))
