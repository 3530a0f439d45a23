"""Atomic file writes: a file of a run directory is written completely or not at all.

Where it sits: below the writers of ``report``, ``run_dir``, ``records``, ``profile``, ``checkpoint`` and
``pipelining``; a reader never sees half a file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """Yield a path beside a file: what the block writes there becomes the file, completely or not at all."""
    # In the same folder, because a rename is atomic within one file system only. The process id keeps two
    # writers of one file from sharing a draft.
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str, *, sync: bool = False) -> Path:
    """Write a text file atomically (a temporary file beside it, then a rename).

    Args:
        path: The file; its folder is created if it is missing.
        text: What to write, as UTF-8.
        sync: Whether the text is on the disk before the rename. Otherwise the file may be old, empty or
            missing after a power failure.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft(path) as beside, beside.open("w", encoding="utf-8") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    return path


def write_json(path: str | Path, value: Any, *, indent: int | None = 2) -> Path:
    """Write JSON atomically. Numbers that are NaN or infinite become null, since JSON has no such numbers.

    Args:
        path: The file.
        value: Plain values.
        indent: Spaces for each level, or None for a single line.

    Returns:
        The path.
    """
    return write_text(path, json.dumps(plain(value), indent=indent, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """Return the value with JSON types only: containers are copied, NaN and infinities become None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # ``float()`` turns a subclass, such as NumPy's float64, into Python's own.
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
