"""Nested: lists, tuples and dicts of numbers and texts that a graph carries, and their form in JSON.

Where it sits: ``attributes`` asks what may be carried, ``graph.partition.store`` keeps it with a partition.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

DEEPEST: Final = 20
"""Lists within lists: more are a list that holds itself."""
LARGEST: Final = 10_000
"""Entries in all: every rank holds them, and texts of a million vertices are not what a model is given."""

_PLAIN: Final = (bool, int, float, str)
_NUMBERS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def fault_of(value: Any) -> str:
    """Why a value is not carried; empty if it is."""
    kind = type(value).__name__
    if type(value) not in (list, tuple, dict):
        return "" if isinstance(value, _PLAIN) else f"a {kind}"
    count, odd = _look(value, 0)
    if odd:
        return f"a {kind} with a {odd} in it"
    return f"a {kind} of more than {LARGEST:,} entries" if count > LARGEST else ""


def _look(value: Any, depth: int) -> tuple[int, str]:
    """How many entries there are, up to one too many, and the type of the first that is not plain."""
    if value is None or isinstance(value, _PLAIN):
        return 1, ""
    if depth == DEEPEST or type(value) not in (list, tuple, dict):
        return 1, type(value).__name__
    count = 0
    for part in [*value, *value.values()] if isinstance(value, dict) else value:
        more, odd = _look(part, depth + 1)
        count += more
        if odd or count > LARGEST:
            return count, odd
    return count, ""


def unboxed(value: Any, depth: int = 0) -> Any:
    """A value whose numbers of NumPy are Python's; a list that holds itself is left."""
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
    """A value as JSON has it: what JSON does not know is an object of one key, its kind."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, tuple):
        return {"tuple": [to_json(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(part)] for key, part in value.items()]}
    return [to_json(part) for part in value] if isinstance(value, list) else value


def from_json(tree: Any, depth: int = 0) -> Any:
    """The value of what :func:`to_json` wrote.

    Raises:
        ValueError: If it is nothing of the kind.
    """
    if tree is None or isinstance(tree, _PLAIN):
        return tree
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
