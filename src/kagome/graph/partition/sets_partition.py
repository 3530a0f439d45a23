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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from kagome.errors import PartitionError
from kagome.graph.partition.choice import PartitionMethod
from kagome.graph.partition.partition import Partition, extract
from kagome.graph.partition.partitioners import assign, shared_out
from kagome.graph.structure.attributes import Shared
from kagome.graph.structure.hetero import SetsData
from kagome.graph.structure.sets import Edges, Graph, edge_type, tied_ends


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
        nodes: Attributes of own rows of each vertex set; empty if forward gets them as arguments.
        shared: Attributes of the whole graph, the same in all parts.
        target: The number of the vertex set that is trained on and scored.
        fingerprint: A name for graph, method, seed and number of parts; the same in all parts.
    """

    part: int
    num_parts: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    own: tuple[Tensor, ...]
    edges: tuple[EdgesPart, ...]
    nodes: tuple[Mapping[str, Tensor], ...] = ()
    shared: Mapping[str, Shared] = field(default_factory=dict)
    target: int = 0
    fingerprint: str = ""

    @property
    def types(self) -> tuple[tuple[str, str, str] | None, ...]:
        """The edge type of each edge set; None for a set of another name."""
        return tuple(
            edge_type(each.name, self.names[each.source], self.names[each.target]) for each in self.edges
        )

    @property
    def metadata(self) -> tuple[list[str], list[tuple[str, str, str]]]:
        """The vertex types and edge types, as ``HeteroData.metadata`` returns them."""
        return list(self.names), [each for each in self.types if each is not None]

    @property
    def scored(self) -> Partition:
        """The vertices of the target's set with their attributes, as a part of a graph without edges."""
        none = torch.empty(0, dtype=torch.int64)
        return Partition(
            part=self.part,
            num_parts=self.num_parts,
            num_nodes=self.sizes[self.target],
            num_edges=0,
            last_vertex=-1,
            own=self.own[self.target],
            halo=none,
            edge_index=none.view(2, 0),
            edge_ids=none,
            send=none,
            send_counts=(0,) * self.num_parts,
            recv_counts=(0,) * self.num_parts,
            nodes=dict(self.nodes[self.target]) if self.nodes else {},
            edges={},
            fingerprint=self.fingerprint,
            shared=dict(self.shared),
        )


Part = Partition | SetsPartition
"""One part of a graph, of one vertex set or of several."""


def scored_rows(part: Part) -> Partition:
    """Return the vertices that are trained on and scored, with their attributes."""
    return part if isinstance(part, Partition) else part.scored


def with_scored(part: Part, scored: Partition) -> Part:
    """Return a part with other attributes of the vertices that are trained on and scored."""
    if isinstance(part, Partition):
        return scored
    nodes = [*part.nodes]
    nodes[part.target] = scored.nodes
    return replace(part, nodes=tuple(nodes))


