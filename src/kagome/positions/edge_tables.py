"""Edge tables: tensors of the model with a row for each edge of the whole graph, cut to a part's edges.

Where it sits: ``intercept.hooks`` finds them in a user's modules. ``intercept.interceptor`` puts a part's own
rows in their place in each torch call. The tables themselves stay whole on all ranks, and so do their
gradients: each rank contributes those of its own edges.

::

    self.w = nn.Parameter(E numbers)    w * messages    w[edge_ids] * messages: own rows, in the part's order
                                        w[data.e_id]    the whole table, read by numbers of edges
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn

from kagome.errors import ModelError
from kagome.placement.axis_rules import attribute
from kagome.placement.placement import IDS, Placement, PlacementKind, Placements, tensors
from kagome.placement.weak_map import WeakTensorMap
from kagome.placement.writes import IN_PLACE, writes, written_by
from kagome.positions.position_scope import Args, Kwargs
from kagome.scope.constants import Constants
from kagome.sparse_ops.edge_view import EdgeView
from kagome.user_frame import user_line

if TYPE_CHECKING:
    from kagome.positions.kept_tensors import KeptTensors

WAY_OUT: Final = "give it to the model as an attribute of the edges (data.edge_attr), or as data.e_id"
# Tensors of these modules are weights, even if a size happens to be the number of edges. Containers and
# embeddings are theirs too, but hold what the user put there.
_OWN: Final = ("torch_geometric.nn.", "torch.nn.")
_HOLDERS: Final = (nn.ParameterList, nn.ParameterDict, nn.Embedding)
_ROWS_FIRST: Final = frozenset(
    [
        "linear",
        "bilinear",
        "embedding",
        "embedding_bag",
        "batch_norm",
        "layer_norm",
        "group_norm",
        "instance_norm",
        "matmul",
        "mm",
        "bmm",
        "__matmul__",
        "conv1d",
    ]
)
"""Calls whose arguments after the first are weights, however many rows they have."""
_READS: Final = frozenset(["__getitem__", "index_select", "gather", "take", "take_along_dim", "embedding"])
_SKIPPED: Final = frozenset(
    [
        "__hash__",
        "__repr__",
        "__deepcopy__",
        "__reduce_ex__",
        "__setstate__",
        "__set__",
        "__delete__",
        "__dir__",
        "__format__",
        "requires_grad_",
        "register_hook",
        "dim",
        "ndimension",
        "is_floating_point",
        "is_complex",
        "element_size",
        "get_device",
    ]
)
# Attributes answered for own rows. Others, such as dtype, device or grad, are asked of the table itself.
_ATTRIBUTES: Final = frozenset(["shape", "T", "mT", "data"])


class Cutter(Protocol):
    """The interface of the running interceptor that edge tables use."""

    placements: Placements
    views: list[EdgeView]
    constants: Constants
    keeping: KeptTensors
    parted: bool

    def where(self) -> str:
        """Return the path of the module whose forward is running."""


class EdgeTables:
    """The edge tables of one model, and their own rows on this part.

    Args:
        names: The name of each table.
    """

    def __init__(self, names: WeakTensorMap[str]) -> None:
        self.names = names
        self._own: WeakTensorMap[tuple[int, bool, Tensor]] = WeakTensorMap()

    def cut(self, scope: Cutter, name: str, func: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Replace tables in a call's arguments by their own rows.

        Raises:
            ModelError: If the call writes to a table.
        """
        # These calls look at no rows, and hash or deepcopy must see the table itself.
        if name in _SKIPPED or (name == "__get__" and attribute(func) not in _ATTRIBUTES):
            return args, kwargs
        first = args[0] if args else None
        if first in self and writes(name):
            raise ModelError(
                "a tensor that the model keeps for the edges to stay unchanged in forward",
                f"{name}, which writes to {self.names[first]} with a row for each edge of the graph",
                where="; ".join(filter(None, (scope.where(), user_line()))),
                hint="compute a new tensor from it, or train on one rank",
            )
        # w[data.e_id] reads by numbers in the whole graph, so it needs the whole table. w[order], with
        # positions among own edges, reads own rows.
        whole = name in _READS and first in self and _by_number(args[1:], kwargs)
        whole = whole and not self._by_order(scope, first, (*args[1:], *kwargs.values()))
        # F.linear(h, weight) with as many outputs as edges: the weight stays whole.
        if name in _ROWS_FIRST and args:
            return (self._of(scope, first, whole=whole), *args[1:]), kwargs
        return (
            tuple(self._of(scope, value, whole=whole and place == 0) for place, value in enumerate(args)),
            {key: self._of(scope, value) for key, value in kwargs.items()},
        )

    def forget(self) -> None:
        """Drop cached own rows at the end of a forward: learned tables change before the next one."""
        self._own.clear()

    def __contains__(self, value: object) -> bool:
        return isinstance(value, Tensor) and value in self.names

    def _by_order(self, scope: Cutter, table: Any, rest: Args) -> bool:
        """Return True if rows are read by positions among the part's own edges.

        Raises:
            ModelError: If it is unknown among which edges.
        """
        held = [
            (each, placement)
            for each in tensors(rest, {})
            if (placement := scope.placements.get(each)) is not None
        ]
        local = [
            (each, placement)
            for each, placement in held
            if placement.kind in (PlacementKind.LOCAL, PlacementKind.MIXED)
        ]
        for index, placement in local:
            view = scope.views[placement.view]
            # If the list that they count is unknown, as many numbers as own edges are an order of all.
            known = placement.edges is not None and (
                placement.edges is view.edge_index or placement.edges is view.given
            )
            if placement.kind is PlacementKind.MIXED or not (known or index.numel() == view.edge_ids.numel()):
                raise ModelError(
                    "rows of a tensor that the model keeps for the edges to be read by numbers of edges",
                    f"{self.names[table]}, read by numbers that forward has chosen or reckoned with",
                    where="; ".join(filter(None, (scope.where(), user_line()))),
                    hint=WAY_OUT,
                )
        return bool(local)

    def _of(self, scope: Cutter, value: Any, *, whole: bool = False) -> Any:
        if isinstance(value, (tuple, list)):
            return (
                type(value)(self._of(scope, each) for each in value)
                if type(value) in (tuple, list)
                else value
            )
        if value not in self or whole:
            return value
        # Cut once per forward. An in-place write changes the version; rows cut under no_grad have no graph.
        version, grad, own = self._own.get(value, (-1, False, value))
        if version != value._version or grad != torch.is_grad_enabled():
            at, axis = _view_of(scope, value)
            own = own_edges(scope, value, axis, Placement(PlacementKind.PAIRS, at))
            scope.keeping.copy(scope, value, own)
            self._own[value] = value._version, torch.is_grad_enabled(), own
        return own


