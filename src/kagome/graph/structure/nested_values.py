"""Nested values: lists, tuples and dicts of numbers and texts that a graph carries, and their JSON form.

Where it sits: ``attributes`` asks what may be carried; ``graph.partition.store`` keeps it with a partition.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

DEEPEST: Final = 20
"""Deepest nesting of lists that is accepted: deeper ones are taken to contain themselves."""
LARGEST: Final = 10_000
"""Most entries in all: every rank holds them, and a model has no use for texts of a million vertices."""

_PLAIN: Final = (bool, int, float, str)
_NUMBERS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def fault_of(value: Any) -> str:
    """Return why a value cannot be carried, or ``""`` if it can."""
    kind = type(value).__name__
    if type(value) not in (list, tuple, dict):
        return "" if isinstance(value, _PLAIN) else f"a {kind}"
    count, odd = _look(value, 0)
    if odd:
        return f"a {kind} with a {odd} in it"
    return f"a {kind} of more than {LARGEST:,} entries" if count > LARGEST else ""


def _look(value: Any, depth: int) -> tuple[int, str]:
    """Count the entries, up to one more than allowed, and return the type of the first unsupported one."""
    if value is None or isinstance(value, _PLAIN):
        return 1, ""
    if depth == DEEPEST or type(value) not in (list, tuple, dict):
        return 1, type(value).__name__
    count = 0
    # Keys of a dict count as entries, too.
    for part in [*value, *value.values()] if isinstance(value, dict) else value:
        more, odd = _look(part, depth + 1)
        count += more
        if odd or count > LARGEST:
            return count, odd
    return count, ""


def unboxed(value: Any, depth: int = 0) -> Any:
    """Return the value with NumPy numbers as Python numbers; a list that contains itself stays as it is."""
    if isinstance(value, np.generic):
        return value.item()
    if depth == DEEPEST:
        return value
    if type(value) in (list, tuple):
        return type(value)(unboxed(part, depth + 1) for part in value)
    if type(value) is dict:
        return {unboxed(key): unboxed(part, depth + 1) for key, part in value.items()}
    return value


def to_json(value: Any) -> Any:
    """Return a value as JSON; a type that JSON lacks becomes an object with one key, the name of the type."""
    # JSON has neither infinity nor NaN, and its keys are texts; a list of pairs keeps keys of any kind.
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, tuple):
        return {"tuple": [to_json(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(part)] for key, part in value.items()]}
    return [to_json(part) for part in value] if isinstance(value, list) else value


def from_json(tree: Any, depth: int = 0) -> Any:
    """Return the value of what :func:`to_json` wrote.

    Raises:
        ValueError: If the tree is not in the form that :func:`to_json` writes.
    """
    if tree is None or isinstance(tree, _PLAIN):
        return tree
    # A level of a tuple or dict is two levels of JSON.
    if depth > 2 * DEEPEST:
        raise ValueError("it is nested too deep")
    if isinstance(tree, list):
        return [from_json(part, depth + 1) for part in tree]
    ((kind, held),) = tree.items()
    if kind == "float" and held in _NUMBERS:
        return _NUMBERS[held]
    if kind == "tuple" and isinstance(held, list):
        return tuple(from_json(part, depth + 1) for part in held)
    if kind == "dict" and isinstance(held, list):
        return {from_json(key, depth + 1): from_json(part, depth + 1) for key, part in held}
    raise ValueError(f"{str(kind)[:40]!r} is no kind of value")
