"""Sets sample: a small sample of a part of a graph with several vertex sets, to check a model on.

Where it sits: ``check`` runs a model on one, whole and split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from kagome.graph.partition.sets_partition import SetsPartition, extract_sets, joined_ends
from kagome.graph.structure.hetero import SetsData, validate_sets
from kagome.graph.structure.sets import Edges, Graph, Vertices
from kagome.profile.subgraph import NUMBERED, take_sample


def sets_part(data: HeteroData) -> SetsPartition:
    """Return a whole graph as one part."""
    held = validate_sets(data)
    none = {name: torch.zeros(each.count, dtype=torch.int64) for name, each in held.graph.vertices.items()}
    return extract_sets(held.graph, none, 0, 1, held)


@overload
def sample_sets(part: SetsPartition, vertices: int, seed: int) -> SetsData: ...
@overload
def sample_sets(
    part: SetsPartition, vertices: int, seed: int, *, numbered: bool = ...
) -> SetsData | None: ...
def sample_sets(part: SetsPartition, vertices: int, seed: int, *, numbered: bool = False) -> SetsData | None:
    """Sample a part's own vertices and the edges among them, breadth first over all sets together.

    Args:
        part: The part.
        vertices: The most vertices of all sets together.
        seed: The seed of the random vertices.
        numbered: Whether vertices keep their numbers in the whole graph, among all vertices of it. Those that
            the part does not own get the attributes of vertices that it owns.

    Returns:
        The sample; None if all vertices of the graph are too many.
    """
    entries = [
        sum(value.shape[1:].numel() for value in rows.values()) * size
        for rows, size in zip(part.nodes, part.sizes, strict=True)
    ]
    if numbered and sum(entries) > NUMBERED:
        return None
    counts = [own.numel() for own in part.own]
    # Sources that are halo rows have no attributes on this rank, so their edges are left out.
    inside = [each.part.edge_index[0] < counts[each.source] for each in part.edges]
    ends = [each.part.edge_index[:, kept] for each, kept in zip(part.edges, inside, strict=True)]
    named = [(each.source, each.target) for each in part.edges]
    joined = Data(edge_index=joined_ends(ends, named, counts), num_nodes=sum(counts))
    found = take_sample(joined, vertices, seed)
    begins = [0, *torch.tensor(counts).cumsum(0).tolist()]
    chosen: Tensor = found.__dict__["vertices"]
    kept = [chosen[(chosen >= begin) & (chosen < end)] - begin for begin, end in pairwise(begins)]
    rows = [_among_all(part, place) if numbered else each for place, each in enumerate(kept)]
    places: list[Tensor] = []
    for own, chosen_rows in zip(part.own, kept, strict=True):
        place = torch.full((own.numel(),), -1)
        place[chosen_rows] = own[chosen_rows] if numbered else torch.arange(chosen_rows.numel())
        places.append(place)
    sets: dict[str, Vertices | Edges] = {
        name: Vertices(each.numel()) for name, each in zip(part.names, rows, strict=True)
    }
    edges: dict[str, dict[str, Tensor]] = {}
    for each, kept_edges, (source, target) in zip(part.edges, inside, named, strict=True):
        index = each.part.edge_index[:, kept_edges]
        local = torch.stack([places[source][index[0]], places[target][index[1]]])
        there = (local >= 0).all(0)
        sets[each.name] = Edges(part.names[source], part.names[target], local[:, there])
        edges[each.name] = {name: value[kept_edges][there] for name, value in each.part.edges.items()}
    nodes = {
        name: {key: _rows_of(value, chosen_rows) for key, value in held.items()}
        for name, held, chosen_rows in zip(part.names, part.nodes, rows, strict=True)
    }
    return SetsData(Graph(**sets), nodes, edges, part.shared, part.names[part.target], None, ())


def _among_all(part: SetsPartition, number: int) -> Tensor:
    """Return, for each vertex of a set, the own row whose attributes it gets: its own, or another in turn."""
    own = part.own[number]
    like = torch.arange(part.sizes[number]) % max(own.numel(), 1)
    like[own] = torch.arange(own.numel())
    return like


def _rows_of(value: Tensor, rows: Tensor) -> Tensor:
    # A rank without vertices of a set has no attributes to give.
    return value[rows] if value.size(0) else torch.ones(rows.numel(), *value.shape[1:], dtype=value.dtype)


def has_tables(model: nn.Module, part: SetsPartition) -> bool:
    """Return whether a model has a tensor with a row for each vertex of a set, such as a learned table."""
    return any(t.dim() and t.size(0) in part.sizes for t in (*model.parameters(), *model.buffers()))


def cast_sets(sample: SetsData, dtype: torch.dtype) -> SetsData:
    """Return a sample with its floating-point attributes in another dtype."""

    def turned(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    each: Callable[[Any], Any] = lambda held: {  # noqa: E731
        name: {key: turned(value) for key, value in rows.items()} for name, rows in held.items()
    }
    shared = {name: turned(value) for name, value in sample.shared.items()}
    return replace(sample, nodes=each(sample.nodes), edges=each(sample.edges), shared=shared)


def cut_sets(sample: SetsData, parts: int, seed: int) -> list[SetsPartition]:
    """Cut a sample at random, so that most edges cross parts."""
    generator = torch.Generator().manual_seed(seed)
    owners = {
        name: torch.randint(0, parts, (each.count,), generator=generator)
        for name, each in sample.graph.vertices.items()
    }
    return [extract_sets(sample.graph, owners, part, parts, sample) for part in range(parts)]
