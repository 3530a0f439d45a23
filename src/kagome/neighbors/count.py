"""Count: numbers of rows that know what they count.

Where it sits: ``handlers`` answers with them where a forward asks how many vertices or edges there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kagome.neighbors.marks import Mark


class Count(int):
    """The number of own rows or of edges, as ``x.size(0)`` or ``row.size(0)`` gave it.

    What is made with so many rows (``torch.zeros``, ``torch.rand``) has a row a vertex or a row an edge: it
    is this part's number there. Divided by, or made a float, it is the whole graph's.
    """

    mark: Mark
    of_all: Callable[[], int]

    def __new__(cls, number: int, mark: Mark, of_all: Callable[[], int]) -> Count:
        """An int that knows what it counts, and how to ask for the whole graph's number."""
        self = super().__new__(cls, number)
        self.mark, self.of_all = mark, of_all
        return self

    def __float__(self) -> float:
        return float(self.of_all())

    def __truediv__(self, other: Any) -> Any:
        return self.of_all() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.of_all()

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        return pow(self.of_all(), other, modulo)


class NoneHere(int):
    """No edges on this rank, which does not say that there are none: it is 0, and does not equal 0."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__
