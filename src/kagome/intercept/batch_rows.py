"""Batch rows: a batch of samples over one graph that a forward flattens into rows, and its repeated edges.

Where it sits: ``intercept.interceptor`` asks these handlers. ``scope.batches`` has the vertex sets and edges
of a batch.

::

    x.reshape(B * N, F)              [B, n, F] -> [B * n, F]     own rows of every sample, one after the other
    h.view(B, N, F)                  and back
    attr.repeat(B, 1)                [e, F] -> [B * e, F]
    cat([edges + i * stride ...])    the edges of the batch

[Note: stand-ins] A part cannot tell by its own edges what arithmetic has made of them: it may have none. So
the arithmetic is repeated on a stand-in, a short list of edges that is the same on all ranks. If it gives
copies of the stand-in, shifted from copy to copy by the numbers of vertices, it does so to any list.
Only sums with tensors of all ranks, joins and views are followed, because they look at no values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import now
from kagome.placement.axis_rules import VIEWS
from kagome.placement.placement import ALIGNED, VERTICES, PlacementKind, lose
from kagome.placement.symbolic_size import SymbolicSize, as_place
from kagome.positions.position_scope import Args, Func, Kwargs, PositionScope, dim_of
from kagome.user_frame import from_library


def view(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer a view of rows by the shapes of the whole graph: ``x.reshape(B * N, F)``."""
    base: Any = args[0] if args else None
    placement = scope.placements.get(base)
    # PyG's code gives sizes of this part.
    if placement is None or placement.kind not in ALIGNED or from_library():
        return NotImplemented
    # Sizes in user code are those of the whole graph: the part's shape follows from where its rows go.
    base = now(base)
    found = scope.batches.viewed(name, args, kwargs, base)
    if found is None:
        return NotImplemented
    shape, placed = found
    if placed is None:
        # Of rows of edges ``edge_positions`` says why; of vertices, the result is lost.
        if not scope.parted or placement.kind is PlacementKind.PAIRS:
            return NotImplemented
        out = func(base, *args[1:], **kwargs)
        lose(scope.placements, name, out)
        return out
    with torch._C.DisableTorchFunction():
        out = base.view(shape) if name.startswith(("view", "unflatten")) else base.reshape(shape)
    return scope.placements.put(out, placed)


