"""Sets partition: one part of a graph with several vertex sets and edge sets.

Where it sits: made from a ``graph.structure.sets.Graph`` and the owner of each vertex. The interceptor takes
one in place of a ``Partition``. Each edge set is cut as a graph of its own, whose vertices are those of its
two ends::

    grid  0 1 2 3       owner 0 0 1 1       edge set up: grid -> mesh
    mesh  0 1           owner 0 1             part 1 has the in-edges of mesh 1, own grid rows 2 3, and
                                              halo rows of grid, if the edges read any
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch_geometric.data import Data

from kagome.errors import PartitionError
from kagome.graph.partition.partition import Partition, extract
from kagome.graph.partition.partitioners import assign, shared_out
from kagome.graph.structure.sets import Edges, Graph


@dataclass(frozen=True)
class EdgesPart:
    """One edge set of a part.

    Args:
        name: Its name.
        source: The number of the vertex set that its edges read.
        target: The number of the vertex set that they write.
        part: Own rows and halo rows of the source's set, the in-edges of own vertices of the target's, and
            the rows that are sent. Row 1 of its ``edge_index`` numbers own vertices of the target's set.
    """

    name: str
    source: int
    target: int
    part: Partition


@dataclass(frozen=True)
class SetsPartition:
    """One part of a graph with several sets.

    Args:
        part: The number of this part.
        num_parts: The number of parts.
        names: The names of the vertex sets.
        sizes: The number of vertices of each in the whole graph.
        own: The ids of own vertices of each, ascending.
        edges: The edge sets.
    """

    part: int
    num_parts: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    own: tuple[Tensor, ...]
    edges: tuple[EdgesPart, ...]


def assign_sets(graph: Graph, method: str, parts: int, seed: int) -> dict[str, Tensor]:
    """Assign each vertex of each set to a part, all sets together, so that neighbours lie on one part.

    ``metis/2`` divides the vertices of each set in each of its parts evenly between two consecutive parts.

    Args:
        graph: The graph.
        method: The partitioner's name.
        parts: The number of parts.
        seed: The partitioner's seed.

    Raises:
        PartitionError: If there is no such partitioner, or it lacks coordinates of a set.

    Shapes:
        owners ``[count]`` of each set, int64.
    """
    # One graph of all sets: the vertices of each are numbered behind those of the sets before it.
    counts = [each.count for each in graph.vertices.values()]
    begins = dict(zip(graph.vertices, torch.tensor([0, *counts]).cumsum(0).tolist(), strict=False))
    edge_index = torch.cat(
        [
            each.index.cpu() + torch.tensor([[begins[each.source]], [begins[each.target]]])
            for each in graph.edges.values()
        ],
        dim=1,
    )
    given = {name: each.pos for name, each in graph.vertices.items()}
    lacking = [name for name, pos in given.items() if pos is None]
    if method == "coordinates" and lacking:
        raise PartitionError(
            "coordinates of every vertex set, for partitioner='coordinates'",
            f"none of {', '.join(lacking)}",
            hint="kagome.Vertices(count, pos=...), or partitioner='metis'",
        )
    pos = None if lacking else torch.cat([each.cpu().double() for each in given.values() if each is not None])
    name, _, each = method.partition("/")
    shares = int(each or 1)
    owners = assign(name, edge_index, sum(counts), parts // shares, seed, pos).split(counts)
    dealt = owners if shares == 1 else [shared_out(owner, parts // shares, shares) for owner in owners]
    return dict(zip(graph.vertices, dealt, strict=True))


def extract_sets(graph: Graph, owners: Mapping[str, Tensor], part: int, num_parts: int) -> SetsPartition:
    """Extract one part of a graph with several sets.

    Args:
        graph: The graph.
        owners: The part of each vertex of each set.
        part: The number of the part to extract.
        num_parts: The number of parts.
    """
    names = tuple(graph.vertices)
    found = [
        EdgesPart(
            name,
            names.index(each.source),
            names.index(each.target),
            _edges_part(each, owners[each.source], owners[each.target], part, num_parts),
        )
        for name, each in graph.edges.items()
    ]
    return SetsPartition(
        part,
        num_parts,
        names,
        tuple(each.count for each in graph.vertices.values()),
        tuple((owners[name] == part).nonzero().view(-1) for name in names),
        tuple(found),
    )


def _edges_part(edges: Edges, sources: Tensor, targets: Tensor, part: int, num_parts: int) -> Partition:
    index = edges.index.cpu()
    if edges.source == edges.target:
        found = extract(Data(edge_index=index, num_nodes=sources.numel()), sources, part, num_parts)
        return _with_attribute(found, edges)
    # One graph of both sets: the target's vertices are numbered behind the source's.
    joined = torch.stack([index[0], index[1] + sources.numel()])
    data = Data(edge_index=joined, num_nodes=sources.numel() + targets.numel())
    found = extract(data, torch.cat([sources, targets]), part, num_parts)
    own = found.own[found.own < sources.numel()]
    mine, theirs = own.numel(), found.own.numel() - own.numel()
    #     local rows of the joined graph    own sources | own targets | halo
    #     rows of the edge set              own sources | halo             and own targets by themselves
    # Edges read sources alone, so no target's row is in the halo, and none is sent.
    source, target = found.edge_index
    source = torch.where(source < mine, source, source - theirs)
    return _with_attribute(
        replace(
            found,
            own=own,
            edge_index=torch.stack([source, target - mine]),
            num_nodes=sources.numel(),
        ),
        edges,
    )


def _with_attribute(part: Partition, edges: Edges) -> Partition:
    if edges.attr is None:
        return part
    return replace(part, edges={"edge_attr": edges.attr.cpu()[part.edge_ids]})


def sets_fingerprint(graph: Graph) -> str:
    """Return a name for a graph of several sets: it changes with any count, edge, attribute or coordinate."""
    digest = hashlib.blake2b(digest_size=16)
    for name, vertices in graph.vertices.items():
        digest.update(f"{name} {vertices.count}".encode())
        if vertices.pos is not None:
            digest.update(vertices.pos.detach().cpu().double().contiguous().numpy().data)
    for name, edges in graph.edges.items():
        digest.update(f"{name} {edges.source} {edges.target}".encode())
        digest.update(edges.index.cpu().contiguous().numpy().data)
        if edges.attr is not None:
            # As bytes, because NumPy has no bfloat16.
            attr = edges.attr.detach().cpu().contiguous()
            digest.update(f"{attr.dtype} {list(attr.shape)}".encode())
            digest.update(attr.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
