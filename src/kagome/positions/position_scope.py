"""Position scope: what handlers of row positions ask of the running interceptor, and of a call's arguments.

Where it sits: ``row_positions``, ``row_order`` and ``vertex_tables`` share it. A position is a row's place
among all vertices of the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from kagome.halo.forward_pass import RunningForward
from kagome.placement.placement import VERTICES, Placement, Placements
from kagome.placement.symbolic_size import as_place
from kagome.placement.torch_calls import Args as Args, Func as Func, Kwargs as Kwargs
from kagome.placement.vertex_sets import VertexSets
from kagome.scope.batches import Batches
from kagome.scope.exchanges import RankSums
from kagome.scope.rows import Axes, LocatedScope, VertexIds, refused
from kagome.sparse_ops.edge_view import EdgeView

if TYPE_CHECKING:
    from kagome.positions.kept_tensors import KeptTensors
    from kagome.positions.row_copies import RowCopies


FULL = slice(None)


class PositionScope(LocatedScope, Protocol):
    """The interface of the running interceptor that these handlers use."""

    placements: Placements
    axes: Axes
    ids: VertexIds
    ranks: RankSums
    forward: RunningForward
    parted: bool
    sets: VertexSets
    views: list[EdgeView]
    numbered: bool
    device: torch.device
    copies: RowCopies
    keeping: KeptTensors
    batches: Batches
    recorder: Any

    def __torch_function__(self, func: Any, types: Any, args: Any = ..., kwargs: Any = ...) -> Any:
        """Answer one torch call of the forward."""


def span_of(scope: PositionScope, placement: Placement, item: slice) -> range:
    """Return the vertices that a slice of an axis selects."""
    whole = scope.axes.length(placement)
    if whole < 0:
        raise refused(scope, "a slice that counts rows chosen by a mask")
    # Python resolves missing, negative and too large bounds against the whole graph's length.
    span = range(whole)[slice(as_place(item.start), as_place(item.stop), as_place(item.step))]
    if span.step < 0:
        raise refused(scope, "a slice that turns the order of vertices round")
    # [N * each]: the bounds must fall between vertices.
    if placement.each > 1:
        if span and (span.step != 1 or span.start % placement.each or span.stop % placement.each):
            raise refused(scope, f"a slice that cuts through the {placement.each} entries of a vertex")
        span = range(span.start // placement.each, span.stop // placement.each)
    # x[a:b][c:d]: the second slice counts within the span of the first.
    held = (
        placement.subset.span
        if placement.subset is not None and placement.subset.span is not None
        else range(scope.sets.of(placement).size)
    )
    return held[span.start : span.stop : span.step] if span else range(0)


def rows_base(scope: PositionScope, args: Args, kwargs: Kwargs) -> tuple[Tensor, Placement] | None:
    """Return a call's tensor with rows of vertices and its placement; None where all rows are local."""
    base = args[0] if args else kwargs.get("input")
    placement = scope.placements.get(base) if isinstance(base, Tensor) else None
    if (
        not isinstance(base, Tensor)
        or placement is None
        or placement.kind not in VERTICES
        or not scope.parted
    ):
        return None
    return base, placement


def dim_of(args: Args, kwargs: Kwargs, place: int, base: Tensor) -> int:
    """Return the axis that a call names, as a non-negative number."""
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else 0))
    return int(dim or 0) % max(base.dim(), 1)


def items_of(index: Any, dims: int, axis: int) -> tuple[list[Any], int]:
    """Expand an index to one item per axis, and find the item that stands at an axis.

    Args:
        index: The index between the brackets.
        dims: The number of axes of the tensor.
        axis: The axis to find.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    # An item consumes one axis, a boolean mask of k axes consumes k, and None consumes none:
    #   x [N, A, B]    x[..., None, mask]    mask [A, B]    items [:, None, mask], row item at 0
    wide = [each.dim() if isinstance(each, Tensor) and each.dtype == torch.bool else 1 for each in items]
    given = sum(w for each, w in zip(items, wide, strict=True) if each is not None and each is not Ellipsis)
    place = next((i for i, each in enumerate(items) if each is Ellipsis), None)
    if place is None:
        items += [FULL] * (dims - given)
    else:
        items[place : place + 1] = [FULL] * (dims - given)
    seen = 0
    for i, each in enumerate(items):
        if each is None:
            continue
        width = each.dim() if isinstance(each, Tensor) and each.dtype == torch.bool else 1
        if seen <= axis < seen + width:
            return items, i
        seen += width
    return [*items, FULL], len(items)


_PIECES: Final = (
    *("split_size_or_sections", "split_size", "split_sizes", "chunks"),
    *("indices_or_sections", "tensor_indices_or_sections", "indices", "sections"),
)


def pieces_of(args: Args, kwargs: Kwargs) -> Any:
    """Return what ``split``, ``chunk`` or ``tensor_split`` is told of its pieces: a number, sizes or ends."""
    given = args[1] if len(args) > 1 else None
    return next((kwargs[key] for key in _PIECES if key in kwargs), given)
