"""Download of missing raw files by PyG, in a process of its own.

Where it sits: ``raw_files`` calls :func:`download` if the files are nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from kagome.errors import DataError
from kagome.graph.datasets.catalog import Entry, Stopped, arguments, class_of

#: Seconds without new data after which a download is given up.
SILENCE_SECONDS: Final = 60


def download(entry: Entry, work: Path, wanted: list[Path]) -> None:
    """Let PyG download in a process of its own, which can be stopped safely when no more data arrives.

    Args:
        entry: The data set.
        work: The folder that receives the files once all have arrived.
        wanted: Paths of the raw files in that folder.

    Raises:
        DataError: If the download fails; it says which files to put where.
    """
    # A folder of its own, so that ``work`` never holds an incomplete file under its final name.
    fresh = work / f".download.{os.getpid()}"
    call = f"from {__name__} import fetch; fetch({entry.kind!r}, {entry.name!r}, {str(fresh)!r})"
    try:
        code, message = _watched([sys.executable, "-c", call], fresh)
        if code != 0 or not all((fresh / file).exists() for file in wanted):
            shown = ", ".join(str(file) for file in wanted[:12]) + (", ..." if len(wanted) > 12 else "")
            raise DataError(
                f"the raw files of the data set {entry.kind} {entry.name or ''}".rstrip(),
                f"no such files, and a download that failed: {message}",
                where="data.root",
                hint=f"put {shown} into {work}, or set KAGOME_DATA to a folder with them in {entry.folder}/",
            )
        for file in wanted:
            (work / file).parent.mkdir(parents=True, exist_ok=True)
            (fresh / file).replace(work / file)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _bytes_in(folder: Path) -> int:
    """Return the bytes of a folder's files, while another process may unpack, rename and delete some."""
    found = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            found += file.stat().st_size if file.is_file() else 0
    return found


def _watched(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a download; end it if its folder stops growing. Returns its exit code and its last output."""
    with tempfile.TemporaryFile("w+") as words:
        # Without input: a class that asks for a confirmation fails instead of waiting for an answer.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=words)
        size, since = -1, time.monotonic()
        try:
            while child.poll() is None:
                time.sleep(0.1)
                # Progress is judged by what arrives: PyG's downloads have no time limit.
                now = _bytes_in(folder)
                if now != size:
                    size, since = now, time.monotonic()
                elif time.monotonic() - since > SILENCE_SECONDS:
                    return 1, f"nothing arrived for {SILENCE_SECONDS} s"
        finally:
            # Reached also if this process is interrupted; a child that has ended is not affected.
            child.kill()
            code = child.wait()
        words.seek(0)
        lines = words.read().strip().splitlines()
    return code, lines[-1] if lines else "the download did not bring all files"


def fetch(kind_name: str, name: str | None, root: str) -> None:
    """Download a data set's raw files and nothing more: main function of the download's process.

    Args:
        kind_name: The class of ``torch_geometric.datasets``.
        name: The class's ``name`` argument.
        root: The folder to download into.
    """
    entry = Entry(kind_name, name, "")
    kind = class_of(entry)

    def stop(self: Any) -> None:
        # PyG has downloaded by now. Processing is left to the caller's process.
        raise Stopped([])

    with contextlib.suppress(Stopped):
        type(kind.__name__, (kind,), {"_process": stop})(**arguments(entry, Path(root)))
