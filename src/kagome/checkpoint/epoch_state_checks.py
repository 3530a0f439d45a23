"""Epoch state checks: what each kind of entry in an epoch's state must hold, by the shapes in a checkpoint.

Where it sits: ``epoch_state`` asks it when a checkpoint is read, before any of its rows is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

FLOATS: Final = tuple(f"torch.{name}" for name in ("float64", "float32", "bfloat16", "float16"))
ANY: Final = ""
"""Stands for any number type."""


@dataclass(frozen=True)
class EntryForm:
    """The form of an entry: what it holds.

    Args:
        needs: Tensors that it must have, and how many axes they have; 0 for any number.
        may: Tensors that may be None instead.
        types: The number types of tensors that are not floating point.
        plain: Other values, each with a function that returns whether a value is valid.
        alike: Names of tensors of one shape.
        rows: Groups of names of tensors that have the same number of rows.
    """

    needs: Mapping[str, int] = field(default_factory=dict)
    may: Mapping[str, int] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    plain: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    alike: Collection[str] = ()
    rows: Collection[Collection[str]] = ()

    @property
    def names(self) -> set[str]:
        """The names of all that it holds."""
        return {*self.needs, *self.may, *self.plain}

    def fault(self, state: Mapping[str, Any]) -> str:
        """Return how an entry does not fit this form; empty if it fits."""
        for name, axes in (*self.needs.items(), *self.may.items()):
            value = state[name]
            if value is None and name in self.may:
                continue
            shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
            if not isinstance(shape, tuple) or (axes and len(shape) != axes):
                return f"{name} is no tensor{f' of {axes} axes' if axes else ''}"
            wanted = self.types.get(name)
            # A tensor without an entry in `types` must be floating point; ANY allows each type.
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


# bool is a subclass of int. Up to 2**53 a number survives JSON readers that use floats.
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


# `goes` and `comes` are about the rows of the next epoch: bits of each row where bits are fitted, a mask
# where rows are skipped.
_NEXT: Final = {"goes": 1, "comes": 1}
_LINE: Final = {"epoch": _place, "drift": _drift, "oldest": _count, "weight": _number}
ON_HOST: Final = frozenset((*_NEXT, "when", "epochs", "state step"))
"""Names of tensors that the host reads, whatever device the rows are on; the last is an optimizer's."""
FORMS: Final[Mapping[str, tuple[EntryForm, ...]]] = {
    "crossing": (
        EntryForm(plain={"synchronous": _flag, "drifted": _number}),
        EntryForm(plain={"synchronous": _flag}),  # of earlier checkpoints
    ),
    "line": (
        EntryForm(may={"rows": 2, "mean": 2, "sample": 1}, plain=_LINE, alike=("rows", "mean")),
        EntryForm(may={"rows": 2, "mean": 2}, plain=_LINE, alike=("rows", "mean")),  # of earlier checkpoints
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
"""The forms by kind of entry; an entry may have any of its kind's forms."""


def fault(kind: str, state: Mapping[str, Any]) -> str:
    """Return how an entry does not fit its kind; empty if it does, or if the kind is unknown."""
    forms = FORMS.get(kind)
    if forms is None:
        return ""
    fitting = [form for form in forms if form.names == set(state)]
    if not fitting:
        return f"it holds {', '.join(sorted(map(str, state)))[:80] or 'nothing'}"
    return fitting[0].fault(state)
