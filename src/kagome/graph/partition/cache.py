"""Cache: partitions kept in the user's cache folder and used again while nothing that decides them changes.

Where it sits: ``train.data`` looks here before it cuts, and keeps what it has cut. An entry is a folder that
appears by one rename and goes by one, so any number of runs may use the cache at a time.
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

#: Least recently used entries go when all together are larger, or more.
LIMIT_BYTES: Final = 20 * 2**30
LIMIT_ENTRIES: Final = 256
#: Entries of this size are told of when they are made.
LARGE_BYTES: Final = 2**30
OWNERS: Final = "owner.npy"
_CODE: Final = Path(__file__).parents[1]
_MAKERS: Final = ("kagome", "numpy", "torch", "torch-geometric", "pymetis", "scikit-learn")


def cache_folder() -> Path:
    """``$KAGOME_CACHE``, else ``kagome`` in the user's cache folder."""
    own = os.environ.get("KAGOME_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kagome"


def parts_key(
    settings: config.Data, files: Sequence[Path] | None, *, method: str, seed: int, parts: int
) -> str | None:
    """A name for the partition that settings lead to, without loading anything.

    It changes with the data settings, with path, size and time of each raw file, with the partitioner, its
    seed and the number of parts, and with the code that makes parts: Kagome's own and the packages it calls.

    Args:
        settings: The data set and its flags.
        files: Its raw files, from ``data.raw_files``.
        method: The partitioner asked for.
        seed: Its seed.
        parts: Parts.

    Returns:
        A name; None where only loading can tell what the graph is.

    Cost: a look at each raw file.
    """
    if files is None:
        return None
    try:
        seen = [_seen(file) for file in files]
    except OSError:
        return None
    asked = {key: value for key, value in dataclasses.asdict(settings).items() if key != "root"}
    return f"parts-{_digest([asked, seen, method, seed, parts, store.FORMAT, makers(_CODE)])}"


def owner_key(fingerprint: str) -> str:
    """A name for the owners of a graph's vertices; the fingerprint knows graph, method, seed and parts."""
    return f"owner-{_digest([fingerprint, makers(_CODE)])}"


def _digest(facts: object) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _seen(file: Path) -> tuple[str, int, int]:
    real = file.resolve()
    facts = real.stat()
    return str(real), facts.st_size, facts.st_mtime_ns


def makers(folder: Path) -> list[str]:
    """Versions of the packages that what is kept depends on, and Kagome's own code as it stands.

    Args:
        folder: Where that code lies.
    """
    versions = []
    for name in _MAKERS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    code = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.rglob("*.py")):
        code.update(file.read_bytes())
    return [*versions, code.hexdigest()]


@dataclass(frozen=True)
class Cache:
    """Partitions in a folder.

    Args:
        folder: The folder; made when something is kept.
        limit_bytes: Bytes of all entries together; the entry just made stays until it has been read.
        limit_entries: Number of entries.
    """

    folder: Path
    limit_bytes: int = LIMIT_BYTES
    limit_entries: int = LIMIT_ENTRIES

    def parts(self, key: str) -> tuple[Path, store.Meta] | None:
        """A partition that was kept; None where there is none. A damaged one is thrown away.

        Cost: a look at each file; a rank that reads its part compares its checksum.
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
        """Owners that were kept; None where there are none that fit. Damaged ones are thrown away.

        Shapes:
            ``[N]``, int64.
        """
        entry = self.folder / key
        if not entry.is_dir():
            return None
        try:
            kept = np.load(entry / OWNERS, allow_pickle=False)
            fits = kept.dtype == np.int32 and kept.shape == (num_nodes,)
            if not fits or (num_nodes and not 0 <= kept.min() <= kept.max() < parts):
                raise ValueError("of another graph")
        except (OSError, ValueError, EOFError):
            _discard(entry)
            return None
        _touch(entry)
        return torch.from_numpy(kept.astype(np.int64))

    def keep_owner(self, key: str, owner: Tensor) -> None:
        """Keep owners; nothing where the folder cannot be written.

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
        """A folder of its own to make an entry in, gone at the end unless it was kept; None without one."""
        fresh: Path | None = None
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
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
        """Give what was made its name; where another run was first, its entry stands.

        Args:
            key: The entry's name.
            fresh: A folder made in :meth:`making`, or one inside it.

        Returns:
            The entry; None if there is none, because it cannot be renamed.
        """
        entry = self.folder / key
        with suppress(OSError):
            fresh.rename(entry)
        return entry if entry.is_dir() else None

    def drop(self, entry: Path) -> None:
        """Throw an entry away; a rank that has opened its part keeps it."""
        _discard(entry)

    def sweep(self) -> None:
        """Throw away what was used least recently, until the rest is within both limits.

        A rank that has opened a part keeps it: its file goes when the last reader ends.

        Cost: a look at each file of each entry.
        """
        entries: list[tuple[float, int, Path]] = []
        with suppress(OSError):
            for entry in self.folder.iterdir():
                with suppress(OSError):
                    used = entry.stat().st_mtime
                    if entry.is_dir() and not entry.name.startswith("."):
                        entries.append((used, size(entry), entry))
        total = number = 0
        for _, bytes_, entry in sorted(entries, reverse=True):
            total, number = total + bytes_, number + 1
            if total > self.limit_bytes or number > self.limit_entries:
                _discard(entry)


def opened(reuse: bool) -> Cache | None:
    """The user's cache of partitions, if it is to be used."""
    return Cache(cache_folder() / "partitions") if reuse else None


def size(entry: Path) -> int:
    """Bytes of an entry's files."""
    return sum(file.stat().st_size for file in entry.iterdir())


def reused(entry: Path) -> str:
    """The sentence that says where a partition came from."""
    return f"The partition is reused from {shown(entry)} (--parallel.no-reuse cuts anew)."


def shown(entry: Path) -> str:
    """An entry's path, shortened: the home folder as ~, the name up to what tells it apart."""
    short = entry.with_name(entry.name[:14])
    with suppress(ValueError, RuntimeError):
        return f"~/{short.relative_to(Path.home())}"
    return str(short)


def _touch(entry: Path) -> None:
    with suppress(OSError):
        os.utime(entry)


def _discard(entry: Path) -> None:
    """Take an entry away by its name first, so that nobody finds half of it."""
    gone = entry.with_name(f".gone-{entry.name}-{os.getpid()}")
    with suppress(OSError):
        entry.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
