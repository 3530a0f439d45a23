"""Partition cache: partitions in the user's cache folder, reused until an input that determines them changes.

Where it sits: ``train.data`` looks here before it cuts a graph, and stores the result. An entry is a folder
that appears by one rename and disappears by one, so any number of runs may use the cache at the same time.
Measured values have ``profile.cache``: they are small, hold for one machine, and expire after a day.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kagome import config
from kagome.errors import KagomeError
from kagome.graph.partition import store
from kagome.storage import temporary

#: Most bytes of all entries together; the least recently used entries beyond it are removed.
LIMIT_BYTES: Final = 20 * 2**30
LIMIT_ENTRIES: Final = 256
#: Size from which a new entry is reported when it is made.
LARGE_BYTES: Final = 2**30
OWNERS: Final = "owner.npy"
_CODE: Final = Path(__file__).parents[1]
_MAKERS: Final = ("kagome", "numpy", "torch", "torch-geometric", "pymetis", "scikit-learn")


def cache_folder() -> Path:
    """Return ``$KAGOME_CACHE``, or else ``kagome`` in the user's cache folder."""
    own = os.environ.get("KAGOME_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kagome"


def parts_key(
    settings: config.Data, files: Sequence[Path] | None, *, method: str, seed: int, parts: int
) -> str | None:
    """Return a name for the partition that the settings lead to, without loading anything.

    It changes with the data settings, with path, size and time of each raw file, with the partitioner, its
    seed and the number of parts, and with the code that makes parts: Kagome's own and the packages it calls.

    Args:
        settings: The data set and its flags.
        files: The raw files of the data set, from ``datasets.load.raw_files``.
        method: The partitioner that was asked for.
        seed: The partitioner's seed.
        parts: The number of parts.

    Returns:
        The name, or None if the graph is known only once it is loaded.

    Cost: one ``stat`` of each raw file, and a read of the code of ``graph``.
    """
    if files is None:
        return None
    # Path, size and time tell a changed file; reading all bytes would take as long as loading the graph.
    try:
        seen = [_seen(file) for file in files]
    except OSError:
        return None
    # ``root`` only says where files are looked for, and the files found are in the key by themselves.
    asked = {key: value for key, value in dataclasses.asdict(settings).items() if key != "root"}
    return f"parts-{_digest([asked, seen, method, seed, parts, store.FORMAT, makers(_CODE)])}"


def owner_key(fingerprint: str) -> str:
    """Return a name for a graph's owners; the fingerprint covers graph, method, seed and parts."""
    return f"owner-{_digest([fingerprint, makers(_CODE)])}"


def _digest(facts: object) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _seen(file: Path) -> tuple[str, int, int]:
    real = file.resolve()
    facts = real.stat()
    return str(real), facts.st_size, facts.st_mtime_ns


def makers(folder: Path) -> list[str]:
    """Return the versions of the packages that cached results depend on, and a digest of Kagome's own code.

    Args:
        folder: The folder that holds that code.
    """
    versions = []
    for name in _MAKERS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    code = hashlib.blake2b(digest_size=16)
    # Any change in the code of ``graph`` makes new entries, so that no version is raised by hand.
    for file in sorted(folder.rglob("*.py")):
        code.update(file.read_bytes())
    return [*versions, code.hexdigest()]


@dataclass(frozen=True)
class Cache:
    """A cache of partitions in a folder.

    Args:
        folder: The folder; it is created when something is stored.
        limit_bytes: Most bytes of all entries together; a new entry stays until it has been read.
        limit_entries: Most entries.
    """

    folder: Path
    limit_bytes: int = LIMIT_BYTES
    limit_entries: int = LIMIT_ENTRIES

    def parts(self, key: str) -> tuple[Path, store.Meta] | None:
        """Return a cached partition, or None if there is none. A damaged entry is removed.

        Cost: one ``stat`` of each file. A rank that reads its part also compares its checksum.
        """
        entry = self.folder / key
        if not entry.is_dir():
            return None
        try:
            meta = store.verify_sizes(entry)
        except KagomeError:
            _discard(entry)
            return None
        _touch(entry)
        return entry, meta

    def owner(self, key: str, num_nodes: int, parts: int) -> Tensor | None:
        """Return cached owners, or None if there are none that fit. Damaged ones are removed.

        Shapes:
            ``[N]``, int64.
        """
        entry = self.folder / key
        if not entry.is_dir():
            return None
        try:
            kept = np.load(entry / OWNERS, allow_pickle=False)
            # Owners are stored as int32, in half the bytes.
            fits = kept.dtype == np.int32 and kept.shape == (num_nodes,)
            # Out of range owners would index out of bounds in the compiled loops.
            if not fits or (num_nodes and not 0 <= kept.min() <= kept.max() < parts):
                raise ValueError("of another graph")
        except (OSError, ValueError, EOFError):
            _discard(entry)
            return None
        _touch(entry)
        return torch.from_numpy(kept.astype(np.int64))

    def keep_owner(self, key: str, owner: Tensor) -> None:
        """Store owners; does nothing if the folder is not writable.

        Shapes:
            owner ``[N]``.
        """
        with self.making() as fresh:
            if fresh is None:
                return
            with suppress(OSError):
                np.save(fresh / OWNERS, owner.to(torch.int32).numpy())
                self.keep(key, fresh)

    @contextmanager
    def making(self) -> Iterator[Path | None]:
        """Yield a temporary folder for a new entry, or None; it is removed at the end unless stored."""
        fresh: Path | None = None
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            # Folders that killed processes left behind.
            temporary.clear(self.folder, ".making-*")
            temporary.clear(self.folder, ".gone-*")
            fresh = Path(tempfile.mkdtemp(prefix=".making-", dir=self.folder))
        try:
            with nullcontext() if fresh is None else temporary.held(fresh):
                yield fresh
        finally:
            if fresh is not None:
                shutil.rmtree(fresh, ignore_errors=True)

    def keep(self, key: str, fresh: Path) -> Path | None:
        """Give a new entry its name; if another run was first, the other run's entry stays.

        Args:
            key: The name of the entry.
            fresh: A folder made in :meth:`making`, or one inside it.

        Returns:
            The entry, or None if it could not be renamed and no entry exists.
        """
        entry = self.folder / key
        # Renaming onto an entry fails, which is no fault: it has the same content.
        with suppress(OSError):
            fresh.rename(entry)
        return entry if entry.is_dir() else None

    def drop(self, entry: Path) -> None:
        """Remove an entry; a rank that has opened its part can still read it."""
        _discard(entry)

    def sweep(self) -> None:
        """Remove the least recently used entries until the rest is within both limits.

        A rank that has opened a part can still read it: the file disappears when its last reader ends.

        Cost: one ``stat`` of each file of each entry.
        """
        entries: list[tuple[float, int, Path]] = []
        with suppress(OSError):
            for entry in self.folder.iterdir():
                with suppress(OSError):
                    # ``_touch`` sets the time at each use.
                    used = entry.stat().st_mtime
                    # Names with a dot are entries that are being made or removed.
                    if entry.is_dir() and not entry.name.startswith("."):
                        entries.append((used, size(entry), entry))
        total = number = 0
        for _, bytes_, entry in sorted(entries, reverse=True):
            total, number = total + bytes_, number + 1
            if total > self.limit_bytes or number > self.limit_entries:
                _discard(entry)


def opened(reuse: bool) -> Cache | None:
    """Return the user's cache of partitions, or None if it is not to be used."""
    return Cache(cache_folder() / "partitions") if reuse else None


def size(entry: Path) -> int:
    """Return the bytes of an entry's files."""
    return sum(file.stat().st_size for file in entry.iterdir())


def reused(entry: Path) -> str:
    """Return the sentence that says which cache entry a partition came from."""
    return f"The partition is reused from {shown(entry)} (--parallel.no-reuse cuts anew)."


def shown(entry: Path) -> str:
    """Return an entry's path, shortened: the home folder as ~, the name cut to what identifies it."""
    short = entry.with_name(entry.name[:14])
    with suppress(ValueError, RuntimeError):
        return f"~/{short.relative_to(Path.home())}"
    return str(short)


def _touch(entry: Path) -> None:
    with suppress(OSError):
        os.utime(entry)


def _discard(entry: Path) -> None:
    """Rename an entry before it is deleted, so that no other run finds half of it."""
    gone = entry.with_name(f".gone-{entry.name}-{os.getpid()}")
    with suppress(OSError):
        entry.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
