"""Temporary folders: folders of running processes, and removal of those left by processes that ended.

Where it sits: ``graph.partition.store``, ``graph.partition.cache`` and ``train.host_parts`` create folders
that they remove when they end. A process that was killed leaves its folder behind, and the next start removes
it. A folder in use is locked by its process; the lock disappears with the process, however it ends.
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
"""Minimum age of a folder that may be removed: a younger one may have been created but not yet locked."""
ABANDONED_SECONDS: Final = 86_400
"""On a file system without locks, a folder is removed after a day."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Protect a folder from :func:`clear` inside the block."""
    descriptor: int | None = None
    # Some network file systems have no flock. The folder is then protected for a day by its age alone.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def clear(folder: Path, pattern: str) -> None:
    """Remove the folders that match a pattern and whose processes have ended.

    Args:
        folder: The folder that contains them.
        pattern: Pattern of their names, as in ``Path.glob``.
    """
    with suppress(OSError):
        for leftover in folder.glob(pattern):
            with suppress(OSError):
                if leftover.is_dir() and not leftover.is_symlink() and _gone(leftover):
                    shutil.rmtree(leftover, ignore_errors=True)


def _gone(folder: Path) -> bool:
    age = time.time() - folder.stat().st_mtime
    # Folders of other users may lie beside this one's in TMPDIR.
    if age < YOUNG_SECONDS or folder.stat().st_uid != os.getuid():
        return False
    # A flock belongs to the open file, not to the process, so this process's own folders count as held too.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # Its process is alive and holds the lock.
        return False
    except OSError:
        return age > ABANDONED_SECONDS
    finally:
        os.close(descriptor)
    return True
