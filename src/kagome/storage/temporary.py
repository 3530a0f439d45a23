"""Leftovers: folders that a process makes for a while, told from those of processes that are gone.

Where it sits: ``graph.partition.store``, ``graph.partition.cache`` and ``train.host_parts`` make folders that
go when they end. One that was killed leaves its folder: the next start takes it away. A folder that is in use
is locked by its process, and the lock goes with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

YOUNG_SECONDS: Final = 60
"""A folder that is not locked yet may have been made this moment."""
ABANDONED_SECONDS: Final = 86_400
"""Where a file system knows no locks, a folder goes after a day."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a folder from :func:`clear` for a block."""
    descriptor: int | None = None
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def clear(folder: Path, pattern: str) -> None:
    """Remove the folders of a pattern whose processes are gone.

    Args:
        folder: Where they lie.
        pattern: Of their names, as in ``Path.glob``.
    """
    with suppress(OSError):
        for leftover in folder.glob(pattern):
            with suppress(OSError):
                if leftover.is_dir() and not leftover.is_symlink() and _gone(leftover):
                    shutil.rmtree(leftover, ignore_errors=True)


def _gone(folder: Path) -> bool:
    age = time.time() - folder.stat().st_mtime
    if age < YOUNG_SECONDS or folder.stat().st_uid != os.getuid():
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return age > ABANDONED_SECONDS
    finally:
        os.close(descriptor)
    return True
