"""Edits of a graph: what the data flags change in edges, self-loops and features, and generated attributes.

Where it sits: ``load`` applies these between reading and the last validation.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from kagome.errors import DataError, ResourceError
from kagome.graph.structure.attributes import attributes_of, is_sparse, plain
from kagome.graph.structure.sparse_adjacency import with_loops
from kagome.launch.host_memory import available_bytes

MADE_FEATURES: Final = 128
MADE_CLASSES: Final = 16


def add_reverse(data: Data) -> Data:
    """Add the reverse of every edge that lacks it, with a copy of the edge's attributes.

    Edges that exist in both directions keep their own attributes. Added edges come last.

    Args:
        data: A graph; not changed.

    Returns:
        The graph with every edge in both directions.

    Shapes:
        edge_index ``[2, E]`` to ``[2, E']``, E' from E to 2 E.
    """
    # Edge u -> v is the number u N + v. Its reverse is missing if v N + u is not among the numbers.
    source, target = data.edge_index.numpy()
    count = int(data.num_nodes)
    missing = ~np.isin(target * count + source, source * count + target)
    chosen = torch.from_numpy(missing.nonzero()[0])
    return _append(
        data, data.edge_index[:, chosen].flip(0), {k: v[chosen] for k, v in _of_edges(data).items()}
    )


def add_self_loops(data: Data) -> Data:
    """Add a self-loop to every vertex that lacks one; its attributes are 1, as in PyG.

    Args:
        data: A graph; not changed.

    Returns:
        The graph with a self-loop at every vertex.

    Shapes:
        edge_index ``[2, E]`` to ``[2, E']``, E' from E to E + N.
    """
    source, target = data.edge_index
    bare = torch.ones(int(data.num_nodes), dtype=torch.bool)
    # These vertices have a loop already.
    bare[source[source == target]] = False
    at = bare.nonzero().view(-1)
    ones = {k: v.new_ones((at.numel(), *v.shape[1:])) for k, v in _of_edges(data).items()}
    looped = _append(data, torch.stack([at, at]), ones)
    # A sparse matrix travels as an edge attribute whose name says whether it has loops.
    edges = _of_edges(looped)
    kept = {name: value for name, value in looped.to_dict().items() if name not in edges}
    return Data(**kept, **with_loops(edges))


def _of_edges(data: Data) -> dict[str, Tensor]:
    """Return the attributes that grow with the edges; an attribute that may or may not be one is an error."""
    found = attributes_of(data)
    for name, why in found.refused.items():
        value = data[name]
        if isinstance(value, Tensor) and value.dim() and value.size(0) == data.edge_index.size(1):
            raise DataError("a row a vertex or a row an edge", f"unclear rows: {why}", where=f"data.{name}")
    return found.edges


def _append(data: Data, edge_index: Tensor, attributes: dict[str, Tensor]) -> Data:
    changed = Data(**data.to_dict())
    for name, value in attributes.items():
        changed[name] = torch.cat([data[name], value])
    changed.edge_index = torch.cat([data.edge_index, edge_index], dim=1)
    return changed


def project(x: Any, columns: int, *, seed: int = 0) -> tuple[Tensor, str]:
    """Map features to fewer columns by a seeded normal matrix, divided by the square root of the columns.

    Lengths and angles are preserved up to about 1 / sqrt(columns) (Johnson and Lindenstrauss).

    Args:
        x: Features, dense or sparse.
        columns: The number of columns of the result.
        seed: The seed of the matrix.

    Returns:
        The projected features, and a sentence that says so.

    Raises:
        DataError: If ``columns`` is less than 1.
        ResourceError: If the result does not fit into memory.

    Shapes:
        x ``[N, F]``; result ``[N, columns]``, dense.
    """
    if columns < 1:
        raise DataError("data.project to be 1 or more", f"{columns}")
    if is_sparse(x):
        # A sparse matrix is multiplied as it is: the dense one may not fit.
        whole: Tensor = x if isinstance(x, Tensor) else x.to_torch_sparse_coo_tensor()
        matrix = whole.detach().cpu().to_sparse_coo()
    else:
        matrix = plain(x)
        matrix = matrix[:, None] if matrix.dim() == 1 else matrix
    before = matrix.size(-1)
    kind = matrix.dtype if matrix.is_floating_point() else torch.float32
    # The result and the random matrix: (N + F) columns.
    size, left = (matrix.size(0) + before) * columns * kind.itemsize, available_bytes()
    if left is not None and size > left:
        raise ResourceError(
            f"{size / 2**30:.1f} GiB of free memory for features projected to {columns:,} columns",
            f"{left / 2**30:.1f} GiB",
            where="data.project",
            hint="fewer columns: 256",
        )
    projected: Tensor = matrix.to(kind) @ _normal(before, columns, seed, kind)
    return (
        projected,
        f"Features are projected from {before:,} to {columns:,} columns by a matrix of seed {seed}.",
    )


def _normal(rows: int, columns: int, seed: int, kind: torch.dtype) -> Tensor:
    # Drawn in float32 in every case, so that a float64 run projects by the same matrix.
    draw = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return (draw / math.sqrt(columns)).to(kind)


def make_up(data: Data, *, labels: bool) -> list[str]:
    """Generate features, and on request labels, for a graph that has none, in place.

    Args:
        data: The graph.
        labels: Whether to generate labels too. For a bare graph this is sensible; a real data set without
            labels is an error instead.

    Returns:
        Sentences about what was generated.
    """
    notes = []
    num_nodes = int(data.num_nodes)
    draw = torch.Generator().manual_seed(0)
    # Labels are drawn behind the features, so asking for them leaves the features as they are.
    if data.x is None:
        size, room = num_nodes * MADE_FEATURES * 4, available_bytes()
        if room is not None and size > room:
            raise DataError(
                f"{size / 2**30:,.1f} GiB of free memory to make features for {num_nodes:,} vertices",
                f"{room / 2**30:,.1f} GiB",
                where="data.num_nodes",
            )
        data.x = torch.randn(num_nodes, MADE_FEATURES, generator=draw)
        notes.append(f"No features given: {MADE_FEATURES} normal columns are made with seed 0.")
    if labels and data.y is None:
        data.y = torch.randint(MADE_CLASSES, (num_nodes,), generator=draw)
        notes.append(
            f"No labels given: {MADE_CLASSES} classes are drawn with seed 0. They measure speed; "
            "accuracy on them means nothing."
        )
    return notes
