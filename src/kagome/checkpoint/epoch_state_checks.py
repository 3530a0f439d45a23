"""Handed: what each kind of entry that epochs hand on must hold, by the shapes that a checkpoint says.

Where it sits: ``epoch_state`` asks it when a checkpoint is read, before any of its rows is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

FLOATS: Final = tuple(f"torch.{name}" for name in ("float64", "float32", "bfloat16", "float16"))
ANY: Final = ""
"""In place of a type: whatever it is."""


class Told(Protocol):
    """A tensor, as a checkpoint tells of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> str:
        """Its type."""


@dataclass(frozen=True)
class EntryForm:
    """What an entry holds.

    Args:
        needs: Tensors that it has, and how many axes they have; 0 for any number.
        may: Tensors in place of which it may have None.
        types: Of tensors that are no floats.
        plain: Other values, and what they must be.
        alike: Names of tensors of one shape.
        rows: Names of tensors with as many rows as each other.
    """

    needs: Mapping[str, int] = field(default_factory=dict)
    may: Mapping[str, int] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    plain: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    alike: Collection[str] = ()
    rows: Collection[Collection[str]] = ()

    @property
    def names(self) -> set[str]:
        """All that it holds."""
        return {*self.needs, *self.may, *self.plain}

    def fault(self, state: Mapping[str, Any]) -> str:
        """What an entry of this form lacks, or has too much; nothing if it fits."""
        for name, axes in (*self.needs.items(), *self.may.items()):
            value = state[name]
            if value is None and name in self.may:
                continue
            shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
            if not isinstance(shape, tuple) or (axes and len(shape) != axes):
                return f"{name} is no tensor{f' of {axes} axes' if axes else ''}"
            wanted = self.types.get(name)
            if dtype not in FLOATS if wanted is None else wanted not in (ANY, dtype):
                return f"{name} is {dtype}"
        for name, fits in self.plain.items():
            if not fits(state[name]):
                return f"{name} is {str(state[name])[:40]!r}"
        shapes = {name: state[name].shape for name in (*self.needs, *self.may) if state[name] is not None}
        if len({shapes[name] for name in self.alike if name in shapes}) > 1:
            return f"{' and '.join(self.alike)} differ in shape"
        for group in self.rows:
            if len({shapes[name][0] for name in group if name in shapes}) > 1:
                return f"{' and '.join(group)} differ in rows"
        return ""


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _place(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _drift(value: Any) -> bool:
    return value is None or (_number(value) and value >= 0)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _counts(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(map(_count, value))


_NEXT: Final = {"goes": 1, "comes": 1}
FORMS: Final[Mapping[str, tuple[EntryForm, ...]]] = {
    "crossing": (
        EntryForm(plain={"synchronous": _flag, "drifted": _number}),
        EntryForm(plain={"synchronous": _flag}),  # earlier checkpoints
    ),
    "line": (
        EntryForm(
            may={"rows": 2, "mean": 2},
            plain={"epoch": _place, "drift": _drift, "oldest": _count, "weight": _number},
            alike=("rows", "mean"),
        ),
    ),
    "selection": (
        EntryForm(),
        EntryForm(may=_NEXT, types=dict.fromkeys(_NEXT, "torch.int64")),
        EntryForm(
            needs={"when": 1, "epochs": 1},
            may={"sent": 2, "table": 2, **_NEXT},
            types={**dict.fromkeys(("when", "epochs"), "torch.int64"), **dict.fromkeys(_NEXT, "torch.bool")},
            plain={"counts": _counts, "last": _count, "oldest": _count},
            rows=(("sent", "goes", "when"), ("table", "comes", "epochs")),
        ),
    ),
    "residual": (EntryForm(needs={"rows": 2}),),
    "table": (EntryForm(needs={"rows": 2}, may={"due": 2}, plain={"due_in": _place}, alike=("rows", "due")),),
    "statistic": (EntryForm(needs={"value": 0}, types={"value": ANY}),),
}
"""By kind; each of these may be what a kind holds."""


def fault(kind: str, state: Mapping[str, Any]) -> str:
    """Why an entry is none of its kind; nothing if it is, or if the kind says nothing about it."""
    forms = FORMS.get(kind)
    if forms is None:
        return ""
    fitting = [form for form in forms if form.names == set(state)]
    if not fitting:
        return f"it holds {', '.join(sorted(map(str, state)))[:80] or 'nothing'}"
    return fitting[0].fault(state)
