"""Sparse adjacency: the stand-in for a graph's sparse matrix (``adj_t``) in a model's forward.

Where it sits: the ``interceptor`` makes it where the data was given as a matrix, and asks these handlers
first. With the whole graph at hand it is the matrix itself. On a part it is a matrix of the part's rows,
whose columns include halo rows. Calls on it are answered by the part's edges; unknown calls are refused by
name.

::

    adj_t @ x, torch.sparse.mm(adj_t, x)      values * x[source], summed at targets
    adj_t.values(), .col_indices()            the part's edges, with their placements
    GCNConv(x, adj_t)                         GCNConv(x, edge_index, edge_weight), where that is the same
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from kagome.deferred.lazy_tensor import now
from kagome.errors import ModelError
from kagome.graph.structure.sparse_adjacency import Adjacency, adjacency_of
from kagome.placement.axis_rules import attribute
from kagome.placement.placement import Placement, PlacementKind, Placements, tensors
from kagome.placement.symbolic_size import SymbolicSize
from kagome.placement.torch_calls import Args, Func, Kwargs
from kagome.scope.constants import Constants
from kagome.scope.exchanges import RankSums
from kagome.sparse_ops.edge_view import EdgeView
from kagome.user_frame import user_line


@dataclass(frozen=True, eq=False)
class Matrix:
    """The sparse matrix of one interceptor.

    Args:
        given: The tensor that the model is given in place of the matrix.
        adjacency: The adjacency as the data held it.
        values: One value per edge of view 0, in its order.
        source: Ids that edges read.
        target: Ids of own rows.
        ends: Both, targets first, in the order in which PyG takes a matrix apart.
        pointer: Where each row begins.
    """

    given: Tensor
    adjacency: Adjacency
    values: Tensor
    source: Tensor
    target: Tensor
    ends: Tensor
    pointer: Tensor


class MatrixScope(Protocol):
    """The interface of the running interceptor that these handlers use."""

    placements: Placements
    views: list[EdgeView]
    constants: Constants
    parted: bool
    matrix: Matrix | None
    ranks: RankSums
    own: int

    def where(self) -> str:
        """Return the path of the running module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = ..., kwargs: Any = ...) -> Any:
        """Answer one torch call of the forward."""


def matrix_of(scope: MatrixScope) -> Matrix | None:
    """Return the stand-in for the matrix of view 0; None if the data was given as edges."""
    view = scope.views[0]
    adjacency = adjacency_of(view.attributes)
    if adjacency is None:
        return None
    source, target = view.edge_index
    pointer = torch.zeros(scope.own + 1, dtype=torch.int64, device=source.device)
    torch.cumsum(torch.bincount(target, minlength=scope.own), 0, out=pointer[1:])
    if scope.parted:
        # A real sparse tensor [n, n + H], so that its type, device and layout are right. Its columns exceed
        # the rows of x, so torch must not multiply it: see ``refuse_unknown``.
        size = (scope.own, view.ids.numel())
        order = target.argsort(stable=True)
        given = torch.sparse_csr_tensor(
            pointer, source[order], adjacency.values[order], size, check_invariants=False
        )
    else:
        given = adjacency.matrix(view.edge_index, scope.own)
    scope.placements.put(given, Placement(PlacementKind.MATRIX))
    scope.placements.put(source, Placement(PlacementKind.SOURCE, edges=view.edge_index))
    scope.placements.put(target, Placement(PlacementKind.TARGET, edges=view.edge_index))
    scope.placements.put(pointer, Placement(PlacementKind.MATRIX))
    ends = scope.placements.put(torch.stack([target, source]), Placement(PlacementKind.EDGES, swapped=True))
    # As constants, these ids are recognised in later passes: reads by them are deferred.
    for value in (source, target, ends):
        scope.constants.add(value)
    return Matrix(given, adjacency, adjacency.values, source, target, ends, pointer)


