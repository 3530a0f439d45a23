"""Vertex sets: the kinds of vertices of a graph, and this rank's own vertices of each.

Where it sits: ``intercept.interceptor`` makes them from its part; a placement names its set by number. A
graph with one kind of vertices has one set, number 0.

::

    set 0  grid   own ids 0 2 5      of 9        ROWS of set 0: [3, ...]
    set 1  mesh   own ids 1 2        of 4        ROWS of set 1: [2, ...]
    set 2  grid ++ mesh                          cat([grid, mesh]): own ids 0 2 5 | 10 11, of 13
    set 3  2 of mesh                             [2, mesh] flattened: own ids 1 2 | 5 6, of 8
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
        copies: Of a batch of samples flattened into rows: how many samples, one after the other.
        single: The number of the set that each sample has a row for each vertex of; None for a set of no
            batch.

    Shapes:
        ids ``[n]``, int64.
    """

    name: str
    ids: Tensor
    size: int
    members: tuple[int, ...] = ()
    copies: int = 1
    single: int | None = None

    @property
    def own(self) -> int:
        """The number of own vertices."""
        return self.ids.numel()

    @property
    def words(self) -> str:
        """The set in an error message."""
        kind = f"vertices of {self.name}" if self.name else "vertices"
        return kind if self.copies == 1 else f"{kind} in a batch of {self.copies}"


class VertexSets(Sequence[VertexSet]):
    """The vertex sets of one part: those of the graph, and those that forward has concatenated or batched.

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
        """Return the number of the only set with this many vertices in all; None if none is, or several.

        Sets that forward has concatenated do not count, batches of one do.
        """
        found = [number for number, each in enumerate(self._each) if each.size == size and not each.members]
        return found[0] if len(found) == 1 else None

    def batched(self, number: int, copies: int) -> int:
        """Return the number of the set of a batch: the rows of this many samples, one after the other.

        Args:
            number: The number of a set; of one that is a batch, its samples are counted anew.
            copies: How many samples.
        """
        single = self._each[number].single
        number = number if single is None else single
        if copies == 1:
            return number
        for at, held in enumerate(self._each):
            if (held.single, held.copies) == (number, copies):
                return at
        # Made once for each number of samples, so that placements can be compared by number.
        one = self._each[number]
        # Vertex v of sample i is vertex v + i * N of the flattened batch.
        first = torch.arange(copies, device=one.ids.device).unsqueeze(1) * one.size
        ids = (one.ids + first).view(-1)
        self._each.append(VertexSet(one.name, ids, one.size * copies, copies=copies, single=number))
        return len(self._each) - 1

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
        """Return the number of the set that a span of a concatenation or batch is; None if it is none."""
        held = self._each[number]
        if held.single is not None:
            # h[N : 3 * N]: two samples of the batch.
            size = held.size // held.copies
            whole = len(span) > 0 and span.step == 1 and not (span.start % size or span.stop % size)
            return self.batched(number, len(span) // size) if whole else None
        begin = 0
        for member in self._each[number].members:
            if span == range(begin, begin + self._each[member].size):
                return member
            begin += self._each[member].size
        return None
