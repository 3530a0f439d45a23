"""Position refusals: what handlers of row positions share, and errors for calls a part cannot follow.

Where it sits: ``row_positions``, ``row_order`` and ``vertex_tables`` share it. A position is a row's place
among all vertices of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.placement.placement import PAIRS, VERTICES, Placement, Placements
from kagome.placement.symbolic_size import as_place
from kagome.user_frame import user_line

if TYPE_CHECKING:
    from kagome.halo.forward_pass import ForwardPass
    from kagome.positions.kept_tensors import KeptTensors
    from kagome.positions.row_copies import RowCopies

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Func = Callable[..., Any]

_TOLD_APART = "vertices told apart by what they hold, or by their numbers in a way that parts can follow"
_BY_EDGES = (
    "a layer to read other vertices by the graph's edges, or to attend to all of them by torch's attention"
)
_WAY_OUT = "give the Data an attribute with a value a vertex (data.kind = ...) and tell rows apart by that"
_ATTENTION = (
    "F.scaled_dot_product_attention(q, k, v) where all vertices attend to all, edges where some do; or train "
    "on one rank"
)
FULL = slice(None)


class LocatedScope(Protocol):
    """An object that knows which module is running."""

    def where(self) -> str:
        """Return the path of the module whose forward is running."""


class PositionScope(LocatedScope, Protocol):
    """What these handlers ask of the running interceptor."""

    marks: Placements
    parted: bool
    ascending: bool
    numbered: bool
    device: torch.device
    copies: RowCopies
    keeping: KeptTensors
    turn: ForwardPass

    def __torch_function__(self, func: Any, types: Any, args: Any = ..., kwargs: Any = ...) -> Any:
        """Answer one torch call of the forward."""

    @property
    def own(self) -> int:
        """Number of rows that this rank owns."""

    @property
    def vertices(self) -> int:
        """Number of vertices of the whole graph."""

    def ids_of(self, mark: Placement) -> Tensor:
        """Return the original numbers of the vertices that a tensor has rows for."""

    def ids_in(self, mark: Placement) -> Tensor:
        """Return the original numbers of own and halo rows, in the order of the part's ids."""

    def local_of(self, ids: Tensor) -> Tensor:
        """Return the local positions of own vertices."""

    def number_of(self, mark: Placement, count: int) -> int:
        """Return how many rows all ranks have together, ``count`` of them on this rank."""

    @property
    def checked(self) -> bool:
        """Whether this forward compares headers between ranks."""

    def total(self, part: Tensor, what: str = ...) -> Tensor:
        """Return the sum over ranks, with gradient; ``what`` names it."""

    def greatest(self, part: Tensor) -> Tensor:
        """Return the maximum over ranks, without gradient."""


def length(scope: PositionScope, mark: Placement) -> int:
    """Return the length of the axis in the whole graph, or -1 if it is unknown."""
    if mark.subset is not None:
        return -1 if mark.subset.span is None else len(mark.subset.span) * mark.each
    return scope.vertices * mark.each


def span_of(scope: PositionScope, mark: Placement, item: slice) -> range:
    """Return the vertices that a slice of an axis selects."""
    whole = length(scope, mark)
    if whole < 0:
        raise refused(scope, "a slice that counts rows chosen by a mask")
    span = range(whole)[slice(as_place(item.start), as_place(item.stop), as_place(item.step))]
    if span.step < 0:
        raise refused(scope, "a slice that turns the order of vertices round")
    if mark.each > 1:
        if span and (span.step != 1 or span.start % mark.each or span.stop % mark.each):
            raise refused(scope, f"a slice that cuts through the {mark.each} entries of a vertex")
        span = range(span.start // mark.each, span.stop // mark.each)
    held = (
        mark.subset.span
        if mark.subset is not None and mark.subset.span is not None
        else range(scope.vertices)
    )
    return held[span.start : span.stop : span.step] if span else range(0)


def rows_base(scope: PositionScope, args: Args, kwargs: Kwargs) -> tuple[Tensor, Placement] | None:
    """Return a call's tensor with rows of vertices and its placement; None where all rows are local."""
    base = args[0] if args else kwargs.get("input")
    mark = scope.marks.get(base) if isinstance(base, Tensor) else None
    if not isinstance(base, Tensor) or mark is None or mark.kind not in VERTICES or not scope.parted:
        return None
    return base, mark


def dim_of(args: Args, kwargs: Kwargs, place: int, base: Tensor, default: int = 0) -> int:
    """Return the axis that a call names, as a non-negative number."""
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
    return int(dim or 0) % max(base.dim(), 1)


def refused(scope: LocatedScope, got: str, *, hint: str = "", asked: str = _TOLD_APART) -> ModelError:
    """Return the error for a call that depends on row positions in a way that no part can follow."""
    line = user_line()
    return ModelError(
        asked,
        got,
        where="; ".join(filter(None, (scope.where(), line))),
        hint=hint or f"{_WAY_OUT}; or train on one rank",
    )


def lost(scope: LocatedScope, mark: Placement, *, edges: bool = False) -> ModelError:
    """Return the error for a tensor that was made from rows by their positions, and so is lost.

    Args:
        scope: The running interceptor.
        mark: The placement of the lost tensor.
        edges: Whether the tensor says which rows are connected.
    """
    product = mark.origin.startswith(("matmul", "bmm", "mm", "einsum", "baddbmm"))
    hint = "make these edges before training (data.edge_index), not inside forward; or train on one rank"
    pairs = mark.origin.endswith(PAIRS)
    return refused(
        scope,
        f"rows that went through {mark.origin}",
        hint=hint if edges else _ATTENTION if product or pairs else "",
        asked=_BY_EDGES if pairs else _TOLD_APART,
    )
