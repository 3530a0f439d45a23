"""Subgraph: a small connected sample of a graph, or of a rank's part, to check or measure a model on.

Where it sits: ``verify.check`` checks a model on one; ``step_shapes`` surveys a model's steps on one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome.graph.partition.partition import Partition, kinds_of
from kagome.graph.structure.attributes import Attributes, Sorted, attributes_of
from kagome.positions.edge_tables import fit


def take_sample(data: Data | Partition, vertices: int, seed: int) -> Data:
    """Sample vertices of a graph breadth first from random ones, so that most are connected.

    Args:
        data: The graph, or a rank's part of it.
        vertices: The most vertices that the sample may have.
        seed: The seed of the random vertices.

    Shapes:
        At most ``vertices`` rows, and all edges among them.
    """
    if isinstance(data, Partition):
        # Edges from halo rows are left out: their sources have no attributes on this rank.
        inside = data.edge_index[0] < data.own.numel()
        edge_index, places = data.edge_index[:, inside], data.edge_ids[inside]
        kinds = kinds_of(data)
        given = replace(kinds, edges={name: value[inside] for name, value in kinds.edges.items()})
        count = data.own.numel()
    else:
        count, edge_index = int(data.num_nodes or 0), data.edge_index
        places = torch.arange(edge_index.size(1))
        given = attributes_of(data)
    # A generator of its own leaves the user's random numbers as they are.
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(count, dtype=torch.bool)
    if count <= vertices:
        chosen[:] = True
    while (missing := vertices - int(chosen.sum())) > 0 and count > vertices:
        # Start from random vertices that are not chosen yet, then follow their in-edges back three steps.
        # Few starts make few large pieces, where layers have neighbours to sum. Each round chooses at least
        # one vertex, so the loop ends also in a graph without edges.
        rest = (~chosen).nonzero().view(-1)
        front = rest[torch.randperm(rest.numel(), generator=generator)[: max(missing // 16, 1)]]
        for _ in range(3):
            new = torch.zeros(count, dtype=torch.bool)
            new[front] = True
            fresh = (new & ~chosen).nonzero().view(-1)
            # A hub can have more in-neighbours than there is room for, so some are chosen at random.
            room = vertices - int(chosen.sum())
            chosen[fresh[torch.randperm(fresh.numel(), generator=generator)[:room]]] = True
            front = edge_index[0][new[edge_index[1]]]
            if not front.numel():
                break
    # Renumber: place[v] is the row of vertex v in the sample, -1 if it is left out.
    kept = chosen.nonzero().view(-1)
    place = torch.full((count,), -1)
    place[kept] = torch.arange(kept.numel())
    inside = chosen[edge_index[0]] & chosen[edge_index[1]]
    taken = Attributes(
        {name: value[kept] for name, value in given.nodes.items()},
        {name: value[inside] for name, value in given.edges.items()},
        given.shared,
        given.refused,
    )
    sample = Sorted(place[edge_index[:, inside]], kept.numel(), taken)
    # Past Data.__setattr__, which would make these two attributes of the graph and give them to the model.
    sample.__dict__["edge_places"], sample.__dict__["vertices"] = places[inside], kept
    return sample


def sample_part(part: Partition, vertices: int, seed: int) -> Partition:
    """Sample a part as one of two parts of the graph; vertices and edges keep their numbers in the graph.

    No edge leaves the sample, so that nothing is sent.

    Args:
        part: The part to sample from.
        vertices: The most vertices that the sample may have.
        seed: The seed of the random vertices.

    Shapes:
        At most ``vertices`` rows, at most one less than the graph has, and all edges among them.
    """
    # A sample of all vertices would not be a part: chunks always have rows outside of them.
    sample = take_sample(part, max(1, min(vertices, part.num_nodes - 1)), seed)
    kept, taken, none = sample.__dict__["vertices"], attributes_of(sample), part.send[:0]
    return replace(
        part,
        # The second part has no edge to the first and owns the other vertices; nobody computes it.
        part=0,
        num_parts=2,
        own=part.own[kept],
        halo=none,
        edge_index=sample.edge_index,
        edge_ids=sample.__dict__["edge_places"],
        send=none,
        send_counts=(0, 0),
        recv_counts=(0, 0),
        nodes=taken.nodes,
        edges=taken.edges,
    )


NUMBERED: Final = 2**25
"""Most entries of all vertices' attributes for which :func:`numbered_sample` makes a sample."""


def numbered_sample(data: Data | Partition, sample: Data) -> Data | None:
    """Return the sample's edges among all vertices of the graph, which keep their numbers.

    Vertices that a part does not own get the attributes of vertices that it owns. That is enough for a check,
    because the split and the whole model are given the same rows.

    Args:
        data: The graph or part that the sample was taken from.
        sample: A sample made by :func:`take_sample`.

    Returns:
        The graph; None if it has too many vertices, or if the sample already has them all.

    Shapes:
        N rows, and the sample's edges.

    Cost:
        A copy of the attributes of all vertices.
    """
    part = isinstance(data, Partition)
    own = data.own if part else torch.arange(int(data.num_nodes or 0))
    given = kinds_of(data) if part else attributes_of(data)
    count, kept = int(data.num_nodes or 0), own[sample.__dict__["vertices"]]
    entries = sum(math.prod(value.shape[1:]) for value in given.nodes.values()) * count
    if entries > NUMBERED or kept.numel() == count:
        return None
    # like[v] is the own row whose attributes vertex v gets: its own, or one of the others in turn.
    like = torch.arange(count) % max(own.numel(), 1)
    like[own] = torch.arange(own.numel())
    found = attributes_of(sample)
    nodes = {name: value[like] for name, value in given.nodes.items()}
    every = Sorted(
        kept[sample.edge_index], count, Attributes(nodes, found.edges, found.shared, found.refused)
    )
    every.__dict__["edge_places"] = sample.__dict__["edge_places"]
    return every


def fitted(own_copy: nn.Module, data: Data | Partition, sample: Data) -> bool:
    """Cut the per-edge tables in a copy of a model to a sample's edges; return whether it has any."""
    part = isinstance(data, Partition)
    edges = data.num_edges if part else data.edge_index.size(1)
    return fit(own_copy, int(edges), int(data.num_nodes or 0), sample.__dict__["edge_places"])


def cast(sample: Data, dtype: torch.dtype) -> Data:
    """Return the sample with its floating-point attributes in another dtype."""

    def turned(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    found = attributes_of(sample)
    nodes, edges, shared = (
        {name: turned(value) for name, value in kind.items()}
        for kind in (found.nodes, found.edges, found.shared)
    )
    attributes = Attributes(nodes, edges, shared, found.refused)
    return Sorted(sample.edge_index, int(sample.num_nodes or 0), attributes)
