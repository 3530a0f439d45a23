"""Row positions: rows selected by position among all vertices: ``x[:6000]``, ``x[-4:]``, ``x[5]``.

Where it sits: ``intercept.interceptor`` asks these handlers before those of ``intercept.gather_scatter``. A
position in a user's forward is one among the vertices of the whole graph. A part has some of them, in its own
order.

::

    x[2:6]             own rows among vertices 2 to 5           a subset: its placement keeps the positions
    x[5], x[ids]       rows of named vertices, on every rank    summed over ranks: one of them has the row
    cat([a, b])        subsets that make up all vertices        every row back at its own position
    table[:x.size(0)]  a tensor with a row for each vertex      own rows of it
    arange(x.size(0))  the numbers of own vertices

Other uses of positions (``cumsum`` over vertices, ``view(K, P, F)``) are refused by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import now
from kagome.halo.exchange import NAMED
from kagome.placement.placement import VERTICES, Placement, PlacementKind
from kagome.placement.row_subset import RowSubset, among
from kagome.placement.symbolic_size import as_place
from kagome.positions.position_scope import (
    FULL,
    Args,
    Func,
    Kwargs,
    PositionScope,
    dim_of,
    items_of,
    pieces_of,
    rows_base,
    span_of,
)
from kagome.scope.rows import refused
from kagome.user_frame import from_library


def getitem(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x[...]`` where the item at the row axis is a position or selects among positions."""
    base, index = args[0], args[1]
    placement = scope.placements.get(base)
    if placement is None or placement.kind not in VERTICES:
        return NotImplemented
    items, at = items_of(index, base.dim(), placement.axis)
    item = items[at]
    if type(item) is slice and item == FULL:
        return NotImplemented
    alone = all(type(each) is slice and each == FULL for i, each in enumerate(items) if i != at)
    # A mask of own rows, or ids of this part: the index already selects among own rows.
    if isinstance(item, Tensor) and _known(scope, item):
        return _chosen(scope, func, base, index, placement, item) if alone else NotImplemented
    # PyG computes with the part's own sizes, so its positions are local and torch's own indexing is right.
    if scope.parted and from_library():
        return NotImplemented
    # The whole graph is local, so torch's slice is right. Draws still need to know which vertices it has.
    if not scope.parted:
        return _noted(scope, func, now(base), index, placement, item) if alone else NotImplemented
    out = take(scope, base, placement, item)
    # One position: the result has no axis of vertices, and every rank has it. In plain PyTorch it is a view.
    if isinstance(item, int):
        del items[at]
        return scope.copies.note(out[tuple(items)] if not alone else out)
    if alone:
        return out
    # Rows are selected already, so the other axes are indexed with the row axis taken whole.
    items[at] = FULL
    if isinstance(item, Tensor) and any(isinstance(each, (Tensor, list)) for each in items):
        raise refused(scope, "x[ids, columns], which picks single entries by the numbers of vertices")
    return scope.__torch_function__(Tensor.__getitem__, (), (out, tuple(items)))


def _chosen(
    scope: PositionScope, func: Func, base: Tensor, index: Any, placement: Placement, item: Tensor
) -> Any:
    """Answer ``x[mask]`` and ``x[order]``: own rows selected by one flag per row, or by own positions."""
    held = scope.placements.get(item)
    # x[arange(x.size(0))]: the index holds original numbers of own vertices, so no other rank is asked.
    if held is not None and held.kind is PlacementKind.NUMBERS:
        scope.numbered = True
        places = scope.ids.local_of(item, placement.vertex_set)
        out = (
            rows_at(now(base), placement, places, whole=False)
            if placement.is_complete and item.dim() == 1
            else NotImplemented
        )
        return out if out is NotImplemented else scope.placements.put(out, replace(placement))
    # A flag per own row selects whatever it was computed from. Positions do so only if they were made on this
    # part (LOCAL): an argsort of own rows, say. Any other integers would be vertex numbers held as data.
    own = held is None or held.kind in (*VERTICES, PlacementKind.LOCAL)
    if not own or item.dim() != 1 or placement.each > 1:
        return NotImplemented
    flags = item.dtype in (torch.bool, torch.uint8)
    if (flags and item.numel() != base.size(placement.axis)) or not (
        flags or (held and held.kind is PlacementKind.LOCAL)
    ):
        return NotImplemented
    out = func(now(base), index)
    with torch._C.DisableTorchFunction():
        places = item.bool() if flags else item
        # A subset names positions among all own rows, also where x itself has rows of some of them.
        if placement.subset is not None:
            places = placement.subset.places()[places]
    return scope.placements.put(out, replace(placement, subset=RowSubset(places)))