def by_type(
    part: SetsPartition, nodes: Sequence[Mapping[str, Any]], edges: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return attributes of several sets as PyG names them, such as ``x_dict`` and ``edge_index_dict``.

    Each has its plain name too, ``x``, as :func:`torch_geometric.nn.to_hetero` names arguments.

    Args:
        part: The part, which knows the vertex types and edge types.
        nodes: The attributes of each vertex set.
        edges: ``edge_index`` and the attributes of each edge set.
    """
    found: dict[str, dict[Any, Any]] = {}
    kinds: list[Any] = [*part.names, *part.types]
    for kind, attributes in zip(kinds, (*nodes, *edges), strict=True):
        for name, value in attributes.items():
            found.setdefault(name, {})[kind] = value
    return {**found, **{f"{name}_dict": values for name, values in found.items()}}


def without_attributes(part: Part) -> Part:
    """Return a part without the rows of its attributes."""
    if isinstance(part, Partition):
        return replace(part, nodes={}, edges={})
    edges = tuple(replace(each, part=replace(each.part, edges={})) for each in part.edges)
    return replace(part, nodes=(), edges=edges)


def assign_sets(graph: Graph, method: str, parts: int, seed: int) -> dict[str, Tensor]:
    """Assign each vertex of each set to a part, all sets together, so that neighbours lie on one part.

    A tied set follows the other one where it has edges to it: parts are then as even as these edges are.
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
    edge_index, counts = joined_edges(graph), [each.count for each in graph.vertices.values()]
    given = {name: each.pos for name, each in graph.vertices.items()}
    lacking = [name for name, pos in given.items() if pos is None]
    asked = PartitionMethod.parse(method)
    if asked.name == "coordinates" and lacking:
        raise PartitionError(
            "coordinates of every vertex set, for partitioner='coordinates'",
            f"none of {', '.join(lacking)}",
            hint="kagome.Vertices(count, pos=...), or partitioner='metis'",
        )
    pos = None if lacking else torch.cat([each.cpu().double() for each in given.values() if each is not None])
    # All sets in one graph, so that the partitioner sees the edges between them.
    cut = asked.cut_parts(parts)
    whole = str(replace(asked, shares=1))
    owners = assign(whole, edge_index, sum(counts), cut, seed, pos).split(counts)
    owners = _with_ties(graph, dict(zip(graph.vertices, owners, strict=True)))
    if asked.shares == 1:
        return owners
    return {name: shared_out(owner, cut, asked.shares) for name, owner in owners.items()}


def _with_ties(graph: Graph, owners: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts with each vertex of a tied set on that of the first vertex it has an edge to."""
    moved = dict(owners)
    for name, vertices in graph.vertices.items():
        if vertices.tied is None:
            continue
        other, *ends = tied_ends(graph, name)
        mine, theirs = (each.cpu() for each in ends)
        place = torch.arange(mine.numel())
        # [vertices of the set]: the place of the first edge of each, behind all if there is none.
        first = torch.full((vertices.count,), mine.numel()).scatter_reduce_(0, mine, place, "amin")
        has = first < mine.numel()
        # A vertex without an edge stays where the partitioner has put it.
        moved[name] = owners[name].clone()
        moved[name][has] = owners[other][theirs[first[has]]]
    return moved


def joined_edges(graph: Graph) -> Tensor:
    """Return all edges as those of one graph: the vertices of each set are numbered behind those before it.

    Shapes:
        ``[2, E]``, the edge sets one after the other.
    """
    names = [*graph.vertices]
    ends = [(names.index(each.source), names.index(each.target)) for each in graph.edges.values()]
    index = [each.index.cpu() for each in graph.edges.values()]
    return joined_ends(index, ends, [each.count for each in graph.vertices.values()])


def joined_ends(index: Sequence[Tensor], ends: Sequence[tuple[int, int]], counts: Sequence[int]) -> Tensor:
    """Return edges between several vertex sets as those of one graph.

    Args:
        index: The edges of each edge set.
        ends: The numbers of the vertex sets at the two ends of each.
        counts: The number of vertices of each vertex set.

    Shapes:
        ``[2, E]``, the edge sets one after the other.
    """
    begins = torch.tensor([0, *counts]).cumsum(0)
    return torch.cat([each + begins[[*both]].view(2, 1) for each, both in zip(index, ends, strict=True)], 1)


def extract_sets(
    graph: Graph,
    owners: Mapping[str, Tensor],
    part: int,
    num_parts: int,
    held: SetsData | None = None,
    fingerprint: str = "",
) -> SetsPartition:
    """Extract one part of a graph with several sets.

    Args:
        graph: The graph.
        owners: The part of each vertex of each set.
        part: The number of the part to extract.
        num_parts: The number of parts.
        held: The graph with its attributes, of which the part keeps own rows.
        fingerprint: The fingerprint to keep in the result.
    """
    names = tuple(graph.vertices)
    found = []
    for name, each in graph.edges.items():
        # Each edge set has a part of its own: halo, send lists and edges are of this set alone.
        cut = _edges_part(each, owners[each.source], owners[each.target], part, num_parts)
        attributes = held.edges[name] if held is not None else {}
        if held is None and each.attr is not None:
            attributes = {"edge_attr": each.attr.cpu()}
        cut = replace(cut, edges={key: value[cut.edge_ids] for key, value in attributes.items()})
        found.append(EdgesPart(name, names.index(each.source), names.index(each.target), cut))
    # Own vertices are those of the set, also where no edge of any set reaches them.
    own = tuple((owners[name] == part).nonzero().view(-1) for name in names)
    sizes = tuple(each.count for each in graph.vertices.values())
    if held is None:
        return SetsPartition(part, num_parts, names, sizes, own, tuple(found))
    nodes = [
        {key: value[ids] for key, value in held.nodes[name].items()}
        for name, ids in zip(names, own, strict=True)
    ]
    return SetsPartition(
        part,
        num_parts,
        names,
        sizes,
        own,
        tuple(found),
        tuple(nodes),
        held.shared,
        names.index(held.target),
        fingerprint,
    )


def _edges_part(edges: Edges, sources: Tensor, targets: Tensor, part: int, num_parts: int) -> Partition:
    index = edges.index.cpu()
    if edges.source == edges.target:
        return extract(Data(edge_index=index, num_nodes=sources.numel()), sources, part, num_parts)
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
    return replace(found, own=own, edge_index=torch.stack([source, target - mine]), num_nodes=sources.numel())


def sets_fingerprint(graph: Graph) -> str:
    """Return a name for a graph of several sets: it changes with any count, edge, attribute or coordinate."""
    digest = hashlib.blake2b(digest_size=16)
    for name, vertices in graph.vertices.items():
        digest.update(f"{name} {vertices.count} {vertices.tied}".encode())
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
