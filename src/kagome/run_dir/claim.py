"""Claim: a lock on a run's folder, which belongs to one run at a time and contains no other files.

Where it sits: ``run_dir.run_dir`` claims the folder before it writes. The command line asks
:func:`refuse_taken` before it starts ranks. The lock disappears with the process that holds it, however that
ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from kagome.config.fields import path_of
from kagome.errors import ConfigError

LOCK: Final = ".kagome.lock"
"""File that marks a folder as a run's; it is locked while a run writes there."""
MADE_BEFORE: Final = frozenset({"plan.json", "plan.html"})
"""Files that the command line writes before the run begins."""
OF_A_RUN: Final = (
    *("metrics.jsonl", "summary.json", "predictions.npz", "model.safetensors", "trace.json", "report.html"),
    *("checkpoints", "tensorboard", "config.toml"),
)
_PASSING: Final = (".*.tmp", ".predictions.npz", ".model.safetensors", "checkpoints/.epoch-*.new")
"""Temporary files that a killed run leaves behind."""


class Claim:
    """The right to write to a run's folder, held until it is closed.

    Args:
        folder: The folder; it is created if it does not exist.

    Raises:
        ConfigError: If another run writes there, or the folder belongs to no run and contains files.
        OSError: If the folder cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # The kernel drops the lock when the process ends, also if it is killed, so a claim never needs
            # cleaning up. The file itself stays: it marks the folder as a run's.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise ConfigError(
                f"{folder} to be free for the run's files",
                f"another run that writes there ({holder or 'it has just begun'})",
                hint="another --out, or wait until it ends",
            ) from None
        except OSError:
            return  # a file system without locks: a second run at the same time is not detected
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):  # the holder's name is only for error messages
            os.ftruncate(self._lock, 0)
            holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
            os.pwrite(self._lock, holder.encode(), 0)
        # Under the lock, such files can only be left over from a run that was killed while it wrote them.
        for pattern in _PASSING:
            for passing in folder.glob(pattern):
                _remove(passing)

    @property
    def stands(self) -> bool:
        """Whether the folder is still the one that was claimed."""
        try:
            # A folder that was deleted and made again has another inode, while this descriptor still holds
            # the old one.
            there, held = os.stat(self.folder / LOCK), os.fstat(self._lock)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def refuse_taken(folder: str | Path, *, resume: str | Path | None, overwrite: bool) -> None:
    """Refuse a folder that contains another run.

    Args:
        folder: The folder of the run that begins.
        resume: The folder or checkpoint that the run resumes from; its own folder may contain the earlier
            epochs.
        overwrite: Whether existing files may be removed.

    Raises:
        ConfigError: If it contains another run, or belongs to no run and contains files.
    """
    folder = path_of(folder, "out")
    _refuse_foreign(folder)
    if continues_run(folder, resume) or overwrite or not holds_run(folder):
        return
    finished = (folder / "summary.json").exists()
    raise ConfigError(
        f"{folder} to be free for the files of a new run",
        f"a run there that {'has finished' if finished else 'was stopped'}",
        hint=f"--resume {folder} goes on with it, --overwrite removes it; or another --out",
    )


def continues_run(folder: Path, resume: str | Path | None) -> bool:
    """Return whether the run resumes from this folder."""
    if resume is None:
        return False
    # `resume` is the run's folder itself or a checkpoint inside it.
    there = path_of(resume, "resume").resolve()
    return folder.resolve() in (there, *there.parents)


def holds_run(folder: Path) -> bool:
    """Return whether a run has finished an epoch in this folder."""
    metrics = folder / "metrics.jsonl"
    return (
        (metrics.exists() and metrics.stat().st_size > 0)
        or (folder / "summary.json").exists()
        or any((folder / "checkpoints").glob("epoch-*"))
    )


def remove_run(folder: Path) -> None:
    """Remove the files that a run has written and the plan that it used, and nothing else.

    A plan that is newer than the run belongs to the next run.

    Raises:
        OSError: If a file cannot be removed.
    """
    with suppress(FileNotFoundError):
        # The command line writes plan.json before the run begins, and a run writes config.toml when it
        # begins. So a plan that is newer than config.toml is the new run's own.
        begun = (folder / "config.toml").stat().st_mtime_ns
        for path in (folder / name for name in sorted(MADE_BEFORE)):
            if path.exists() and path.stat().st_mtime_ns <= begun:
                _remove(path)
    for name in OF_A_RUN:
        _remove(folder / name)


def _refuse_foreign(folder: Path) -> None:
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise unwritable(folder, error) from None
    foreign = [name for name in names if name not in MADE_BEFORE]
    if not foreign or LOCK in names:
        return
    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
    raise ConfigError(
        f"{str(folder)!r} to be free for the run's files",
        f"a folder that is not a run's and holds {foreign[0]}{more}",
        hint="a folder of its own: --out runs/NAME",
    )


def unwritable(folder: Path, error: Exception) -> ConfigError:
    """Return the error of a run's folder that cannot be written to."""
    return ConfigError(
        f"the run's files to be written to {str(folder)!r}",
        f"{getattr(error, 'strerror', None) or error}",
        hint="another --out; or free some disk, then --resume",
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