def _noted(
    scope: PositionScope, func: Func, base: Tensor, index: Any, placement: Placement, item: Any
) -> Any:
    """Run a slice where all rows are local, and record which vertices it selects, for random draws."""
    # A subset that a mask selected has no span, so a slice of it is no range of vertices.
    spanned = placement.subset is None or placement.subset.span is not None
    if not isinstance(item, slice) or placement.each > 1 or not spanned:
        return NotImplemented
    numbers = slice(as_place(item.start), as_place(item.stop), as_place(item.step))
    out = func(base, index)
    held = (
        range(scope.sets.of(placement).size)
        if placement.subset is None or placement.subset.span is None
        else placement.subset.span
    )
    span = held[numbers]
    member = None if placement.subset is not None else scope.sets.span(placement.vertex_set, span)
    if member is not None:
        return scope.placements.put(out, replace(placement, vertex_set=member))
    with torch._C.DisableTorchFunction():
        return scope.placements.put(
            out,
            replace(
                placement, subset=RowSubset(torch.arange(scope.sets.of(placement).own)[list(span)], span)
            ),
        )


def _known(scope: PositionScope, item: Tensor) -> bool:
    """Return True if an index already refers to own rows, rather than listing numbers of vertices."""
    placement = scope.placements.get(item)
    # Ids, LOCAL positions and NUMBERS refer to this part. Rows of integers are vertex numbers held as data.
    if placement is not None and placement.kind is not PlacementKind.LOST:
        return placement.kind not in (PlacementKind.ROWS, PlacementKind.PAIRS) or item.dtype == torch.bool
    # A mask without a placement has an entry per own row, or, as a constant of the model, one per vertex.
    if item.dtype in (torch.bool, torch.uint8):
        whole = item.dim() == 1 and any(item.numel() == each.size for each in scope.sets)
        return not scope.parted or not whole
    return not scope.parted


def take(scope: PositionScope, base: Tensor, placement: Placement, item: Any) -> Tensor:
    """Return the whole graph's rows that an index item names, as far as this part has them.

    Args:
        scope: The running interceptor.
        base: A tensor with rows of vertices.
        placement: Its placement.
        item: A position, a slice, or a list of positions among all rows of the axis.

    Returns:
        Those rows on every rank, for one position or a list. Own rows among them, for a slice.
    """
    scope.numbered, base = True, now(base)
    if isinstance(item, int):
        return _one(scope, base, placement, item)
    if isinstance(item, slice):
        return _spanned(scope, base, placement, span_of(scope, placement, item))
    if isinstance(item, (list, range)):
        item = torch.as_tensor(list(item), device=base.device)
    if not isinstance(item, Tensor):
        raise refused(scope, f"rows indexed by a {type(item).__name__}")
    if item.dtype in (torch.bool, torch.uint8):
        return _masked(scope, base, placement, item)
    if (held := scope.placements.get(item)) is not None and held.kind in (
        PlacementKind.ROWS,
        PlacementKind.PAIRS,
    ):
        holder = "vertex" if held.kind is PlacementKind.ROWS else "edge"
        raise refused(
            scope,
            f"rows of other vertices read by numbers that each {holder} holds",
            hint="rebuild the edges before training (data.edge_index): make edges of them, of which row 0 "
            "holds the numbers and row 1 the vertices that read",
        )
    return _listed(scope, base, placement, item)


def _spanned(scope: PositionScope, base: Tensor, placement: Placement, span: range) -> Tensor:
    """Return own rows among a span of vertices."""
    # The span covers the axis: a view, so that writes to it reach x as in plain PyTorch.
    if len(span) * placement.each == scope.axes.length(placement):
        return scope.placements.put(base.view_as(base), placement)
    ids = scope.ids.of(placement)
    with torch._C.DisableTorchFunction():
        inside = among(ids, span)
        chosen = inside.nonzero().view(-1)
        held = placement.subset.places() if placement.subset is not None else None
        out = rows_at(base, placement, chosen, whole=scope.ids.ascending)
        # The rows were copied, because they are not contiguous here. A write to the copy would not reach x.
        if out._base is None:
            scope.copies.note(out)
    if held is None and (member := scope.sets.span(placement.vertex_set, span)) is not None:
        return scope.placements.put(out, replace(placement, vertex_set=member))  # cat([a, b])[: len(a)]
    subset = RowSubset(chosen if held is None else held[chosen], span)
    return scope.placements.put(out, replace(placement, subset=subset))