def repeat(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``attr.repeat(B, 1)``: the rows of a batch of equal samples."""
    base = args[0] if args else kwargs.get("input")
    placement = scope.placements.get(base)
    sizes: Any = kwargs.get("repeats", kwargs.get("dims", args[1:]))
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    if placement is None or placement.kind not in ALIGNED or not isinstance(base, Tensor):
        return NotImplemented
    # bias.repeat(x.size(0), 1) makes rows: see ``row_counts.widened``.
    if not all(type(each) is int for each in sizes):
        return NotImplemented
    # ``tile`` takes fewer numbers than there are axes, which then are those of the last ones.
    axis = placement.axis + max(len(sizes) - base.dim(), 0)
    times = ([1] * (base.dim() - len(sizes)) + list(sizes))[axis]
    placed = None
    if times > 1:
        placed = scope.batches.with_copies(placement, scope.batches.copies_of(placement) * times)
    if placed is None:
        return NotImplemented
    out = func(now(base), *args[1:], **kwargs)
    return scope.placements.put(out, placed.along(axis))


def joined(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``cat([a, b])`` of all rows of one vertex set, several times: a batch of these samples."""
    values = args[0] if args else kwargs.get("tensors")
    if not isinstance(values, tuple | list) or len(values) < 2:
        return NotImplemented
    held = [scope.placements.get(each) for each in values]
    first = held[0]
    if first is None or first.kind not in VERTICES or from_library():
        return NotImplemented
    if dim_of(args, kwargs, 1, values[0]) != first.axis:
        return NotImplemented
    # Rows of some vertices, or of several sets, are for ``row_order``.
    copies = 0
    for each in held:
        if each is None or each.kind not in VERTICES or not each.is_complete or each.axis != first.axis:
            return NotImplemented
        if scope.batches.with_copies(each, 1) != scope.batches.with_copies(first, 1):
            return NotImplemented
        copies += scope.batches.copies_of(each)
    # Own rows of one sample follow those of the sample before, as in the whole graph.
    placed = scope.batches.with_copies(first, copies)
    out = func(
        [now(each) for each in values], *args[1:], **{k: v for k, v in kwargs.items() if k != "tensors"}
    )
    return scope.placements.put(out, placed)


def follow(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer arithmetic with ids by the edges of a batch, if it makes them: see [Note: stand-ins]."""
    if scope.batches.following or kwargs.get("out") is not None or from_library():
        return NotImplemented
    found = _stand_ins(scope, args, kwargs)
    if found is None:
        return NotImplemented
    number, held = found
    # The same call on the stand-in. One that does not fit it makes no copies of it.
    put = _put(scope, name, number, held)
    try:
        with torch._C.DisableTorchFunction():
            made = func(*map(put, args), **{key: put(value) for key, value in kwargs.items()})
    except (RuntimeError, IndexError, TypeError, _UnlikeError):
        return NotImplemented
    if not isinstance(made, Tensor):
        return NotImplemented
    edges = scope.batches.made_by(number, made, once=name in _SUMS | _JOINS)
    if edges is not None:
        return edges
    # Not yet: ``edges + stride``, of which ``cat`` will make copies.
    with scope.batches.unfollowed():
        noted = None if scope.recorder is None else scope.recorder.paused()
        try:
            out = scope.__torch_function__(func, (), args, kwargs)
        finally:
            if noted is not None:
                noted()
    if isinstance(out, Tensor):
        scope.batches.stand_ins[out] = number, made
    return out


class _UnlikeError(Exception):
    """A size that says nothing of the stand-in."""


def _stand_ins(scope: PositionScope, args: Args, kwargs: Kwargs) -> tuple[int, dict[int, Tensor]] | None:
    """Return the view whose ids a call works with, and the stand-in of each tensor of ids, by its ``id``.

    Returns:
        None if there is no such tensor, or another that is not the same on all ranks.
    """
    # Whole numbers without a placement are the same on all ranks: strides, and multiples of them.
    numbers, held, others = set(), {}, False
    for each in _deep((*args, *kwargs.values())):
        if each.dtype != torch.int64:
            others = True
            continue
        found = scope.batches.stand_in(each)
        if found is not None:
            numbers.add(found[0])
            held[id(each)] = found[1]
        elif scope.placements.get(each) is not None:
            others = True
    if len(numbers) != 1 or others:
        return None
    return numbers.pop(), held


def _deep(values: Any) -> Any:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif type(each) in (tuple, list):
            yield from _deep(each)


def _put(scope: PositionScope, name: str, number: int, held: dict[int, Tensor]) -> Callable[[Any], Any]:
    """Return what replaces ids by their stand-in, and numbers of edges by that of the stand-in's."""
    length, count = scope.batches.length, scope.views[number].count

    def put(value: Any) -> Any:
        if isinstance(value, Tensor):
            return held.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(put(each) for each in value)
        # A number that is added is one of vertices; any other is a size.
        if name in _SUMS or not isinstance(value, int):
            return as_place(value)
        if isinstance(value, SymbolicSize):
            whole = value.of_all()
            if not count or whole % count:
                raise _UnlikeError
            return whole // count * length
        if value and value % length == 0:
            raise _UnlikeError  # a number of the user's own that is that of the stand-in's edges
        return value

    return put


_SUMS: Final = frozenset(["add", "__add__", "__radd__", "sub", "__sub__"])
_JOINS: Final = frozenset(["cat", "concat", "concatenate", "hstack"])
FOLLOWED: Final = (
    _SUMS
    | _JOINS
    | VIEWS
    | frozenset(["stack", "unsqueeze", "transpose", "permute", "swapaxes", "movedim", "contiguous", "clone"])
    | frozenset(["expand", "repeat", "tile", "long", "to"])
)
"""Calls whose results may be the edges of a batch."""

HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(("repeat", "tile"), repeat),
    **dict.fromkeys(("cat", "concat", "concatenate", "vstack"), joined),
}
"""Calls that merge samples and rows."""
