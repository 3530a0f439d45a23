"""Vertex sets: the kinds of vertices of a graph, and this rank's own vertices of each.

Where it sits: ``intercept.interceptor`` makes them from its part; a placement names its set by number. A
graph with one kind of vertices has one set, number 0.

::

    set 0  grid   own ids 0 2 5      of 9        ROWS of set 0: [3, ...]
    set 1  mesh   own ids 1 2        of 4        ROWS of set 1: [2, ...]
    set 2  grid ++ mesh                          cat([grid, mesh]): own ids 0 2 5 | 10 11, of 13
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kagome.placement.placement import Placement


@dataclass(frozen=True, eq=False)
class VertexSet:
    """One kind of vertices, as one part sees it.

    Args:
        name: Its name; empty for a graph with one kind.
        ids: The numbers of own vertices in the whole graph, within this set.
        size: The number of vertices of the whole graph.
        members: The sets whose rows were concatenated, by number; empty for a set of the graph's own.

    Shapes:
        ids ``[n]``, int64.
    """

    name: str
    ids: Tensor
    size: int
    members: tuple[int, ...] = ()

    @property
    def own(self) -> int:
        """The number of own vertices."""
        return self.ids.numel()

    @property
    def words(self) -> str:
        """The set in an error message."""
        return f"vertices of {self.name}" if self.name else "vertices"


class VertexSets(Sequence[VertexSet]):
    """The vertex sets of one part: those of the graph, and those that forward has concatenated.

    Args:
        each: The sets of the graph.
    """

    def __init__(self, each: Sequence[VertexSet]) -> None:
        self._each = list(each)
        self.given = len(self._each)
        """The number of sets of the graph itself."""
        self.several = self.given > 1
        """Whether the graph has several kinds of vertices."""

    def __getitem__(self, number: int) -> VertexSet:  # type: ignore[override]
        return self._each[number]

    def __len__(self) -> int:
        return len(self._each)

    def __iter__(self) -> Iterator[VertexSet]:
        return iter(self._each)

    def of(self, placement: Placement) -> VertexSet:
        """Return the set whose rows a tensor has."""
        return self._each[placement.vertex_set]

    def of_size(self, size: int) -> int | None:
        """Return the number of the only set of the graph with this many vertices in all; None if none is."""
        found = [number for number in range(self.given) if self._each[number].size == size]
        return found[0] if len(found) == 1 else None

    def joined(self, members: Sequence[int]) -> int:
        """Return the number of the set whose rows are those of these sets, one after the other."""
        # cat([cat([a, b]), c]) is cat([a, b, c]).
        flat = tuple(each for member in members for each in (self._each[member].members or (member,)))
        for number, held in enumerate(self._each):
            if held.members == flat:
                return number
        begin, ids = 0, []
        # Ids of the k-th set are behind those of the sets before it, as in the whole graph's tensor.
        for member in flat:
            ids.append(self._each[member].ids + begin)
            begin += self._each[member].size
        name = " and ".join(self._each[member].name for member in flat)
        self._each.append(VertexSet(name, torch.cat(ids), begin, flat))
        return len(self._each) - 1

    def span(self, number: int, span: range) -> int | None:
        """Return the number of the set that a span of a concatenation is; None if it is no whole set."""
        begin = 0
        for member in self._each[number].members:
            if span == range(begin, begin + self._each[member].size):
                return member
            begin += self._each[member].size
        return None
