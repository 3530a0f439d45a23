"""Validation: a user's Data in, a clean Data and what is worth saying about it out; each fault its own error.

Where it sits: ``data.load_data`` and the Python API both pass every graph through :func:`validate`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from kagome.errors import DataError
from kagome.graph import masks
from kagome.graph.adjacency import beside, taken_apart
from kagome.graph.attributes import dense, is_sparse, plain, split_attributes
from kagome.graph.topology import topology

Task = Literal["multiclass", "multilabel"]
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def validate(data: object, *, split: int = 0) -> tuple[Data, list[str]]:
    """Check a graph and bring it into the one form that training reads.

    The given object is never changed. Kept are ``edge_index``, ``num_nodes`` and every tensor with a row a
    vertex or a row an edge.

    Args:
        data: A PyG ``Data``.
        split: Which of several given splits; the seed of a 60/20/20 split where there are no masks.

    Returns:
        A new Data with ``x`` (floating), ``edge_index`` (int64), ``y`` and three masks; and sentences to say
        at the start of the run. Sentences that an earlier call left in ``data.notes`` come first.

    Raises:
        DataError: One for each fault.

    Shapes:
        x ``[N, F]``, edge_index ``[2, E]``, y ``[N]`` (classes, -1 unlabelled) or ``[N, C]`` (0 and 1), masks
        ``[N]`` or ``[N, splits]`` in, ``[N]`` out.

    Cost: two sorts of the edges.
    """
    graph, notes = validate_edges(data)
    edge_index, num_nodes = graph.edge_index, int(graph.num_nodes)
    x = _features(graph.x, num_nodes, notes)
    y = _labels(graph.y, num_nodes, notes)
    labelled = y >= 0 if y.dim() == 1 else torch.ones(num_nodes, dtype=torch.bool)
    given = {name: graph[name] for name in masks.NAMES if name in graph}
    chosen = masks.settle(given, num_nodes, labelled, split, notes)
    notes += topology(edge_index, num_nodes)

    rest = Data(edge_index=edge_index, num_nodes=num_nodes)
    for name, value in graph.to_dict().items():
        if isinstance(value, Tensor) and name not in rest and not is_sparse(value):
            rest[name] = plain(value)
    nodes, edges = split_attributes(rest)
    clean = Data(edge_index=edge_index, num_nodes=num_nodes, **{**nodes, **edges, "x": x, "y": y, **chosen})
    return clean, list(dict.fromkeys(notes))


def validate_edges(data: object) -> tuple[Data, list[str]]:
    """Check the edges alone, as a first step: features, labels and masks stay as they are given.

    Args:
        data: A PyG ``Data``.

    Returns:
        A new Data with ``edge_index`` and ``num_nodes``, and sentences to say.

    Raises:
        DataError: If it is no graph, or its edges or their attributes have a fault.

    Shapes:
        edge_index ``[2, E]``, edge_weight and edge_attr ``[E, ...]``.
    """
    given = _fields(data)
    notes = [note for note in given.pop("notes", None) or () if isinstance(note, str)]
    edge_index = _edge_index(given)
    num_nodes = _num_nodes(given, edge_index, notes)
    check_ids(edge_index, num_nodes)
    for name in ("edge_weight", "edge_attr"):
        if given.get(name) is not None:
            given[name] = _edge_values(name, plain(given[name]), edge_index.size(1))
    return Data(**{**given, "edge_index": edge_index, "num_nodes": num_nodes}), notes


def num_classes(data: Data) -> int:
    """Columns that a model must give: classes, or labels a vertex may have at once."""
    if data.y.dim() == 2:
        return int(data.y.size(1))
    return max(int(data.y.max()) + 1, 1)


def task(data: Data) -> Task:
    """Whether a vertex has one class or several labels at once."""
    return "multilabel" if data.y.dim() == 2 else "multiclass"


def check_ids(edge_index: Tensor, num_nodes: int) -> None:
    """Every id in the edges must be a vertex.

    Raises:
        DataError: With the first id that is none, its place, and the number of vertices.

    Shapes:
        edge_index ``[2, E]``.
    """
    if edge_index.numel() == 0 or (int(edge_index.min()) >= 0 and int(edge_index.max()) < num_nodes):
        return
    row, column = ((edge_index < 0) | (edge_index >= num_nodes)).nonzero()[0].tolist()
    raise DataError(
        f"vertex ids run from 0 to {num_nodes - 1} ({num_nodes:,} vertices)",
        f"edge_index[{row}, {column}] is {int(edge_index[row, column])}",
        where="data.edge_index",
        hint="give each vertex a row in x, or set data.num_nodes",
    )


def _fields(data: object) -> dict[str, Any]:
    if isinstance(data, HeteroData):
        raise DataError(
            "a graph with one kind of vertex (torch_geometric.data.Data) was expected",
            f"this is a HeteroData with {len(data.node_types)} kinds of vertices and "
            f"{len(data.edge_types)} kinds of edges; a partition here has one list of vertices",
            hint="data.to_homogeneous(), if its kinds have the same number of features",
        )
    if not isinstance(data, Data):
        hint = "pass dataset[0]" if hasattr(data, "__getitem__") and hasattr(data, "__len__") else ""
        raise DataError(
            "a torch_geometric.data.Data was expected", f"this is a {type(data).__name__}", hint=hint
        )
    fields = dict(data.to_dict())
    for name, value in fields.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            fields[name] = torch.as_tensor(value)
    return fields


def _edge_index(given: dict[str, Any]) -> Tensor:
    edge_index, adjacency = given.get("edge_index"), given.pop("adj_t", None)
    if edge_index is None and adjacency is None:
        raise DataError(
            "a graph needs edges",
            "this Data has neither edge_index nor adj_t",
            hint="set data.edge_index, 2 x E",
        )
    if edge_index is None or is_sparse(edge_index):
        edge_index, along = taken_apart(adjacency if edge_index is None else edge_index, given)
        given.update(along)
    elif adjacency is not None and is_sparse(adjacency):
        beside(adjacency, plain(edge_index))
    edge_index = plain(edge_index)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        turned = edge_index.dim() == 2 and edge_index.size(1) == 2
        raise DataError(
            "edge_index must have the shape [2, E]",
            f"it has {list(edge_index.shape)}",
            where="data.edge_index",
            hint="data.edge_index.t().contiguous()" if turned else "",
        )
    if edge_index.dtype not in _INTEGERS and edge_index.numel() > 0:
        raise DataError(
            "edge_index must hold whole numbers (torch.int64)",
            f"it holds {edge_index.dtype}",
            where="data.edge_index",
            hint="data.edge_index.long()",
        )
    return edge_index.to(torch.int64).contiguous()


def _num_nodes(given: dict[str, Any], edge_index: Tensor, notes: list[str]) -> int:
    """What the user set, else the rows of x, y or a mask; the largest id last, as it misses the isolated."""
    count = given.pop("num_nodes", None)
    if count is None:
        for name in ("x", "y", *masks.NAMES):
            value = given.get(name)
            if value is not None:
                count = value.size(0) if callable(getattr(value, "size", None)) else len(value)
                break
        else:
            count = int(edge_index.max()) + 1 if edge_index.numel() else 0
            notes.append(f"The number of vertices is taken from the largest id in the edges: {count:,}.")
    if int(count) < 1:
        raise DataError("a graph needs at least one vertex", f"it has {int(count)}")
    return int(count)


def _features(x: Any, num_nodes: int, notes: list[str]) -> Tensor:
    if x is None:
        raise DataError(
            "every vertex needs features",
            f"data.x is missing ({num_nodes:,} vertices)",
            hint="data.x = torch.randn(data.num_nodes, 128), or one column of degrees",
        )
    if is_sparse(x):
        x = dense(x)
        notes.append(f"Sparse features are made dense: {x.size(0):,} x {x.size(1):,}.")
    rows = plain(x)
    if rows.dim() == 0 or rows.size(0) != num_nodes:
        raise DataError(
            f"x must have a row for each of {num_nodes:,} vertices",
            f"it has {rows.size(0) if rows.dim() else 0:,}",
            where="data.x",
        )
    if rows.dim() == 1:
        rows = rows[:, None]
    if rows.is_complex():
        raise DataError("features must be real numbers", f"x holds {rows.dtype}", where="data.x")
    if not rows.is_floating_point():
        notes.append(f"Features are turned from {str(rows.dtype).removeprefix('torch.')} into float32.")
        rows = rows.float()
    _finite("x", rows)
    return rows.contiguous()


def _finite(name: str, value: Tensor) -> None:
    if not value.is_floating_point() or value.numel() == 0:
        return
    # One pass without copies: a NaN anywhere makes both NaN.
    if bool(torch.stack(value.aminmax()).isfinite().all()):
        return
    bad = (~value.isfinite()).nonzero()
    first = bad[0].tolist()
    raise DataError(
        f"{name} must hold finite numbers",
        f"{name}[{', '.join(map(str, first))}] (row {first[0]}) is {value[tuple(first)].item()}, "
        f"and so are {len(bad) - 1:,} other entries",
        where=f"data.{name}",
    )


def _labels(y: Any, num_nodes: int, notes: list[str]) -> Tensor:
    if y is None:
        raise DataError("every vertex needs a label (-1 for none)", "data.y is missing", hint="set data.y")
    y = plain(y)
    if y.dim() == 2 and y.size(1) == 1:
        y = y.view(-1)
    if y.dim() not in (1, 2) or y.size(0) != num_nodes:
        raise DataError(
            f"y must have a row for each of {num_nodes:,} vertices, and one or two dimensions",
            f"its shape is {list(y.shape)}",
            where="data.y",
        )
    return _several(y) if y.dim() == 2 else _classes(y, num_nodes, notes)


def _several(y: Tensor) -> Tensor:
    odd = (y != 0) & (y != 1)
    if odd.any():
        row, column = odd.nonzero()[0].tolist()
        raise DataError(
            "y with several columns must hold 0 and 1 (several labels a vertex)",
            f"y[{row}, {column}] is {y[row, column].item()}",
            where="data.y",
        )
    return y.contiguous()


def _classes(y: Tensor, num_nodes: int, notes: list[str]) -> Tensor:
    if y.is_floating_point():
        odd = ~(y.isfinite() & (y == y.round()))
        if odd.any():
            row = int(odd.nonzero()[0])
            raise DataError(
                "class labels must be whole numbers", f"y[{row}] is {y[row].item()}", where="data.y"
            )
        notes.append(f"Labels are turned from {str(y.dtype).removeprefix('torch.')} into int64.")
    y = y.to(torch.int64)
    # More classes than this are vertex ids or hashes taken for labels; the last layer would be as wide.
    limit = max(num_nodes, 10_000)
    odd = (y < -1) | (y >= limit)
    if odd.any():
        row = int(odd.nonzero()[0])
        raise DataError(
            f"class labels run from 0 to C - 1 (-1 for none, at most {limit:,} classes)",
            f"y[{row}] is {int(y[row])}",
            where="data.y",
        )
    return y.contiguous()


def _edge_values(name: str, value: Tensor, num_edges: int) -> Tensor:
    if value.dim() == 0 or value.size(0) != num_edges:
        raise DataError(
            f"{name} must have a row for each of {num_edges:,} edges",
            f"it has {value.size(0) if value.dim() else 0:,}",
            where=f"data.{name}",
        )
    _finite(name, value)
    return value.contiguous()
