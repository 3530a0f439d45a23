"""Validation: check a user's ``Data`` and return a clean one, with notes; each fault has its own error.

Where it sits: ``graph.datasets.load`` and the Python API both pass every graph through :func:`validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from kagome.errors import DataError
from kagome.graph.structure import splits
from kagome.graph.structure.attributes import (
    Notes,
    dense,
    is_sparse,
    numbers_of,
    plain,
    unboxed,
    without_numbers,
)
from kagome.graph.structure.labels import Labels, labelled, labels_of
from kagome.graph.structure.sets import Graph
from kagome.graph.structure.sparse_adjacency import beside, from_adjacency
from kagome.graph.structure.topology import topology

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def validate(data: object, *, split: int = 0) -> tuple[Data, list[str]]:
    """Check a graph and bring its edges and masks into the one form that training reads.

    The given object is never changed. ``x``, ``y`` and all other attributes keep their type, shape and
    values, except that sparse features become dense. Which value marks a missing label is left to the loss.

    Args:
        data: A PyG ``Data``; ``x`` and ``y`` may be missing. OGB's ``split_idx`` serves as masks.
        split: The index among several given splits, or the seed of a 60/20/20 split if there are no masks.

    Returns:
        A new Data with ``edge_index`` (int64), three masks and the given attributes; and notes, sentences to
        print at the start of the run. Notes that an earlier call left in ``data.notes`` come first.

    Raises:
        DataError: One for each kind of fault.

    Shapes:
        x ``[N, ...]``, edge_index ``[2, E]``, y ``[N, ...]``, masks ``[N]`` or ``[N, splits]`` in, ``[N]``
        out.

    Cost: two sorts of the edges.
    """
    graph, notes = validate_edges(data)
    settled = validate_rows(graph, int(graph.num_nodes), split, notes)
    notes += topology(graph.edge_index, int(graph.num_nodes))
    return Data(**settled), list(dict.fromkeys(notes))


def validate_rows(graph: Data, num_nodes: int, split: int, notes: list[str]) -> dict[str, Any]:
    """Check features, labels and masks of one kind of vertices.

    Args:
        graph: Their attributes, with edges that were checked before, or without any.
        num_nodes: The number of vertices.
        split: The index among several given splits, or the seed of the one that is drawn.
        notes: Sentences for the start of the run; this function appends its own.

    Returns:
        All attributes, with three masks.

    Raises:
        DataError: One for each kind of fault.
    """
    settled: dict[str, Any] = {}
    # The vertices that a split is drawn from, if no masks are given: those with a label.
    there = torch.ones(num_nodes, dtype=torch.bool)
    if graph.x is not None:
        settled["x"] = features(graph.x, num_nodes, notes)
    if graph.y is not None:
        settled["y"] = _rows_of_labels(graph.y, num_nodes)
        there = labelled(settled["y"], labels_of(settled["y"]))
    given = {name: graph[name] for name in splits.NAMES if graph.get(name) is not None}
    ids = graph.get("split_idx")
    # Anything else called ``split_idx`` is the user's own attribute if masks are given, and an error if not.
    if isinstance(ids, Mapping) or (ids is not None and not given):
        given = splits.of_ids(ids, given, num_nodes)
    # Without labels no vertex can be trained on, but the graph can still be cut.
    if graph.y is None and not given:
        settled |= {name: torch.zeros(num_nodes, dtype=torch.bool) for name in splits.NAMES}
    else:
        settled |= splits.settle(given, num_nodes, there, split, notes)
    # All other attributes pass unchanged; ``split_idx`` has become masks.
    for name, value in graph.to_dict().items():
        if name in settled or value is None or isinstance(value, Notes):
            continue
        if name != "split_idx" or not isinstance(value, Mapping):
            numbers = isinstance(value, Tensor) and not is_sparse(value) and not without_numbers(value)
            settled[name] = plain(value) if numbers else value
    return settled


def validate_edges(data: object) -> tuple[Data, list[str]]:
    """Check the edges alone, as a first step: features, labels and masks stay as they are given.

    Args:
        data: A PyG ``Data``.

    Returns:
        A new Data with ``edge_index`` and ``num_nodes``, and notes to print.

    Raises:
        DataError: If the object is not a graph, or its edges or their attributes have a fault.

    Shapes:
        edge_index ``[2, E]``, edge_weight and edge_attr ``[E, ...]``.
    """
    given = _fields(data)
    before = given.get("notes")
    notes = list(given.pop("notes")) if isinstance(before, Notes) else []
    edge_index = _edge_index(given)
    num_nodes = _num_nodes(given, edge_index, notes)
    check_ids(edge_index, num_nodes)
    # The data flags add edges, and rows to these two, before the other attributes are checked.
    for name in ("edge_weight", "edge_attr"):
        if given.get(name) is not None:
            given[name] = _edge_values(name, numbers_of(name, given[name]), edge_index.size(1))
    return Data(**{**given, "edge_index": edge_index, "num_nodes": num_nodes}), notes


def facts_of(data: Data) -> Labels | None:
    """Return the facts about the labels of a validated graph, or None if it has no labels."""
    return None if data.y is None else labels_of(data.y)


def check_ids(edge_index: Tensor, num_nodes: int) -> None:
    """Check that every id in the edges is a vertex.

    Raises:
        DataError: With the first invalid id, its position, and the number of vertices.

    Shapes:
        edge_index ``[2, E]``.
    """
    if edge_index.numel() == 0 or (int(edge_index.min()) >= 0 and int(edge_index.max()) < num_nodes):
        return
    # Found only in the case of a fault, since the search makes masks of all edges.
    row, column = ((edge_index < 0) | (edge_index >= num_nodes)).nonzero()[0].tolist()
    raise DataError(
        f"vertex ids from 0 to {num_nodes - 1} ({num_nodes:,} vertices)",
        f"edge_index[{row}, {column}] = {int(edge_index[row, column])}",
        where="data.edge_index",
        hint="give each vertex a row in x, or set data.num_nodes",
    )


def _fields(data: object) -> dict[str, Any]:
    if isinstance(data, HeteroData):
        raise DataError(
            "a graph with one kind of vertex and of edge (torch_geometric.data.Data)",
            f"a HeteroData with {len(data.node_types)} kinds of vertices and {len(data.edge_types)} kinds of "
            "edges",
            hint="kagome.Trainer(model, data) and kagome.shard(model, data) take it",
        )
    if isinstance(data, Graph):
        raise DataError(
            "a graph whose vertices have labels (torch_geometric.data.Data or HeteroData)",
            f"a {type(data).__name__} of vertex sets and edge sets alone",
            hint="kagome.shard(model, graph) with a training loop of your own",
        )
    if not isinstance(data, Data):
        hint = "pass dataset[0]" if hasattr(data, "__getitem__") and hasattr(data, "__len__") else ""
        raise DataError("a torch_geometric.data.Data", f"a {type(data).__name__}", hint=hint)
    given = data.to_dict()
    if "self" in given:  # neither Data(...) nor forward(...) could take it as a keyword
        raise DataError(
            "attributes of the data with names that an argument may have",
            "the name self",
            where="data.self",
        )
    return {name: unboxed(value) for name, value in given.items()}


def _edge_index(given: dict[str, Any]) -> Tensor:
    edge_index, adjacency = given.get("edge_index"), given.pop("adj_t", None)
    if edge_index is None and adjacency is None:
        raise DataError(
            "a graph with edges",
            "a Data with neither edge_index nor adj_t",
            hint="set data.edge_index, 2 x E",
        )
    if edge_index is None and not is_sparse(adjacency):
        raise DataError("adj_t to be a sparse matrix", f"a {type(adjacency).__name__}", where="data.adj_t")
    if edge_index is None or is_sparse(edge_index):
        edge_index, along = from_adjacency(adjacency if edge_index is None else edge_index, given)
        given.update(along)
    # Both forms are given: the matrix must say nothing that the edges do not.
    elif adjacency is not None and is_sparse(adjacency):
        beside(adjacency, plain(edge_index))
    edge_index = numbers_of("edge_index", edge_index)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        turned = edge_index.dim() == 2 and edge_index.size(1) == 2
        raise DataError(
            "edge_index to have the shape [2, E]",
            f"{list(edge_index.shape)}",
            where="data.edge_index",
            hint="data.edge_index.t().contiguous()" if turned else "",
        )
    if edge_index.dtype not in _INTEGERS and edge_index.numel() > 0:
        raise DataError(
            "edge_index to hold whole numbers (torch.int64)",
            f"{edge_index.dtype}",
            where="data.edge_index",
            hint="data.edge_index.long()",
        )
    return edge_index.to(torch.int64).contiguous()


def _num_nodes(given: dict[str, Any], edge_index: Tensor, notes: list[str]) -> int:
    """Return the number of vertices: the user's, else that of a vertex attribute, else the largest id + 1."""
    count = given.pop("num_nodes", None)
    if count is None:
        # Attributes that have a row per vertex by definition; an isolated last vertex is in no edge.
        for name in ("x", "y", *splits.NAMES, "pos", "n_id"):
            value = given.get(name)
            if value is not None and not isinstance(value, str):
                count = _rows(name, value)
                break
        else:
            count = int(edge_index.max()) + 1 if edge_index.numel() else 0
            notes.append(f"The number of vertices is taken from the largest id in the edges: {count:,}.")
    return check_count(count)


