"""Places: what it means for rows to be told apart by their place among all vertices, and how that is refused.

Where it sits: ``positions``, ``row_order`` and ``whole_tables`` share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kagome.caller import user_line
from kagome.errors import ModelError
from kagome.neighbors.count import as_place
from kagome.neighbors.marks import PAIRS, VERTICES, Mark, Marks

if TYPE_CHECKING:
    from kagome.neighbors.copies import Copies
    from kagome.neighbors.kept import Kept
    from kagome.neighbors.turn import Turn

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Func = Callable[..., Any]

_TOLD_APART = "vertices are told apart by what they hold, or by their numbers in a way that parts can follow"
_BY_EDGES = (
    "a layer reads other vertices by the graph's edges, or attends to all of them by torch's attention"
)
_WAY_OUT = "give the Data an attribute with a value a vertex (data.kind = ...) and tell rows apart by that"
_ATTENTION = (
    "F.scaled_dot_product_attention(q, k, v) where all vertices attend to all, edges where some do; or train "
    "on one rank"
)
FULL = slice(None)


class Placed(Protocol):
    """Who knows where a forward is."""

    def where(self) -> str:
        """The path of the module whose forward is running."""


class Places(Placed, Protocol):
    """What these handlers ask of the running interception."""

    marks: Marks
    parted: bool
    ascending: bool
    numbered: bool
    device: torch.device
    copies: Copies
    keeping: Kept
    turn: Turn

    def __torch_function__(self, func: Any, types: Any, args: Any = ..., kwargs: Any = ...) -> Any:
        """Answer a torch call."""

    @property
    def own(self) -> int:
        """The number of vertices that this rank owns."""

    @property
    def vertices(self) -> int:
        """Vertices of the whole graph."""

    def ids_of(self, mark: Mark) -> Tensor:
        """Original numbers of the vertices whose rows lie along an axis."""

    def ids_in(self, mark: Mark) -> Tensor:
        """Original numbers of own and halo rows, in the order of the part's ids."""

    def local_of(self, ids: Tensor) -> Tensor:
        """The own rows of own vertices."""

    def number_of(self, mark: Mark, count: int) -> int:
        """How many rows, of which this rank has ``count``, all ranks have."""

    @property
    def checked(self) -> bool:
        """Whether this forward compares what the ranks do."""

    def total(self, part: Tensor, what: str = ...) -> Tensor:
        """Sum over ranks, with gradient; ``what`` it is of."""

    def greatest(self, part: Tensor) -> Tensor:
        """Maximum over ranks, without gradient."""


def length(scope: Places, mark: Mark) -> int:
    """Entries of the whole graph's axis, or -1 where they are not known."""
    if mark.subset is not None:
        return -1 if mark.subset.span is None else len(mark.subset.span) * mark.each
    return scope.vertices * mark.each


def span_of(scope: Places, mark: Mark, item: slice) -> range:
    """The vertices that a slice of an axis names."""
    whole = length(scope, mark)
    if whole < 0:
        raise refused(scope, "a slice counts rows that a mask has chosen")
    span = range(whole)[slice(as_place(item.start), as_place(item.stop), as_place(item.step))]
    if span.step < 0:
        raise refused(scope, "a slice turns the order of vertices round")
    if mark.each > 1:
        if span and (span.step != 1 or span.start % mark.each or span.stop % mark.each):
            raise refused(scope, f"a slice cuts through the {mark.each} entries of a vertex")
        span = range(span.start // mark.each, span.stop // mark.each)
    held = (
        mark.subset.span
        if mark.subset is not None and mark.subset.span is not None
        else range(scope.vertices)
    )
    return held[span.start : span.stop : span.step] if span else range(0)


def rows_base(scope: Places, args: Args, kwargs: Kwargs) -> tuple[Tensor, Mark] | None:
    """The tensor of a call that has rows of vertices, and its mark; None where all rows are here."""
    base = args[0] if args else kwargs.get("input")
    mark = scope.marks.get(base) if isinstance(base, Tensor) else None
    if not isinstance(base, Tensor) or mark is None or mark.kind not in VERTICES or not scope.parted:
        return None
    return base, mark


def dim_of(args: Args, kwargs: Kwargs, place: int, base: Tensor, default: int = 0) -> int:
    """The axis that a call names."""
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
    return int(dim or 0) % max(base.dim(), 1)


def refused(scope: Placed, what: str, *, hint: str = "", asked: str = _TOLD_APART) -> ModelError:
    """The error of a call that depends on where rows lie, in a way that no part can follow."""
    line = user_line()
    return ModelError(
        asked,
        what,
        where="; ".join(filter(None, (scope.where(), line))),
        hint=hint or f"{_WAY_OUT}; or train on one rank",
    )


def lost(scope: Placed, mark: Mark, *, edges: bool = False) -> ModelError:
    """The error of what became of rows by a call that goes by their places.

    Args:
        scope: The running interception.
        mark: Of what is lost.
        edges: Whether it tells which rows belong together.
    """
    product = mark.origin.startswith(("matmul", "bmm", "mm", "einsum", "baddbmm"))
    hint = "make these edges before training (data.edge_index), not inside forward; or train on one rank"
    pairs = mark.origin.endswith(PAIRS)
    return refused(
        scope,
        f"rows went through {mark.origin}",
        hint=hint if edges else _ATTENTION if product or pairs else "",
        asked=_BY_EDGES if pairs else _TOLD_APART,
    )
