"""Weak map: facts about living tensors, by identity.

Where it sits: placements, cached reads and slices are stored in such maps. Every torch call of a forward
looks into one, so a lookup must cost less than making a key for torch's own ``WeakIdKeyDictionary``.
"""

from __future__ import annotations

from functools import partial
from typing import Generic, TypeVar, overload
from weakref import ref

Value = TypeVar("Value")
Other = TypeVar("Other")


class WeakTensorMap(Generic[Value]):
    """A map whose keys are objects compared by identity. An entry is removed when its key dies."""

    def __init__(self) -> None:
        # No two living objects share an id, and an entry does not outlive its key.
        self._table: dict[int, tuple[ref[object], Value]] = {}

    @overload
    def get(self, key: object) -> Value | None: ...

    @overload
    def get(self, key: object, default: Other) -> Value | Other: ...

    def get(self, key: object, default: Other | None = None) -> Value | Other | None:
        """Return the value of a key, or the default if there is none."""
        # Equal ids mean the same object, so no key is compared: ``==`` of tensors is a torch call.
        found = self._table.get(id(key))
        return default if found is None else found[1]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._table

    def __getitem__(self, key: object) -> Value:
        return self._table[id(key)][1]

    def __setitem__(self, key: object, value: Value) -> None:
        place = id(key)
        # Setting an entry again drops its old weak reference, whose callback then never runs.
        self._table[place] = (ref(key, partial(_forget, self._table, place)), value)

    def __delitem__(self, key: object) -> None:
        del self._table[id(key)]

    def __len__(self) -> int:
        return len(self._table)

    def setdefault(self, key: object, value: Value) -> Value:
        """Return the value of a key; set it to the given one first if there is none."""
        if key not in self:
            self[key] = value
        return self[key]

    def clear(self) -> None:
        """Remove all entries of the map."""
        self._table.clear()

    def living(self) -> list[object]:
        """Return the keys that are still alive."""
        # The list is copied: a key may die, and remove its entry, while it is read.
        return [key for held, _ in list(self._table.values()) if (key := held()) is not None]

    def values(self) -> list[Value]:
        """Return the values of all entries."""
        return [value for _, value in self._table.values()]


def _forget(table: dict[int, tuple[ref[object], Value]], place: int, _gone: object) -> None:
    table.pop(place, None)
