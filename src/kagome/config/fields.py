"""Kinds: whether a setting's value is of the kind that its annotation says, and how that is said.

Where it sits: ``settings`` asks when settings are made, ``toml_io`` when they are read from a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from kagome.errors import ConfigError, shortened

LARGEST: Final = 2**63 - 1
LARGEST_FLOAT: Final = 3.4028234663852886e38
"""Of 32 bits: weights, rates and losses are such."""
LONGEST_NAME: Final = 255
"""Bytes of a file's name."""
WORDS: Final = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}


@cache
def hints_of(settings: Hashable) -> dict[str, Any]:
    """The annotation of each field of a dataclass."""
    return get_type_hints(settings)


def check_kinds(section: str, settings: Any) -> None:
    """Refuse values that are not of their fields' kinds.

    Raises:
        ConfigError: Naming the first.
    """
    hints = hints_of(settings.__class__)
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if not fits(value, hint):
            raise ConfigError(f"{section}.{field.name} to be {takes(hint)}", shown(value))
        if odd := oddity(value):
            raise ConfigError(f"{section}.{field.name} to be {odd}", shown(value))


def check_kind(what: str, value: object, hint: Any, *, least: float | None = None) -> None:
    """Refuse an argument that is not of its kind.

    Args:
        what: Its name.
        value: What was given.
        hint: Its annotation.
        least: The least that a number may be.

    Raises:
        ConfigError: If it is not, or no machine holds it, or it is less.
    """
    odd = "" if fits(value, hint) else takes(hint)
    odd = odd or oddity(value)
    if odd:
        raise ConfigError(f"{what} to be {odd}", shown(value))
    if least is not None and isinstance(value, Real) and not float(value) >= least:
        raise ConfigError(f"{what} to be {least} or more", shown(value))


def oddity(value: object) -> str:
    """What a value of the right kind should be, where no machine or file system holds it; else nothing."""
    if isinstance(value, (tuple, list)):
        return next(filter(None, map(oddity, value)), "")
    if isinstance(value, str):
        if "\0" in value:
            return "a text without the character NUL"
        return f"a text without names of over {LONGEST_NAME} bytes" if _too_long(value) else ""
    if isinstance(value, bool) or not isinstance(value, Real):
        return ""
    if isinstance(value, Integral):
        return "" if -LARGEST - 1 <= int(value) <= LARGEST else "a whole number of 64 bits"
    return "" if abs(float(value)) <= LARGEST_FLOAT else f"a finite number, up to {LARGEST_FLOAT:.3g}"


def _too_long(text: str) -> bool:
    return len(text) > LONGEST_NAME // 4 and any(
        len(name.encode(errors="replace")) > LONGEST_NAME for name in text.split("/")
    )


def path_of(text: str | Path, what: str) -> Path:
    """A path that somebody gave, if any file system can hold it.

    Args:
        text: The path.
        what: Where it was given: ``--cluster``, ``out``.

    Raises:
        ConfigError: If it is none, or none can.
    """
    if not isinstance(text, (str, Path)):
        raise ConfigError(f"{what} to be a text or a path", shown(text))
    if odd := oddity(str(text)):
        raise ConfigError(f"{what} to be {odd}", shown(str(text)))
    return Path(text)


def shown(value: object, most: int = 200) -> str:
    """A value for an error, whatever it is."""
    try:
        return shortened(repr(value), most)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too large to show"


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of a kind; a whole number serves where any number does."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(fits(value, kind) for kind in get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(fits(each, get_args(hint)[0]) for each in value)
    if isinstance(value, bool):
        return hint is bool
    kinds: dict[Any, type] = {int: Integral, float: Real, NoneType: NoneType}
    return isinstance(value, kinds.get(hint, hint))


def takes(hint: Any) -> str:
    """What a field takes, in words."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(takes(kind) for kind in get_args(hint) if kind is not NoneType)
    if origin is Literal:
        known = get_args(hint)
        return " or ".join(known) if len(known) < 3 else f"one of {', '.join(known)}"
    if origin is tuple:
        kind = get_args(hint)[0]
        return f"a list of {'texts' if kind is str else takes(kind).removeprefix('one of ')}"
    return WORDS.get(hint) or f"a {hint.__name__}"
