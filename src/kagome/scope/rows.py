"""Rows: what a part knows of a tensor's rows: along which axis they lie, and whose they are.

Where it sits: handlers, layer rules and fast paths ask it before they treat a tensor as rows; it raises the
errors for calls that no part can follow. The placements are those of ``placement.placement``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.halo.forward_pass import RunningForward
from kagome.placement.axis_rules import JOINS
from kagome.placement.placement import (
    ALIGNED,
    IDS,
    PAIRS,
    VERTICES,
    Placement,
    PlacementKind,
    Placements,
    tensors,
)
from kagome.placement.symbolic_size import SymbolicSize
from kagome.placement.torch_calls import Args, Kwargs
from kagome.placement.vertex_sets import VertexSets
from kagome.placement.weak_map import WeakTensorMap
from kagome.sparse_ops.edge_view import EdgeView, pair_ids
from kagome.user_frame import from_library, user_line

_TOLD_APART = "vertices told apart by what they hold, or by their numbers in a way that parts can follow"
_BY_EDGES = (
    "a layer to read other vertices by the graph's edges, or to attend to all of them by torch's attention"
)
_WAY_OUT = "give the Data an attribute with a value a vertex (data.kind = ...) and tell rows apart by that"
_ATTENTION = (
    "F.scaled_dot_product_attention(q, k, v) where all vertices attend to all, edges where some do; or train "
    "on one rank"
)


class LocatedScope(Protocol):
    """An object that knows which module is running."""

    def where(self) -> str:
        """Return the path of the module whose forward is running."""


def refused(scope: LocatedScope, got: str, *, hint: str = "", expected: str = _TOLD_APART) -> ModelError:
    """Return the error for a call that depends on row positions in a way that no part can follow."""
    line = user_line()
    return ModelError(
        expected,
        got,
        where="; ".join(filter(None, (scope.where(), line))),
        hint=hint or f"{_WAY_OUT}; or train on one rank",
    )


def lost(scope: LocatedScope, placement: Placement, *, edges: bool = False) -> ModelError:
    """Return the error for a tensor that was made from rows by their positions, and so is lost.

    Args:
        scope: The running interceptor.
        placement: The placement of the lost tensor.
        edges: Whether the tensor says which rows are connected.
    """
    # A product of rows with rows is most likely attention written by hand, for which torch has a call.
    product = placement.origin.startswith(("matmul", "bmm", "mm", "einsum", "baddbmm"))
    hint = "make these edges before training (data.edge_index), not inside forward; or train on one rank"
    pairs = placement.origin.endswith(PAIRS)
    return refused(
        scope,
        f"rows that went through {placement.origin}",
        hint=hint if edges else _ATTENTION if product or pairs else "",
        expected=_BY_EDGES if pairs else _TOLD_APART,
    )


def draw_refused(scope: LocatedScope, name: str, why: str) -> ModelError:
    """Return the error for a draw of rows that would differ between ranks."""
    return refused(
        scope,
        f"{name}, whose random numbers are not made exact: {why}",
        hint="draw a row a vertex or a row an edge (torch.rand(x.size(0), k), torch.rand_like(x))",
        expected="what a model draws for vertices and edges to be the same on any ranks",
    )


class Axes:
    """The placements of one part's tensors, as questions about their rows.

    Args:
        placements: The placements.
        sets: The vertex sets.
        forward: The running forward, which errors name.
    """

    def __init__(self, placements: Placements, sets: VertexSets, forward: RunningForward) -> None:
        self.placements, self.sets, self._forward = placements, sets, forward

    def of(self, tensor: Any) -> int | None:
        """Return the axis along which a tensor has one row per vertex or edge; None if it has none."""
        placement = self.placements.get(tensor)
        return placement.axis if placement is not None and placement.kind in ALIGNED else None

    def counts(self, value: Any) -> bool:
        """Return True if a value has one row per vertex or edge, or is a count of such rows."""
        return isinstance(value, SymbolicSize) or self.of(value) is not None

    def of_vertices(self, tensor: Any) -> bool:
        """Return True if a tensor has one row per vertex."""
        placement = self.placements.get(tensor)
        return placement is not None and placement.kind in VERTICES

    def of_each_vertex(self, tensor: Any) -> bool:
        """Return True if a tensor has one row for each own vertex."""
        placement = self.placements.get(tensor)
        return placement is not None and placement.kind in VERTICES and placement.is_complete

    def vertices_counted(self, value: Any) -> int | None:
        """Return the whole graph's vertex count if a value is the count of own vertices; else None."""
        counted = (
            isinstance(value, SymbolicSize)
            and value.placement.kind is PlacementKind.ROWS
            and value.placement.is_complete
        )
        return self.sets.of(value.placement).size if counted else None

    def length(self, placement: Placement) -> int:
        """Return the length of an axis of vertices in the whole graph, or -1 if it is unknown."""
        # A subset by positions (``x[:6000]``) has a known length; one by a mask depends on values.
        if placement.subset is not None:
            return -1 if placement.subset.span is None else len(placement.subset.span) * placement.each
        return self.sets.of(placement).size * placement.each

    def like(self, out: Tensor, tensor: Tensor, axis: int | None = None) -> Tensor:
        """Give ``out`` the placement of ``tensor``, along another axis if one is given."""
        placement = self.placements.get(tensor)
        if placement is not None and axis is not None:
            placement = placement.along(axis)
        # ``out`` has other values than ``tensor``: a row for each
        # vertex, but no longer the vertices' numbers.
        if placement is not None and placement.kind is PlacementKind.NUMBERS:
            placement = replace(placement, kind=PlacementKind.ROWS)
        return self.placements.put(out, placement)

    def targets(self, index: Tensor) -> Tensor:
        """Record that a tensor holds ids of own rows."""
        return self.placements.put(index, Placement(PlacementKind.TARGET))

    def names_targets(self, index: Any) -> bool:
        """Return True if a tensor holds ids of own rows, one per edge: each edge's target."""
        placement = self.placements.get(index)
        return placement is not None and placement.kind is PlacementKind.TARGET

    def unknown_ids(self, ids: Tensor) -> Tensor:
        """Mark ids as meaningless on a part, so that reads by them are refused."""
        return self.placements.put(ids, Placement(PlacementKind.MIXED))

    def lost(self, tensor: Tensor, origin: str) -> Tensor:
        """Mark a tensor as lost: no part has it. Anything made from it is refused where it leaves forward."""
        return self.placements.put(
            tensor, Placement(PlacementKind.LOST, origin=f"{origin} ({user_line() or 'a library'})")
        )

    def refuse_lost(self, *values: Any) -> None:
        """Refuse values that were made from rows by their positions in this part."""
        if (gone := self.placements.lost(values, {})) is not None:
            raise lost(self._forward, gone)


