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
from kagome.placement.placement import IDS, Placement, PlacementKind, tensors
from kagome.positions.edge_positions import EdgeScope, refused
from kagome.positions.edge_tables import edge_axis
from kagome.positions.position_scope import Args, Kwargs
from kagome.scope.constants import Constants
from kagome.scope.exchanges import NeighborReads

_JOINS: Final = frozenset(["cat", "concat", "concatenate", "hstack"])
_ASKS: Final = frozenset(["size", "__get__", "numel", "stride"])


class AlignedEdges(EdgeScope, Protocol):
    """The interface of the running interceptor that alignment uses."""

    forward: RunningForward
    constants: Constants
    reads: NeighborReads


def aligned(scope: AlignedEdges, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Convert a call's rows of in-edges to rows of out-edges where the call combines both.

    Raises:
        ModelError: If it is unknown which edge a row belongs to.
    """
    # Sizes and attributes combine no rows.
    if name in _ASKS:
        return args, kwargs
    found = [
        (tensor, placement)
        for tensor in tensors(args, kwargs)
        if (placement := _of_edges(scope, tensor)) is not None
    ]
    # All rows are of in-edges, or all of out-edges: rank and order agree.
    if len({placement.view for _, placement in found}) < 2:
        return args, kwargs
    # cat([edge_index, back], 1): the two views number their halo rows differently, so one list cannot hold
    # ids of both. The flipped half is made from own in-edges, in the order of their attributes (cat([w, w])).
    if name in _JOINS and all(placement.kind is PlacementKind.EDGES for _, placement in found):
        return _each(args, kwargs, lambda value: _inward(scope, value))
    if any(placement.view and not _whole(scope, tensor, placement) for tensor, placement in found):
        raise refused(scope, f"{name} of edges with flipped ones that forward has chosen or added to")
    return _each(args, kwargs, lambda value: _outward(scope, name, value))


def _each(args: Args, kwargs: Kwargs, do: Any) -> tuple[Args, Kwargs]:
    def done(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(done(each) for each in value)
        return do(value)

    return tuple(done(value) for value in args), {key: done(value) for key, value in kwargs.items()}


def _of_edges(scope: AlignedEdges, tensor: Tensor) -> Placement | None:
    placement = scope.placements.get(tensor)
    if placement is None or placement.view not in (0, scope.reads.turned_at):
        return None  # edges of a batch stay as they are
    return placement if placement.kind in IDS or placement.kind is PlacementKind.PAIRS else None


def _whole(scope: AlignedEdges, tensor: Tensor, placement: Placement) -> bool:
    """Return True if a tensor has an entry for each edge of its view, in that order."""
    view = scope.views[placement.view]
    edges = tensor if placement.kind is PlacementKind.EDGES else placement.edges
    # A list that forward made has another order, and ``edge_ids`` says nothing of it.
    known = edges is view.edge_index or edges is view.given
    axis = edge_axis(tensor, placement)
    return known and axis is not None and tensor.size(axis) == view.edge_ids.numel()


def _outward(scope: AlignedEdges, name: str, value: Any) -> Any:
    """Convert rows of in-edges to rows of the same edges where they are out-edges."""
    placement = _of_edges(scope, value) if isinstance(value, Tensor) else None
    if placement is None or placement.view:
        return value
    if placement.kind is not PlacementKind.PAIRS or not _whole(scope, value, placement):
        raise refused(scope, f"{name} of flipped edges with edges that forward has chosen or added to")
    return turned(scope, now(value), placement.axis)


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
    view = scope.views[scope.reads.turned_at]
    assert view.across is not None
    assert view.across_index is not None
    with torch._C.DisableTorchFunction():
        # Constant values, such as edge weights, are exchanged in the first forward and kept for all others.
        last = scope.constants.is_constant(values)
        key = ("turned", address(values), tuple(values.shape), axis)
        found: Tensor | None = scope.constants.cached(key) if last else None
        if found is None:
            front = values.movedim(axis, 0)
            # [e, ...] -> [e, columns]: an exchange sends rows of a matrix.
            rows = front.reshape(front.size(0), front.shape[1:].numel())
            # Exchanges carry floats. Float64 keeps whole numbers up to 2^53.
            if not rows.is_floating_point():
                rows = rows.double()
            if last:
                with scope.constants.once():
                    every = view.across.gather(rows, scope.forward.forward_pass, "flipped edges")
            else:
                every = view.across.gather(rows, scope.forward.forward_pass, f"{scope.where()}.flipped")
            # [e + received] -> [e'], in the order of the out-edges.
            picked = every.index_select(0, view.across_index).to(values.dtype)
            # Without rows, -1 could not be resolved.
            found = picked.reshape(-1 if picked.size(0) else 0, *front.shape[1:]).movedim(0, axis)
            if last:
                scope.constants.cache(key, found)
    placement = Placement(PlacementKind.PAIRS, scope.reads.turned_at, axis, edges=view.edge_index)
    return scope.placements.put(found, placement)


def _inward(scope: AlignedEdges, value: Any) -> Any:
    """Convert flipped edges to the part's own edges, ends swapped; their targets are on other ranks."""
    placement = scope.placements.get(value)
    if placement is None or placement.view == 0:
        return value
    if not _whole(scope, value, placement):
        raise refused(scope, "a list put together with flipped edges that forward has chosen")
    edges = scope.views[0].edge_index
    # View 1 as given has the graph's edges unflipped. Over all ranks they are the in-edges again.
    if value is scope.views[scope.reads.turned_at].given:
        return edges
    with torch._C.DisableTorchFunction():
        return scope.placements.put(edges.flip(0), Placement(PlacementKind.EDGES, 0, swapped=True))
