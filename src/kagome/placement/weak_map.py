"""By identity: what is known of each living tensor, by which one it is.

Where it sits: marks, kept reads and slices lie in such tables; every torch call of a forward looks into one,
so a look has to cost less than torch's own ``WeakIdKeyDictionary`` takes to make a key.
"""

from __future__ import annotations

from functools import partial
from typing import Generic, TypeVar, overload
from weakref import ref

Value = TypeVar("Value")
Other = TypeVar("Other")


class WeakTensorMap(Generic[Value]):
    """A table whose keys are tensors or other objects, by identity: an entry goes when its key does."""

    def __init__(self) -> None:
        # No other object has a living one's id, and an entry does not outlive its key.
        self._table: dict[int, tuple[ref[object], Value]] = {}

    @overload
    def get(self, key: object) -> Value | None: ...

    @overload
    def get(self, key: object, default: Other) -> Value | Other: ...

    def get(self, key: object, default: Other | None = None) -> Value | Other | None:
        """What is known of a tensor."""
        found = self._table.get(id(key))
        return default if found is None else found[1]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._table

    def __getitem__(self, key: object) -> Value:
        return self._table[id(key)][1]

    def __setitem__(self, key: object, value: Value) -> None:
        place = id(key)
        self._table[place] = (ref(key, partial(_forget, self._table, place)), value)

    def __delitem__(self, key: object) -> None:
        del self._table[id(key)]

    def __len__(self) -> int:
        return len(self._table)

    def setdefault(self, key: object, value: Value) -> Value:
        """What is known of a tensor; this, if nothing was."""
        if key not in self:
            self[key] = value
        return self[key]

    def clear(self) -> None:
        """Forget all."""
        self._table.clear()

    def living(self) -> list[object]:
        """All that something is known of."""
        return [key for held, _ in list(self._table.values()) if (key := held()) is not None]

    def values(self) -> list[Value]:
        """What is known of all of them."""
        return [value for _, value in self._table.values()]


def _forget(table: dict[int, tuple[ref[object], Value]], place: int, _gone: object) -> None:
    table.pop(place, None)
