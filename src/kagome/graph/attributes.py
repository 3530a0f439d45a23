"""Attributes of a graph: which tensors have a row a vertex or an edge; foreign kinds made plain.

Where it sits: ``validate`` cleans with these, ``partition`` splits by them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from kagome.errors import DataError

#: A dense copy of sparse features may be so large; beyond it the user is asked to project.
DENSE_LIMIT_BYTES = 4 * 2**30


def split_attributes(data: Data) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors with a row a vertex, and those with a row an edge.

    As PyG decides it, by the first size; where there are as many vertices as edges, a name that begins with
    ``edge`` is an edge's.

    Args:
        data: A graph with ``num_nodes`` and ``edge_index``.

    Returns:
        Attributes of vertices and attributes of edges, by name.
    """
    nodes: dict[str, Tensor] = {}
    edges: dict[str, Tensor] = {}
    num_nodes, num_edges = int(data.num_nodes), data.edge_index.size(1)
    for name, value in data.to_dict().items():
        if not isinstance(value, Tensor) or value.dim() == 0 or name in ("edge_index", "adj_t"):
            continue
        rows = value.size(0)
        if rows == num_edges and (name.startswith("edge") or rows != num_nodes):
            edges[name] = value
        elif rows == num_nodes and not name.startswith("edge"):
            nodes[name] = value
    return nodes, edges


def plain(value: Any) -> Tensor:
    """A plain CPU tensor that knows no gradient, from a tensor, a subclass of it, or an array.

    Shapes:
        any; kept.
    """
    if hasattr(value, "as_tensor"):  # torch_geometric.EdgeIndex and Index
        value = value.as_tensor()
    return torch.as_tensor(value).detach().cpu()


def is_sparse(value: Any) -> bool:
    """Whether this is a sparse tensor of torch, or a SparseTensor of torch_sparse."""
    if isinstance(value, Tensor):
        return value.layout != torch.strided
    return hasattr(value, "to_dense") and hasattr(value, "sizes")


def dense(value: Any) -> Tensor:
    """A sparse matrix as a dense tensor.

    Raises:
        DataError: If that would take more memory than is sensible.

    Shapes:
        value ``[N, F]``, sparse; result ``[N, F]``, dense.
    """
    rows, columns = (value.sizes() if callable(getattr(value, "sizes", None)) else value.shape)[:2]
    size = rows * columns * 4
    if size > DENSE_LIMIT_BYTES:
        raise DataError(
            f"sparse features are made dense up to {DENSE_LIMIT_BYTES / 2**30:.0f} GiB",
            f"{rows:,} x {columns:,} would take {size / 2**30:.1f} GiB",
            where="data.x",
            hint="--data.project 256 makes fewer columns of them",
        )
    return plain(value.to_dense())


def edges_of(adjacency: Any) -> tuple[Tensor, Tensor | None]:
    """Edges of a sparse adjacency held transposed, as PyG does (``adj_t``): rows are targets.

    Returns:
        The edges, and their values where these are not all 1.

    Shapes:
        adjacency ``[N, N]``; edges ``[2, E]``; values ``[E, ...]``.
    """
    from torch_geometric.utils import to_edge_index

    target_source, value = to_edge_index(adjacency)
    value = None if value is None or bool((value == 1).all()) else plain(value)
    return plain(target_source).flip(0).contiguous(), value
