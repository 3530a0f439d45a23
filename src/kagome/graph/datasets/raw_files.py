"""Raw files: the places where a PyG data set's files are looked for, to load it without the network.

Where it sits: ``load`` calls :func:`load_pyg` for short names and ``pyg:Class[:name]``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kagome.errors import DataError
from kagome.graph.datasets.catalog import Entry, arguments, class_of, raw_files, takes
from kagome.graph.datasets.download import download
from kagome.graph.partition.cache import cache_folder

#: Seconds that a rank waits for another one that downloads or processes the same data set.
LOCK_SECONDS: Final = 1800


def load_pyg(entry: Entry, root: Path) -> Any:
    """Load a data set of PyG that holds a single graph.

    Raw files are looked for in ``root``, in ``root/<folder>`` and in the same places of ``$KAGOME_DATA``.
    ``$KAGOME_DATA`` is never written to: files from there, or from any read-only folder, are linked into
    ``root/<folder>`` or the user's cache. Files are downloaded only if they are in none of these places, in a
    process of its own.

    Args:
        entry: The class, its ``name`` and its usual folder.
        root: The user's data folder.

    Returns:
        The only graph of the data set.

    Raises:
        DataError: If there is no such class or name, it holds several graphs, or its files cannot be found.
    """
    kind = class_of(entry)
    wanted = raw_files(kind, entry)
    # A class without a root generates its graph.
    if wanted is None:
        return _only(_build(kind, entry, None, "one that cannot be made"), entry)
    found = _place(entry, root, wanted)
    # Raw files in a writable folder     are processed there.
    # Raw files in a read-only folder    are linked into a folder of the user's and processed there.
    # Missing raw files                  are downloaded into a folder of the user's.
    work = found if found is not None and _writable(found) else _work_folder(entry, root)
    place = found or work
    with _locked(work):
        if place != work:
            _link(place, work, wanted)
        # Looked for again under the lock: another process may have downloaded them in the meantime.
        elif not all((work / file).exists() for file in wanted):
            download(entry, work, wanted)
        return _only(_build(kind, entry, work, f"files in {work} that cannot be read"), entry)


def pyg_files(entry: Entry, root: Path) -> list[Path]:
    """Return the raw files that :func:`load_pyg` would read; empty if some are missing or none are needed.

    Raises:
        DataError: If there is no such class or name.
    """
    wanted = raw_files(class_of(entry), entry)
    place = _place(entry, root, wanted) if wanted else None
    return [] if place is None else [place / file for file in wanted or ()]


def _place(entry: Entry, root: Path, wanted: list[Path]) -> Path | None:
    """Return the first place that holds all raw files, or None."""
    return next(
        (place for place in _places(entry, root) if all((place / file).exists() for file in wanted)), None
    )


def _build(kind: type, entry: Entry, root: Path | None, fault: str) -> Any:
    """Construct the class without output or download; if its cache is broken, again from the raw files."""
    # PyG checks the instance's ``log`` before it prints; a property stops the constructor from setting it.
    still = {"_download": lambda self: None, "log": property(lambda self: False, lambda self, value: None)}
    quiet = type(kind.__name__, (kind,), still)
    given: dict[str, Any] = arguments(entry, root)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return quiet(**given)
            # A missing package does not come with another attempt.
            except ImportError:
                raise
            except Exception:
                # A process that died while writing leaves an incomplete file in processed/.
                if root is None or not takes(kind, "force_reload"):
                    raise
                return quiet(**given, force_reload=True)
    except ImportError as error:
        raise DataError(
            f"a package for {entry.kind}",
            f"{error}",
            hint=f"pip install {error.name or 'kagome[data]'}",
        ) from None
    except Exception as error:
        raise DataError(
            f"the data set {entry.kind} {entry.name or ''}".rstrip(),
            f"{fault}: {type(error).__name__} {error}",
            hint="replace the raw files; one of them may be truncated",
        ) from None


def _only(dataset: Any, entry: Entry) -> Any:
    if len(dataset) != 1:
        raise DataError("a data set of one graph", f"{entry.kind} with {len(dataset)} graphs")
    return dataset[0]


def _places(entry: Entry, root: Path) -> Iterator[Path]:
    shared = os.environ.get("KAGOME_DATA")
    for base in (root, Path(shared).expanduser() if shared else None):
        if base is not None:
            # The usual folder, one named like the class, or the files themselves.
            yield from (base / entry.folder, base / entry.kind, base)


def _writable(place: Path) -> bool:
    shared = os.environ.get("KAGOME_DATA")
    if shared and place.resolve().is_relative_to(Path(shared).expanduser().resolve()):
        return False
    # The superuser may write anywhere, but a folder marked read-only is meant to stay unchanged.
    return os.access(place, os.W_OK) and bool(place.stat().st_mode & stat.S_IWUSR)


def _work_folder(entry: Entry, root: Path) -> Path:
    cache = cache_folder()
    for base in (root, cache):
        try:
            base.mkdir(parents=True, exist_ok=True)
            if _writable(base):
                (base / entry.folder).mkdir(exist_ok=True)
                return base / entry.folder
        except OSError:
            continue
    raise DataError(
        f"a folder to process {entry.kind} in",
        f"{root} and {cache}, which cannot be written",
        hint="--data.root DIR with a folder of your own",
    )


def _link(place: Path, work: Path, wanted: list[Path]) -> None:
    for file in wanted:
        link = work / file
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)  # a link to a file that no longer exists
            link.symlink_to((place / file).resolve())


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Hold a lock on this folder for one process at a time; the system frees it if the process dies."""
    with open(work / ".kagome.lock", "w") as file:
        limit = time.monotonic() + LOCK_SECONDS
        # ``flock`` has no time limit of its own.
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > limit:
                    raise DataError(
                        f"{work} to be free within {LOCK_SECONDS} s", "another process that works in it"
                    ) from None
                time.sleep(0.05)
        yield
