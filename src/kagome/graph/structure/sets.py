"""Graph: a graph of several vertex sets and edge sets, as a user declares it.

Where it sits: public, as ``kagome.Graph``, ``kagome.Vertices`` and ``kagome.Edges``. ``kagome.shard`` takes
one, or a ``HeteroData``, which becomes one; ``graph.partition.sets_partition`` cuts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from kagome.errors import DataError


@dataclass(frozen=True, eq=False)
class Vertices:
    """A vertex set: one kind of vertices.

    Args:
        count: The number of vertices.
        pos: Their coordinates, by which ``partitioner="coordinates"`` cuts; all sets in one space.
        tied: The name of an edge set between this vertex set and another. A vertex then lies on the part of
            the vertex at the other end of its first edge there, as a point of a grid with the vertex of the
            mesh that it feeds.

    Example:
        >>> import torch
        >>> from kagome import Vertices
        >>> Vertices(3, pos=torch.zeros(3, 2)).count
        3

    Raises:
        DataError: If the coordinates are not those of ``count`` vertices.

    Shapes:
        pos ``[count, D]``.
    """

    count: int
    pos: Tensor | None = None
    tied: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 0:
            raise DataError("the number of vertices in kagome.Vertices(count)", repr(self.count))
        if self.pos is not None and (self.pos.dim() != 2 or self.pos.size(0) != self.count):
            raise DataError(
                f"coordinates [{self.count:,}, D] in kagome.Vertices({self.count}, pos=...)",
                f"shape {list(self.pos.shape)}",
            )


@dataclass(frozen=True, eq=False)
class Edges:
    """An edge set: edges from the vertices of one set to those of one set, which may be the same.

    Args:
        source: The name of the vertex set that row 0 of ``index`` numbers.
        target: The name of the vertex set that row 1 numbers.
        index: The edges.
        attr: A tensor with a row for each edge, if the model takes one.

    Example:
        >>> import torch
        >>> from kagome import Edges
        >>> Edges("user", "item", torch.tensor([[0, 1], [2, 0]])).target
        'item'

    Shapes:
        index ``[2, E]``, int64; attr ``[E, ...]``.
    """

    source: str
    target: str
    index: Tensor
    attr: Tensor | None = None


class Graph:
    """A graph of vertex sets and edge sets, by their names.

    Args:
        sets: :class:`Vertices` and :class:`Edges` by name.

    Raises:
        DataError: If an edge set names a vertex set that is not there, or has ids out of its range.

    Example:
        >>> import torch
        >>> from kagome import Edges, Graph, Vertices
        >>> index = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
        >>> graph = Graph(grid=Vertices(4), mesh=Vertices(2), up=Edges("grid", "mesh", index))
        >>> graph
        Graph(grid=4 vertices, mesh=2 vertices, up=4 edges grid -> mesh)
    """

    def __init__(self, **sets: Vertices | Edges) -> None:
        self.vertices: dict[str, Vertices] = {}
        self.edges: dict[str, Edges] = {}
        for name, each in sets.items():
            if isinstance(each, Vertices):
                self.vertices[name] = each
            elif isinstance(each, Edges):
                self.edges[name] = each
            else:
                raise DataError(
                    "kagome.Vertices and kagome.Edges in kagome.Graph",
                    f"{name} of type {type(each).__name__}",
                )
        self._check()

    def __repr__(self) -> str:
        words = [f"{name}={each.count:,} vertices" for name, each in self.vertices.items()]
        words += [
            f"{name}={each.index.size(1):,} edges {each.source} -> {each.target}"
            for name, each in self.edges.items()
        ]
        return f"Graph({', '.join(words)})"

    @staticmethod
    def of(data: HeteroData | Graph) -> Graph:
        """Return the sets of a ``HeteroData``, whose edge sets are named after their three words."""
        if isinstance(data, Graph):
            return data
        sets: dict[str, Vertices | Edges] = {}
        for kind in data.node_types:
            count, pos = data[kind].num_nodes, data[kind].get("pos")
            if count is None:
                raise DataError(
                    f"the number of vertices of {kind!r}",
                    "no attribute that tells it",
                    hint=f"data[{kind!r}].num_nodes = ...",
                )
            sets[kind] = Vertices(int(count), pos if isinstance(pos, Tensor) else None)
        for source, relation, target in data.edge_types:
            store = data[source, relation, target]
            if store.get("edge_index") is None:
                raise DataError(
                    "edge_index for each edge type",
                    f"{(source, relation, target)} with {', '.join(store.keys()) or 'nothing'}",
                )
            attr = store.get("edge_attr")
            sets[edge_name(source, relation, target)] = Edges(
                source, target, store.edge_index, attr if isinstance(attr, Tensor) else None
            )
        return Graph(**sets)

    @staticmethod
    def attributes(data: HeteroData) -> Mapping[str, Mapping[str, Any]]:
        """Return the attributes of a ``HeteroData`` by the name of their vertex set or edge set."""
        kinds = {kind: data[kind].to_dict() for kind in data.node_types}
        return kinds | {edge_name(*kind): data[kind].to_dict() for kind in data.edge_types}

    def _check(self) -> None:
        if not self.vertices or not self.edges:
            raise DataError(
                "a vertex set and an edge set at least", f"{len(self.vertices)} and {len(self.edges)}"
            )
        for name, each in self.edges.items():
            index = each.index
            if index.dim() != 2 or index.size(0) != 2 or index.dtype != torch.int64:
                raise DataError(f"int64 [2, E] in the edge set {name}", f"{index.dtype} {list(index.shape)}")
            if each.attr is not None and each.attr.size(0) != index.size(1):
                raise DataError(
                    f"an attribute for each of the {index.size(1):,} edges of {name}",
                    f"{each.attr.size(0):,} rows",
                )
            for row, kind in enumerate((each.source, each.target)):
                self._check_ends(name, kind, index[row], row)
        for name, vertices in self.vertices.items():
            if vertices.tied is not None:
                self._check_tie(name, vertices.tied)

    def _check_tie(self, name: str, tied: str) -> None:
        edges = self.edges.get(tied)
        # One end is this set, and the other is not: a set cannot follow itself.
        if edges is None or (edges.source == name) is (edges.target == name):
            raise DataError(
                f"an edge set between {name} and another vertex set in {name}=kagome.Vertices(tied=...)",
                repr(tied) if edges is None else f"{tied!r}, from {edges.source} to {edges.target}",
            )
        other, *_ = tied_ends(self, name)
        if self.vertices[other].tied is not None:
            raise DataError(
                f"a vertex set that is not tied itself, for {name} to follow",
                f"{other}, which is tied by {self.vertices[other].tied!r}",
            )

    def _check_ends(self, name: str, kind: str, ids: Tensor, row: int) -> None:
        if kind not in self.vertices:
            raise DataError(f"a vertex set for both ends of {name}: {', '.join(self.vertices)}", repr(kind))
        count = self.vertices[kind].count
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise DataError(
                f"ids from 0 to {count - 1:,} of {kind} in row {row} of {name}",
                f"ids from {int(ids.min()):,} to {int(ids.max()):,}",
            )


def tied_ends(graph: Graph, name: str) -> tuple[str, Tensor, Tensor]:
    """Return the vertex set that a tied one follows, and the ends of the edges on both sides.

    Returns:
        The name of the other set; for each edge the vertex of this set, and that of the other one.
    """
    edges = graph.edges[str(graph.vertices[name].tied)]
    # Edges of either direction tie: a set may be the one that is read or the one that is written.
    if edges.source == name:
        return edges.target, edges.index[0], edges.index[1]
    return edges.source, edges.index[1], edges.index[0]


def edge_name(source: str, relation: str, target: str) -> str:
    """Return the name of the edge set of an edge type, as PyG's modules write it."""
    return f"{source}__{relation}__{target}"


def edge_type(name: str, source: str, target: str) -> tuple[str, str, str] | None:
    """Return the edge type of an edge set that :func:`edge_name` has named; None for another name."""
    begin, end = f"{source}__", f"__{target}"
    if not (name.startswith(begin) and name.endswith(end) and len(name) >= len(begin) + len(end)):
        return None
    return source, name[len(begin) : len(name) - len(end)], target
