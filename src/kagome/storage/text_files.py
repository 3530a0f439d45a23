"""Text files: settings and facts that a person or a crash may have altered, read as plain values.

Where it sits: settings, plans, clusters and runs are read with it. The result contains only what later code
can show and compare: its depth is limited, and so is the size of its numbers.
"""

from __future__ import annotations

import json
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

DEEPEST: Final = 64
"""Maximum number of nested lists and tables."""
LARGEST: Final = 256 * 2**20
"""Maximum size of a file in bytes."""
BITS: Final = 1024
"""Maximum number of bits of an integer; no float has more."""


class UnreadableError(ValueError):
    """Error of a file that cannot be read, or that does not contain what its name says."""


def toml(path: str | Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        UnreadableError: If the file cannot be read as TOML, with the reason.
    """
    found: dict[str, Any] = _parsed(path, tomllib.loads)
    return found


def json_file(path: str | Path) -> Any:
    """Return the content of a JSON file. Extensions of JSON, such as ``NaN``, are refused.

    Raises:
        UnreadableError: If the file cannot be read as JSON, with the reason.
    """
    return _parsed(path, json_text)


def json_text(text: str) -> Any:
    """Return the content of a JSON text.

    Raises:
        ValueError: If the text is not JSON.
    """
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _parsed(path: str | Path, parse: Callable[[str], Any]) -> Any:
    try:
        text = _text(Path(path))
        value = parse(text)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(_reason(error)) from None
    refuse_huge(value)
    return value


def _text(path: Path) -> str:
    facts = path.stat()
    # Checked before it is opened: reading a pipe or a device would wait, or never end.
    if not stat.S_ISREG(facts.st_mode):
        raise UnreadableError("it is not a file" if not path.is_dir() else "it is a folder")
    if facts.st_size > LARGEST:
        raise UnreadableError(f"it has {facts.st_size:,} bytes")
    return path.read_text(encoding="utf-8")


def refuse_huge(value: Any) -> None:
    """Refuse plain values that are nested too deeply, or that contain too large integers.

    Raises:
        UnreadableError: If a limit is exceeded, with the value found.
    """
    # Level by level, not by recursion, because a value that is nested too deep would exhaust the stack:
    #
    #     level 0    the value        level 1    its members        ...        level DEEPEST    must be empty
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, int) and each.bit_length() > BITS:
                # Python reads integers of any length, but float() of one of 2^1024 or more raises an error.
                raise UnreadableError(f"a whole number has {each.bit_length():,} bits")
        level = inner
        if not level:
            return
    raise UnreadableError(f"it is nested more than {DEEPEST} levels deep")


def _reason(error: BaseException) -> str:
    # The parsers recurse, so they may fail before ``refuse_huge`` sees the depth.
    if isinstance(error, RecursionError):
        return f"it is nested more than {DEEPEST} levels deep"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start})"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__
