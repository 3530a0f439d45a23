"""Sparse adjacency: a graph given as a sparse matrix (``adj_t``), kept as edges that can rebuild the matrix.

Where it sits: ``validate`` converts the matrix into edges; ``intercept.sparse_adjacency`` gives a model an
object that stands for it. The values travel with the edges as an attribute whose name encodes the matrix's
layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kagome.errors import DataError
from kagome.graph.structure.attributes import edges_of, plain

_PREFIX: Final = "edge_adj_t_"
_LAYOUTS: Final = {"csr": torch.sparse_csr, "csc": torch.sparse_csc, "coo": torch.sparse_coo}


_KNOWN: Final = tuple(_LAYOUTS.values())


@dataclass(frozen=True)
class Adjacency:
    """The layout and values of a sparse adjacency matrix.

    Args:
        layout: ``csr``, ``csc`` or ``coo``.
        kind: ``loops`` if it has self-loops; otherwise ``ones`` if all values are 1, or ``simple``.
        values: One value per edge.
    """

    layout: str
    kind: str
    values: Tensor

    @property
    def name(self) -> str:
        """Name of the edge attribute that carries the values."""
        return f"{_PREFIX}{self.layout}_{self.kind}"

    def matrix(self, edge_index: Tensor, count: int) -> Tensor:
        """Return the sparse matrix from its edges in any order.

        Shapes:
            edge_index ``[2, E]`` -> ``[count, count]``.
        """
        # adj_t has targets as rows. In csr and coo entries are sorted by target first, in csc by source.
        columns = self.layout == "csc"
        major, minor = edge_index[0 if columns else 1], edge_index[1 if columns else 0]
        # Stable, so that duplicates of an edge keep their order.
        order = torch.argsort(major * count + minor, stable=True)
        major, minor, values = major[order], minor[order], self.values[order]
        if self.layout == "coo":
            matrix = torch.sparse_coo_tensor(
                torch.stack([major, minor]), values, (count, count), check_invariants=False
            )
            # Sorted above, so torch need not sort it again.
            return matrix._coalesced_(True)
        pointer = torch.zeros(count + 1, dtype=torch.int64, device=edge_index.device)
        torch.cumsum(torch.bincount(major, minlength=count), 0, out=pointer[1:])
        make = torch.sparse_csc_tensor if columns else torch.sparse_csr_tensor
        return make(pointer, minor, values, (count, count), check_invariants=False)


def adjacency_of(edges: Mapping[str, Tensor]) -> Adjacency | None:
    """Return the matrix that an edge attribute carries, or None if there is no such attribute."""
    name = next((name for name in edges if name.startswith(_PREFIX)), None)
    if name is None:
        return None
    layout, kind = name.removeprefix(_PREFIX).split("_")
    return Adjacency(layout, kind, edges[name])


def inputs_of(edges: Mapping[str, Tensor], edge_index: Tensor, count: int) -> dict[str, Tensor]:
    """Return the model's inputs from edge attributes of a whole graph, with ``adj_t`` rebuilt."""
    found = adjacency_of(edges)
    rest = {name: value for name, value in edges.items() if not name.startswith(_PREFIX)}
    return rest if found is None else {**rest, "adj_t": found.matrix(edge_index, count)}


def with_loops(edges: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return edge attributes for edges to which self-loops were added: the matrix then has self-loops."""
    told = adjacency_of(edges)
    rest = {name: value for name, value in edges.items() if not name.startswith(_PREFIX)}
    return rest if told is None else {**rest, Adjacency(told.layout, "loops", told.values).name: told.values}


def from_adjacency(matrix: Any, given: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the edges of a matrix whose rows are targets, and the edge attributes that carry its values.

    Args:
        matrix: A sparse matrix of torch or of torch_sparse.
        given: The other attributes of the data.

    Returns:
        The edges and their attributes.

    Raises:
        DataError: If the values would be lost, or the matrix does not have a usable form.

    Shapes:
        matrix ``[N, N]``; edges ``[2, E]``.
    """
    odd = isinstance(matrix, Tensor) and (
        matrix.layout not in _KNOWN or matrix.is_meta or matrix.dim() - matrix.dense_dim() != 2
    )
    if odd:
        layout = str(matrix.layout).removeprefix("torch.")
        raise DataError(
            "an adjacency as a sparse matrix with numbers in one of the layouts csr, csc and coo",
            f"{layout} of shape {list(matrix.shape)} on {matrix.device}",
            where="data.adj_t",
        )
    edge_index, values = edges_of(matrix)
    # A SparseTensor of torch_sparse: only its edges are kept, and the model is given edge_index.
    if not isinstance(matrix, Tensor):
        if values is not None:
            raise DataError(
                "a weighted adjacency as a sparse tensor of torch",
                f"a {type(matrix).__name__} with values",
                where="data.adj_t",
                hint="data.adj_t = data.adj_t.to_torch_sparse_csr_tensor()",
            )
        return edge_index, {}
    layout = next(name for name, each in _LAYOUTS.items() if each == matrix.layout)
    # A coo matrix may have several values for one entry until it is coalesced.
    whole = matrix.coalesce() if layout == "coo" else matrix
    if whole.values().dim() > 1:
        raise DataError(
            "an adjacency with one value an edge",
            f"values of shape {list(whole.values().shape)}",
            where="data.adj_t",
            hint="data.edge_index, data.edge_attr = torch_geometric.utils.to_edge_index(data.adj_t)",
        )
    loops = bool((edge_index[0] == edge_index[1]).any())
    kind = "loops" if loops else "ones" if values is None else "simple"
    kept = plain(whole.values()) if values is None else values
    found = {Adjacency(layout, kind, kept).name: kept}
    # Layers that take edge_index read the values as edge_weight.
    if kind != "ones" and "edge_weight" not in given:
        found["edge_weight"] = kept
    return edge_index, found


def beside(matrix: Any, edge_index: Tensor) -> None:
    """Check that a matrix given beside ``edge_index`` is redundant: the same edges and no values.

    Raises:
        DataError: If it has values or other edges.
    """
    ends, values = edges_of(matrix)
    # The order of the edges may differ between the two forms.
    same = ends.shape == edge_index.shape and torch.equal(_sorted(ends), _sorted(edge_index))
    if values is None and same:
        return
    raise DataError(
        "a graph to be given once, as edge_index or as adj_t",
        f"both, and adj_t has {'values' if same else 'other edges'}",
        where="data.adj_t",
        hint="del data.edge_index, or del data.adj_t",
    )


def _sorted(edge_index: Tensor) -> Tensor:
    """Return the edges sorted by target, then source."""
    by_source = edge_index[:, edge_index[0].argsort(stable=True)]
    return by_source[:, by_source[1].argsort(stable=True)]
