"""Raw files: where a PyG data set's files lie, so that it is loaded without asking the network.

Where it sits: ``data`` calls :func:`load_pyg` for short names and ``pyg:Class[:name]``.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch_geometric.datasets

from kagome.errors import DataError
from kagome.graph.catalog import Entry

#: A download that brings nothing for so long is given up.
SILENCE_SECONDS: Final = 60
#: As long as a rank waits for another one that downloads or processes the same data set.
LOCK_SECONDS: Final = 1800


class _Probed(Exception):  # noqa: N818 - no fault, an answer
    def __init__(self, raw_paths: list[str]) -> None:
        self.raw_paths = raw_paths


def load_pyg(entry: Entry, root: Path) -> Any:
    """Load a single-graph data set of PyG.

    Raw files are looked for in ``root``, in ``root/<folder>`` and in the same places of ``$KAGOME_DATA``,
    which is never written to: files from there, or from any folder that cannot be written, are linked into
    ``root/<folder>`` or the user's cache. Only what is nowhere is downloaded, in a process of its own.

    Args:
        entry: The class, its ``name``, its usual folder.
        root: The user's data folder.

    Returns:
        What the class holds as its only graph.

    Raises:
        DataError: If there is no such class or name, it holds several graphs, or its files are nowhere.
    """
    kind = _class(entry)
    wanted = raw_files(kind, entry)
    if wanted is None:
        return _only(_build(kind, entry, None, "it cannot be made"), entry)
    for place in _places(entry, root):
        if all((place / file).exists() for file in wanted):
            work = place if _writable(place) else _work_folder(entry, root)
            break
    else:
        work = _work_folder(entry, root)
        place = work
    with _locked(work):
        if place != work:
            _link(place, work, wanted)
        elif not all((work / file).exists() for file in wanted):
            _download(entry, work, wanted)
        return _only(_build(kind, entry, work, f"the files in {work} cannot be read"), entry)


def raw_files(kind: type, entry: Entry) -> list[Path] | None:
    """Paths of the raw files under the class's root, found by starting it and stopping it at its first look.

    Raises:
        DataError: If the class does not take this name.
    """

    def stop(self: Any) -> None:
        raise _Probed(self.raw_paths)

    def stop_later(self: Any) -> None:
        raise _Probed([])  # a class that downloads nothing goes on to process

    if not _takes(kind, "root"):
        return None
    nowhere = "/nowhere"
    try:
        type(kind.__name__, (kind,), {"_download": stop, "_process": stop_later})(
            **_arguments(kind, entry, Path(nowhere))
        )
    except _Probed as found:
        return [Path(path).relative_to(nowhere) for path in found.raw_paths]
    except (AssertionError, KeyError, ValueError, AttributeError) as error:
        raise DataError(
            f"{entry.kind} was asked for {entry.name!r}",
            f"it knows no such name ({type(error).__name__} {error})".replace(" )", ")"),
            where=f"pyg:{entry.kind}:{entry.name}",
        ) from None
    return None


def _class(entry: Entry) -> type:
    kind = getattr(torch_geometric.datasets, entry.kind, None)
    if not inspect.isclass(kind):
        raise DataError(
            "a class of torch_geometric.datasets was asked for",
            f"it has no {entry.kind!r}",
            where="data.name",
        )
    if _takes(kind, "name") and _required(kind, "name") and entry.name is None:
        raise DataError(
            f"pyg:{entry.kind} needs a name",
            "none is given",
            hint=f"pyg:{entry.kind}:NAME",
            where="data.name",
        )
    if entry.name is not None and not _takes(kind, "name"):
        raise DataError(f"pyg:{entry.kind} takes no name", f"found {entry.name!r}", where="data.name")
    more = [
        name
        for name in inspect.signature(kind).parameters
        if name not in ("root", "name") and _required(kind, name)
    ]
    if more:
        raise DataError(
            f"pyg:{entry.kind} must need no more than root and name",
            f"it needs {', '.join(more)}",
            hint="write a function that returns its Data: --data.name python:package.module:function",
        )
    return kind


def _takes(kind: type, argument: str) -> bool:
    return argument in inspect.signature(kind).parameters


def _required(kind: type, argument: str) -> bool:
    parameter = inspect.signature(kind).parameters[argument]
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


def _arguments(kind: type, entry: Entry, root: Path | None) -> dict[str, str]:
    arguments = {} if root is None else {"root": str(root)}
    return arguments if entry.name is None else {**arguments, "name": entry.name}


def _build(kind: type, entry: Entry, root: Path | None, fault: str) -> Any:
    """Construct the class silently, without its download; again from the raw files if a cache is broken."""
    # PyG asks the instance's ``log`` before it prints; a property keeps its constructor from setting it.
    still = {"_download": lambda self: None, "log": property(lambda self: False, lambda self, value: None)}
    quiet = type(kind.__name__, (kind,), still)
    arguments: dict[str, Any] = _arguments(kind, entry, root)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return quiet(**arguments)
            except ImportError:
                raise
            except Exception:
                # A process that died while it wrote leaves half a file in processed/.
                if root is None or not _takes(kind, "force_reload"):
                    raise
                return quiet(**arguments, force_reload=True)
    except ImportError as error:
        raise DataError(
            f"{entry.kind} needs a package", f"{error}", hint=f"pip install {error.name or 'kagome[data]'}"
        ) from None
    except Exception as error:
        raise DataError(
            f"the data set {entry.kind} {entry.name or ''}".rstrip() + " was asked for",
            f"{fault}: {type(error).__name__} {error}",
            hint="replace the raw files; one of them may be truncated",
        ) from None


def _only(dataset: Any, entry: Entry) -> Any:
    if len(dataset) != 1:
        raise DataError("a data set of one graph was expected", f"{entry.kind} holds {len(dataset)} graphs")
    return dataset[0]


def _places(entry: Entry, root: Path) -> Iterator[Path]:
    shared = os.environ.get("KAGOME_DATA")
    for base in (root, Path(shared).expanduser() if shared else None):
        if base is not None:
            yield from (base / entry.folder, base / entry.kind, base)


def _writable(place: Path) -> bool:
    shared = os.environ.get("KAGOME_DATA")
    if shared and place.resolve().is_relative_to(Path(shared).expanduser().resolve()):
        return False
    # The superuser may write anywhere; a folder marked read-only is meant to stay as it is all the same.
    return os.access(place, os.W_OK) and bool(place.stat().st_mode & stat.S_IWUSR)


def _work_folder(entry: Entry, root: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kagome"
    for base in (root, cache):
        try:
            base.mkdir(parents=True, exist_ok=True)
            if _writable(base):
                (base / entry.folder).mkdir(exist_ok=True)
                return base / entry.folder
        except OSError:
            continue
    raise DataError(
        f"a folder to process {entry.kind} in was needed",
        f"neither {root} nor {cache} can be written",
        hint="--data.root DIR with a folder of your own",
    )


def _link(place: Path, work: Path, wanted: list[Path]) -> None:
    for file in wanted:
        link = work / file
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)  # a link to a file that has gone
            link.symlink_to((place / file).resolve())


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """One process at a time in this folder; the system frees the lock of a process that dies."""
    with open(work / ".kagome.lock", "w") as file:
        limit = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > limit:
                    raise DataError(
                        f"{work} was to be free within {LOCK_SECONDS} s", "another process still works in it"
                    ) from None
                time.sleep(0.05)
        yield


def _download(entry: Entry, work: Path, wanted: list[Path]) -> None:
    """Let PyG download in a process of its own, where a limit on silence harms nobody."""
    fresh = work / f".download.{os.getpid()}"
    call = f"from kagome.graph.rawfiles import fetch; fetch({entry.kind!r}, {entry.name!r}, {str(fresh)!r})"
    try:
        code, said = _watched([sys.executable, "-c", call], fresh)
        if code != 0 or not all((fresh / file).exists() for file in wanted):
            shown = ", ".join(str(file) for file in wanted[:12]) + (", ..." if len(wanted) > 12 else "")
            raise DataError(
                f"the data set {entry.kind} {entry.name or ''}".rstrip() + " was asked for",
                f"its raw files are not there and cannot be downloaded: {said}",
                where="data.root",
                hint=f"put {shown} into {work}, or set KAGOME_DATA to a folder with them in {entry.folder}/",
            )
        for file in wanted:
            (work / file).parent.mkdir(parents=True, exist_ok=True)
            (fresh / file).replace(work / file)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _watched(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a download; end it when its folder has not grown for a while. Its exit code and its last words."""
    with tempfile.TemporaryFile("w+") as words:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=words)
        size, since = -1, time.monotonic()
        try:
            while child.poll() is None:
                time.sleep(0.1)
                now = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                if now != size:
                    size, since = now, time.monotonic()
                elif time.monotonic() - since > SILENCE_SECONDS:
                    return 1, f"nothing arrived for {SILENCE_SECONDS} s"
        finally:
            child.kill()
            code = child.wait()
        words.seek(0)
        lines = words.read().strip().splitlines()
    return code, lines[-1] if lines else "the download did not bring all files"


def fetch(kind_name: str, name: str | None, root: str) -> None:
    """Download a data set's raw files and no more; the whole of a process that :func:`load_pyg` starts.

    Args:
        kind_name: Class of ``torch_geometric.datasets``.
        name: Its ``name`` argument.
        root: Folder to download into.
    """
    entry = Entry(kind_name, name, "")
    kind = _class(entry)

    def stop(self: Any) -> None:
        raise _Probed([])

    with contextlib.suppress(_Probed):
        type(kind.__name__, (kind,), {"_process": stop})(**_arguments(kind, entry, Path(root)))
