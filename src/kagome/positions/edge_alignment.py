"""Edge alignment: rows of in-edges, brought to the ranks that hold the same edges as out-edges.

Where it sits: ``intercept.interceptor`` calls :func:`aligned` before torch calls, once a model has flipped
edges. A part holds the in-edges of its vertices. Flipped edges are the out-edges of its vertices, which other
ranks hold.

::

    back = edge_index.flip(0)     x[back[0]] * w     w is sent to the flipped edges' ranks, with gradient
    cat([edge_index, back], 1)                       flipped edges stay with the edges they are made from
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import now
from kagome.halo.forward_pass import RunningForward
from kagome.kernels.base.address import address
from kagome.placement.placement import IDS, Placement, PlacementKind
from kagome.positions.edge_positions import Edges, refused
from kagome.positions.edge_tables import flat
from kagome.scope.constants import Constants

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_JOINS: Final = frozenset(["cat", "concat", "concatenate", "hstack"])
_ASKS: Final = frozenset(["size", "__get__", "numel", "stride"])


class AlignedEdges(Edges, Protocol):
    """The interface of the running interceptor that alignment uses."""

    forward: RunningForward
    constants: Constants


def aligned(scope: AlignedEdges, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Convert a call's rows of in-edges to rows of out-edges where the call combines both.

    Raises:
        ModelError: If it is unknown which edge a row belongs to.
    """
    if name in _ASKS:
        return args, kwargs
    found = [
        (tensor, mark) for tensor in flat(args, kwargs) if (mark := _of_edges(scope, tensor)) is not None
    ]
    if len({mark.view for _, mark in found}) < 2:
        return args, kwargs
    if name in _JOINS and all(mark.kind is PlacementKind.EDGES for _, mark in found):
        return _each(args, kwargs, lambda value: _inward(scope, value))
    if any(mark.view == 1 and not _whole(scope, tensor, mark) for tensor, mark in found):
        raise refused(scope, f"{name} of edges with flipped ones that forward has chosen or added to")
    return _each(args, kwargs, lambda value: _outward(scope, name, value))


def _each(args: Args, kwargs: Kwargs, do: Any) -> tuple[Args, Kwargs]:
    def done(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(done(each) for each in value)
        return do(value)

    return tuple(done(value) for value in args), {key: done(value) for key, value in kwargs.items()}


def _of_edges(scope: AlignedEdges, tensor: Tensor) -> Placement | None:
    mark = scope.marks.get(tensor)
    return mark if mark is not None and (mark.kind in IDS or mark.kind is PlacementKind.PAIRS) else None


def _axis(tensor: Tensor, mark: Placement) -> int:
    return (
        mark.axis
        if mark.kind is PlacementKind.PAIRS
        else tensor.dim() - 1
        if mark.kind is PlacementKind.EDGES
        else 0
    )


def _whole(scope: AlignedEdges, tensor: Tensor, mark: Placement) -> bool:
    """Return True if a tensor has an entry for each edge of its view, in that order."""
    view = scope.views[mark.view]
    edges = tensor if mark.kind is PlacementKind.EDGES else mark.edges
    known = edges is view.edge_index or edges is view.given
    return known and tensor.size(_axis(tensor, mark)) == view.edge_ids.numel()


def _outward(scope: AlignedEdges, name: str, value: Any) -> Any:
    """Convert rows of in-edges to rows of the same edges where they are out-edges."""
    mark = _of_edges(scope, value) if isinstance(value, Tensor) else None
    if mark is None or mark.view == 1:
        return value
    if mark.kind is not PlacementKind.PAIRS or not _whole(scope, value, mark):
        raise refused(scope, f"{name} of flipped edges with edges that forward has chosen or added to")
    return turned(scope, now(value), mark.axis)


def turned(scope: AlignedEdges, values: Tensor, axis: int) -> Tensor:
    """Return values of a part's in-edges reordered and exchanged for its out-edges, with gradient.

    Args:
        scope: The running interceptor.
        values: One row for each in-edge.
        axis: The row axis.

    Shapes:
        ``[..., E, ...]`` -> ``[..., E', ...]``.

    Cost:
        An exchange of one row for each edge between parts, and one back. Constant values are sent once.
    """
    view = scope.views[1]
    assert view.across is not None
    assert view.pick is not None
    with torch._C.DisableTorchFunction():
        last = scope.constants.lasting(values)
        key = ("turned", address(values), tuple(values.shape), axis)
        found: Tensor | None = scope.constants.kept(key) if last else None
        if found is None:
            front = values.movedim(axis, 0)
            rows = front.reshape(front.size(0), front.shape[1:].numel())
            if not rows.is_floating_point():
                rows = rows.double()
            if last:
                with scope.constants.once():
                    every = view.across.extend(rows, scope.forward.turn, "flipped edges")
            else:
                every = view.across.extend(rows, scope.forward.turn, f"{scope.where()}.flipped")
            picked = every.index_select(0, view.pick).to(values.dtype)
            found = picked.reshape(-1 if picked.size(0) else 0, *front.shape[1:]).movedim(0, axis)
            if last:
                scope.constants.keep(key, found)
    return scope.marks.put(found, Placement(PlacementKind.PAIRS, 1, axis, edges=view.edge_index))


def _inward(scope: AlignedEdges, value: Any) -> Any:
    """Convert flipped edges to the part's own edges, ends swapped; their targets are on other ranks."""
    mark = scope.marks.get(value)
    if mark is None or mark.view == 0:
        return value
    if not _whole(scope, value, mark):
        raise refused(scope, "a list put together with flipped edges that forward has chosen")
    edges = scope.views[0].edge_index
    if value is scope.views[1].given:
        return edges
    with torch._C.DisableTorchFunction():
        return scope.marks.put(edges.flip(0), Placement(PlacementKind.EDGES, 0, swapped=True))
