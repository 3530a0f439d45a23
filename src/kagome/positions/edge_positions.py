"""Edge positions: edges selected by their position in the list: ``edge_index[:, :m]``, ``torch.arange(E)``.

Where it sits: ``intercept.interceptor`` asks these handlers first, on a part of the graph. A position in a
user's forward is one in the whole graph's list. A part has some of the edges, in the same order, and knows
the position of each.

::

    edge_index[:, :m], w[::2]     own edges among the selected ones; likewise narrow, split and chunk
    arange(edge_index.size(1))    the positions of own edges
    messages[3], messages[rev]    refused: the row may be on another rank
    cumsum, roll, view(K, P, F)   refused: a row's result depends on the rows before it

Positions that a library makes for itself (a sort by target and back) are local to the part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import now
from kagome.errors import ModelError
from kagome.placement.placement import IDS, Placement, PlacementKind
from kagome.placement.symbolic_size import SymbolicSize, as_place, behind
from kagome.positions.edge_tables import WAY_OUT, Cutter, edge_axis, own_edges
from kagome.positions.position_scope import FULL, Args, Func, Kwargs, items_of, pieces_of
from kagome.user_frame import from_library, user_line

__answers__ = True  # for ``user_frame``: functions here are also methods of numbers


class EdgeScope(Cutter, Protocol):
    """The interface of the running interceptor that these handlers use."""

    parted: bool
    device: torch.device

    def __torch_function__(self, func: Any, types: Any, args: Any = ..., kwargs: Any = ...) -> Any:
        """Answer one torch call of the forward."""


class EdgeEntries(SymbolicSize):
    """A sum or multiple of numbers of edges: this part's as the size of a tensor, the whole graph's else."""

    def _known(self) -> int:
        return int(self) if from_library() else self.of_all()

    def __add__(self, other: Any) -> Any:
        return _reckoned(self, other, operator.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return _reckoned(self, other, operator.sub)

    def __mul__(self, other: Any) -> Any:
        return _times(self, other)

    __rmul__ = __mul__


def _reckoned(one: Any, other: Any, do: Callable[[Any, Any], Any]) -> Any:
    """Return a sum or difference of numbers of edges; with a plain number it is no size of a tensor."""
    if isinstance(other, SymbolicSize) or other == 0:
        return _both(one, other, do)
    return do(one._known(), other)


def _times(one: Any, other: Any) -> Any:
    """Return a multiple of a number of edges; of a fraction the whole graph's."""
    whole = isinstance(other, int) and not isinstance(other, SymbolicSize)
    return _both(one, other, operator.mul) if whole else one._known() * as_place(other)


def _both(one: Any, other: Any, do: Callable[[Any, Any], Any]) -> Any:
    out = do(int(one), int(behind(other)))
    if from_library():
        return out
    return EdgeEntries(out, Placement(PlacementKind.LOCAL), lambda: do(one.of_all(), as_place(other)))


