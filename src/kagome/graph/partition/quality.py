"""Partition quality: how good a cut is, in numbers and in plain sentences.

Where it sits: ``store`` measures each cut; ``kagome partition`` and the report print it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kagome.graph.structure import edges

Row = tuple[int, int, int, int, float]
HEADER = ("part", "vertices", "in-edges", "halo rows", "halo share")


@dataclass(frozen=True)
class Quality:
    """The costs of a cut into parts.

    Args:
        num_parts: The number of parts.
        num_nodes: The number of vertices of the whole graph.
        num_edges: The number of edges of the whole graph.
        cut_edges: The number of edges whose ends belong to different parts.
        vertices: The number of own vertices of each part.
        in_edges: The number of in-edges of each part's own vertices.
        halo: The number of rows that each part reads and others own.
        largest_in_degree: The largest in-degree of any vertex.
        weights: The work that each part was to get, relative to the others; () if all were to be alike.
    """

    num_parts: int
    num_nodes: int
    num_edges: int
    cut_edges: int
    vertices: tuple[int, ...]
    in_edges: tuple[int, ...]
    halo: tuple[int, ...]
    largest_in_degree: int
    weights: tuple[float, ...] = ()

    @property
    def cut(self) -> float:
        """Share of edges whose ends belong to different parts."""
        return self.cut_edges / max(self.num_edges, 1)

    @property
    def replication(self) -> float:
        """Halo rows of all parts, divided by the vertices: a layer exchanges that many rows per vertex."""
        return sum(self.halo) / max(self.num_nodes, 1)

    @property
    def vertex_balance(self) -> float:
        """Vertices of the fullest part, over the mean, or over what its weight asks for."""
        return self._fullest(self.vertices) / max(self.num_nodes, 1)

    @property
    def edge_balance(self) -> float:
        """In-edges of the fullest part, over the mean, or over what its weight asks for."""
        return self._fullest(self.in_edges) / self.num_edges if self.num_edges else 1.0

    def _fullest(self, counts: tuple[int, ...]) -> float:
        """Return the largest count, times the parts; of parts with weights, relative to their weights."""
        # A part of twice the weight may have twice the work: its rank is as soon ready.
        weights = self.weights or (1.0,) * self.num_parts
        return max(count / weight for count, weight in zip(counts, weights, strict=True)) * sum(weights)

    def halo_share(self, part: int) -> float:
        """Return the halo rows over all rows that a part holds."""
        return self.halo[part] / max(self.halo[part] + self.vertices[part], 1)

    def table(self) -> list[Row]:
        """Return one row per part, in the order of :data:`HEADER`."""
        return [
            (part, self.vertices[part], self.in_edges[part], self.halo[part], self.halo_share(part))
            for part in range(self.num_parts)
        ]

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice in whole sentences; empty if the cut is good."""
        notes = []
        empty = self.vertices.count(0)
        if empty:
            notes.append(f"{empty} of {self.num_parts} parts own no vertex: use fewer parts.")
        worst = max(range(self.num_parts), key=self.halo_share)
        share = self.halo_share(worst)
        # More than two rows of others for each own one.
        if share >= 0.7:
            notes.append(
                f"Part {worst} is {share:.0%} halo: most rows that it holds are copies of others'. Fewer "
                f"parts exchange less; the graph is too dense to be cut into {self.num_parts}."
            )
        mean = "the number that its weight asks for of" if self.weights else "the mean number of"
        # The partitioners keep to 1.25 where the graph allows it.
        if self.vertex_balance > 1.3 and not empty:
            notes.append(f"The fullest part has {self.vertex_balance:.1f} times {mean} vertices.")
        if self.edge_balance > 1.3:
            # All in-edges of a vertex are on one part, so a hub above the mean overloads its part.
            cause = (
                f" One vertex alone has {self.largest_in_degree:,}: no cut by vertices is even."
                if self.largest_in_degree > self.num_edges / self.num_parts
                else " The partitioner metis evens out edges as well as vertices."
            )
            notes.append(
                f"The fullest part has {self.edge_balance:.1f} times {mean} in-edges, and every "
                f"epoch waits for it.{cause}"
            )
        return tuple(notes)


def quality(edge_index: Tensor, owner: Tensor, parts: int, weights: tuple[float, ...] = ()) -> Quality:
    """Measure the quality of a cut.

    Args:
        edge_index: The edges of the whole graph.
        owner: The part of each vertex.
        parts: The number of parts.
        weights: The work that each part was to get; () if all were to be alike.

    Returns:
        The figures.

    Shapes:
        edge_index ``[2, E]``; owner ``[N]``.

    Cost: two passes over the edges.

    Example:
        >>> import torch
        >>> ring = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
        >>> found = quality(ring, torch.tensor([0, 0, 0, 1, 1, 1]), parts=2)
        >>> found.cut_edges, found.halo
        (2, (1, 1))
    """
    return measured(edge_index, owner, parts, weights)[0]


def measured(
    edge_index: Tensor, owner: Tensor, parts: int, weights: tuple[float, ...] = ()
) -> tuple[Quality, NDArray[np.int64]]:
    """Measure a cut, and also return which parts read each vertex, which the same pass finds.

    Shapes:
        edge_index ``[2, E]``; owner ``[N]``; readers ``[N, parts / 64]``, see ``edges.read_by``.

    Cost: two passes over the edges.
    """
    source, target = edge_index.contiguous().numpy()
    readers, in_edges, cut = edges.read_by(source, target, owner.to(torch.int32).numpy(), parts)
    found = Quality(
        num_parts=parts,
        num_nodes=owner.numel(),
        num_edges=edge_index.size(1),
        cut_edges=int(cut),
        vertices=tuple(torch.bincount(owner, minlength=parts).tolist()),
        in_edges=tuple(in_edges.tolist()),
        halo=tuple(edges.halo_counts(readers, parts).tolist()),
        largest_in_degree=int(np.bincount(target, minlength=1).max()),
        weights=weights,
    )
    return found, readers
