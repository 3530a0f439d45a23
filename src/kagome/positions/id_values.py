"""Id values: what a user's forward computes from edge ids, other than reading and writing rows by them.

Where it sits: ``intercept.interceptor`` asks it before all handlers, on a part of the graph. A part renumbers
its vertices, own ones first. To the user an id is the number of a vertex of the whole graph.

::

    x[e[0]], index_add(0, e[1], v)     used as indices: the part's own numbers are right
    e[0] < 6000, e[1] % 2, e[0].float()     used as values: global numbers, one value per edge
    e.max() + 1                        as many vertices as the whole graph has
    bincount(e[1], minlength=N)        one count for each own vertex

What is computed from such values is an attribute of the edges: it cannot index rows of vertices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kagome.placement.placement import IDS, NO_IDS, Placement, PlacementKind, tensors
from kagome.placement.symbolic_size import SymbolicSize
from kagome.positions.position_scope import FULL, Args, Func, Kwargs, PositionScope
from kagome.positions.vertex_tables import end_of
from kagome.scope.rows import refused
from kagome.sparse_ops.edge_view import EdgeView
from kagome.user_frame import from_library


class EndpointValues(PositionScope, Protocol):
    """The interface of the running interceptor that this module uses."""

    views: list[EdgeView]


_STAY: Final = NO_IDS | frozenset(
    [
        *("clone", "contiguous", "detach", "cpu", "cuda", "alias", "requires_grad_", "pin_memory"),
        *("__deepcopy__", "sort", "masked_select", "as_subclass", "long", "int", "record_stream"),
        *("view", "reshape", "unsqueeze", "expand", "expand_as", "squeeze", "flatten", "repeat", "view_as"),
        *("__getitem__", "select", "narrow", "unbind", "split", "split_with_sizes", "chunk", "tensor_split"),
        *("cat", "concat", "concatenate", "hstack", "vstack", "stack", "flip", "roll", "fliplr", "flipud"),
        *("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
        *("__get__", "__set__", "__len__", "__iter__", "__repr__", "__format__", "__hash__", "data_ptr"),
        *("element_size", "get_device", "is_pinned", "storage_offset", "untyped_storage", "_version"),
        *("index_put", "index_put_", "__setitem__", "put_", "is_sparse", "is_nested", "has_names"),
        *("_convert_indices_from_coo_to_csr", "cumsum", "cumprod", "diff", "unfold"),
        *(f"sparse_{kind}_tensor" for kind in ("coo", "csr", "csc", "compressed")),
    ]
)
"""Calls whose result still holds ids, that read or write by ids, or that do not look at them.

``edge_positions`` refuses calls along the edge list, and ``gather_scatter`` sparse matrices.
"""
# A cast to integers keeps ids; a cast to floats or booleans looks at their values.
_CASTS: Final = frozenset(["to", "type", "type_as"])
# Calls that hand numbers to Python or NumPy, where no placement follows them.
_LEAVE: Final = frozenset(["tolist", "numpy", "__array__", "item", "__int__", "__index__"])
_ORDERS: Final = frozenset(["gt", "lt", "ge", "le", "__gt__", "__lt__", "__ge__", "__le__"])
"""Comparisons that find the larger end of an edge; PyG's own code makes them too."""
# Two lists of local ids are equal where their global numbers are.
_SAME: Final = frozenset(["eq", "ne", "__eq__", "__ne__", "equal"])
# Writes by an index: the index stays local, and ids that are written as values become global.
_SOURCES: Final = frozenset(
    ["scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"]
) | frozenset(["scatter_reduce", "scatter_reduce_", "__setitem__", "index_put", "index_put_"])
# Reads by an index, and cuts whose bounds are positions.
_READS: Final = frozenset(["embedding", "index_select", "gather", "take_along_dim", "__getitem__"])
_SLICES: Final = frozenset(["narrow", "select", "split", "chunk", "tensor_split"])
_BLIND: Final = _STAY - _SOURCES - _SLICES - _READS
"""Calls that look neither at the values of ids nor at positions among a part's own edges."""


