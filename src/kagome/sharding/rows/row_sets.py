"""Row sets: what the rows of a tensor can belong to: the vertex sets and the edge sets of a graph.

Where it sits: :class:`kagome.sharding.rows.placing.Placer` places tensors by them; the methods of a sharded
model take their names, and ``cut_tables`` finds by them whose rows a parameter has. A graph of one kind of
vertices has ``"vertices"`` and ``"edges"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import SetsPartition
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
        self._scope, self._each = scope, dict[str, RowSet]()
        for each in sets_of(scope.given_part):
            # On the device of the model, and with the list of edges that forward is given.
            if each.ends is None:
                held = replace(each, own=scope.sets[each.placement.vertex_set].ids)
            else:
                view = scope.views[each.placement.view]
                placement = replace(each.placement, edges=view.edge_index)
                held = replace(each, own=view.edge_ids.to(scope.device), placement=placement)
            self._each[each.name] = held

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

    def batched(self, name: str, copies: int) -> RowSet:
        """Return the rows of so many samples, one after the other, of a set's rows."""
        one = self._each[name]
        placement = self._scope.batches.with_copies(one.placement, copies)
        assert placement is not None
        if placement is one.placement:
            return one
        if one.ends is None:
            own = self._scope.sets.of(placement).ids
        else:
            own = self._scope.views[placement.view].edge_ids.to(self._scope.device)
        return replace(one, own=own, size=one.size * copies, placement=placement)

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


def sets_of(part: Partition | SetsPartition) -> list[RowSet]:
    """Return the vertex sets and edge sets of a part; placements of edges are without their list."""
    if isinstance(part, Partition):
        vertices, ends = [("vertices", part.own, part.num_nodes)], ("vertices", "vertices")
        edges = [("edges", part, ends)]
    else:
        vertices = [*zip(part.names, part.own, part.sizes, strict=True)]
        edges = [
            (each.name, each.part, (part.names[each.source], part.names[each.target])) for each in part.edges
        ]
    return [
        *(
            RowSet(name, own, size, Placement(PlacementKind.ROWS, vertex_set=number))
            for number, (name, own, size) in enumerate(vertices)
        ),
        *(
            RowSet(name, cut.edge_ids, cut.num_edges, Placement(PlacementKind.PAIRS, view), ends)
            for view, (name, cut, ends) in enumerate(edges)
        ),
    ]