class VertexIds:
    """The original ids of one part's rows and edges.

    Args:
        sets: The vertex sets.
        views: The part's in-edges, and its out-edges once they were fetched.
        placements: The placements.
        last_vertex: The last vertex of the whole graph that has an edge; None with several vertex sets.
    """

    def __init__(
        self,
        sets: VertexSets,
        views: Sequence[EdgeView],
        placements: Placements,
        last_vertex: int | None,
    ) -> None:
        self._sets, self._views, self._placements = sets, views, placements
        self.last_vertex = last_vertex
        own = sets[0].ids
        self.ascending = bool((own[1:] > own[:-1]).all())
        self._edge_keys: WeakTensorMap[Any] = WeakTensorMap()

    def own(self, vertex_set: int = 0) -> Tensor:
        """Return the original ids of own rows of a vertex set."""
        return self._sets[vertex_set].ids

    def numbers(self, ids: Tensor, placement: Placement) -> Tensor:
        """Return the original ids of vertices that a part's ids name. Shapes: any, kept."""
        view = self._views[placement.view]
        if view.sources == view.targets:
            return view.ids[ids]
        # Own and halo rows of the sources' set; own rows of the targets' set.
        targets = self._sets[view.targets].ids
        if placement.kind is not PlacementKind.EDGES:
            return (targets if placement.kind is PlacementKind.TARGET else view.ids)[ids]
        ends = (
            (targets[ids[0]], view.ids[ids[1]]) if placement.swapped else (view.ids[ids[0]], targets[ids[1]])
        )
        return torch.stack(ends)

    def of(self, placement: Placement) -> Tensor:
        """Return the original ids of the vertices that a tensor has rows for, one each."""
        with torch._C.DisableTorchFunction():
            ids = self.own(placement.vertex_set)
            return ids if placement.subset is None else ids[placement.subset.places()]

    def local_of(self, ids: Tensor, vertex_set: int = 0) -> Tensor:
        """Return the local positions of own vertices. Shapes: any, kept."""
        with torch._C.DisableTorchFunction():
            own = self.own(vertex_set)
            # A binary search needs ids in ascending order; without it, search in the sorted ids and map back.
            if self.ascending:
                return torch.searchsorted(own, ids.contiguous())
            order = own.argsort()
            return order[torch.searchsorted(own[order], ids.contiguous())]

    def last_row(self) -> int:
        """Count own vertices up to the last one of the whole graph that has an edge."""
        # PyG guesses the number of vertices as the largest id of an edge plus one, so vertices behind the
        # last edge get no loop. The same must hold on a part.
        assert self.last_vertex is not None
        return int((self.own() <= self.last_vertex).sum())

    def row_counters(self, tensor: Tensor) -> Tensor:
        """Return one number per entry along the row axis, equal on any ranks: vertex and its entry.

        Shapes:
            ``[k]``.
        """
        placement = self._placements.get(tensor)
        assert placement is not None
        ids = self.of(placement)
        # [ids] for a row a vertex. After ``x.view(-1, d)`` with ``each`` entries a vertex, vertex v has the
        # numbers v * each, ..., v * each + each - 1.
        if placement.each == 1:
            return ids
        with torch._C.DisableTorchFunction():
            return (ids[:, None] * placement.each + torch.arange(placement.each, device=ids.device)).view(-1)

    def edge_counters(
        self, tensor: Tensor, word: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor | None:
        """Return ``word(source, target, copy)`` per row of an edge tensor, by original ids, if known."""
        placement = self._placements.get(tensor)
        edges = placement.edges if placement is not None else None
        if edges is None:
            return None
        # One word for each edge of this list, made once for all draws: ``pair_ids`` sorts the edges.
        if edges not in self._edge_keys:
            ends = self._placements.get(edges)
            assert ends is not None
            view = self._views[ends.view]
            source, target = (edges[1], edges[0]) if ends.swapped else (edges[0], edges[1])
            # A word names the graph's own edge, whichever direction messages run along it.
            first, second = view.ids[source], self._sets[view.targets].ids[target]
            first, second = (second, first) if view.across is not None else (first, second)
            with torch._C.DisableTorchFunction():
                self._edge_keys[edges] = word(first, second, pair_ids(first, second))
        # With loops added, or edges masked out, rows no longer match
        # the edge list: the caller refuses the draw.
        counters: Tensor = self._edge_keys[edges]
        return (
            counters
            if counters.numel() == tensor.size(placement.axis if placement is not None else 0)
            else None
        )

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept from one forward pass to the next."""
        yield from self._edge_keys.values()


# [Note: unlike rows] Two vertex sets with as many own rows on each rank fit in torch, but their rows are not
# those that meet in the whole graph:
#
#     users  own 0 2    items  own 1 3      users + items: 0 + 1, 2 + 3 in place of 0 + 0, 1 + 1, ...


_SEPARATE: Final = JOINS | {
    # Joined rows, shapes and types: rows of the arguments do not meet.
    *("view_as", "expand_as", "reshape_as", "type_as", "to", "new_tensor", "resize_as_", "stack", "vstack"),
    *("scaled_dot_product_attention", "multi_head_attention_forward", "cdist", "is_same_size"),
}
_WRITTEN_BY_IDS: Final = frozenset(
    f"{name}{suffix}"
    for name in ("index_add", "scatter_add", "scatter_reduce", "scatter")
    for suffix in ("", "_")
)
_PRODUCTS: Final = frozenset(["matmul", "mm", "bmm", "__matmul__", "__rmatmul__", "einsum"])
_READ_BY_IDS: Final = frozenset(
    ["index_select", "gather", "embedding", "take_along_dim", "index_put", "index_put_"]
)


class SetsScope(LocatedScope, Protocol):
    """The interface of the running interceptor that this module uses."""

    placements: Placements
    sets: VertexSets
    views: list[EdgeView]


def refuse_unlike_rows(scope: SetsScope, name: str, args: Args, kwargs: Kwargs) -> None:
    """Refuse a call in which rows of two vertex sets, or of two edge sets, meet.

    Raises:
        ModelError: Naming both.
    """
    if name in _SEPARATE or name in _READ_BY_IDS:
        return
    if name in _WRITTEN_BY_IDS:
        _refuse_write(scope, name, args, kwargs)
        return
    if name == "__getitem__":
        # By a mask, rows are taken by their place. Other reads are by number.
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        if not isinstance(index, Tensor) or index.dtype != torch.bool:
            return
        args = (args[0], index)
    rows: dict[str, Placement] = {}
    edges: dict[str, Placement] = {}
    for each in tensors(args, kwargs):
        held = scope.placements.get(each)
        if held is None:
            continue
        if held.kind in VERTICES:
            rows.setdefault(scope.sets.of(held).words, held)
        elif held.kind is PlacementKind.PAIRS:
            # The edges of a set whose ids are shifted are the same edges.
            edges.setdefault(f"edges of {scope.views[held.view].name}", held)
    if name == "__setitem__" and any(scope.sets.of(held).members for held in rows.values()):
        return  # cat([a, b])[: len(a)] = rows of a: see ``positions.row_positions``
    for found in (rows, edges):
        if len(found) > 1:
            raise _met(scope, name, *found)


def _refuse_write(scope: SetsScope, name: str, args: Args, kwargs: Kwargs) -> None:
    """Refuse a write by ids of one set to rows of another, and of values of other edges than the ids'.

    Raises:
        ModelError: Naming both.
    """
    ids = kwargs.get("index", args[2] if len(args) > 2 else None)
    value = kwargs.get("src", kwargs.get("source", args[3] if len(args) > 3 else None))
    held, base, rows = map(scope.placements.get, (ids, args[0] if args else None, value))
    if held is None or held.kind not in IDS:
        return
    view = scope.views[held.view]
    if rows is not None and rows.kind is PlacementKind.PAIRS and scope.views[rows.view].name != view.name:
        raise _met(scope, name, f"edges of {view.name}", f"edges of {scope.views[rows.view].name}")
    if base is None or base.kind not in VERTICES:
        return
    named = view.targets if held.kind is PlacementKind.TARGET else view.sources
    # cat([receivers, senders]) is read, and rows of the receivers alone are written.
    if base.vertex_set not in (named, *scope.sets[named].members[:1]):
        raise _met(scope, name, scope.sets.of(base).words, f"ids of {scope.sets[named].words}")


def _met(scope: SetsScope, name: str, one: str, two: str) -> Exception:
    hint = "rows of the other set read along edges of the graph, or sums and means of all its rows"
    if name in _WRITTEN_BY_IDS and from_library():
        hint = "size=(sources, targets) of a layer that is given rows of the sources alone, (x, None)"
    elif name in _PRODUCTS:
        hint = "F.scaled_dot_product_attention(q, k, v), with q of one set and k, v of the other"
    return refused(
        scope,
        f"{name} of {one} and {two}",
        expected="rows of one vertex set or edge set in a call that combines them row by row",
        hint=hint,
    )
