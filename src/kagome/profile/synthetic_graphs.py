"""Graphs: what is known of a graph that is to be cut, and the smaller ones on which a model is timed.

Where it sits: ``autoplan.workload`` scales what was timed there to the parts that are counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch_geometric.data import Data

from kagome.graph.partition.partition import Partition, extract, kinds_of
from kagome.graph.partition.partitioners import assign, shared_out
from kagome.graph.structure.attributes import Sorted
from kagome.profile.epoch_costs import shares_of
from kagome.profile.part_size import PartSize, split_counts
from kagome.profile.synthetic_parts import drawn

LARGEST = 4_000_000
"""Edges of the largest graph that is timed as it is."""
MADE = 1_000_000
"""Edges of the largest that is made in proportion to one that is larger, or not there."""
GUESSED = 0.5
"""By which share a halo may be off where no graph was cut: degrees do not tell of communities."""
COMMUNITIES = 0.6
"""Of the halo of a random cut, what METIS leaves on graphs of people, pages and papers: about the middle of
those in shared data sets."""
CUTS = 2, 4
"""Parts of the cuts on which a model is timed."""


@dataclass(frozen=True)
class GraphSize:
    """What is known of a graph.

    Args:
        vertices: How many.
        edges: Entries of ``edge_index``.
        data: The graph itself, if it is there.
    """

    vertices: int
    edges: int
    data: Data | None = None
    _owners: dict[tuple[str, int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def owner(self, method: str, parts: int, seed: int) -> Tensor:
        """The part of each vertex of a graph that is there, cut once."""
        assert self.data is not None
        key = method, parts, seed
        if key not in self._owners:
            edge_index: Tensor = self.data.edge_index
            self._owners[key] = assign(method, edge_index, self.vertices, parts, seed)
        return self._owners[key]

    def counts(self, number: int, seed: int) -> tuple[tuple[PartSize, ...], float]:
        """Of each part of a cut, or one that stands for all; and by which share its halo may be off."""
        n, e = self.vertices, self.edges
        if self.data is not None:
            edge_index: Tensor = self.data.edge_index
            owner = self.owner("metis" if number > 1 else "contiguous", number, seed)
            return split_counts(edge_index, owner, number, getattr(self.data, "train_mask", None)), 0.0
        degree = e / max(n, 1)
        # Of d neighbours of a vertex none lies in a part with probability (1 - 1/P)^d, in a random cut.
        outside = (number - 1) * (1 - (1 - 1 / number) ** degree) * COMMUNITIES
        halo = round(n * outside / number)
        cut = round(e / number * (1 - 1 / number) * COMMUNITIES)
        one = PartSize(-(-n // number), halo, -(-e // number), 0, cut, halo, n // number)
        return (one,), 0.0 if number == 1 else GUESSED

    def shares(self, groups: int, number: int, seed: int) -> tuple[PartSize, ...]:
        """Of each of so many equal shares of each part's vertices, or one that stands for all."""
        size = groups * number
        if self.data is None:
            (one,), _ = self.counts(size, seed)
            return (one,)
        edge_index: Tensor = self.data.edge_index
        owner = shared_out(self.owner("metis" if groups > 1 else "contiguous", groups, seed), groups, number)
        mask = getattr(self.data, "train_mask", None)
        return split_counts(edge_index, owner, size, mask)


def samples_of(graph: GraphSize, like: Partition, seed: int) -> list[Partition]:
    """Graphs to time a model on: the graph itself if it is small, a smaller one, one with fewer edges."""
    there = graph.data is not None and graph.edges <= LARGEST
    share = 1.0 if there else min(1.0, MADE / max(graph.edges, 1))

    def made(vertices: float, edges: float) -> Partition:
        n = max(2, round(vertices))
        return extract(drawn(like, n, max(2, round(edges)), seed), torch.zeros(n, dtype=torch.long), 0, 1)

    n, e = graph.vertices * share, graph.edges * share
    return [like if there else made(n, e), made(n / 4, e / 4), made(n, e / 4)]


def cuts_of(graph: GraphSize, like: Partition, seed: int) -> list[Sequence[Partition]]:
    """Graphs cut into parts of different sizes, to time ranks on: as a run would cut this one, if there.

    Args:
        graph: What is known of it.
        like: The graph, or a small one whose attributes are taken.
        seed: Of cuts and of edges that are drawn.
    """
    samples = samples_of(graph, like, seed)
    if samples[0] is not like:
        return [shares_of(sample, CUTS[0]) for sample in samples]
    data = Sorted(like.edge_index, graph.vertices, kinds_of(like))
    found: list[Sequence[Partition]] = []
    for parts in CUTS:
        owner = graph.owner("metis", parts, seed)
        found.append([extract(data, owner, part, parts) for part in range(parts)])
    # One that no row crosses, and one with few edges: else nobody could tell what takes time.
    return [[like], *found, shares_of(samples[-1], CUTS[0])]
