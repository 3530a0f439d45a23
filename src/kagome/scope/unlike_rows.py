"""Unlike rows: calls that combine rows of one vertex set, or edge set, with the same rows of another.

Where it sits: ``intercept.interceptor`` asks it before each call on a part of a graph of several vertex sets.
Two sets with as many own rows on each rank would fit in torch, but their rows are not those that meet in the
whole graph::

    users  own 0 2    items  own 1 3      users + items: 0 + 1, 2 + 3 in place of 0 + 0, 1 + 1, ...
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kagome.placement.axis_rules import JOINS
from kagome.placement.placement import IDS, VERTICES, Placement, PlacementKind, Placements, tensors
from kagome.placement.vertex_sets import VertexSets
from kagome.scope.rows import LocatedScope, refused
from kagome.sparse_ops.edge_view import EdgeView

_APART: Final = JOINS | {
    # Joined rows, shapes and types: rows of the arguments do not meet.
    *("view_as", "expand_as", "reshape_as", "type_as", "to", "new_tensor", "resize_as_", "stack", "vstack"),
    *("scaled_dot_product_attention", "multi_head_attention_forward", "cdist", "is_same_size"),
}
_WRITES: Final = frozenset(
    f"{name}{suffix}"
    for name in ("index_add", "scatter_add", "scatter_reduce", "scatter")
    for suffix in ("", "_")
)
_READS: Final = frozenset(
    ["index_select", "gather", "embedding", "take_along_dim", "index_put", "index_put_"]
)


class SetsScope(LocatedScope, Protocol):
    """The interface of the running interceptor that this module uses."""

    placements: Placements
    sets: VertexSets
    views: list[EdgeView]


def refuse(scope: SetsScope, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call in which rows of two vertex sets, or of two edge sets, meet.

    Raises:
        ModelError: Naming both.
    """
    if name in _APART or name in _READS:
        return
    if name in _WRITES:
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


def _refuse_write(scope: SetsScope, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
    return refused(
        scope,
        f"{name} of {one} and {two}",
        expected="rows of one vertex set or edge set in a call that combines them row by row",
        hint="rows of the other set read along edges of the graph, or sums and means of all its rows",
    )