def _rows(name: str, value: Any) -> int:
    try:
        return int(value.size(0)) if callable(getattr(value, "size", None)) else len(value)
    except (TypeError, IndexError):
        raise DataError(f"{name} to have a row a vertex", f"{value!r}", where=f"data.{name}") from None


MOST_VERTICES = 2**31
"""Most vertices that are accepted.

Adjacency lists (``kernels.adjacency``) hold ids as int32. An edge is told apart by ``source * N + target`` in
int64 (``topology``, ``datasets.edits``), which holds numbers below N^2 = 2^62.
"""


def check_count(count: Any) -> int:
    """Return the number of vertices as an int.

    Raises:
        DataError: If it is not a whole number, or larger than :data:`MOST_VERTICES`.
    """
    # Arrays of a file hold num_nodes as a tensor of one number.
    value = count.item() if isinstance(count, Tensor) and count.numel() == 1 else count
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and isinstance(value, float) and value.is_integer():
        value, whole = int(value), True
    if not whole:
        shown = f"an array of {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
        raise DataError("num_nodes to be one whole number", shown, where="data.num_nodes")
    if value < 1:
        raise DataError("a graph with at least one vertex", f"{value}")
    if value > MOST_VERTICES:
        raise DataError(
            f"a graph with at most {MOST_VERTICES:,} vertices",
            f"num_nodes = {value:.3g}",
            where="data.num_nodes",
        )
    return int(value)


