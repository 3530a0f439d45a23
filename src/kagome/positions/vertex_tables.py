"""Vertex tables: tensors with a row for every vertex of the graph, the same on all ranks.

Where it sits: ``intercept.interceptor`` and ``intercept.gather_scatter`` ask it where such a tensor is
combined with rows of own vertices, or is read or written by the part's ids. Examples are a parameter or
buffer ``[N, d]``, or ``torch.zeros(8000, d)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.placement.axis_rules import ELEMENTWISE
from kagome.placement.placement import IDS, VERTICES, Placement, PlacementKind, tensors
from kagome.placement.symbolic_size import SymbolicSize, as_place
from kagome.placement.writes import IN_PLACE, written_by
from kagome.positions.position_scope import FULL, Args, Func, Kwargs, PositionScope
from kagome.scope.rows import lost, refused
from kagome.user_frame import from_library


def of_table(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``table[:x.size(0)]`` with own rows of a tensor that has all rows."""
    base, index = args[0], args[1]
    if type(index) not in (slice, tuple) or scope.placements.get(base) is not None:
        return NotImplemented
    head, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    # The bound is a count of own vertices, [:x.size(0)], so the slice asks for one row per vertex.
    if type(head) is slice and isinstance(head.stop, SymbolicSize) and head.stop.of_vertices:
        if (
            not isinstance(base, Tensor)
            or as_place(head.start)
            or head.step not in (None, 1)
            or base.dim() == 0
        ):
            return NotImplemented
        placement = head.stop.placement
        # A table may be longer than the graph, as one of positional encodings is.
        if not placement.is_complete or base.size(0) < scope.sets.of(placement).size:
            return NotImplemented
        scope.numbered = True
        own = func(base, scope.ids.of(placement)) if scope.parted else func(base, head)
        scope.placements.put(own, Placement(PlacementKind.ROWS, vertex_set=placement.vertex_set))
        # In plain PyTorch these rows are a view. Here a write to them would be lost, so it is watched: by
        # ``keeping`` if the model keeps the table, else by ``copies``.
        if scope.parted and not scope.keeping.copy(scope, base, own):
            scope.copies.note(own)
        return own[(FULL, *rest)] if rest else own
    return NotImplemented


