"""Row sets: what the rows of a tensor can belong to: the vertex sets and the edge sets of a graph.

Where it sits: :class:`kagome.sharding.rows.placing.Placer` places tensors by them; the methods of a sharded
model take their names. A graph of one kind of vertices has ``"vertices"`` and ``"edges"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kagome.errors import ModelError
from kagome.intercept.interceptor import Interceptor
from kagome.placement.placement import Placement, PlacementKind


@dataclass(frozen=True, eq=False)
class RowSet:
    """The rows of one vertex set or edge set.

    Args:
        name: Its name.
        own: The ids of own rows in the whole graph.
        size: The number of rows of the whole graph.
        placement: The placement of a tensor with such rows along axis 0.
        ends: Of an edge set, the names of the vertex sets at its two ends.
    """

    name: str
    own: Tensor
    size: int
    placement: Placement
    ends: tuple[str, str] | None = None

    @cached_property
    def count(self) -> int:
        """The number of own rows."""
        return self.own.numel()


class RowSets(Mapping[str, RowSet]):
    """The row sets of one part, by name; the first one is the default of methods.

    Args:
        scope: The interceptor of the part.
    """

    def __init__(self, scope: Interceptor) -> None:
        self._scope = scope
        self._each: dict[str, RowSet] = {}
        for number in range(scope.sets.given):
            held = scope.sets[number]
            placement = Placement(PlacementKind.ROWS, vertex_set=number)
            name = held.name or "vertices"
            self._each[name] = RowSet(name, held.ids, held.size, placement)
        # Only the graph's own sets so far: forward may join some later.
        names = [*self._each]
        for number, view in enumerate(scope.views):
            placement = Placement(PlacementKind.PAIRS, number, edges=view.edge_index)
            name = view.name or "edges"
            own = view.edge_ids.to(scope.device)
            ends = names[view.sources], names[view.targets]
            self._each[name] = RowSet(name, own, view.count, placement, ends)

    def __getitem__(self, name: str) -> RowSet:
        return self._each[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._each)

    def __len__(self) -> int:
        return len(self._each)

    @property
    def vertices(self) -> list[RowSet]:
        """The vertex sets, in their order."""
        return [each for each in self._each.values() if each.ends is None]

    def named(self, name: str | None, where: str) -> RowSet:
        """Return a row set by its name; by default the vertices of a graph that has one kind of them.

        Raises:
            ModelError: If there is none of this name, or there are several kinds and no name.
        """
        if name is None and len(self.vertices) == 1:
            return self.vertices[0]
        if name not in self._each:
            raise ModelError(
                f"the name of a vertex set or edge set: {', '.join(map(repr, self._each))}",
                repr(name),
                where=where,
            )
        return self._each[name]

    def of(self, placement: Placement) -> RowSet | None:
        """Return the set that a placed tensor has a row for each own row of; None if it is another."""
        for each in self._each.values():
            held = each.placement
            if (held.kind, held.view, held.vertex_set) == (
                placement.kind,
                placement.view if placement.kind is PlacementKind.PAIRS else 0,
                placement.vertex_set,
            ):
                return each
        return None
