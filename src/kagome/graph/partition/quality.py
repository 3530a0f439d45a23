"""Quality: how good a cut is, in numbers and in plain words.

Where it sits: ``partition`` measures each cut, ``kagome partition`` and the report print it.
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
    """What a cut costs.

    Args:
        num_parts: Parts.
        num_nodes: Vertices of the whole graph.
        num_edges: Edges of the whole graph.
        cut_edges: Edges whose ends are owned by different parts.
        vertices: Own vertices of each part.
        in_edges: In-edges of each part's own vertices.
        halo: Rows that each part reads and others own.
        largest_in_degree: In-edges of the vertex that has most.
    """

    num_parts: int
    num_nodes: int
    num_edges: int
    cut_edges: int
    vertices: tuple[int, ...]
    in_edges: tuple[int, ...]
    halo: tuple[int, ...]
    largest_in_degree: int

    @property
    def cut(self) -> float:
        """Share of edges that are cut."""
        return self.cut_edges / max(self.num_edges, 1)

    @property
    def replication(self) -> float:
        """Halo rows of all parts over the vertices: rows that cross in each layer, in graphs."""
        return sum(self.halo) / max(self.num_nodes, 1)

    @property
    def vertex_balance(self) -> float:
        """Vertices of the fullest part over the mean."""
        return max(self.vertices) * self.num_parts / max(self.num_nodes, 1)

    @property
    def edge_balance(self) -> float:
        """In-edges of the fullest part over the mean."""
        return max(self.in_edges) * self.num_parts / self.num_edges if self.num_edges else 1.0

    def halo_share(self, part: int) -> float:
        """Halo rows over all rows that a part holds."""
        return self.halo[part] / max(self.halo[part] + self.vertices[part], 1)

    def table(self) -> list[Row]:
        """A row a part, in the order of :data:`HEADER`."""
        return [
            (part, self.vertices[part], self.in_edges[part], self.halo[part], self.halo_share(part))
            for part in range(self.num_parts)
        ]

    @property
    def advice(self) -> tuple[str, ...]:
        """What to think about, in whole sentences; nothing where the cut is good."""
        said = []
        empty = self.vertices.count(0)
        if empty:
            said.append(f"{empty} of {self.num_parts} parts own no vertex: use fewer parts.")
        worst = max(range(self.num_parts), key=self.halo_share)
        share = self.halo_share(worst)
        if share >= 0.7:
            said.append(
                f"Part {worst} is {share:.0%} halo: most rows that it holds are copies of others'. Fewer "
                f"parts exchange less; the graph is too dense to be cut into {self.num_parts}."
            )
        if self.vertex_balance > 1.3 and not empty:
            said.append(f"The fullest part has {self.vertex_balance:.1f} times the mean number of vertices.")
        if self.edge_balance > 1.3:
            mean = self.num_edges / self.num_parts
            cause = (
                f" One vertex alone has {self.largest_in_degree:,}: no cut by vertices is even."
                if self.largest_in_degree > mean
                else " The partitioner metis evens out edges as well as vertices."
            )
            said.append(
                f"The fullest part has {self.edge_balance:.1f} times the mean number of in-edges, and every "
                f"epoch waits for it.{cause}"
            )
        return tuple(said)


def quality(edge_index: Tensor, owner: Tensor, parts: int) -> Quality:
    """Measure a cut.

    Args:
        edge_index: Edges of the whole graph.
        owner: Part of each vertex.
        parts: Parts.

    Returns:
        The figures.

    Shapes:
        edge_index ``[2, E]``; owner ``[N]``.

    Cost: two passes over the edges.
    """
    return measured(edge_index, owner, parts)[0]


def measured(edge_index: Tensor, owner: Tensor, parts: int) -> tuple[Quality, NDArray[np.int64]]:
    """Measure a cut, and give what the same pass has found: which parts read each vertex.

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
    )
    return found, readers