def rows_at(base: Tensor, placement: Placement, chosen: Tensor, *, whole: bool) -> Tensor:
    """Return rows at positions along the row axis; contiguous rows are returned as a view."""
    # Own rows usually ascend in the graph's order, so a span of vertices is one run of own rows.
    first = int(chosen[0]) if chosen.numel() else 0
    if (
        placement.each == 1
        and whole
        and (not chosen.numel() or int(chosen[-1]) - first + 1 == chosen.numel())
    ):
        return base.narrow(placement.axis, first, chosen.numel())
    if placement.each == 1:
        return base.index_select(placement.axis, chosen)
    # [rows * each] -> [rows, each]
    apart = base.unflatten(placement.axis, (base.size(placement.axis) // placement.each, placement.each))
    out: Tensor = apart.index_select(placement.axis, chosen).flatten(placement.axis, placement.axis + 1)
    return out


def _masked(scope: PositionScope, base: Tensor, placement: Placement, mask: Tensor) -> Tensor:
    """Return own rows where a mask over all vertices is true."""
    if placement.subset is not None or placement.each > 1:
        raise refused(scope, "a mask of all vertices that chooses among some of them")
    # [N] -> [n]
    own = scope.placements.put(
        mask.bool()[scope.ids.of(placement)], Placement(PlacementKind.ROWS, vertex_set=placement.vertex_set)
    )
    with torch._C.DisableTorchFunction():
        chosen = own.nonzero().view(-1)
        out = base.index_select(placement.axis, chosen)
    return scope.placements.put(out, replace(placement, subset=RowSubset(own)))


def _one(scope: PositionScope, base: Tensor, placement: Placement, place: int) -> Tensor:
    whole = scope.axes.length(placement)
    place = int(as_place(place))
    if whole >= 0 and not -whole <= place < whole:
        raise IndexError(f"index {place} is out of bounds for dimension {placement.axis} with size {whole}")
    return _listed(scope, base, placement, torch.tensor(place, device=base.device))


def _listed(scope: PositionScope, base: Tensor, placement: Placement, places: Tensor) -> Tensor:
    """Return rows of named vertices, on every rank."""
    whole = scope.axes.length(placement)
    if whole < 0 or placement.each > 1:
        raise refused(scope, "rows that a mask has chosen, or that lie several a vertex, read by number")
    ids = scope.ids.of(placement)
    _alike(scope, places)
    with torch._C.DisableTorchFunction():
        # The rank that owns a wanted vertex contributes its row and all others contribute zeros:
        #   wanted         5    7    9
        #   rank 0, owns 5, 9    x5   0    x9
        #   rank 1, owns 7       0    x7   0      sum over ranks: x5 x7 x9 on both
        # Backward of the sum gives each owner the gradients of all ranks.
        wanted = torch.where(places < 0, places + whole, places).reshape(-1)
        if wanted.numel() and not bool(((wanted >= 0) & (wanted < whole)).all()):
            raise IndexError(f"an index is out of bounds for dimension {placement.axis} with size {whole}")
        # Positions within x[a:b:s] become original numbers.
        if placement.subset is not None and placement.subset.span is not None:
            wanted = placement.subset.span.start + wanted * placement.subset.span.step
        order = ids.argsort()
        # The search also finds a place for a vertex that is not here; comparing the ids tells the two apart.
        at = torch.searchsorted(ids[order], wanted).clamp(max=max(ids.numel() - 1, 0))
        local = order[at] if ids.numel() else at
        mine = ids[local] == wanted if ids.numel() else torch.zeros_like(wanted, dtype=torch.bool)
        shape = [wanted.numel(), *(s for d, s in enumerate(base.shape) if d != placement.axis)]
        front = base.movedim(placement.axis, 0)
        found = front.new_zeros(shape)
        found = found.index_add(0, mine.nonzero().view(-1), front[local[mine]])
    # An all-reduce cannot sum flags.
    wide = found.to(torch.int64) if found.dtype == torch.bool else found
    summed = scope.ranks.total(wide, NAMED).to(found.dtype)
    with torch._C.DisableTorchFunction():
        out = summed.reshape(*places.shape, *summed.shape[1:])
        return out.movedim(tuple(range(places.dim())), tuple(placement.axis + i for i in range(places.dim())))


def _alike(scope: PositionScope, places: Tensor) -> None:
    """Refuse vertex numbers that differ between ranks, because they were made from a part's own rows."""
    if not scope.forward.forward_pass.checked:
        return
    with torch._C.DisableTorchFunction():
        # Count and checksum of the list, order included: ranks add up the rows of equal places in it. max(w)
        # and max(-w), in one all-reduce, show whether all ranks have the same.
        told = zlib.crc32(places.to("cpu", torch.int64).contiguous().numpy().tobytes())
        word = torch.tensor([places.numel(), told], dtype=torch.float64)
        both = torch.cat([word, -word]).to(places.device)
    with scope.forward.forward_pass.reading_once():  # later forward passes skip this check
        most, least = scope.ranks.greatest(both).view(2, 2)
    if not torch.equal(most, -least):
        raise refused(scope, "rows read by numbers that are not the same on all ranks")


def narrow(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x.narrow(0, start, length)`` as a slice."""
    held = rows_base(scope, args, kwargs)
    if held is None or dim_of(args, kwargs, 1, held[0]) != held[1].axis or from_library():
        return NotImplemented
    start = as_place(kwargs.get("start", args[2] if len(args) > 2 else 0))
    count = as_place(kwargs.get("length", args[3] if len(args) > 3 else 0))
    start = start + max(scope.axes.length(held[1]), 0) if start < 0 else start
    return take(scope, *held, slice(start, start + count))


def select(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x.select(0, place)`` as an index."""
    held = rows_base(scope, args, kwargs)
    if held is None or dim_of(args, kwargs, 1, held[0]) != held[1].axis or from_library():
        return NotImplemented
    return scope.copies.note(
        take(scope, *held, int(as_place(kwargs.get("index", args[2] if len(args) > 2 else 0))))
    )


def index_select(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x.index_select(0, ids)`` by numbers of vertices that do not come from edges."""
    held = rows_base(scope, args, kwargs)
    index = kwargs.get("index", args[2] if len(args) > 2 else None)
    if held is None or not isinstance(index, Tensor) or _known(scope, index) or from_library():
        return NotImplemented
    return take(scope, *held, index) if dim_of(args, kwargs, 1, held[0]) == held[1].axis else NotImplemented


def split(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``split``, ``chunk`` and ``tensor_split`` along the vertices as spans of all of them."""
    held = rows_base(scope, args, kwargs)
    if held is None or dim_of(args, kwargs, 2, held[0]) != held[1].axis or from_library():
        return NotImplemented
    whole = scope.axes.length(held[1])
    if whole < 0:
        raise refused(scope, f"{name}, which counts rows chosen by a mask")
    ends = _ends(name, whole, pieces_of(args, kwargs))
    return tuple(take(scope, *held, slice(a, b)) for a, b in zip([0, *ends], [*ends, whole], strict=True))


def _ends(name: str, whole: int, how: Any) -> list[int]:
    """Return the positions where pieces end, except the last piece."""
    if isinstance(how, Tensor):
        how = how.tolist()
    if name == "tensor_split":
        if isinstance(how, (tuple, list)):
            return [int(as_place(each)) for each in how]
        # tensor_split(n): n pieces, of which the first ``whole % n`` have one row more.
        how = int(how)
        sizes = [whole // how + (i < whole % how) for i in range(how)]
    elif isinstance(how, (tuple, list)):
        sizes = [int(as_place(each)) for each in how]
        if sum(sizes) != whole:
            raise RuntimeError(f"split sizes sum to {sum(sizes)}, the dimension has {whole}")
    else:
        # chunk(n): pieces of ceil(whole / n) rows, possibly fewer than n. split(s): pieces of s rows.
        size = int(as_place(how)) if name != "chunk" else -(-whole // int(how))
        sizes = [size] * (whole // size) + ([whole % size] if whole % size else [])
    ends, total = [], 0
    for size in sizes[:-1]:
        total += size
        ends.append(total)
    return ends


def setitem(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x[...] = value`` where the item at the row axis is a position."""
    base, index, value = args
    placement, held = scope.placements.get(base), scope.placements.get(value)
    # A tensor that receives lost rows is lost as a whole.
    if held is not None and held.kind is PlacementKind.LOST:
        scope.placements.put(base, held)
    if placement is None or placement.kind not in VERTICES or not scope.parted:
        return NotImplemented
    items, at = items_of(index, base.dim(), placement.axis)
    item = items[at]
    held_here = isinstance(item, Tensor) and _known(scope, item)
    if (type(item) is slice and item == FULL) or held_here or from_library():
        return NotImplemented
    scope.numbered = True
    ids, whole = scope.ids.of(placement), scope.axes.length(placement)
    if placement.each > 1 or placement.subset is not None:
        raise refused(scope, "rows of some vertices written by number")
    if isinstance(item, (list, range)):
        item = torch.as_tensor(list(item), device=base.device)
    span = span_of(scope, placement, item) if isinstance(item, slice) else None
    with torch._C.DisableTorchFunction():
        if span is not None:
            wanted = torch.tensor(list(span), dtype=torch.int64, device=ids.device)
        elif isinstance(item, Tensor) and item.dtype == torch.bool:
            wanted = item.nonzero().view(-1)
        else:
            wanted = torch.as_tensor(item, device=ids.device).reshape(-1)
            wanted = torch.where(wanted < 0, wanted + whole, wanted)
        # [N]: own local row of each vertex, -1 for rows of other ranks. Each rank writes only what it owns.
        known = torch.full((scope.sets.of(placement).size,), -1, device=ids.device)
        known[ids] = torch.arange(ids.numel(), device=ids.device)
        local = known[wanted]
        mine = local >= 0
    items[at] = local[mine]
    # cat([a, b])[: len(a)] = rows of a: each rank has a row for each that it writes.
    member = None if span is None else scope.sets.span(placement.vertex_set, span)
    if held is not None and held.is_complete and held.kind in VERTICES and held.vertex_set == member:
        return func(base, tuple(items), now(value))
    return func(
        base, tuple(items), _written(scope, value, mine, base, placement, items, single=isinstance(item, int))
    )


def _written(
    scope: PositionScope,
    value: Any,
    mine: Tensor,
    base: Tensor,
    placement: Placement,
    items: list[Any],
    *,
    single: bool,
) -> Any:
    """Return own rows' share of a value given for all rows that are written."""
    # A scalar, or one row for one position, is the same for all rows written.
    if not isinstance(value, Tensor) or value.dim() == 0 or single:
        return value
    held = scope.placements.get(value)
    if held is not None and held.kind in VERTICES:
        with torch._C.DisableTorchFunction():
            # x[2:6] = f(x[2:6]): the value has own rows only, and they must be those that are written.
            same = held.subset is not None and torch.equal(held.subset.places(), items[placement.axis])
        if not same:
            raise refused(scope, "rows written by number from rows of other vertices")
        with torch._C.DisableTorchFunction():
            shared = now(value).untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        return now(value).clone() if shared else now(value)  # x[:n] += 1 writes the rows it has read
    # Row axis of the value, counted from the right: x[:9, 3] = v has one axis fewer than x.
    right = placement.axis - base.dim() + sum(isinstance(each, int) for each in items[placement.axis + 1 :])
    if value.dim() < -right or value.size(right) == 1:
        return value
    return value.index_select(value.dim() + right, mine.nonzero().view(-1).to(value.device))


def written_by_place(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``index_put``, ``index_fill`` and ``index_copy`` by vertex numbers as an assignment."""
    held = rows_base(scope, args, kwargs)
    if held is None or from_library():
        return NotImplemented
    base, placement = held
    if name.startswith("index_put"):
        index, value = _argument(args, kwargs, 1, "indices"), _argument(args, kwargs, 2, "values")
        adds, index = bool(_argument(args, kwargs, 3, "accumulate")), tuple(index)
    else:
        if dim_of(args, kwargs, 1, base) != placement.axis:
            return NotImplemented
        index = (FULL,) * placement.axis + (_argument(args, kwargs, 2, "index"),)
        value, adds = _argument(args, kwargs, 3, "value" if "fill" in name else "source"), False
    items, at = items_of(index, base.dim(), placement.axis)
    item = items[at]
    if not isinstance(item, Tensor) or _known(scope, item):
        return NotImplemented
    if adds:
        raise refused(scope, f"{name} to rows by numbers that are not those of the graph's edges")
    # index_fill returns a new tensor, index_fill_ writes to its argument.
    if not name.endswith("_"):
        base = scope.placements.put(now(base).clone(), placement)
    done = setitem(scope, "__setitem__", Tensor.__setitem__, (base, index, value), {})
    return NotImplemented if done is NotImplemented else base


def _argument(args: Args, kwargs: Kwargs, place: int, name: str) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else None)


HANDLERS: dict[str, Callable[..., Any]] = {
    "__getitem__": getitem,
    "__setitem__": setitem,
    **dict.fromkeys(("index_put", "index_put_", "index_fill", "index_fill_"), written_by_place),
    **dict.fromkeys(("index_copy", "index_copy_"), written_by_place),
    "index_select": index_select,
    "narrow": narrow,
    "select": select,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), split),
}
"""Handlers asked before all others: they turn positions among all vertices into own rows."""