def features(x: Any, num_nodes: int, notes: list[str]) -> Tensor:
    """Return features as a dense tensor with a row a vertex; notes get a sentence on what was changed.

    Raises:
        DataError: If they are no finite real numbers, or have another number of rows.
    """
    if is_sparse(x):
        x = dense(x)
        notes.append(f"Sparse features are made dense: {x.size(0):,} x {x.size(1):,}.")
    rows = numbers_of("x", x)
    if rows.dim() == 0 or rows.size(0) != num_nodes:
        raise DataError(
            f"x to have a row for each of {num_nodes:,} vertices",
            f"{rows.size(0) if rows.dim() else 0:,}",
            where="data.x",
        )
    if rows.is_complex():
        raise DataError("features to be real numbers", f"{rows.dtype}", where="data.x")
    _finite("x", rows)
    return rows.contiguous()


def _finite(name: str, value: Tensor) -> None:
    if not value.is_floating_point() or value.numel() == 0:
        return
    if value.element_size() == 1:  # torch cannot compare 8-bit floats
        value = value.float()
    # One pass without copies: a NaN anywhere makes both extremes NaN.
    if bool(torch.stack(value.aminmax()).isfinite().all()):
        return
    bad = (~value.isfinite()).nonzero()
    first = bad[0].tolist()
    raise DataError(
        f"{name} to hold finite numbers",
        f"{value[tuple(first)].item()} in row {first[0]} ({name}[{', '.join(map(str, first))}]), "
        f"and {len(bad) - 1:,} more such entries",
        where=f"data.{name}",
    )


def _rows_of_labels(y: Any, num_nodes: int) -> Tensor:
    rows = numbers_of("y", y)
    if rows.dim() == 0 or rows.size(0) != num_nodes or not rows.numel():
        raise DataError(
            f"y to have a row for each of {num_nodes:,} vertices",
            f"shape {list(rows.shape)}",
            where="data.y",
        )
    return rows.contiguous()


def _edge_values(name: str, value: Tensor, num_edges: int) -> Tensor:
    if value.dim() == 0 or value.size(0) != num_edges:
        raise DataError(
            f"{name} to have a row for each of {num_edges:,} edges",
            f"{value.size(0) if value.dim() else 0:,}",
            where=f"data.{name}",
        )
    _finite(name, value)
    return value.contiguous()
