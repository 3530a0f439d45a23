"""Gather and scatter: handlers of torch calls that read or write rows by the graph's ids, for one part.

Where it sits: the ``interceptor`` looks a call up here by its name before it runs it. The handlers of
statistics, draws and attention are in ``model.exact.handlers``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kagome.deferred import sliced_reduce
from kagome.deferred.deferral import Deferral
from kagome.deferred.edge_map import EdgeMap
from kagome.deferred.lazy_tensor import LazyTensor, now
from kagome.deferred.message import Linear
from kagome.deferred.rewrite_rules import all_computed
from kagome.errors import ModelError
from kagome.intercept import batch_rows, embedding_bag, row_counts, sparse_adjacency
from kagome.placement.axis_rules import ids_behind_axes
from kagome.placement.placement import ALIGNED, IDS, VERTICES, Placement, PlacementKind
from kagome.placement.torch_calls import Args, Func, Kwargs
from kagome.positions import (
    cut_rows,
    edge_positions,
    id_values,
    kept_tensors,
    row_order,
    row_positions,
    vertex_tables,
)
from kagome.positions.position_scope import PositionScope
from kagome.scope.exchanges import NeighborReads
from kagome.scope.rows import lost, refused
from kagome.sparse_ops import linear
from kagome.sparse_ops.edge_view import EdgeView
from kagome.sparse_ops.sparse_features import SparseFeatures
from kagome.user_code import host_reads, in_backward
from kagome.user_code.derivatives import DERIVATIVES
from kagome.user_frame import from_library


class Reader(PositionScope, Protocol):
    """The interface of the running interceptor that handlers use."""

    size: int
    views: list[EdgeView]
    inputs: dict[str, Tensor]
    reads: NeighborReads
    deferral: Deferral


Handler = Callable[[Any, str, Func, Args, Kwargs], Any]
"""A handler answers a torch call itself, or returns NotImplemented to let torch run it."""


# [Note: reads by id] What a gather reads depends on what its index stands for:
#
#     x[source]        rows of neighbours: deferred as a message, else own and halo rows are read first
#     x[target]        own rows: deferred, else torch runs it
#     table[source]    a table with all rows: the part's ids become original numbers
#     x[edge_index]    both ends at once, [2, E, ...]: own and halo rows
#     x[MIXED]         refused: ids computed from ids, whose meaning is no longer known
def _gather(scope: Reader, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x[row]`` and ``x.index_select(dim, row)``; source ids read halo rows as well."""
    base: Tensor = args[0]
    index: Any = args[1] if len(args) > 1 else None
    axis: Any = 0
    rest: Any = ()
    if name == "__getitem__":
        if (behind := ids_behind_axes(base, index)) is not None:  # x[:, row], with a leading batch axis
            return _gather(scope, "index_select", Tensor.index_select, (base, *behind), {})
        if isinstance(index, tuple) and index and isinstance(index[0], Tensor):
            index, rest = index[0], index[1:]
    else:
        axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        index = kwargs.get("index", args[2] if len(args) > 2 else None)
    placement = scope.placements.get(index)
    held = scope.placements.get(base)
    # A mask selects by position, and ids of ids (``source[perm]``) are read as torch does.
    if placement is None or index.dtype == torch.bool or (held is not None and held.kind in IDS):
        return NotImplemented
    if held is not None and held.kind is PlacementKind.LOST and placement.kind not in IDS:
        return NotImplemented  # a lost tensor stays lost
    axis = axis % max(base.dim(), 1)
    if placement.kind is PlacementKind.MIXED:
        raise _rebuilt(scope, "indexing")
    id_values.refuse_rows_by_value(scope, base, axis, index, placement)
    numbers = vertex_tables.original(scope, base, axis, index, placement) if placement.kind in IDS else None
    if (
        numbers is None
        and placement.kind in (PlacementKind.SOURCE, PlacementKind.TARGET)
        and axis == 0
        and not rest
    ):
        late = scope.deferral.defer(base, index, placement)
        if late is not None:
            return late
    base = now(base)
    if numbers is not None:
        out = base[(numbers, *rest)] if name == "__getitem__" else base.index_select(axis, numbers)
    else:
        out = _gathered(scope, name, func, base, axis, index, rest, placement, kwargs)
    if placement.kind in (PlacementKind.SOURCE, PlacementKind.TARGET):
        scope.placements.put(out, Placement(PlacementKind.PAIRS, placement.view, axis, placement.edges))
    elif placement.kind is PlacementKind.EDGES:
        scope.placements.put(out, Placement(PlacementKind.PAIRS, placement.view, 1, index))
    elif placement.kind in ALIGNED and index.dim() == 1:
        scope.placements.put(out, replace(placement, axis=axis))
    return out