def _product(scope: MatrixScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``adj_t @ x`` and its other names."""
    matrix = scope.matrix
    if matrix is None or not any(value is matrix.given for value in args):
        return NotImplemented
    first, *rest = args
    how = kwargs.get("reduce", rest[1] if len(rest) > 1 else "sum")
    x = now(rest[0])
    if first is not matrix.given or scope.placements.get(x) is None or x.dim() > 2:
        if not scope.parted:
            return NotImplemented
        raise _refused(scope, f"{name} of it with a tensor of shape {list(x.shape)} that has no row a vertex")
    if not scope.parted:
        return scope.placements.put(func(first, x, *rest[1:], **kwargs), Placement(PlacementKind.ROWS))
    if how not in ("sum", "mean"):
        raise _refused(scope, f"{name} with {how!r}", hint="give the layer edge_index, or take sums or means")
    # The product as calls that the interceptor answers, which defer the read and exchange the halo: gather by
    # source, times the values, sum by target.
    call = scope.__torch_function__
    read = call(Tensor.index_select, (), (x, 0, matrix.source))
    values = matrix.values.to(x.dtype)
    scope.placements.put(values, Placement(PlacementKind.PAIRS, edges=scope.views[0].edge_index))
    weighted = call(Tensor.mul, (), (read, values if x.dim() == 1 else values.view(-1, 1)))
    zeros = scope.placements.put(x.new_zeros(x.shape), Placement(PlacementKind.ROWS))
    out = now(call(Tensor.index_add, (), (zeros, 0, matrix.target, weighted)))
    if how == "mean":
        count = matrix.pointer.diff().clamp(min=1).to(out.dtype)
        out = out / (count if x.dim() == 1 else count.view(-1, 1))
    return scope.placements.put(out, Placement(PlacementKind.ROWS))


def _size(scope: MatrixScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``size`` and ``shape``: as many rows and columns as there are vertices."""
    matrix = scope.matrix
    if matrix is None or args[0] is not matrix.given or not scope.parted:
        return NotImplemented
    if name == "__get__" and attribute(func) != "shape":
        return NotImplemented
    count = SymbolicSize(
        scope.own,
        Placement(PlacementKind.ROWS),
        lambda: scope.ranks.number_of(Placement(PlacementKind.ROWS), scope.own),
    )
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return torch.Size([count, count]) if dim is None else count


def _asked(scope: MatrixScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer reads of the matrix's components with the part's edges, in their order."""
    matrix, first = scope.matrix, args[0] if args else None
    if matrix is None or not scope.parted:
        return NotImplemented
    if first is matrix.given:
        parts = {"values": matrix.values, "col_indices": matrix.source, "crow_indices": matrix.pointer}
        return parts.get(name, matrix.given)
    # PyG's ``to_edge_index`` takes a CSR matrix apart: row ids by repeat_interleave of the pointer's
    # differences, then a stack of row and column ids. Each of its calls is answered by the part's edges.
    if name == "stack":
        ends = list(first) if isinstance(first, (tuple, list)) else []
        same = len(ends) == 2 and ends[0] is matrix.target and ends[1] is matrix.source
        return matrix.ends if same else NotImplemented
    if name == "repeat_interleave" and len(args) > 1:
        placement = scope.placements.get(args[1])
        return (
            matrix.target
            if placement is not None and placement.kind is PlacementKind.MATRIX
            else NotImplemented
        )
    placement = scope.placements.get(first)
    if (
        placement is not None and placement.kind is PlacementKind.MATRIX
    ):  # the row pointer on its way to row ids
        return scope.placements.put(func(*args, **kwargs), placement)
    return NotImplemented


def refuse_unknown(scope: MatrixScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> None:
    """Refuse a call on a part's matrix that no handler has answered.

    Raises:
        ModelError: If the call was given the matrix or its pointer, and asks for more than type and place.
    """
    matrix = scope.matrix
    assert matrix is not None
    if name in _KNOWN or (name == "__get__" and attribute(func) not in ("T", "mT", "H", "mH")):
        return
    if any(value is matrix.given or value is matrix.pointer for value in tensors(args, kwargs)):
        raise _refused(scope, f"{name} of it")


_KNOWN: Final = frozenset(
    [
        "dim",
        "ndimension",
        "is_floating_point",
        "is_complex",
        "get_device",
        "numel",
        "sparse_dim",
        "dense_dim",
        "requires_grad_",
    ]
)


def swap(scope: MatrixScope, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Replace the matrix in a PyG layer's arguments by edges where the result is the same; else return None.

    For a matrix of ones without self-loops, a layer computes the same from its edges. Values become edge
    weights of a layer that takes them.
    """
    matrix = scope.matrix
    if matrix is None or not type(module).__module__.startswith("torch_geometric.nn."):
        return None
    if not any(value is matrix.given for value in (*args, *kwargs.values())):
        return None
    weighted = {}
    if matrix.adjacency.kind != "ones":
        # A layer without an edge_weight would ignore the values. ``place`` counts arguments behind ``self``.
        names = inspect.signature(type(module).forward).parameters
        place = list(names).index("edge_weight") - 1 if "edge_weight" in names else -1
        taken = "edge_weight" in kwargs or len(args) > place
        if matrix.adjacency.kind == "loops" or not scope.parted or place < 0 or taken:
            return None
        weighted = {"edge_weight": matrix.values}
    edges = scope.views[0].edge_index

    def swapped(value: Any) -> Any:
        return edges if value is matrix.given else value

    return tuple(map(swapped, args)), {**{key: swapped(value) for key, value in kwargs.items()}, **weighted}


def _refused(scope: MatrixScope, got: str, *, hint: str = "") -> ModelError:
    return ModelError(
        "a part to read its own rows of the adjacency: products with rows of vertices, its edges, its values",
        got,
        where="; ".join(filter(None, (scope.where(), user_line()))),
        hint=hint or "give the layer data.edge_index and data.edge_weight, or train on one rank",
    )


HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("_sparse_mm", "matmul", "mm", "__matmul__", "mv"), _product),
    "size": _size,
    **dict.fromkeys(
        (
            *("values", "col_indices", "crow_indices", "repeat_interleave", "detach", "diff", "coalesce"),
            *("to_sparse_csr", "contiguous", "clone", "to", "is_coalesced", "stack"),
        ),
        _asked,
    ),
    "__get__": _size,
}
"""Handlers asked before all others where the model is given a matrix."""