def own_edges(scope: Cutter, table: Tensor, axis: int, like: Placement) -> Tensor:
    """Return own rows of a tensor with a row for each edge of the graph, in the order of the part's edges.

    Args:
        scope: The running interceptor.
        table: The tensor with all rows.
        axis: Its row axis.
        like: The placement of the tensor that it is combined with; it says which edges.

    Shapes:
        ``[..., E, ...]`` -> ``[..., e, ...]``.
    """
    view = scope.views[like.view]
    with torch._C.DisableTorchFunction():
        own = table.index_select(axis, view.edge_ids.to(table.device))
    return scope.placements.put(own, Placement(PlacementKind.PAIRS, like.view, axis, edges=view.given))


def tables_of(
    model: nn.Module,
    edges: Sequence[int],
    vertices: Sequence[int],
    placements: Placements | None = None,
) -> EdgeTables | None:
    """Return the tensors that a model keeps with a row for each edge; None if there are none.

    Weights of torch's and PyG's own layers do not count, whatever their sizes.

    Args:
        model: The user's module.
        edges: The number of edges of each edge set of the whole graph.
        vertices: The number of vertices of each vertex set.
        placements: Those of the part; a tensor that has one holds own rows already.

    Raises:
        ModelError: If there are as many vertices as edges, so that it is ambiguous which rows they are, or if
            the model keeps a sparse matrix of the vertices.
    """
    names: WeakTensorMap[str] = WeakTensorMap()
    for each in edges:
        for name, tensor in _tables_among(model, each, vertices, placements):
            if tensor in names:
                continue
            # Rows of two edge sets of one size, such as a set and its reverse: the tensor stays whole until
            # it meets rows of one of them. Lists of edges are for ``sharding.rows.model_edges``.
            if sum(count in tensor.shape for count in edges) > 1 or (len(edges) > 1 and _is_list(tensor)):
                continue
            names[tensor] = name
    return EdgeTables(names) if len(names) else None