def _gathered(
    scope: Reader,
    name: str,
    func: Callable[..., Any],
    base: Tensor,
    axis: int,
    index: Tensor,
    rest: tuple[Any, ...],
    placement: Placement,
    kwargs: Kwargs,
) -> Any:
    if placement.kind in (PlacementKind.SOURCE, PlacementKind.EDGES):
        base = scope.reads.read(base, axis, placement)
    if name == "__getitem__":
        return func(base, (index, *rest) if rest else index, **kwargs)
    return func(base, axis, index)


# [Note: writes by id] What a scatter writes depends on its index too:
#
#     TARGET     own rows: by kernels if they apply, else by torch on this part alone
#     SOURCE     own and halo rows; the sums on halo rows go to their owners
#     NUMBERS    arange(x.size(0)): positions of own rows
#     others     groups, such as the graphs of a batch, which may have rows on every rank: all ranks' sums or
#                extremes are joined
def _scatter(scope: Reader, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``out.scatter_add_(dim, row, src)``; for source ids, sums on halo rows go to their owners."""
    base = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    index = kwargs.get("index", args[2] if len(args) > 2 else None)
    value = kwargs.get("src", kwargs.get("source", args[3] if len(args) > 3 else None))
    placement = scope.placements.get(index)
    if placement is None and isinstance(index, Tensor):
        vertex_tables.refuse_unknown_write(scope, name, base, dim)
    if placement is None or not isinstance(value, Tensor) or not isinstance(index, Tensor):
        return NotImplemented
    if scope.parted and (gone := scope.placements.get(value)) is not None and gone.kind is PlacementKind.LOST:
        raise lost(scope, gone)
    axis = dim % max(base.dim(), 1)
    if placement.kind is PlacementKind.MIXED:
        raise _rebuilt(scope, name)
    id_values.refuse_rows_by_value(scope, base, axis, index, placement)
    if placement.kind is PlacementKind.NUMBERS:
        args, kwargs = _by_place(scope, index, args, kwargs)
        return func(*args, **kwargs)
    if scope.parted and placement.kind in IDS and not isinstance(base, LazyTensor):
        base = vertex_tables.written_to(scope, base, axis, index, name)
        if base is not args[0]:
            args, name = (base, *args[1:]), name.removesuffix("_")
            func = getattr(torch.Tensor, name)
    late = (
        _reduced(scope, name, base, axis, index, value, args, kwargs)
        if placement.kind is PlacementKind.TARGET
        else None
    )
    if late is not None:
        return scope.placements.put(late, _written(scope, placement, base, axis))
    args, kwargs = all_computed(args, kwargs)
    base, value = args[0], now(value)
    if placement.kind is PlacementKind.TARGET:
        return scope.placements.put(func(*args, **kwargs), _written(scope, placement, base, axis))
    if placement.kind is PlacementKind.SOURCE and scope.size == 1:
        scope.reads.report_global_read()
        return scope.placements.put(func(*args, **kwargs), _written(scope, placement, base, axis))
    if scope.size == 1 or placement.kind is PlacementKind.LOCAL:
        return NotImplemented
    reduce = kwargs.get("reduce", args[4] if len(args) > 4 else "sum")
    adds = not name.startswith("scatter_reduce") or reduce == "sum"
    if not adds and (placement.kind is PlacementKind.SOURCE or reduce not in ("amax", "amin")):
        raise ModelError(
            "what is written by source ids to be a sum, and what is pooled a sum, maximum or minimum",
            f"{name} with {reduce!r}",
            where=scope.where(),
            hint="sum or mean, or let messages flow from source to target",
        )
    if placement.kind is PlacementKind.SOURCE:
        return _add_at_sources(scope, name, base, axis, index, value, placement)
    # Groups are the same on all ranks, though there may be as many as this rank has rows.
    if adds:
        total = scope.ranks.total(_plain_sum(torch.zeros_like(base), axis, index, value, name))
        return scope.placements.put(_add(base, total, name), None)
    best = _pooled_extreme(scope, base, axis, index, value, 1 if reduce == "amax" else -1)
    return scope.placements.put(base.copy_(best) if name.endswith("_") else best, None)


def _add_at_sources(
    scope: Reader, name: str, base: Tensor, axis: int, index: Tensor, value: Tensor, placement: Placement
) -> Any:
    """Add values at source ids: sums on halo rows go to their owners."""
    halo_exchange = scope.views[placement.view].rows
    shape = list(base.shape)
    if shape[axis] != halo_exchange.own:
        return NotImplemented
    shape[axis] = halo_exchange.own + halo_exchange.halo
    sums = _plain_sum(value.new_zeros(shape), axis, index, value, name)
    return scope.placements.put(
        _add(base, scope.reads.write(sums, axis, placement), name),
        _written(scope, placement, base, axis),
    )


def _written(scope: Reader, index: Placement, base: Tensor, axis: int) -> Placement:
    """Return the placement of rows that were written by one end of edges."""
    number = vertex_tables.end_of(scope, index)
    named, held = scope.sets[number], scope.placements.get(base)
    # cat([receivers, senders]) is read, and rows of the receivers alone are written. On a rank without
    # senders the number of rows does not tell which.
    if held is not None and held.kind in VERTICES:
        number = held.vertex_set
    elif named.members and base.size(axis) != named.own:
        number = named.members[0]
    return Placement(PlacementKind.ROWS, axis=axis, vertex_set=number)


def _by_place(
    scope: Reader, index: Tensor, args: Args, kwargs: Kwargs
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace ``arange(x.size(0))`` in a write's arguments by the positions of own rows on this part."""
    held = scope.placements.get(index)
    number = 0 if held is None else held.vertex_set
    own = scope.placements.put(scope.ids.local_of(index, number), Placement(PlacementKind.TARGET))
    args = tuple(own if value is index else value for value in args)
    return args, {key: own if value is index else value for key, value in kwargs.items()}


def _reduced(
    scope: Reader,
    name: str,
    base: Tensor,
    axis: int,
    index: Tensor,
    value: Tensor,
    args: Args,
    kwargs: Kwargs,
) -> Tensor | None:
    """Answer a write by the graph's targets with kernels; None where they do not apply."""
    how: Any = "sum"
    takes: Any = False
    if name.startswith("scatter_reduce"):
        how = kwargs.get("reduce", args[4] if len(args) > 4 else "sum")
        takes = kwargs.get("include_self", args[5] if len(args) > 5 else True)
    # scatter_add with a smaller index leaves some values out.
    whole = index.dim() == 1 or index.shape == value.shape
    if (
        isinstance(base, LazyTensor)
        or axis
        or takes
        or how not in ("sum", "amax", "amin")
        or not whole
        or kwargs.get("alpha", 1) != 1
    ):
        return None
    if base.shape[1:] != value.shape[1:] or base.dtype != value.dtype:
        return None
    sums = scope.deferral.edge_reduce(value, index, 0, how)
    if sums is None or sums.size(0) != base.size(0):
        return None
    with torch._C.DisableTorchFunction():
        sums = now(sums)
        if how != "sum":
            ids = index if index.dim() == 1 else index.flatten(1)[:, 0]
            # With include_self=False a row that receives no value keeps its old one.
            none = torch.bincount(ids, minlength=base.size(0)) == 0
            sums = torch.where(none.view(-1, *[1] * (base.dim() - 1)), base, sums)
            out = base.copy_(sums) if name.endswith("_") else sums
        else:
            out = _add(base, sums, name)
    return out


def _linear_of_rows(scope: Reader, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``F.linear`` of rows: deferred if neighbours can be summed first, else the fastest product."""
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    if not args or not isinstance(weight, Tensor) or isinstance(args[0], LazyTensor):
        return NotImplemented
    if scope.parted and (held := scope.placements.get(weight)) is not None and held.kind in ALIGNED:
        # A weight that itself has rows of vertices or edges: the handlers of matmul know such products.
        call = scope.__torch_function__  # a product with rows, like any other
        out = call(Tensor.matmul, (), (args[0], call(Tensor.t, (), (weight,))))
        return out if bias is None else call(Tensor.add, (), (out, bias))
    # PyG's convolutions add their bias after the aggregation: a map with a bias is not one before a sum.
    if bias is None and scope.deferral.sums_late(args[0], weight):
        return scope.axes.like(LazyTensor(Linear(args[0], weight, scope.deferral)), args[0])
    if scope.deferral.maps_late(args[0], weight):
        return scope.axes.like(LazyTensor(EdgeMap(args[0], weight, bias, (weight.size(0),))), args[0])
    rows = _factor(scope, args[0], weight)
    if rows is None or not (isinstance(rows, SparseFeatures) or linear.suits(rows, weight)):
        return NotImplemented
    return scope.axes.like(linear.linear(rows, weight, bias), args[0])


def _matmul(scope: Reader, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x @ w`` for constant rows that are nearly all zeros."""
    weight = args[1] if len(args) == 2 and not kwargs else None
    if not isinstance(args[0], Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return NotImplemented
    rows = _factor(scope, args[0], weight)
    if not isinstance(rows, SparseFeatures):
        return NotImplemented
    return scope.axes.like(linear.linear(rows, weight.t()), args[0])


def _factor(scope: Reader, x: Tensor, weight: Tensor) -> Tensor | SparseFeatures | None:
    """Return rows of vertices or edges in the form a product takes; None if :mod:`linear` does not apply."""
    if (
        not scope.forward.fast
        or torch.is_autocast_enabled("cpu")
        or isinstance(x, LazyTensor)
        or isinstance(weight, LazyTensor)
    ):
        return None
    if scope.axes.of(x) != 0 or scope.placements.get(weight) is not None:
        return None
    rows = scope.deferral.as_sparse(x)
    return x if isinstance(rows, SparseFeatures) and rows.dtype != weight.dtype else rows


def _pooled_extreme(
    scope: Reader, base: Tensor, axis: int, index: Tensor, value: Tensor, sign: int
) -> Tensor:
    """Return each group's largest value on all ranks, or ``base`` if it is empty. Ties share the gradient."""
    low = -math.inf if value.is_floating_point() else torch.iinfo(value.dtype).min
    best = torch.full_like(base, low, requires_grad=False)
    best = best.scatter_reduce(axis, index, value.detach() * sign, "amax", include_self=True)
    best = scope.ranks.greatest(best)
    none, best = best == low, best * sign
    if value.requires_grad:
        same = value.detach() == best.gather(axis, index)
        ties = torch.zeros_like(best).scatter_add(axis, index, same.to(value.dtype))
        kept = torch.where(same & value.detach().isfinite(), value, torch.zeros_like(value))
        # value - value.detach() is 0 with gradient 1, so entries that equal the extreme share its gradient.
        slope = torch.zeros_like(best).scatter_add(axis, index, kept - kept.detach())
        best = best + scope.ranks.total(slope) / scope.ranks.total(ties).clamp(min=1)
    return torch.where(none, base, best)


def _plain_sum(base: Tensor, axis: int, index: Tensor, value: Tensor, name: str) -> Tensor:
    return (
        base.index_add(axis, index, value)
        if name.startswith("index")
        else base.scatter_add(axis, index, value)
    )


def _add(base: Tensor, sums: Tensor, name: str) -> Tensor:
    return base.add_(sums) if name.endswith("_") else base + sums


def _flip(scope: Reader, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer a flip of the graph's own edges with the out-edges of own vertices."""
    edges = args[0]
    dims = kwargs.get("dims", args[1:])
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if tuple(d % 2 for d in dims) != (0,):
        return NotImplemented
    # A flipped in-edge belongs to the owner of its source, so a part needs edges that its peers hold.
    if edges is scope.inputs.get("edge_index"):
        return scope.reads.out_edges().edge_index
    if scope.reads.turned is not None and edges is scope.reads.turned.edge_index:
        return scope.views[0].edge_index
    return NotImplemented


def _greatest_id(scope: Reader, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``edge_index.max()``, which asks for the last vertex that has an edge.

    A user's code gets the last vertex of the whole graph. PyG's own code allocates that many rows, so it gets
    the last one of this part.
    """
    placement = scope.placements.get(args[0])
    if placement is None or placement.kind is not PlacementKind.EDGES or len(args) > 1 or kwargs:
        return NotImplemented
    if scope.ids.last_vertex is None:
        raise refused(
            scope, f"{name} of ids of one of several edge sets", hint="x.size(0) of rows of that set"
        )
    if not from_library() and scope.parted:
        return torch.tensor(scope.ids.last_vertex, device=scope.device)
    return torch.tensor(scope.ids.last_row() - 1, device=scope.device)


def _sparse(scope: Reader, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Refuse sparse matrices of edges: their halo columns make torch access memory out of bounds."""
    known = (*ALIGNED, PlacementKind.TARGET) if name.startswith("_convert") else ALIGNED
    found = [scope.placements.get(value) for value in (*args, *kwargs.values())]
    if scope.size == 1 or all(placement is None or placement.kind in known for placement in found):
        return NotImplemented
    raise ModelError(
        "a layer to read neighbours by edge_index",
        f"a sparse matrix of the edges made inside forward ({name})",
        where=scope.where(),
        hint="give the layer edge_index itself, or gather x[edge_index[0]] and scatter by edge_index[1]",
    )


def _rebuilt(scope: PositionScope, what: str) -> ModelError:
    """Return the error for ids whose meaning is no longer known."""
    return refused(
        scope,
        f"{what} by ids that were computed from them (an edge list rebuilt inside forward)",
        hint="rebuild the edges before training (data.edge_index), not inside forward",
        expected="every read of neighbours' rows to go by ids from edge_index",
    )


HANDLERS: dict[str, Handler] = {
    **DERIVATIVES,
    "linear": _linear_of_rows,
    **dict.fromkeys(("matmul", "mm", "__matmul__"), _matmul),
    **dict.fromkeys(("div", "true_divide", "__rdiv__", "__rtruediv__", "mul", "__rmul__"), row_counts.scale),
    "size": row_counts.size,
    **dict.fromkeys(("numel", "nelement"), row_counts.numel),
    "__get__": row_counts.size,
    **dict.fromkeys(("zeros", "ones", "full", "empty"), row_counts.make),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new"), row_counts.make),
    **dict.fromkeys(("expand", "broadcast_to", "repeat", "tile"), row_counts.widened),
    **dict.fromkeys((f"sparse_{kind}_tensor" for kind in ("coo", "csr", "csc", "compressed")), _sparse),
    "_convert_indices_from_coo_to_csr": _sparse,
    "__getitem__": _gather,
    "index_select": _gather,
    "scatter_add_": _scatter,
    "scatter_add": _scatter,
    "index_add_": _scatter,
    "index_add": _scatter,
    "scatter_reduce_": _scatter,
    "scatter_reduce": _scatter,
    "flip": _flip,
    "max": _greatest_id,
    **host_reads.HANDLERS,
    **dict.fromkeys(row_counts.RECKON, row_counts.number),
}
"""Handlers asked after those of ``model.exact``."""
_FIRST: dict[str, Handler] = dict.fromkeys(row_counts.FILLS, row_counts.number)  # asked before HANDLERS


def by_call(more: Mapping[str, Handler], *, parted: bool, matrix: bool) -> dict[str, list[Handler]]:
    """Return the handlers of each torch call, in the order in which they are asked.

    Args:
        more: The handlers of ``model.exact``.
        parted: Whether the graph's rows are split over parts.
        matrix: Whether the model is given the graph as a matrix.
    """
    # The first answer ends the search, so tables of special cases come before the general reads and writes.
    tables: list[Mapping[str, Handler]] = [sparse_adjacency.HANDLERS] if matrix else []
    tables += [cut_rows.HANDLERS] if parted else []
    tables.append(batch_rows.HANDLERS)
    tables += [edge_positions.HANDLERS, in_backward.HANDLERS] if parted else []
    tables += [
        id_values.HANDLERS,
        embedding_bag.HANDLERS,
        row_positions.HANDLERS,
        vertex_tables.HANDLERS,
        kept_tensors.HANDLERS,
    ]
    found: dict[str, list[Handler]] = {}
    for table in (*tables, row_order.HANDLERS, more, _FIRST, HANDLERS, sliced_reduce.HANDLERS):
        for name, handler in table.items():
            found.setdefault(name, []).append(handler)
    return found