class EdgeCount(SymbolicSize):
    """The number of a part's edges in user code. Arithmetic on it would give positions on this part only."""

    def _known(self) -> int:
        return int(self) if from_library() else self.of_all()

    def _with(self, other: Any, what: str, do: Callable[[Any, Any], Any]) -> Any:
        # Counts of two concatenated lists may be added: both are this part's. PyG computes with local counts.
        if isinstance(other, int) and (isinstance(other, SymbolicSize) or other == 0 or from_library()):
            return _both(self, other, do)
        raise _refused("", f"the number of edges {what} {other!r}, a place among a part's edges")

    def __add__(self, other: Any) -> Any:
        return self._with(other, "plus", operator.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._with(other, "minus", operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, "taken from", lambda one, two: two - one)

    def __mul__(self, other: Any) -> Any:
        return _times(self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if (part := self._part(other)) is not None:
            return part
        return self._whole(other, "divided by", operator.floordiv)

    def __mod__(self, other: Any) -> Any:
        if self._part(other) is not None:
            return 0
        return self._whole(other, "modulo", operator.mod)

    def _whole(self, other: Any, what: str, do: Callable[[Any, Any], Any]) -> Any:
        return as_place(self._with(other, what, do))  # no size of a tensor


def counts(scope: Any, placement: Placement) -> type[SymbolicSize]:
    """Return the class of number that counts rows of this placement."""
    return EdgeCount if placement.kind is PlacementKind.PAIRS and scope.parted else SymbolicSize


def refused(scope: EdgeScope, got: str, *, hint: str = "") -> ModelError:
    """Return the error for a call that depends on edge positions in a way that no part can follow."""
    return _refused(scope.where(), got, hint)


def _refused(where: str, got: str, hint: str = "") -> ModelError:
    return ModelError(
        "edges told apart by what they hold, or by slices of the whole graph's list",
        got,
        where="; ".join(filter(None, (where, user_line()))),
        hint=hint or f"{WAY_OUT}, or train on one rank",
    )


def _edge_axis(scope: EdgeScope, tensor: Any) -> tuple[int, Placement] | None:
    """Return the axis along which a tensor has one entry per edge, and its placement."""
    placement = scope.placements.get(tensor) if scope.parted else None
    if placement is None:
        return None
    # Ids of one end that forward has put into a column are not followed here.
    if placement.kind in (PlacementKind.SOURCE, PlacementKind.TARGET) and tensor.dim() != 1:
        return None
    axis = edge_axis(tensor, placement)
    return None if axis is None else (axis, placement)


def _ids(scope: EdgeScope, tensor: Tensor, axis: int, placement: Placement) -> Tensor | None:
    """Return each edge's position in the whole list; None if the edges are not exactly those of a view."""
    # Only the lists that the part itself provides are in the graph's order. A list that forward made (with
    # self-loops, or with edges dropped) has another position for each edge.
    at = _view(scope, tensor if placement.kind is PlacementKind.EDGES else placement.edges)
    ids = None if at is None else scope.views[at].edge_ids
    return ids if ids is not None and tensor.size(axis) == ids.numel() else None


def _view(scope: EdgeScope, edges: Tensor | None) -> int | None:
    """Return the number of the view that provides a list of edges; None if forward made the list."""
    return next((at for at, v in enumerate(scope.views) if edges is v.edge_index or edges is v.given), None)


def _subset(tensor: Tensor, placement: Placement) -> Placement:
    """Return the placement of a selection of the edges."""
    # ``edges`` would claim that there is a row for each edge of that list.
    return replace(placement, edges=None)


def getitem(scope: EdgeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer an index that selects along the edge axis."""
    found = _edge_axis(scope, args[0])
    if found is None:
        return NotImplemented
    axis, placement = found
    items, at = items_of(args[1], args[0].dim(), axis)
    item = items[at]
    if isinstance(item, slice) and item == FULL:
        return NotImplemented
    if isinstance(item, slice):
        return _sliced(scope, now(args[0]), axis, placement, items, at)
    if isinstance(item, list):
        item = torch.as_tensor(item)
    if isinstance(item, Tensor):
        return _chosen(scope, func, args, axis, placement, items, at)
    if from_library():
        return NotImplemented
    raise refused(scope, f"one edge read by its place, {item!r}")


def _sliced(
    scope: EdgeScope, base: Tensor, axis: int, placement: Placement, items: list[Any], at: int
) -> Any:
    item = items[at]
    counts = [end for end in (item.start, item.stop) if end is not None]
    ids = None if from_library() else _ids(scope, base, axis, placement)
    local = all(isinstance(end, SymbolicSize) or end == 0 for end in counts) and item.step in (None, 1)
    if local and ids is None:
        out = base[tuple(items)]  # counts of this part's edges: a slice of concatenated lists
        return _placed(scope, out, base, placement, items, at)
    if from_library():
        return NotImplemented
    if ids is None:
        raise refused(scope, "a slice that counts edges of a list made in forward")
    items[at] = _own_slice(scope, ids, item, scope.views[placement.view].count)
    return _placed(scope, base[tuple(items)], base, placement, items, at)


def _own_slice(scope: EdgeScope, ids: Tensor, item: slice, count: int) -> slice | Tensor:
    """Convert a slice of the whole list to one of own edges, or to their positions if it has a step."""
    # ``edge_ids`` ascends, so a slice of the whole list is one run of own edges:
    #   edge_ids  1 3 4 7     edge_index[:, 2:6]     own edges 1:3, the graph's edges 3 and 4
    # A count of edges among its bounds is the whole graph's.
    whole = range(count)[slice(as_place(item.start), as_place(item.stop), item.step)]
    if whole.step < 0:
        raise refused(scope, "a slice that turns the order of edges round")
    with torch._C.DisableTorchFunction():
        ends = torch.tensor([whole.start, whole.stop], device=ids.device)
        begin, end = torch.searchsorted(ids, ends).tolist()
        if whole.step == 1:
            return slice(begin, max(begin, end))
        places = torch.arange(begin, max(begin, end), device=ids.device)
        # With a step: those edges of the run whose position in the whole list is on the step.
        return places[(ids[begin:end] - whole.start) % whole.step == 0]


def _chosen(
    scope: EdgeScope, func: Func, args: Args, axis: int, placement: Placement, items: list[Any], at: int
) -> Any:
    """Select edges by one flag each, or by numbers."""
    base, item = now(args[0]), items[at]
    held = scope.placements.get(item)
    if item.dtype in (torch.bool, torch.uint8):
        if item.dim() != 1:
            return NotImplemented
        # One flag for each edge of the graph, equal on all ranks, selects among own edges.
        if held is None and item.numel() == scope.views[placement.view].count != base.size(axis):
            if _ids(scope, base, axis, placement) is None:
                raise refused(scope, "flags of the graph's edges that choose among edges made in forward")
            items[at] = own_edges(scope, item, 0, placement)
        with torch._C.DisableTorchFunction():
            out = base[tuple(items)]
        return _placed(scope, out, base, placement, items, at)
    # Positions among own edges select own rows. MIXED ids are refused by the handler of gathers.
    if held is not None and held.kind in (PlacementKind.LOCAL, PlacementKind.MIXED):
        return NotImplemented
    if from_library() and (held is None or held.kind is not PlacementKind.PAIRS):
        return NotImplemented
    raise refused(
        scope,
        f"rows of other edges read by their numbers, of a tensor of shape {list(base.shape)}",
        hint="a pair of edges shares what both hold: give it as data.edge_attr, or train on one rank",
    )


def _placed(
    scope: EdgeScope, out: Tensor, base: Tensor, placement: Placement, items: list[Any], at: int
) -> Tensor:
    """Return the result of an index with the placement of a selection of edges."""
    if placement.kind is PlacementKind.PAIRS:
        before = items[:at]
        # Before the edge axis an integer removes an axis and None adds one.
        gone = sum(isinstance(each, int) and not isinstance(each, bool) for each in before)
        new = sum(each is None for each in before)
        place = placement.axis - gone + new
        return scope.placements.put(out, replace(_subset(base, placement), axis=place))
    head = items[0]
    if placement.kind is PlacementKind.EDGES and at == 1 and isinstance(head, int):
        # Row 1 names targets, unless the rows are swapped. With edges of both directions neither row does.
        target = (head % 2 == 1) is not placement.swapped and not placement.both
        return scope.placements.put(
            out, Placement(PlacementKind.TARGET if target else PlacementKind.SOURCE, placement.view)
        )
    if placement.kind is PlacementKind.EDGES and not (
        isinstance(head, slice) and head == FULL and out.dim() == 2
    ):
        return scope.placements.put(out, Placement(PlacementKind.MIXED))
    return scope.placements.put(out, _subset(base, placement))


def index_select(scope: EdgeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``messages.index_select(0, ids)`` along the edge axis."""
    base = args[0]
    found = _edge_axis(scope, base)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    index = kwargs.get("index", args[2] if len(args) > 2 else None)
    if found is None or dim % base.dim() != found[0] or not isinstance(index, Tensor):
        return NotImplemented
    items: list[Any] = [FULL] * found[0] + [index]
    return _chosen(scope, func, args, *found, items, found[0])


def narrow(scope: EdgeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``narrow`` along the edge axis as a slice."""
    base = args[0]
    found = _edge_axis(scope, base)
    given = {**dict(zip(("dim", "start", "length"), args[1:], strict=False)), **kwargs}
    if found is None or given["dim"] % base.dim() != found[0]:
        return NotImplemented
    start, length = given["start"], given["length"]
    if not isinstance(start, SymbolicSize):
        # narrow(0, -4, 4): from the end of the whole list, where a slice -4:0 would be empty.
        start = int(start)
        start += scope.views[found[1].view].count if start < 0 else 0
        # narrow(0, 0, edge_index.size(1)) ends at the count itself; a sum would be a plain number.
        if start == 0:
            return _cut(scope, base, *found, slice(0, length))
    return _cut(scope, base, *found, slice(start, start + length))


def _cut(scope: EdgeScope, base: Tensor, axis: int, placement: Placement, item: slice) -> Any:
    items: list[Any] = [FULL] * base.dim()
    items[axis] = item
    return _sliced(scope, now(base), axis, placement, items, axis)


def split(scope: EdgeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``split`` and ``chunk`` along the edge axis as slices of the whole list."""
    base = args[0] if args else kwargs.get("input")
    found, how = _edge_axis(scope, base), pieces_of(args, kwargs)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if found is None or base is None or dim % base.dim() != found[0] or from_library():
        return NotImplemented
    if isinstance(how, (tuple, list)) and all(isinstance(size, SymbolicSize) for size in how):
        return NotImplemented  # concatenated lists, each of this part's edges
    if _ids(scope, base, *found) is None:
        raise refused(scope, f"{name}, which cuts a list of edges made in forward into pieces")
    with torch._C.DisableTorchFunction():
        # torch itself says where the pieces of the whole list end. Each becomes a slice of own edges.
        places = getattr(torch, name.replace("split_with_sizes", "split"))(
            torch.arange(scope.views[found[1].view].count), as_place(how)
        )
    ends = [(int(piece[0]), int(piece[-1]) + 1) if piece.numel() else (0, 0) for piece in places]
    return tuple(_cut(scope, base, *found, slice(*each)) for each in ends)


def arange(scope: EdgeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``torch.arange(edge_index.size(1))`` with the positions of own edges; likewise ``linspace``."""
    count = next((each for each in (*args, *kwargs.values()) if isinstance(each, SymbolicSize)), None)
    if any(isinstance(each, EdgeEntries) for each in (*args, *kwargs.values())) and not from_library():
        raise refused(scope, f"{name} of a sum or multiple of numbers of edges")
    if count is None or not scope.parted or count.placement.kind is not PlacementKind.PAIRS:
        return NotImplemented
    # PyG numbers the part's edges to sort them and to undo the sort: local positions are right there.
    if from_library():
        return scope.placements.put(func(*args, **kwargs), Placement(PlacementKind.LOCAL))
    view = _view(scope, count.placement.edges)
    if view is None or int(count) != scope.views[view].edge_ids.numel():
        raise refused(scope, f"{name}, which counts edges of a list made in forward")
    edges = scope.views[view].count
    given = [edges if isinstance(each, SymbolicSize) else each for each in args]
    named = {key: edges if isinstance(each, SymbolicSize) else each for key, each in kwargs.items()}
    with torch._C.DisableTorchFunction():
        # All E numbers, of which own ones are kept: linspace and logspace cannot start in the middle.
        every: Tensor = func(*given, **named)
    if every.numel() != edges:
        raise refused(scope, f"{name} with {every.numel():,} numbers for {edges:,} edges")
    return own_edges(scope, every, 0, Placement(PlacementKind.PAIRS, view))


def by_order(scope: EdgeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Refuse calls along the edge axis in which a row's result depends on the rows before it."""
    base = args[0] if args else None
    found = _edge_axis(scope, base)
    if found is None or base is None or from_library():
        return NotImplemented
    place, default = _DIMS.get(name, (1, None))
    dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    if name == "flip" and len(args) > 2:
        dims = args[1:]
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    # Along another axis each row is by itself. No axis given (None) means all of them, or a flattened tensor.
    if all(isinstance(dim, int) and dim % base.dim() != found[0] for dim in dims):
        return NotImplemented
    raise refused(scope, f"{name} along the list of edges")


_DIMS: Final[dict[str, tuple[int, int | None]]] = {
    "unbind": (1, 0),
    "diff": (2, -1),
    "roll": (2, None),
    "take_along_dim": (2, None),
    # These take no axis: 9 is behind every argument, so that the default is used.
    "fliplr": (9, 1),
    "flipud": (9, 0),
}
"""Argument index of the axis where it is not 1, and the axis used where none is given."""


def setitem(scope: EdgeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``w[:m] = 2`` with the same slice of own edges."""
    base = args[0]
    found = _edge_axis(scope, base)
    if found is None:
        return NotImplemented
    axis, placement = found
    items, at = items_of(args[1], base.dim(), axis)
    item = items[at]
    held = scope.placements.get(item)
    if (isinstance(item, slice) and item == FULL) or held is not None or from_library():
        return NotImplemented
    # A mask of own edges, computed on this rank: torch's own assignment is right.
    if isinstance(item, Tensor) and item.dtype == torch.bool and item.numel() == base.size(axis):
        return NotImplemented
    ids = _ids(scope, base, axis, placement)
    if not isinstance(item, slice) or ids is None:
        raise refused(scope, "edges written to by their places")
    items[at] = _own_slice(scope, ids, item, scope.views[placement.view].count)
    return func(base, tuple(items), args[2])


def viewed(scope: EdgeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Refuse ``messages.view(K, P, F)``, which groups edges by their positions in the list."""
    base = args[0] if args else kwargs["input"]
    placement = scope.placements.get(base) if scope.parted else None
    if placement is None or placement.kind is not PlacementKind.PAIRS or from_library():
        return NotImplemented
    shape: Any = kwargs.get("shape", kwargs.get("size", args[1:]))
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if name == "unflatten":
        dim = (kwargs["dim"] if "dim" in kwargs else args[1]) % base.dim()
        if dim != placement.axis:
            return NotImplemented  # splits the columns of each edge
        inner = kwargs["sizes"] if "sizes" in kwargs else args[2]
        shape = (*base.shape[:dim], *inner, *base.shape[dim + 1 :])
    sizes = [size for size in shape if isinstance(size, int)]
    # Served are shapes that keep the edge axis whole, or end in it. [before, E, rest]:
    #   [E, H * C]    view(-1, H, C), view(E, H, C)    one row per edge stays
    #                 view(-1)                         edges stay in order, several entries each
    #                 view(K, P, F)                    refused: which edges share a group depends on the part
    rows, before = base.size(placement.axis), base.shape[: placement.axis].numel()
    rest = base.shape[placement.axis + 1 :].numel()
    for place in range(len(sizes)):
        front = sizes[:place]
        if -1 in front or int(torch.Size(front).numel()) != before:
            continue
        size = sizes[place]
        counts = isinstance(size, SymbolicSize) and not isinstance(size, EdgeEntries)
        if size == -1 or counts or (size == rows and rows != 1):
            # -1 stands for the edge axis only if the sizes behind it divide what belongs to one edge.
            inner = torch.Size(sizes[place + 1 :]).numel()
            if size != -1 or (inner and rest % inner == 0):
                return NotImplemented
        if size == rows * rest:
            return NotImplemented
    raise refused(scope, f"{name} to {sizes}, which groups edges by their places in the list")


def scatter(scope: EdgeScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Cut the rows written by ends of a part's edges from one per edge of the graph to this part's own."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    index = kwargs.get("index", args[2] if len(args) > 2 else None)
    key = next((key for key in ("src", "source") if key in kwargs), None)
    value = kwargs[key] if key else args[3] if len(args) > 3 else None
    placement = scope.placements.get(index) if scope.parted else None
    if (
        placement is None
        or placement.kind not in IDS
        or not isinstance(value, Tensor)
        or not isinstance(index, Tensor)
    ):
        return NotImplemented
    axis = dim % max(args[0].dim(), 1)
    # As many rows as ids: nothing to cut.
    if value.dim() <= axis or value.size(axis) == index.size(0 if index.dim() == 1 else axis):
        return NotImplemented
    if scope.placements.get(value) is not None or value.size(axis) != scope.views[placement.view].count:
        raise refused(scope, f"{name} with {value.size(axis):,} rows for {index.size(0):,} edges")
    own = own_edges(scope, value, axis, placement)
    # The call is made again, so that the handler of scatters answers it with own rows.
    if key:
        return scope.__torch_function__(func, (), args, {**kwargs, key: own})
    return scope.__torch_function__(func, (), (*args[:3], own, *args[4:]), kwargs)


HANDLERS: dict[str, Callable[..., Any]] = {
    "__getitem__": getitem,
    "__setitem__": setitem,
    "index_select": index_select,
    "narrow": narrow,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), split),
    **dict.fromkeys(("arange", "linspace", "logspace"), arange),
    **dict.fromkeys(
        [
            "cumsum",
            "cumprod",
            "cummax",
            "cummin",
            "logcumsumexp",
            "roll",
            "flip",
            "diff",
            "unfold",
            "unbind",
            "select",
            "gather",
            "take_along_dim",
            "fliplr",
            "flipud",
        ],
        by_order,
    ),
    **dict.fromkeys(("view", "reshape", "unflatten"), viewed),
    **dict.fromkeys(
        ("scatter_add_", "scatter_add", "index_add_", "index_add", "scatter_reduce_", "scatter_reduce"),
        scatter,
    ),
}
"""Handlers asked before all others, on a part of the graph alone."""