def _is_list(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int64 and tensor.dim() == 2 and tensor.size(0) == 2


def fit(model: nn.Module, edges: int, vertices: int, places: Tensor) -> bool:
    """Cut the tables of a model to some edges, in place, so that a copy of it runs on a sample of the graph.

    Args:
        model: The copy of the model.
        edges: Number of edges of the whole graph.
        vertices: Number of vertices of the whole graph.
        places: The positions of the edges that stay.

    Returns:
        Whether there was a table.

    Shapes:
        places ``[e]``.
    """
    found = {id(tensor): tensor for _, tensor in _tables_among(model, edges, [vertices])}
    # All edges stay, in their order.
    if places.numel() == edges:
        return False
    for tensor in found.values():
        # The tensor object stays, so that everything that refers to it sees the cut one.
        tensor.data = tensor.data.index_select(_axis(tensor, edges), places)
    return bool(found)


def _tables_among(
    model: nn.Module, edges: int, vertices: Sequence[int], placements: Placements | None = None
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors_of(model):
        if placements is not None and placements.get(tensor) is not None:
            continue
        if tensor.layout is not torch.strided and any(each in tensor.shape for each in vertices):
            raise ModelError(
                "an adjacency to come with the data, so that each part has its own rows",
                f"{name} in the model, a sparse matrix of {list(tensor.shape)}",
                where=name,
                hint="give the Data adj_t, and forward(x, adj_t); or train on one rank",
            )
        # A size equal to the number of edges is the only sign of a table.
        places = [axis for axis, size in enumerate(tensor.shape) if size == edges]
        if edges < 2 or not places or tensor.layout is not torch.strided:
            continue
        if edges in vertices or len(places) > 1:
            what = "as many edges as vertices" if edges in vertices else "one axis of edges"
            raise ModelError(
                f"a tensor of {edges:,} rows in the model to belong to the vertices or to the edges",
                f"{name} of shape {list(tensor.shape)} in a graph with {what}",
                where=name,
                hint=f"{WAY_OUT}; or train on one rank",
            )
        yield name, tensor


def met(scope: Cutter, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Replace tensors of all edges by own rows where a call combines them with rows of the part's edges.

    Returns:
        None if no argument has a row for each of the part's edges, or none has one for each of the graph's.

    Raises:
        ModelError: If the call writes to such a tensor.
    """
    found = next(
        ((t, m) for t in tensors(args, kwargs) if (m := _edges_placement(scope, t)) is not None), None
    )
    if found is None:
        return None
    # Axis of the edges from the right, as broadcasting aligns them.
    right, cut = found[1].axis - found[0].dim(), False
    edges = scope.views[found[1].view].count
    # The result of an operator like += takes the place of its operand, so that is not a write to a table.
    targets = [] if name in IN_PLACE else written_by(name, "", args, kwargs)

    def own(value: Any) -> Any:
        nonlocal cut
        if type(value) in (tuple, list):
            return type(value)(own(each) for each in value)
        if not isinstance(value, Tensor) or scope.placements.get(value) is not None or value.dim() < -right:
            return value
        axis = value.dim() + right
        # A mask of all edges, as in messages[mask], need not align: it selects along an axis of its own size.
        if value.size(axis) != edges:
            axis = _axis(value, edges) if value.dtype == torch.bool else -1
        if axis < 0:
            return value
        if any(value is target for target in targets):
            raise ModelError(
                "a row for each edge that forward was given in a tensor that it writes rows of edges into",
                f"{name}, which writes into a tensor of shape {list(value.shape)}, all {edges:,} edges",
                where="; ".join(filter(None, (scope.where(), user_line()))),
                hint="make it with a row for each of them: x.new_zeros(edge_index.size(1), ...)",
            )
        cut = True
        return own_edges(scope, value, axis, found[1])

    args, kwargs = tuple(own(value) for value in args), {key: own(value) for key, value in kwargs.items()}
    return (args, kwargs) if cut else None


def _edges_placement(scope: Cutter, tensor: Tensor) -> Placement | None:
    """Return the placement along the edge axis of a tensor with an entry per edge of the part, in order."""
    placement = scope.placements.get(tensor)
    axis = None if placement is None else edge_axis(tensor, placement)
    if placement is None or axis is None:
        return None
    # Rows or ids of edges that forward selected have another number of entries.
    fits = tensor.dim() > axis and tensor.size(axis) == scope.views[placement.view].edge_ids.numel()
    return Placement(PlacementKind.PAIRS, placement.view, axis) if fits else None


def edge_axis(tensor: Tensor, placement: Placement) -> int | None:
    """Return the axis along which a tensor has one entry per edge; None if it is not of edges."""
    if placement.kind is PlacementKind.PAIRS:
        return placement.axis
    # [2, E] has its edges along the last axis, one row of it [E] along the first.
    if placement.kind is PlacementKind.EDGES:
        return tensor.dim() - 1
    return 0 if placement.kind in IDS else None


def _view_of(scope: Cutter, table: Tensor) -> tuple[int, int]:
    """Return the number of the edges that a kept tensor has a row for each of, and its row axis."""
    for at, view in enumerate(scope.views):
        if (axis := _axis(table, view.count)) >= 0:
            return at, axis
    raise AssertionError("only tensors with a row for each edge are tables")


def _axis(tensor: Tensor, edges: int) -> int:
    return next((axis for axis, size in enumerate(tensor.shape) if size == edges), -1)


def _by_number(rest: Args, kwargs: Kwargs) -> bool:
    """Return True if rows are read by numbers of edges, rather than by a slice or one flag per edge."""
    items: list[Any] = []
    for value in (*rest, *kwargs.values()):
        items += value if isinstance(value, (tuple, list)) else [value]
    numbers = [each for each in items if isinstance(each, Tensor)]
    # w[ids] reads by number and so does w[5]; w[:m] and w[mask] follow the order of the edges.
    if any(each.dtype not in (torch.bool, torch.uint8) for each in numbers):
        return True
    return not numbers and isinstance(items[0] if items else None, int)


def tensors_of(model: nn.Module, *, libraries: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield named parameters, buffers, and tensors among the attributes of modules.

    Args:
        model: The user's module.
        libraries: Whether to include those of torch's and PyG's own modules.
    """
    for path, module in model.named_modules():
        own = type(module).__module__.startswith(_OWN) and not isinstance(module, _HOLDERS)
        if own and not libraries:
            continue
        held = {**vars(module), **module._parameters, **module._buffers}
        for name, value in held.items():
            label = f"{path}.{name}" if path else name
            # ``vars`` has the registries themselves too, whose entries were added above by name.
            if name in ("_parameters", "_buffers", "_modules") or "hook" in name:
                continue
            if isinstance(value, Tensor):
                yield label, value
            elif isinstance(value, dict):
                yield from (
                    (f"{label}[{key!r}]", each) for key, each in value.items() if isinstance(each, Tensor)
                )
            elif isinstance(value, (tuple, list)):
                yield from (
                    (f"{label}[{key}]", each) for key, each in enumerate(value) if isinstance(each, Tensor)
                )