def by_value(scope: EndpointValues, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Replace a part's ids in a call's arguments by global numbers where the call looks at their values.

    Args:
        scope: The running interceptor.
        name: The name of the call.
        args: Its positional arguments, as the user gave them.
        kwargs: Its keyword arguments, as the user gave them.
    """
    # Every torch call of a part passes here. Most leave at this line or once no argument has ids.
    if name in _BLIND:
        return args, kwargs
    found, places = [], False
    for tensor in tensors(args, kwargs):
        placement = scope.placements.get(tensor)
        if placement is None:
            continue
        if placement.kind in IDS:
            found.append(tensor)
        places = places or placement.kind is PlacementKind.LOCAL
    if not (found or places):
        return args, kwargs
    looks = name not in _STAY or name in _SOURCES
    kinds = {placement.kind for each in found if (placement := scope.placements.get(each)) is not None}
    # PyG's own code compares and computes with local ids, which handlers and layer rules make exact. The one
    # question that they cannot answer is which end of an edge has the larger number.
    ordered = name in _ORDERS and len(kinds) > 1  # dropout_edge keeps one of both directions this way
    if not (places or (found and looks)) or (from_library() and not ordered):
        return args, kwargs
    if places:
        _refuse_places(scope, name, args, kwargs)
    if not (found and looks):
        return args, kwargs
    if name in _CASTS and not _to_float(name, args, kwargs):
        return args, kwargs
    every = list(tensors(args, kwargs))
    if name in _SAME and len(every) > 1 and len(found) == len(every):
        return args, kwargs  # local ids are equal exactly where the vertices are
    if name == "max" and _counts(scope, args, kwargs):
        return args, kwargs
    if name == "bincount":
        return args, kwargs
    if name in _LEAVE:
        raise refused(
            scope,
            f"{name}, which takes the ids of a part's edges out of torch",
            hint="make what is made of them before training (an attribute of the Data); or train on one rank",
        )
    skip = _index_of(name, args, kwargs)

    def told(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(told(each) for each in value)
        return numbers(scope, value) if value is not skip and _is_ids(scope, value) else value

    return tuple(told(value) for value in args), {key: told(value) for key, value in kwargs.items()}


def _refuse_places(scope: EndpointValues, name: str, args: Args, kwargs: Kwargs) -> None:
    """Refuse calls that look at positions among a part's own edges or rows, other than to reorder by them.

    Raises:
        ModelError: If the call compares, slices or computes with them.
    """
    base = scope.placements.get(args[0]) if args else None
    sliced = False
    if name == "__getitem__" and base is not None and base.kind is PlacementKind.LOCAL:
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        item = next((item for item in items if item is not None), FULL)  # nonzero()[:, 0] has columns
        # order[..., :k] of a list of positions cuts the list, too.
        if item is Ellipsis and args[0].dim() == 1:
            item = items[-1]
        sliced = isinstance(item, (int, list)) or (type(item) is slice and item != FULL)
    floats = name in _CASTS and _to_float(name, args, kwargs)
    # x[order] reorders own rows. A table that all ranks have whole would be read at a part's own positions.
    table = name in _READS and _of_no_rows(scope, name, args, kwargs)
    written = name in _SOURCES - {"__setitem__"} and _writes_places(scope, name, args, kwargs)
    if sliced or floats or table or written or name in _SLICES or name not in _STAY | _CASTS:
        raise refused(
            scope,
            f"{name}, which takes an order of a part's own edges or rows for one of all of them",
            hint="put edges and rows in their order before training (the Data), or train on one rank",
        )


def _of_no_rows(scope: EndpointValues, name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return True if what is read by positions is neither rows nor ids: a table that all ranks have whole."""
    table = kwargs.get("weight", args[1] if len(args) > 1 else None) if name == "embedding" else args[0]
    return scope.placements.get(table) is None


def _writes_places(scope: EndpointValues, name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return True if positions are the values written, not the index written to."""
    index = _index_of(name, args, kwargs)
    skipped = index if isinstance(index, (tuple, list)) else (index,)
    placements = [
        scope.placements.get(value)
        for value in tensors(args[1:], kwargs)
        if all(value is not each for each in skipped)
    ]
    return any(placement is not None and placement.kind is PlacementKind.LOCAL for placement in placements)


def _is_ids(scope: EndpointValues, value: Any) -> bool:
    placement = scope.placements.get(value)
    return placement is not None and placement.kind in IDS


def _to_float(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return True if a cast gives a type other than an integer."""
    for value in (*args[1:], *kwargs.values()):
        kind = value.dtype if isinstance(value, Tensor) else value
        if isinstance(kind, torch.dtype):
            return kind.is_floating_point or kind.is_complex or kind is torch.bool
        # The type may be given as a text: ids.type("torch.cuda.LongTensor").
        if isinstance(kind, str) and name == "type":
            return not kind.endswith(("LongTensor", "IntTensor"))
    return False


def _counts(scope: EndpointValues, args: Args, kwargs: Kwargs) -> bool:
    """Return True if ``max`` asks for the last vertex that has an edge; ``gather_scatter`` answers that."""
    placement = scope.placements.get(args[0]) if args else None
    return placement is not None and placement.kind is PlacementKind.EDGES and len(args) == 1 and not kwargs


def _index_of(name: str, args: Args, kwargs: Kwargs) -> Any:
    """Return the index that a write goes by: those ids stay local."""
    if name not in _SOURCES:
        return None
    if name in ("__setitem__", "index_put", "index_put_"):
        return args[1] if len(args) > 1 else kwargs.get("indices")
    return kwargs.get("index", args[2] if len(args) > 2 else None)


def numbers(scope: EndpointValues, ids: Tensor) -> Tensor:
    """Return global vertex numbers for a part's ids, as an attribute of the edges.

    Shapes:
        ids ``[2, e]`` or ``[e]`` -> numbers of the same shape.
    """
    placement = scope.placements.get(ids)
    assert placement is not None
    scope.numbered = True
    edges = ids if placement.kind is PlacementKind.EDGES else placement.edges
    # ``with_halo`` lists the original numbers of own and halo rows, [n + H], in the order of local ids.
    with torch._C.DisableTorchFunction():
        values = scope.ids.numbers(ids.long(), placement).to(ids.dtype)
    count = edges.size(-1) if edges is not None else None
    if (known := scope.batches.stand_in(ids)) is not None:
        scope.batches.stand_ins[values] = known
    return scope.placements.put(
        values, Placement(PlacementKind.PAIRS, placement.view, _axis(values, placement, count), edges)
    )


def _axis(values: Tensor, placement: Placement, edges: int | None) -> int:
    """Return the axis along which there is one entry per edge: ids may have been put in columns."""
    if placement.kind is PlacementKind.EDGES:
        return values.dim() - 1
    # One end of the edges is [E]; forward may have made a column [E, 1] or a row [1, E] of it.
    if edges is not None:
        return next((axis for axis, size in enumerate(values.shape) if size == edges), 0)
    return next((axis for axis, size in enumerate(values.shape) if size != 1), 0)


def bincount(scope: EndpointValues, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``torch.bincount(e[1], minlength=x.size(0))``: how many edges end in each own vertex."""
    ids: Tensor = args[0] if args else kwargs["input"]
    if not scope.parted or not _is_ids(scope, ids) or from_library():
        return NotImplemented
    weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
    least: Any = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    whole = isinstance(least, SymbolicSize) and least.of_vertices and least.placement.is_complete
    # Without it torch returns max(ids) + 1 counts, a number that differs between parts.
    held = scope.placements.get(ids)
    assert held is not None
    number = end_of(scope, held)
    if not whole and int(least) != scope.sets[number].size:
        raise refused(
            scope,
            f"bincount of the ids of edges with minlength={least}, and as many counts as there happen to be",
            hint="minlength=x.size(0)",
        )
    # A count is a sum of ones over edges. The handler of scatters sends counts of halo rows to their owners.
    each = torch.ones(ids.shape, dtype=torch.float64, device=ids.device) if weights is None else weights
    with torch._C.DisableTorchFunction():
        none = torch.zeros(scope.sets[number].own, dtype=each.dtype, device=ids.device)
    rows = Placement(PlacementKind.ROWS, vertex_set=number)
    scope.placements.put(none, rows)
    sums = scope.__torch_function__(Tensor.scatter_add, (), (none, 0, ids, each))
    return sums if weights is not None else scope.placements.put(sums.long(), rows)


def refuse_rows_by_value(
    scope: EndpointValues, base: Any, axis: int, index: Tensor, placement: Placement
) -> None:
    """Refuse reads or writes of rows of vertices by numbers that edges hold.

    Raises:
        ModelError: If the rows are split over parts.
    """
    held = scope.placements.get(base)
    rows = held is not None and held.kind in (PlacementKind.ROWS, PlacementKind.NUMBERS) and held.axis == axis
    # Masks select among own rows, and floats cannot index: only whole numbers can name other vertices.
    ints = index.dtype not in (torch.bool, torch.uint8) and not index.is_floating_point()
    if rows and scope.parted and placement.kind is PlacementKind.PAIRS and ints and not from_library():
        raise refused(
            scope,
            "rows of vertices read or written by numbers that each edge holds",
            hint="rebuild the edges before training (data.edge_index), not inside forward",
        )


def both_ends(scope: EndpointValues, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x[edge_index.T]``, the rows of both ends of each edge.

    Shapes:
        x ``[n, ...]``, index ``[E, 2]`` -> ``[E, 2, ...]``.
    """
    index = args[1]
    held = scope.placements.get(index) if isinstance(index, Tensor) else None
    if held is None or held.kind is not PlacementKind.MIXED:
        return NotImplemented
    edges = _turned_back(scope, index)
    if edges is None:
        return NotImplemented
    ends = scope.__torch_function__(func, (), (args[0], edges))  # [2, E, ...]
    return scope.__torch_function__(Tensor.transpose, (), (ends, 0, 1))


def _turned_back(scope: PositionScope, index: Tensor) -> Tensor | None:
    """Return the list of edges of which a tensor is the transposed view, ``edge_index.T``; else None."""
    with torch._C.DisableTorchFunction():
        edges = index._base
        if edges is None or edges.dim() != 2 or index.dim() != 2:
            return None
        placement, turned = scope.placements.get(edges), edges.t()
        same = (index.shape, index.stride(), index.storage_offset()) == (
            turned.shape,
            turned.stride(),
            turned.storage_offset(),
        )
    return edges if same and placement is not None and placement.kind is PlacementKind.EDGES else None


HANDLERS: dict[str, Callable[..., Any]] = {"bincount": bincount, "__getitem__": both_ends}
