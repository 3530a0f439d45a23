"""Row order: calls that join rows of vertices, number them, go from row to row, or ask for their values.

Where it sits: ``intercept.interceptor`` asks these handlers as it asks those of ``row_positions``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import now
from kagome.placement.axis_rules import attribute
from kagome.placement.placement import ALIGNED, IDS, VERTICES, Placement, PlacementKind
from kagome.placement.row_subset import RowSubset, in_a_row
from kagome.placement.symbolic_size import SymbolicSize, as_place
from kagome.positions.position_scope import Args, Func, Kwargs, PositionScope, rows_base
from kagome.positions.row_positions import rows_at
from kagome.positions.vertex_tables import has_all, own_rows
from kagome.scope.rows import refused
from kagome.user_frame import by_kagome, from_library, user_line


def cat(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``cat`` of subsets. If they make up a span of vertices, each row goes to its own position."""
    values = args[0] if args else kwargs.get("tensors")
    if not isinstance(values, (tuple, list)):
        return NotImplemented
    placements = [scope.placements.get(value) for value in values]
    kinds = {placement.kind for placement in placements if placement is not None}
    if kinds.intersection((*IDS, PlacementKind.PAIRS)) or all(
        placement is None or placement.kind not in VERTICES for placement in placements
    ):
        return _with_edges(scope, func, values, placements, args, kwargs)
    first = next(
        placement for placement in placements if placement is not None and placement.kind in VERTICES
    )
    dims = max(value.dim() for value in values)
    dim = {"hstack": 1, "vstack": 0}.get(name, kwargs.get("dim", args[1] if len(args) > 1 else 0)) % dims
    if scope.sets.several and dim == first.axis:
        joined = _sets_joined(scope, values, placements, dim)
        if joined is not None:
            return joined
    # Along another axis the rows stay apart. PyG's own code concatenates rows of this part.
    if dim != first.axis or (not scope.parted and first.subset is None) or from_library():
        return NotImplemented
    # torch.cat([empty, ...]), as a loop may begin: an empty list without a placement adds nothing.
    pieces = [
        (value, placement)
        for value, placement in zip(values, placements, strict=True)
        if value.size(dim) or placement
    ]
    subsets = [_subset_of(scope, placement) if placement is not None else None for _, placement in pieces]
    spans = [subset.span for subset in subsets if subset is not None]
    # Entries per vertex of each piece; 0 marks a piece whose rows are not along this axis.
    alike = {
        placement.each if placement is not None and placement.axis == dim else 0 for _, placement in pieces
    }
    whole = in_a_row([span for span in spans if span is not None])
    if len(spans) < len(pieces) or None in spans or alike != {first.each} or whole is None:
        if not scope.parted:
            return NotImplemented
        raise refused(scope, f"{name} of rows of vertices that do not follow one another")
    # Pieces follow each other in the whole graph:    x[:5], x[5:9]    whole = range(0, 9)
    laid = torch.cat([now(value) for value, _ in pieces], dim)
    placement = replace(first, subset=None)
    with torch._C.DisableTorchFunction():
        # Own rows in the order of the pieces. They are out of place where own rows do not ascend (merged
        # chunks): each piece has its rows in own order, and the pieces follow in the graph's.
        at = torch.cat([subset.places() for subset in subsets if subset is not None])
        if len(whole) < scope.sets.of(first).size:
            placement = replace(first, subset=RowSubset(at, whole))
        elif not torch.equal(at, torch.arange(at.numel(), device=at.device)):
            laid = rows_at(laid, placement, at.argsort(), whole=False)
    return scope.placements.put(laid, placement)


def _sets_joined(
    scope: PositionScope, values: Sequence[Any], placements: Sequence[Placement | None], dim: int
) -> Tensor | None:
    """Concatenate rows of several vertex sets; None if a piece has not all rows of one."""
    members, pieces = [], []
    for value, placement in zip(values, placements, strict=True):
        if placement is None and (number := has_all(scope, value, dim)) is not None:
            # A learned table of the set's vertices, or what was made from one.
            value, placement = own_rows(scope, value, dim, number), Placement(PlacementKind.ROWS, axis=dim)
            placement = replace(placement, vertex_set=number)
        if placement is None or placement.kind not in VERTICES or not placement.is_complete:
            return None
        if placement.axis != dim:
            return None
        members.append(placement.vertex_set)
        pieces.append(now(value))
    if len(members) < 2:
        return None
    with torch._C.DisableTorchFunction():
        out = torch.cat(pieces, dim)
    placement = Placement(PlacementKind.ROWS, axis=dim, vertex_set=scope.sets.joined(members))
    return scope.placements.put(out, placement)


