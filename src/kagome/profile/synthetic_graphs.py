"""Synthetic graphs: the size of a graph to be planned for, and the smaller graphs on which a model is timed.

Where it sits: ``autoplan.workload`` scales the times measured on them to the part sizes counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor
from torch_geometric.data import Data

from kagome.config import sends_sums
from kagome.graph.partition.choice import PartitionMethod
from kagome.graph.partition.covers import LEAST_SAVED, cover_counts
from kagome.graph.partition.partition import Partition, extract, kinds_of
from kagome.graph.partition.partitioners import assign, shared_out
from kagome.graph.structure.attributes import Sorted
from kagome.profile.epoch_costs import shares_of
from kagome.profile.part_size import PartSize, split_counts
from kagome.profile.synthetic_parts import drawn

LARGEST = 4_000_000
"""Edges of the largest graph that is timed itself."""
MADE = 1_000_000
"""Most edges of a synthetic graph; it stands for a graph that is larger or not at hand, in proportion."""
GUESSED = 0.5
"""Relative uncertainty of a halo size if no graph was cut: degrees do not show communities."""
COMMUNITIES = 0.6
"""Halo of a METIS cut relative to that of a random cut: about the middle of what shared data sets of people,
pages and papers have."""
CUTS = 2, 4
"""Numbers of parts of the cuts on which a model is timed."""


@dataclass(frozen=True)
class GraphSize:
    """The size of a graph, and the graph itself if it is at hand.

    Args:
        vertices: The number of vertices.
        edges: The number of edges, as entries of ``edge_index``.
        data: The graph itself; None if it is not at hand.
    """

    vertices: int
    edges: int
    data: Data | None = None
    _owners: dict[tuple[str, int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def owner(self, method: str, parts: int, seed: int) -> Tensor:
        """Return the part of each vertex of the graph at hand; each cut is computed once."""
        assert self.data is not None
        key = method, parts, seed
        if key not in self._owners:
            edge_index: Tensor = self.data.edge_index
            self._owners[key] = assign(method, edge_index, self.vertices, parts, seed, self.data.get("pos"))
        return self._owners[key]

    def counts(
        self, number: int, seed: int, weights: tuple[float, ...] = ()
    ) -> tuple[tuple[PartSize, ...], float]:
        """Return the size of each part of a cut, and the relative uncertainty of the halo.

        If the graph is not at hand, one estimated size stands for all parts that are alike.

        Args:
            number: The number of parts.
            seed: The partitioner's seed.
            weights: The weights of the parts; () if all are alike.
        """
        if self.data is not None:
            edge_index: Tensor = self.data.edge_index
            # As a run cuts it by default, with the same seed, so that rows and halo are exact.
            method = str(PartitionMethod("metis" if number > 1 else "contiguous", weights=weights))
            owner = self.owner(method, number, seed)
            return split_counts(edge_index, owner, number, getattr(self.data, "train_mask", None)), 0.0
        total, alike = sum(weights) or float(number), weights or (1.0,)
        return tuple(self._estimated(each, total) for each in alike), 0.0 if number == 1 else GUESSED

    def saved(self, number: int, seed: int, weights: tuple[float, ...] = ()) -> list[tuple[int, int]]:
        """Return by how many rows each part sends and reads less with partial sums, as a run has by default.

        Zeros if the graph is not at hand, as degrees do not show it.

        Args:
            number: As of :meth:`counts`, with the other arguments.
            seed: The partitioner's seed.
            weights: The weights of the parts.
        """
        if self.data is None or number == 1 or not sends_sums("auto", self.edges):
            return [(0, 0)] * number
        source, target = self.data.edge_index.numpy()
        owner = self.owner(str(PartitionMethod("metis", weights=weights)), number, seed)
        rows, fewer = cover_counts(source, target, owner.numpy(), number, LEAST_SAVED)
        less = rows - fewer
        return list(zip(less.sum(0).tolist(), less.sum(1).tolist(), strict=True))

    def _estimated(self, weight: float, total: float) -> PartSize:
        """Estimate the size of a part by its weight among all, without a graph at hand."""
        n, e = self.vertices, self.edges
        share = weight / total
        # The mean degree stands for the degree of each vertex. In a random cut, none of a vertex's d
        # neighbours lies in this part with probability (1 - share)^d.
        read = 1 - (1 - share) ** (e / max(n, 1))
        halo = round(n * (1 - share) * read * COMMUNITIES)
        cut = round(e * share * (1 - share) * COMMUNITIES)
        rows, edges = ceil(n * weight / total), ceil(e * weight / total)
        return PartSize(rows, halo, edges, 0, cut, halo, int(n * weight / total))

    def shares(self, groups: int, number: int, seed: int) -> tuple[PartSize, ...]:
        """Return the size of each of ``number`` equal shares of every part's vertices.

        If the graph is not at hand, one estimated size stands for all shares.
        """
        size = groups * number
        if self.data is None:
            (one,), _ = self.counts(size, seed)
            return (one,)
        edge_index: Tensor = self.data.edge_index
        # Feature slices: each part's vertices are dealt to its `number` ranks in equal shares.
        owner = shared_out(self.owner("metis" if groups > 1 else "contiguous", groups, seed), groups, number)
        mask = getattr(self.data, "train_mask", None)
        return split_counts(edge_index, owner, size, mask)


def samples_of(graph: GraphSize, like: Partition, seed: int) -> list[Partition]:
    """Return graphs to time a model on: one like the graph, a smaller one, and one with fewer edges.

    The first is the graph itself if it is at hand and small enough.
    """
    # Three unknowns (fixed seconds, seconds per row, seconds per edge) need three graphs: n vertices and e
    # edges, n / 4 and e / 4, n and e / 4.
    there = graph.data is not None and graph.edges <= LARGEST
    share = 1.0 if there else min(1.0, MADE / max(graph.edges, 1))

    def made(vertices: float, edges: float) -> Partition:
        n = max(2, round(vertices))
        return extract(drawn(like, n, max(2, round(edges)), seed), torch.zeros(n, dtype=torch.long), 0, 1)

    n, e = graph.vertices * share, graph.edges * share
    return [like if there else made(n, e), made(n / 4, e / 4), made(n, e / 4)]


def cuts_of(graph: GraphSize, like: Partition, seed: int) -> list[Sequence[Partition]]:
    """Return graphs cut into parts of different sizes, to time ranks on.

    The graph itself is cut as a run would cut it, if it is at hand and small enough.

    Args:
        graph: The size of the graph.
        like: The graph, or a small one whose attributes are used.
        seed: The seed of cuts and of random edges.
    """
    samples = samples_of(graph, like, seed)
    # A random graph has no communities that METIS could find, so equal shares will do.
    if samples[0] is not like:
        return [shares_of(sample, CUTS[0]) for sample in samples]
    data = Sorted(like.edge_index, graph.vertices, kinds_of(like))
    found: list[Sequence[Partition]] = []
    for parts in CUTS:
        owner = graph.owner("metis", parts, seed)
        found.append([extract(data, owner, part, parts) for part in range(parts)])
    # An uncut graph has no exchange and another has few edges, so that the costs can be told apart.
    return [[like], *found, shares_of(samples[-1], CUTS[0])]
