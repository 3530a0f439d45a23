"""Files of a run directory, written whole or not at all.

Where it sits: under every writer of ``report``; a reader never meets half a file.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file atomically (a temporary file beside it, then a rename).

    Args:
        path: The file; its folder is made where it is missing.
        text: What to write, as UTF-8.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def write_json(path: str | Path, value: Any, *, indent: int | None = 2) -> Path:
    """Write JSON atomically; numbers that are not finite become null, as JSON knows none.

    Args:
        path: The file.
        value: Plain values.
        indent: Spaces a level, or None for one line.

    Returns:
        The path.
    """
    return write_text(path, json.dumps(plain(value), indent=indent, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """The value with only what JSON knows: containers copied, NaN and infinities as None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