def _subset_of(scope: PositionScope, placement: Placement) -> RowSubset:
    """Return the vertices that a placement's rows belong to: all own ones if it names no subset."""
    if placement.subset is not None:
        return placement.subset
    named = scope.sets.of(placement)
    return RowSubset(torch.arange(named.own, device=scope.device), range(named.size))


def _with_edges(
    scope: PositionScope,
    func: Func,
    values: Sequence[Any],
    placements: Sequence[Placement | None],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Concatenate edges with self-loops made from vertex numbers, and weights with weights of loops."""
    lead = next(
        (placement for placement in placements if placement is not None and placement.kind in IDS), None
    )
    pairs = next(
        (
            placement
            for placement in placements
            if placement is not None and placement.kind is PlacementKind.PAIRS
        ),
        None,
    )
    # Edges and self-loops, ids of both kinds; or values of edges and, for the loops, values of vertices.
    given = zip(values, placements, strict=True)
    if lead is not None:
        local = [_loops(scope, value, placement, lead) for value, placement in given]
    elif pairs is not None:
        axis = pairs.axis
        plain = func.__name__ in ("cat", "concat", "concatenate")
        if plain and _are_loops(values, placements, pairs, args, kwargs):
            # Messages of edges, and of each vertex to itself: [E, ..] and [N, ..], as NBFNet joins them.
            with torch._C.DisableTorchFunction():
                joined = torch.cat([now(value) for value in values], axis)
            return scope.placements.put(joined, replace(pairs, edges=None))
        local = [
            own_rows(scope, value, axis, number)
            if placement is None and (number := has_all(scope, value, axis)) is not None
            else value
            for value, placement in given
        ]
    else:
        return NotImplemented
    # Every value is this part's already, so torch's own ``cat`` is right.
    if all(one is other for one, other in zip(local, values, strict=True)):
        return NotImplemented
    kwargs = {key: value for key, value in kwargs.items() if key != "tensors"}
    out = func(local, *args[1:], **kwargs)
    scope.placements.spread(func.__name__, (local, *args[1:]), kwargs, out)
    return out


def _are_loops(
    values: Sequence[Any],
    placements: Sequence[Placement | None],
    pairs: Placement,
    args: Args,
    kwargs: Kwargs,
) -> bool:
    """Return whether rows of edges are followed by a row of each own vertex, along the axis of the rows."""
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0)) % values[0].dim()
    kinds = [placement.kind if placement is not None else None for placement in placements]
    if dim != pairs.axis or kinds != [PlacementKind.PAIRS] * (len(kinds) - 1) + [PlacementKind.ROWS]:
        return False
    last = placements[-1]
    assert last is not None
    whole = last.axis == dim and last.is_complete and last.each == 1
    return whole and {placement.view for placement in placements if placement is not None} == {0}


def _loops(scope: PositionScope, value: Tensor, placement: Placement | None, lead: Placement) -> Tensor:
    """Return ids that are concatenated to a part's edges: own vertices, both ends of a loop, as local ids.

    Raises:
        ModelError: If a user adds other edges, whose ids would be taken for ids of this part.
    """
    # Made of torch.arange(x.size(0)): both ends of a loop are an own vertex.
    if placement is not None and placement.kind is PlacementKind.NUMBERS:
        local = scope.ids.local_of(value, placement.vertex_set)
        return scope.placements.put(local, replace(lead, edges=None))
    if placement is not None or not scope.parted or not value.numel():
        return value
    # Ids without a placement are understood only as 0, 1, ... of all vertices, the loops of
    # add_self_loops. A list of all N is cut to own ones, a list of n is this part's already.
    with torch._C.DisableTorchFunction():
        row = value.reshape(-1, value.size(-1))
        every = torch.arange(row.size(1), device=value.device).expand_as(row)
        named = scope.sets[scope.views[lead.view].targets]
        numbered = row.size(1) in (named.own, named.size) and torch.equal(row, every)
        if numbered and row.size(1) == named.size:
            own = torch.arange(named.own, device=value.device).expand(*value.shape[:-1], -1)
            return scope.placements.put(own.to(value.dtype), replace(lead, edges=None))
    if not numbered and not from_library():
        raise refused(
            scope,
            f"edges of forward's own, of shape {list(value.shape)}, put to those of the graph",
            hint="all edges in data.edge_index, and an attribute an edge that tells their kind",
        )
    return value


def count(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``len(x)`` with the whole graph's number of vertices or edges, or of those a mask selects."""
    placement = scope.placements.get(args[0])
    if placement is None or not scope.parted or from_library() or by_kagome():
        return NotImplemented
    if placement.kind in (PlacementKind.LOST, PlacementKind.MIXED, PlacementKind.MATRIX):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        here, dims = len(args[0]), args[0].dim()
    # The axis that ``len`` counts, the first, must be the one with rows.
    along = placement.axis if placement.kind in ALIGNED else dims - 1 if placement.kind in IDS else 0
    return scope.ranks.number_of(placement, here) if along == 0 else NotImplemented


def numbers(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``torch.linspace(0, 1, x.size(0))`` with the entries of own vertices."""
    counts = [
        value for value in (*args, *kwargs.values()) if isinstance(value, SymbolicSize) and value.of_vertices
    ]
    if not counts or not scope.parted or from_library():
        return NotImplemented
    # The whole list, [N], is made on each rank: own entries depend on its ends and its length.
    with torch._C.DisableTorchFunction():
        every = func(*map(as_place, args), **{key: as_place(value) for key, value in kwargs.items()})
    number = counts[0].placement.vertex_set
    if every.dim() != 1 or every.numel() != scope.sets[number].size:
        return every
    return own_rows(scope, every, 0, number)


def arange(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``torch.arange(x.size(0))`` with the numbers of own vertices."""
    # arange(end), arange(start, end), arange(start, end, step).
    given = [kwargs.get("start", 0), kwargs.get("end"), kwargs.get("step", 1)]
    plain = [value for value in args if isinstance(value, (int, float))]
    if len(plain) == 1 and "end" not in kwargs:
        given[1] = plain[0]
    else:
        given[: len(plain)] = plain
    start, end, step = given
    if not isinstance(end, SymbolicSize) or not end.of_vertices or as_place(start) != 0 or step != 1:
        return numbers(scope, name, func, args, kwargs)
    if from_library():
        return NotImplemented  # PyG makes ids of own rows this way
    if not end.placement.is_complete:
        raise refused(scope, "an arange that counts rows of some vertices, or several a vertex")
    named = {key: value for key, value in kwargs.items() if key in ("dtype", "device")}
    placement = Placement(PlacementKind.NUMBERS, vertex_set=end.placement.vertex_set)
    # The check then compares on a sample in which every vertex has its own number.
    scope.numbered = scope.parted or scope.numbered
    with torch._C.DisableTorchFunction():
        ids = scope.ids.of(placement)
        out = ids.to(named.get("device") or ids.device, named.get("dtype") or torch.int64, copy=True)
    return scope.placements.put(out, placement)


def squeeze(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x.squeeze()`` on a part: the row axis stays, also where this part has one row.

    Raises:
        ModelError: If the whole graph's tensor has one row, so that the axis would go.
    """
    base = args[0] if args else kwargs.get("input")
    placement = scope.placements.get(base) if scope.parted else None
    if placement is None or placement.kind not in ALIGNED or not isinstance(base, Tensor):
        return NotImplemented
    axis = placement.axis
    dims: Any = kwargs.get("dim", args[1] if len(args) > 1 else range(base.dim()))
    named = {int(d) % base.dim() for d in ((dims,) if isinstance(dims, int) else dims)}
    if axis not in named:
        return NotImplemented
    # Of rows of one vertex one rank has [1, F] and the others [0, F], so all of them must refuse.
    if not from_library() and scope.ranks.number_of(placement, base.size(axis)) == 1:
        raise refused(
            scope,
            f"{name} of the only row of a tensor, which one rank has",
            hint="read one row by its number, x[5], or name other axes: x.squeeze(-1)",
        )
    gone = [d for d in named if d != axis and base.size(d) == 1]
    place = axis - sum(d < axis for d in gone)
    return scope.placements.put(Tensor.squeeze(now(base), gone), placement.along(place))


_OVER = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), 1),
    **dict.fromkeys(("cumsum_", "cumprod_", "flip", "gradient"), 1),
    **dict.fromkeys(("diff", "roll", "trapezoid", "repeat_interleave"), 2),
    **dict.fromkeys(("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"), 2),
}
"""Where the axes of calls that go from row to row are among their arguments."""
_OTHERS = ("fliplr", "flipud", "rot90", "unfold", "__reversed__")
"""Such calls whose axes are named in another way."""
_DEFAULT = {"diff": -1, "trapezoid": -1, "fft_fft": -1, "fft_ifft": -1, "fft_rfft": -1}


def over_rows(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Refuse calls that go from one row to the next along the vertex axis."""
    held = rows_base(scope, args, kwargs)
    if held is None:
        return NotImplemented
    base, placement = held
    # Each call names its axes in its own way. Without any, ``roll`` flattens and ``flip`` is an error.
    if name in ("fliplr", "flipud", "__reversed__"):
        dims: Any = (1,) if name == "fliplr" else (0,)
    elif name == "rot90":
        dims = kwargs.get("dims", args[2] if len(args) > 2 else (0, 1))
    elif name == "unfold":
        dims = kwargs.get("dimension", args[1] if len(args) > 1 else 0)
    else:
        dims = kwargs.get("dim", kwargs.get("dims", kwargs.get("axis")))
        rest = args[_OVER[name] :]
        if dims is None:
            dims = rest[0] if len(rest) == 1 else rest or _DEFAULT.get(name)
    if isinstance(dims, int):
        dims = (dims,)
    if dims is not None and placement.axis not in [int(d) % base.dim() for d in dims]:
        return NotImplemented
    if from_library():
        return NotImplemented
    # Reached also without an axis: the flattened tensor goes from row to row.
    raise refused(scope, f"{name}, which goes from one vertex to the next by their places")


def among(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``torch.bucketize(a, b)`` and the like where the values looked up are rows of this part.

    Raises:
        ModelError: If values are looked up among rows of vertices or edges, of which a part has only some.
    """
    # bucketize(values, boundaries) and isin(values, test_elements), but searchsorted(sorted, values).
    second = ("boundaries", "test_elements") if name != "searchsorted" else ("self", "input")
    looked, held = args[0] if args else None, args[1] if len(args) > 1 else None
    held = next((kwargs[key] for key in second if key in kwargs), held)
    if name == "searchsorted":
        looked, held = held, kwargs.get("sorted_sequence", looked)
    if not scope.parted or not isinstance(held, Tensor) or from_library():
        return NotImplemented
    placement = scope.placements.get(held)
    if (
        placement is not None
        and placement.kind in (*ALIGNED, *IDS)
        and (name == "isin" or placement.kind in IDS or placement.axis == held.dim() - 1)
    ):
        raise refused(scope, f"{name} of numbers among rows of which a part has only some")
    # searchsorted(table, x) with a table that all ranks have: one result per row of x.
    told = scope.placements.get(looked) if name == "searchsorted" and placement is None else None
    if told is None or told.kind not in ALIGNED or held.dim() != 1:
        return NotImplemented
    placement = replace(told, kind=PlacementKind.ROWS) if told.kind is PlacementKind.NUMBERS else told
    return scope.placements.put(func(*args, **kwargs), placement)


def nbytes(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x.nbytes`` with the bytes of the rows on all ranks."""
    if (
        attribute(func) != "nbytes"
        or scope.placements.get(args[0]) is None
        or not scope.parted
        or from_library()
    ):
        return NotImplemented
    entries = scope.__torch_function__(Tensor.numel, (), (args[0],))
    with torch._C.DisableTorchFunction():
        every = entries.of_all() if isinstance(entries, SymbolicSize) else entries
        return every * args[0].element_size()


FEWEST = 8
"""Length below which a list counts as a user's constants, even if a part has as many rows."""


def of_list(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Mark ``torch.tensor([f(row) for row in x])`` as lost: a Python loop over rows sees only this part's.

    A list with as many entries as this part has rows counts as one of these where it is combined with rows.
    It does not count as a list of positions.
    """
    values = args[int(name == "new_tensor")] if len(args) > int(name == "new_tensor") else kwargs.get("data")
    if not scope.parted or not isinstance(values, (list, tuple)) or from_library():
        return NotImplemented
    # On a rank that owns all vertices, or few, the length says nothing.
    if all(len(values) != each.own or each.own == each.size or each.own < FEWEST for each in scope.sets):
        return NotImplemented
    out = func(*args, **kwargs)
    line = f"{name} ({user_line()}), which makes as many rows as this part has"
    return scope.placements.put(out, Placement(PlacementKind.LOST, origin=line))


# Values of all ranks -----------------------------------------------------------------------------
#
#     for kind in edge_type.unique():     every rank loops over the same kinds, in the same order,
#         out += conv[kind](x, ...)       including a rank whose part has no edge of a kind

WIDEST: Final = 2**22
"""Limit of the range between the least and the greatest value. Ranks compare one number per value in it."""


def unique(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``unique(values, return_inverse, return_counts)`` for integers or booleans.

    Shapes:
        ``[k]`` values -> ``[u]``, equal on every rank; inverse ``[k]``, counts ``[u]``.

    Cost:
        One all-reduce of one number for each value from the least to the greatest.
    """
    values: Tensor = args[0] if args else kwargs["input"]
    placement = scope.placements.get(values)
    if not scope.parted or placement is None or placement.kind not in ALIGNED:
        return NotImplemented
    # HeteroBatchNorm updates its statistics of the types that there are: on all ranks, of those of all.
    more = any(kwargs.get(option) for option in ("return_inverse", "return_counts", "dim"))
    types = name == "unique" and placement.kind in VERTICES and not more
    if from_library() and (not types or values.is_floating_point()):
        return NotImplemented
    if name == "unique_consecutive" or kwargs.get("dim") is not None or values.is_floating_point():
        raise refused(scope, f"{name} of {values.dtype}, which tells a part's own values apart")
    with torch._C.DisableTorchFunction():
        whole = values.long()
    # Each rank marks which of the values from low to high it has; the maximum over ranks is their union.
    low, high = _ends(scope, whole)
    if high - low >= WIDEST:
        raise refused(scope, f"unique of values from {low:,} to {high:,}, which are more than ranks compare")
    with torch._C.DisableTorchFunction():
        there = torch.zeros(max(high - low + 1, 0), dtype=torch.float64, device=values.device)
        there[whole.reshape(-1) - low] = 1.0
    there = scope.ranks.greatest(there)
    with torch._C.DisableTorchFunction():
        found = there.nonzero().view(-1) + low
        # Position of each own value in the sorted list [u], as torch.unique returns it.
        inverse = torch.searchsorted(found, whole)
        counts = torch.bincount(inverse.reshape(-1), minlength=found.numel()).double()
    out = [found.to(values.dtype)]
    if kwargs.get("return_inverse"):
        out.append(scope.placements.put(inverse, _attribute(placement)))
    if kwargs.get("return_counts"):
        out.append(scope.ranks.total(counts).long())
    return out[0] if len(out) == 1 else tuple(out)


def _ends(scope: PositionScope, values: Tensor) -> tuple[int, int]:
    """Return the least and the greatest value over all ranks."""
    with torch._C.DisableTorchFunction():
        # max(-1 - v), which does not overflow as -v may, and max(v) in one all-reduce. Whole numbers: float64
        # rounds those beyond 2^53. A rank without values sends the least number, which never wins.
        far = torch.full((2,), torch.iinfo(torch.int64).min, device=values.device)
        if values.numel():
            far = torch.stack([~values.min(), values.max()])
    least, most = scope.ranks.greatest(far).tolist()
    return ~int(least), int(most)


def _attribute(placement: Placement) -> Placement:
    """Return the placement of values that vertices or edges hold."""
    return Placement(
        PlacementKind.ROWS if placement.kind is PlacementKind.NUMBERS else placement.kind,
        *(placement.view, placement.axis, placement.edges),
        subset=placement.subset,
        each=placement.each,
    )


def bincount(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``bincount`` of integers that vertices or edges hold with the counts over all ranks."""
    values: Tensor = args[0] if args else kwargs["input"]
    placement = scope.placements.get(values)
    if not scope.parted or placement is None or placement.kind not in ALIGNED or from_library():
        return NotImplemented
    weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
    least: Any = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    with torch._C.DisableTorchFunction():
        whole = values.long()
    _, high = _ends(scope, whole)
    with torch._C.DisableTorchFunction():
        # All ranks count up to the same greatest value, so that the counts can be summed.
        counts = torch.bincount(whole, weights, max(int(as_place(least)), high + 1))
    summed = scope.ranks.total(counts.double())
    if weights is None:
        return summed.long()  # torch returns integers for an empty input, even with weights
    return summed.to(torch.float32 if weights.dtype is torch.float32 else torch.float64)


HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("tensor", "as_tensor", "new_tensor"), of_list),
    **dict.fromkeys(("cat", "concat", "concatenate", "vstack"), cat),
    "__len__": count,
    "__get__": nbytes,
    "arange": arange,
    **dict.fromkeys(("bucketize", "searchsorted", "isin"), among),
    **dict.fromkeys(("linspace", "logspace"), numbers),
    "squeeze": squeeze,
    **dict.fromkeys((*_OVER, *_OTHERS), over_rows),
    "bincount": bincount,
    **dict.fromkeys(("unique", "unique_consecutive"), unique),
}
