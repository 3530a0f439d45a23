"""Fields: check that the value of a setting has the type of its annotation, and name the type in words.

Where it sits: ``settings`` calls it when settings are made, ``toml_io`` when they are read from a file.
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
"""The largest float of 32 bits, the type of weights, rates and losses."""
LONGEST_NAME: Final = 255
"""Largest number of bytes in a file name."""
WORDS: Final = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}

WITHDRAWN: Final = {
    ("parallel.activations", "disk"): (
        "host",
        "activations='host', which keeps them in host memory; or model.recompute=True, which saves fewer",
    )
}
"""Values that a setting no longer takes: with which one a saved run goes on, and what a new run can use."""


@cache
def hints_of(settings: Hashable) -> dict[str, Any]:
    """Return the annotation of each field of a dataclass."""
    return get_type_hints(settings)


def check_kinds(section: str, settings: Any) -> None:
    """Refuse values whose type differs from the annotation of their field.

    Raises:
        ConfigError: Naming the first of them.
    """
    hints = hints_of(settings.__class__)
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if not fits(value, hint):
            raise unfit(f"{section}.{field.name}", value, hint)
        # Python's integers and texts have no limits; torch, JSON and file systems do.
        if odd := oddity(value):
            raise ConfigError(f"{section}.{field.name} to be {odd}", shown(value))


def unfit(name: str, value: object, hint: Any, where: str = "") -> ConfigError:
    """Return the error about a value that a setting does not take, with what replaces a withdrawn one."""
    _, instead = WITHDRAWN.get((name, value), ("", "")) if isinstance(value, str) else ("", "")
    return ConfigError(f"{name} to be {takes(hint)}", shown(value), where=where, hint=instead)


def check_kind(what: str, value: object, hint: Any, *, least: float | None = None) -> None:
    """Refuse an argument whose type differs from its annotation.

    Args:
        what: The argument's name.
        value: Its value.
        hint: Its annotation.
        least: The lower bound of a number.

    Raises:
        ConfigError: If the type differs, the number does not fit 64 bits, or it is below ``least``.
    """
    odd = "" if fits(value, hint) else takes(hint)
    odd = odd or oddity(value)
    if odd:
        raise ConfigError(f"{what} to be {odd}", shown(value))
    # `not >=` rather than `<`, so that NaN is refused.
    if least is not None and isinstance(value, Real) and not float(value) >= least:
        raise ConfigError(f"{what} to be {least} or more", shown(value))


def oddity(value: object) -> str:
    """Return what a value should be if no machine or file system can hold it; else an empty text."""
    if isinstance(value, (tuple, list)):
        return next(filter(None, map(oddity, value)), "")
    if isinstance(value, str):
        # A path with NUL is a ValueError in every call of the system, without a word about the setting.
        if "\0" in value:
            return "a text without the character NUL"
        return f"a text without names of over {LONGEST_NAME} bytes" if _too_long(value) else ""
    if isinstance(value, bool) or not isinstance(value, Real):
        return ""
    if isinstance(value, Integral):
        return "" if -LARGEST - 1 <= int(value) <= LARGEST else "a whole number of 64 bits"
    # NaN and inf fail the comparison too.
    return "" if abs(float(value)) <= LARGEST_FLOAT else f"a finite number, up to {LARGEST_FLOAT:.3g}"


def _too_long(text: str) -> bool:
    # A character has four bytes at most, so short texts, which are most, need no encoding.
    return len(text) > LONGEST_NAME // 4 and any(
        len(name.encode(errors="replace")) > LONGEST_NAME for name in text.split("/")
    )


def path_of(text: str | Path, what: str) -> Path:
    """Return a user's path, if a file system can hold it.

    Args:
        text: The path.
        what: The name of the setting or flag: ``--cluster``, ``out``.

    Raises:
        ConfigError: If it is not a path, or no file system can hold it.
    """
    if not isinstance(text, (str, Path)):
        raise ConfigError(f"{what} to be a text or a path", shown(text))
    if odd := oddity(str(text)):
        raise ConfigError(f"{what} to be {odd}", shown(str(text)))
    return Path(text)


def shown(value: object, most: int = 200) -> str:
    """Return the text of any value for an error message."""
    try:
        # repr of an integer of thousands of digits is a ValueError; of a list
        # that holds itself it is shortened by Python.
        return shortened(repr(value), most)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too large to show"


def fits(value: object, hint: Any) -> bool:
    """Return whether a value has the annotated type; whole numbers count as floats."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(fits(value, kind) for kind in get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(fits(each, get_args(hint)[0]) for each in value)
    # bool is a subclass of int, and True is no number of ranks.
    if isinstance(value, bool):
        return hint is bool
    # NumPy's numbers are Integral and Real, but not int and float.
    kinds: dict[Any, type] = {int: Integral, float: Real, NoneType: NoneType}
    return isinstance(value, kinds.get(hint, hint))


def takes(hint: Any) -> str:
    """Return in words what a field accepts."""
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


def at_least(section: str, settings: object, **lows: float) -> None:
    """Refuse numbers below their lower bounds.

    Raises:
        ConfigError: Naming the first of them.
    """
    for name, low in lows.items():
        value = getattr(settings, name)
        # `not >=` rather than `<`, so that NaN is refused.
        if value is not None and not value >= low:
            raise ConfigError(f"{section}.{name} to be {low} or more", f"{value!r}")