def set_rows(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``table[row] = value`` by ids of edges: a tensor with all rows is written by original numbers.

    Raises:
        ModelError: If rows of a part are written into such a tensor.
    """
    base, index, value = args
    held = scope.placements.get(value)
    if has_all(scope, base, 0) is not None and not from_library():
        # Each rank would write its own rows only, and the tables of the ranks would differ.
        if held is not None and held.kind in VERTICES:
            raise all_rows_written(scope, name)
        head, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        # table[:x.size(0)] = value fills all rows, so the bound becomes the whole graph's.
        if (
            type(head) is slice
            and isinstance(head.stop, SymbolicSize)
            and head.stop.of_vertices
            and head.stop.placement.is_complete
        ):
            whole = slice(head.start, scope.sets.of(head.stop.placement).size, head.step)
            return func(base, (whole, *rest), value)
    placement = scope.placements.get(index) if isinstance(index, Tensor) else None
    if placement is None or placement.kind not in IDS or base.dim() == 0:
        return NotImplemented
    if has_all(scope, base, 0, end_of(scope, placement)) is None:
        return NotImplemented
    numbers = original(scope, base, 0, index, placement)
    return NotImplemented if numbers is None else func(base, numbers, value)


def end_of(scope: PositionScope, ids: Placement) -> int:
    """Return the number of the vertex set that ids of edges name; of both ends, that of the sources."""
    view = scope.views[ids.view]
    return view.targets if ids.kind is PlacementKind.TARGET else view.sources


def own_rows(scope: PositionScope, table: Tensor, axis: int, vertex_set: int) -> Tensor:
    """Return own rows of a tensor that has a row for each vertex of a set, the same on all ranks.

    Shapes:
        table ``[..., N, ...]`` -> ``[..., n, ...]``.
    """
    scope.numbered = True
    placement = Placement(PlacementKind.ROWS, axis=axis, vertex_set=vertex_set)
    with torch._C.DisableTorchFunction():
        out = table.index_select(axis, scope.ids.of(placement).to(table.device))
    return scope.placements.put(out, placement)


def has_all(scope: PositionScope, value: Any, axis: int, vertex_set: int | None = None) -> int | None:
    """Return the vertex set for each of whose vertices an unmarked tensor has a row along an axis.

    Args:
        scope: The running interceptor.
        value: The tensor.
        axis: The axis.
        vertex_set: The only set that is asked for; by default the one of that size, if there is only one.

    Returns:
        The number of the set; None if there is none.
    """
    if not scope.parted or not isinstance(value, Tensor) or scope.placements.get(value) is not None:
        return None
    with torch._C.DisableTorchFunction():
        if not -value.dim() <= axis < value.dim():
            return None
        size = value.size(axis)
    if vertex_set is None:
        found = scope.sets.of_size(size)
        # As many rows as a batch has vertices, by chance: a table of all edges.
        batch = found is not None and scope.sets[found].copies > 1
        return None if batch and any(view.count == size for view in scope.views) else found
    return vertex_set if scope.sets[vertex_set].size == size else None


def original(scope: PositionScope, table: Any, axis: int, ids: Tensor, placement: Placement) -> Tensor | None:
    """Return original numbers for the part's ids where they index a tensor that is the same on all ranks.

    Args:
        scope: The running interceptor.
        table: The tensor that is indexed.
        axis: The axis that is indexed.
        ids: Ids of own and halo rows.
        placement: The placement of the ids.

    Returns:
        None if the tensor has a row for each own vertex, so that the part's ids index it.

    Raises:
        ModelError: If the tensor has fewer rows than there are vertices.
    """
    if not scope.parted or table.dim() == 0:
        return None
    held = scope.placements.get(table)
    if held is not None and held.kind is PlacementKind.LOST:
        raise lost(scope, held)
    if held is not None and held.kind in VERTICES and not held.is_complete:
        raise refused(scope, "edges that read rows of some vertices only, by ids of all of them")
    named = scope.sets[end_of(scope, placement)]
    if held is not None and held.kind in VERTICES and scope.sets.of(held) is not named:
        raise refused(
            scope,
            f"rows of {scope.sets.of(held).words} read by ids of {named.words}",
            expected="edges that read rows of the vertex set that they were declared for",
            hint="kagome.Edges(source, target, index) as the model uses them",
        )
    # Rows of vertices, or a tensor with as many rows as own vertices: the part's ids index it. Where one rank
    # owns all vertices of a set, its peers see a table of all rows and send none: so must this rank.
    if held is not None or (table.size(axis) == named.own and (from_library() or named.own != named.size)):
        return None
    # PyG's own tables may belong to a part, and have any size.
    if from_library() and table.size(axis) != named.size:
        return None
    if table.size(axis) < named.size:
        raise refused(
            scope,
            f"a tensor of shape {list(table.shape)} indexed by ids of {named.size:,} {named.words}",
            hint="index tensors with a row for each vertex of the graph, or rows that forward was given",
        )
    # [n + H] original numbers, read by local ids.
    scope.numbered = True
    with torch._C.DisableTorchFunction():
        return scope.ids.numbers(ids, placement)


def written_to(scope: PositionScope, base: Tensor, axis: int, index: Tensor, name: str) -> Tensor:
    """Return the target of a write by the part's ids: own rows if the tensor has a row for each vertex.

    Raises:
        ModelError: If it writes to such a tensor in place, or to rows of some vertices.
    """
    held = scope.placements.get(base)
    if held is not None and held.kind is PlacementKind.LOST:
        raise lost(scope, held)
    if held is not None and held.kind in VERTICES and not held.is_complete:
        raise refused(scope, "edges that write to rows of some vertices only, by ids of all of them")
    ids = scope.placements.get(index)
    assert ids is not None
    number = end_of(scope, ids)
    if held is not None and held.kind is PlacementKind.PAIRS and from_library():
        # PyG's ``src.new_zeros(size)``, where there are as many edges here as rows are asked for.
        held = None
        scope.placements.put(base, None)
    if scope.sets[number].members and held is None:
        # cat([receivers, senders]) is read, and rows of the receivers alone are written.
        number = scope.sets[number].members[0]
    if has_all(scope, base, axis, number) is None or base.size(axis) == scope.sets[number].own:
        return base
    if (
        index.numel()
        and int(index.max()) >= scope.sets[number].own
        and ids == Placement(PlacementKind.TARGET)
    ):
        return base  # a layer's own groups, made from ids of targets
    # The caller keeps a reference to the tensor, which would stay as it was.
    if name.endswith("_") and not from_library():
        raise all_rows_written(scope, name)
    return own_rows(scope, base, axis, number)


def all_rows_written(scope: PositionScope, name: str) -> ModelError:
    """Return the error for a call that writes a part's rows into a tensor with a row for each vertex."""
    return refused(
        scope,
        f"{name}, which writes into a tensor with a row for each vertex of the graph",
        hint="make it with a row for each row of the input: x.new_zeros(x.size(0), ...)",
    )


def refuse_unknown_write(scope: PositionScope, name: str, base: Any, dim: Any) -> None:
    """Refuse writes to rows of vertices by ids that are not from an edge of the graph.

    Raises:
        ModelError: If the rows that are written to are split over parts.
    """
    held = scope.placements.get(base) if scope.parted else None
    rows = held is not None and held.kind in VERTICES and isinstance(dim, int)
    if rows and held is not None and dim % base.dim() == held.axis and not from_library():
        raise refused(
            scope,
            f"{name}, which writes to rows of vertices by ids that are not those of the graph's edges",
            hint="edges that forward makes itself go into the Data before training (data.edge_index)",
        )


def refuse_unfit(scope: PositionScope, name: str, args: Args, kwargs: Kwargs, error: Exception) -> None:
    """Explain an error of torch if the call was given the rows of a part.

    Raises:
        ModelError: If the user's code gave the call such rows.
    """
    # A part's [n] rows beside a tensor of [N] rows fail in torch with sizes that the user never wrote.
    placements = [scope.placements.get(tensor) for tensor in tensors(args, kwargs)] if scope.parted else []
    gone = next(
        (
            placement
            for placement in placements
            if placement is not None and placement.kind is PlacementKind.LOST
        ),
        None,
    )
    if gone is not None:
        raise lost(scope, gone) from error
    if (
        any(placement is not None and placement.kind in VERTICES for placement in placements)
        and not from_library()
    ):
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        if name == "__setitem__" and scope.placements.get(args[0]) is None:
            raise refused(
                scope,
                f"rows of a part written into a tensor of shape {list(args[0].shape)} that has none",
                expected="rows written over rows of the same vertices, or sets joined by torch.cat",
                hint="torch.cat([a, b]) in place of slices of one tensor, or x.new_zeros(x.size(0), ...)",
            ) from error
        raise refused(scope, f"{name} of the rows of a part, which fails: {words}") from error


def given_rows(scope: PositionScope, values: Any, axis: int) -> Any:
    """Replace vertex tables in a layer's arguments by their own rows.

    Args:
        scope: The running interceptor.
        values: The arguments, in tuples or dicts.
        axis: Where the layer expects its rows.
    """
    if isinstance(values, tuple) and not hasattr(values, "_fields"):
        return tuple(given_rows(scope, value, axis) for value in values)
    if isinstance(values, dict):
        return {key: given_rows(scope, value, axis) for key, value in values.items()}
    if (number := has_all(scope, values, axis)) is None:
        return values
    # A layer's input may be a learned table [N, F]. Vectors and sparse matrices are left to the layer.
    table = values.dim() > 1 and values.layout is torch.strided
    return own_rows(scope, values, axis % values.dim(), number) if table else values


def given_sizes(scope: PositionScope, edges: Any, size: Any) -> Any:
    """Replace, in the ``size`` of a layer, numbers of all vertices by those of own ones.

    A user takes them from a table of all vertices, of which the layer gets own rows.

    Args:
        scope: The running interceptor.
        edges: The edges that the layer is given.
        size: The numbers of rows at row 0 and at row 1 of the edges.
    """
    held = scope.placements.get(edges) if scope.parted else None
    if held is None or held.kind is not PlacementKind.EDGES or not isinstance(size, tuple | list):
        return size
    view = scope.views[held.view]
    ends = (view.targets, view.sources) if held.swapped else (view.sources, view.targets)

    def own(number: Any, end: int) -> Any:
        named = scope.sets[end]
        if type(number) is not int or number != named.size:
            return number
        return SymbolicSize(named.own, Placement(PlacementKind.ROWS, vertex_set=end), lambda: named.size)

    return tuple(own(number, end) for number, end in zip(size, ends, strict=True))


def refuse_some_rows(scope: PositionScope, given: Any, what: str) -> None:
    """Refuse outputs of a forward or stage that are lost, or lack a row for each vertex.

    Args:
        scope: The running interceptor.
        given: The output tensors, in tuples or dicts.
        what: The name of what gives them.

    Raises:
        ModelError: If rows were lost, or belong to some vertices only.
    """
    if not scope.parted:
        return
    if isinstance(given, dict):
        given = tuple(given.values())
    for value in given if isinstance(given, (tuple, list)) else (given,):
        placement = scope.placements.get(value)
        if placement is not None and placement.kind is PlacementKind.LOST:
            raise lost(scope, placement)
        if placement is not None and placement.kind in VERTICES and not placement.is_complete:
            raise refused(scope, f"{what} with rows of some vertices only, of shape {list(value.shape)}")


def refuse_unknown_edges(scope: PositionScope, edges: Any) -> None:
    """Refuse edges given to a layer that are not made from the graph's edges.

    Raises:
        ModelError: If rows are split over parts, so that these ids would be taken for ids of a part.
    """
    if not scope.parted:
        return
    held = scope.placements.get(edges)
    if held is not None and held.kind is PlacementKind.LOST:
        raise lost(scope, held, edges=True)
    if held is None and type(edges) is Tensor and not edges.is_sparse:
        raise refused(
            scope,
            f"an edge list of shape {list(edges.shape)}, given to a layer, that is not made of edge_index",
            hint="all edges in data.edge_index, and an attribute an edge that tells their kind",
        )


def refuse_other_rows(scope: PositionScope, layer: Any, given: Kwargs) -> None:
    """Refuse tensors that a layer lifts to its edges, if they do not have a row for each vertex.

    PyG's code reads them by the part's ids, which would take some row of theirs for another vertex's.

    Args:
        scope: The running interceptor.
        layer: The message-passing layer.
        given: What its ``propagate`` is given.

    Raises:
        ModelError: If one has another number of rows.
    """
    if not scope.parted:
        return
    lifted = {name[:-2] for name in layer._user_args if name[-2:] in ("_i", "_j")}
    for name in lifted & given.keys():
        value = given[name]
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if (
                type(each) is not Tensor
                or each.dim() < abs(layer.node_dim)
                or scope.placements.get(each) is not None
            ):
                continue
            if all(each.size(layer.node_dim) != known.own for known in scope.sets):
                numbers = " or ".join(f"{known.size:,}" for known in scope.sets)
                raise refused(
                    scope,
                    f"{name} of shape {list(each.shape)} for a layer on {numbers} vertices",
                    expected="a row for each vertex in what a layer sends along edges",
                    hint="rows that forward was given, or made from them",
                )


def refuse_lost_ids(scope: PositionScope, name: str, args: Args, kwargs: Kwargs) -> None:
    """Refuse reads or writes by ids made from lost rows, such as the nearest vertices within a part.

    Raises:
        ModelError: If there is such an id. It names the call that lost the rows.
    """
    for value in _deep((*args[1:], *kwargs.values())):
        held = scope.placements.get(value)
        if held is not None and held.kind is PlacementKind.LOST and not value.is_floating_point():
            raise lost(scope, held, edges=True)


def _deep(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _deep(value)


BY_IDS: Final = frozenset(
    [
        *("__getitem__", "__setitem__", "index_select", "gather", "take_along_dim", "take", "embedding"),
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
        *("index_add", "index_add_", "index_put", "index_put_", "index_copy", "index_copy_"),
    ]
)
"""Calls that read or write entries by ids."""


def met(scope: PositionScope, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Replace tensors that have all rows by own rows where a call combines them with rows of vertices.

    Returns:
        None if no argument has rows of vertices, or none has all rows.

    Raises:
        ModelError: If the call writes to a tensor that has all rows.
    """
    if name != "__getitem__" and name.strip("_") not in ELEMENTWISE:
        return None
    placed = next(
        (
            (t, m)
            for t in tensors(args, kwargs)
            if (m := scope.placements.get(t)) is not None and m.kind in VERTICES
        ),
        None,
    )
    if placed is None or not placed[1].is_complete:
        return None
    # Row axis from the right, as broadcasting aligns x [n, F] with table [N, F].
    right, number = placed[1].axis - placed[0].dim(), placed[1].vertex_set
    # The result of an operator like += takes the place of its operand, so that is not a write to a table.
    targets = [] if name in IN_PLACE else written_by(name, "", args, kwargs)
    cut = False

    def own(value: Any) -> Any:
        nonlocal cut
        if isinstance(value, (tuple, list)):
            return type(value)(own(each) for each in value)
        if has_all(scope, value, right, number) is not None:
            if any(value is target for target in targets):
                raise all_rows_written(scope, name)
            cut = True
            return own_rows(scope, value, value.dim() + right, number)
        return value

    args, kwargs = tuple(own(value) for value in args), {key: own(value) for key, value in kwargs.items()}
    return (args, kwargs) if cut else None


def embedding(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``F.embedding(edge_index[0], table)`` by global ids: a table is the same on all ranks."""
    ids = args[0] if args else kwargs.get("input")
    placement = scope.placements.get(ids)
    table = kwargs.get("weight", args[1] if len(args) > 1 else None)
    if placement is None or not isinstance(table, Tensor) or not isinstance(ids, Tensor):
        return NotImplemented
    held = scope.placements.get(table)
    if held is not None and placement.kind in (*VERTICES, PlacementKind.PAIRS):
        # Rows of vertices, or lost rows: not a table that all ranks have.
        return scope.__torch_function__(Tensor.__getitem__, (), (table, ids))
    axis = ids.dim() - 1 if placement.kind in IDS else placement.axis
    # A number that each vertex holds, such as its type, reads the table as it is.
    if placement.kind in VERTICES:
        out = func(*args, **kwargs)
        return scope.placements.put(out, replace(placement, kind=PlacementKind.ROWS))
    if placement.kind not in IDS:
        return NotImplemented
    own = original(scope, table, 0, ids, placement)
    named = {key: value for key, value in kwargs.items() if key not in ("input", "weight")}
    # [E, d] from one end of the edges, [2, E, d] from both.
    out = func(ids if own is None else own, table, *args[2:], **named)
    if placement.kind is PlacementKind.EDGES:
        return scope.placements.put(out, Placement(PlacementKind.PAIRS, placement.view, axis, ids))
    return scope.placements.put(out, Placement(PlacementKind.PAIRS, placement.view, axis, placement.edges))


HANDLERS: dict[str, Callable[..., Any]] = {
    "__getitem__": of_table,
    "__setitem__": set_rows,
    "embedding": embedding,
}
