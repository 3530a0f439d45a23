"""Allocator settings: freed memory stays with the process, so that the next tensor needs no fresh pages.

Where it sits: ``components.parallelize`` and ``pipelining.chunk_engine`` ask :class:`FreedMemory` before each
training pass; ``launcher`` and ``cli`` start ranks with :func:`merging`. glibc returns blocks above 32 MiB to
the system when they are freed, and the next tensor of that size then costs a page fault every 4 KiB. That is
20 ms for 51 MB, ten times the cost of writing to present pages. An epoch frees and allocates the same sizes
again and again.

The price is memory, for two reasons. What set-up and the first pass free leaves holes between what lasts; so
they run in glibc's own way. And torch asks for aligned blocks, for which glibc before 2.39 cuts a splinter of
some bytes off both ends of a larger one. Splinters go to the thread's cache of small blocks. While they are
there, the hole that a tensor leaves is too small for the next tensor of its size, and a process may come to
hold twice what its tensors take. Without that cache the ends are merged again, but only a variable that is
set before a process starts turns it off. A process that has become large gives large blocks back again, as
plain PyTorch does.
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

TUNABLES: Final = "GLIBC_TUNABLES"
MERGING: Final = "glibc.malloc.tcache_count=0"
"""The setting by which no thread caches small blocks."""
MERGES_SINCE: Final = (2, 39)
"""The version of glibc that merges the ends of aligned blocks by itself."""
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""Names of ``mallopt``'s settings (malloc.h)."""
LARGE: Final = 32 * 2**20
"""Bytes of a large block: glibc takes no higher threshold on 64 bits."""
BLOCKS: Final = 65_536
"""Blocks that glibc allocates with mmap at most, by default."""
NEVER: Final = -1
"""The threshold that nothing reaches; the largest number that ``mallopt`` takes is only 2 GiB."""
SHARE: Final = 2
"""A process returns large blocks once it holds one part in so many of what a rank of this host may hold.

What it holds when a pass begins has the peak of earlier passes and their gaps in it. The other half is for
passes that need more, such as exact ones of pipelines.
"""


def _libc(environment: Mapping[str, str]) -> Any:
    """Return the C library whose allocator may be set; None where a user has chosen, or it is not glibc."""
    # LD_PRELOAD may bring another allocator (jemalloc, tcmalloc),
    # whose mallopt does something else or nothing.
    chosen = any(name.startswith("MALLOC_") for name in environment)
    chosen = chosen or "LD_PRELOAD" in environment or environment.get(TUNABLES, MERGING) != MERGING
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
        The process may hold twice the memory of its tensors, a quarter more if it was started with
        :func:`merging`, and does not shrink until it ends, or until :class:`FreedMemory` finds it large.
    """
    libc = _libc(environment)
    # Allocate no block with mmap, and return no free block at the heap's end.
    return libc is not None and bool(libc.mallopt(MMAP_MAX, 0) and libc.mallopt(TRIM_THRESHOLD, NEVER))


def merging(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables to start a process with, so that it keeps hardly more than its tensors take.

    Args:
        environment: As for :func:`keep_freed_memory`.

    Returns:
        One variable; none where a user has chosen, or where the allocator needs none.

    Cost:
        Small blocks are taken from the heap, not from a thread's cache: some tens of nanoseconds each.
    """
    if _libc(environment) is None or not _cuts():
        return {}
    return {TUNABLES: MERGING}


def _cuts() -> bool:
    """Return whether this glibc leaves splinters."""
    version = os.confstr("CS_GNU_LIBC_VERSION") or ""  # "glibc 2.36"
    numbers = version.rpartition(" ")[2].split(".")[:2]
    return all(map(str.isdecimal, numbers)) and tuple(map(int, numbers)) < MERGES_SINCE


class FreedMemory:
    """What becomes of the memory that this process frees, from one training pass to the next.

    Returned until the second pass, then kept while the process is small, then returned again.

    Args:
        least: A process that holds fewer bytes is never large.
        environment: As for :func:`keep_freed_memory`; it also tells the number of ranks on this host.
    """

    def __init__(self, least: int = 2**30, environment: Mapping[str, str] = os.environ) -> None:
        self._least, self._environment, self._libc = least, environment, _libc(environment)
        self._passes = 0

    def look(self) -> bool:
        """Note that a training pass begins, and set what becomes of freed memory from now on.

        Returns:
            Whether large blocks are returned because the process has become large, which begins now.

        Cost:
            20 microseconds, a millisecond where the process holds a GiB, and nothing once it is large.
        """
        self._passes += 1
        if self._passes == 2:
            keep_freed_memory(self._environment)
        if self._libc is None or self._passes <= 2 or (held := _resident()) < self._least:
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


class _Counts(ctypes.Structure):
    """The counts that ``mallinfo2`` returns (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def freed_bytes() -> int | None:
    """Return the bytes that this process has freed and its allocator keeps; None if it does not tell.

    Pages that were returned to the system count where their addresses stay with the process.

    Cost:
        A walk over all free blocks.
    """
    libc = _libc(os.environ)
    if libc is None or not hasattr(libc, "mallinfo2"):  # glibc before 2.33
        return None
    libc.mallinfo2.restype = _Counts
    return int(libc.mallinfo2().fordblks)


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
