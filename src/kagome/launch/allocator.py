"""Allocator settings: freed memory stays with the process, so that the next tensor needs no fresh pages.

Where it sits: ``comm.mesh`` calls :func:`keep_freed_memory` once, before the first large tensor;
``components.parallelize`` asks :class:`FreedMemory` after each training pass. glibc returns blocks above
32 MiB to the system when they are freed, and the next tensor of that size then costs a page fault every
4 KiB. That is 20 ms for 51 MB, ten times the cost of writing to present pages. An epoch frees and allocates
the same sizes again and again.

The price is memory. torch asks for aligned blocks, for which glibc needs a gap that is a little larger than
the block. So a tensor seldom fits where another of its size was, and the process may come to hold twice what
its tensors take. A process that has become large gives large blocks back again, as plain PyTorch does.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kagome.launch.environment import environment as ranks_of
from kagome.launch.host_memory import available_bytes

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""Names of ``mallopt``'s settings (malloc.h)."""
LARGE: Final = 32 * 2**20
"""Bytes of a large block: glibc takes no higher threshold on 64 bits."""
BLOCKS: Final = 65_536
"""Blocks that glibc allocates with mmap at most, by default."""
SHARE: Final = 4
"""A process returns large blocks once it holds one part in so many of what a rank of this host may hold.

Twice that, for gaps, is a half, and the other half is for what a backward pass adds.
"""


def _libc(environment: Mapping[str, str]) -> Any:
    """Return the C library whose allocator may be set; None where a user has chosen, or it is not glibc."""
    # LD_PRELOAD may bring another allocator (jemalloc, tcmalloc),
    # whose mallopt does something else or nothing.
    chosen = any(name.startswith("MALLOC_") for name in environment)
    chosen = chosen or bool({"GLIBC_TUNABLES", "LD_PRELOAD"} & set(environment))
    if chosen or not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):  # another C library
        return None


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep the memory that it frees, unless its user chose otherwise.

    Args:
        environment: The environment; ``MALLOC_...``, ``GLIBC_TUNABLES`` and ``LD_PRELOAD`` in it are a user's
            own choice.

    Returns:
        Whether it was done; possible on Linux with glibc.

    Cost:
        The process may hold twice the memory of its tensors, and does not shrink until it ends, or until
        :class:`FreedMemory` finds it large.
    """
    libc = _libc(environment)
    # Allocate no block with mmap, and return no free block at the heap's end.
    return libc is not None and bool(libc.mallopt(MMAP_MAX, 0) and libc.mallopt(TRIM_THRESHOLD, 2**31 - 1))


class FreedMemory:
    """What becomes of the memory that this process frees: kept while the process is small, then returned.

    Args:
        least: A process that holds fewer bytes is never large.
        environment: As for :func:`keep_freed_memory`; it also tells the number of ranks on this host.
    """

    def __init__(self, least: int = 2**30, environment: Mapping[str, str] = os.environ) -> None:
        self._least, self._environment, self._libc = least, environment, _libc(environment)

    def look(self) -> bool:
        """Return large blocks from now on if the process is large; tell whether that began now.

        Cost:
            20 microseconds, a millisecond where the process holds a GiB, and nothing once it has begun.
        """
        if self._libc is None or (held := _resident()) < self._least:
            return False
        left, ranks = available_bytes(), ranks_of(self._environment).local_size
        if left is None or SHARE * held * ranks < left + held:
            return False
        libc, self._libc = self._libc, None
        # To set any of these has turned off glibc's own adjustment of the threshold, so it is set too.
        done = libc.mallopt(MMAP_THRESHOLD, LARGE) and libc.mallopt(MMAP_MAX, BLOCKS)
        # The pages of gaps in the heap are free at once; their addresses stay with the process.
        libc.malloc_trim(0)
        return bool(done)


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
