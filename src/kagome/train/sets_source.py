"""Sets source: how each rank gets its part of a graph of several vertex sets that all ranks hold.

Where it sits: ``data`` asks for a part with its attributes, for a Trainer; ``sharding.parts`` for one whose
attributes are arguments of the model.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from kagome.comm.channel import Channel
from kagome.components.rank_zero import by_first
from kagome.config import Parallel, Run
from kagome.errors import ConfigError, PartitionError
from kagome.graph.partition import store
from kagome.graph.partition.choice import AUTO
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.quality import Quality
from kagome.graph.partition.sets_partition import (
    Part,
    SetsPartition,
    assign_sets,
    extract_sets,
    joined_edges,
    sets_fingerprint,
)
from kagome.graph.partition.store import Meta
from kagome.graph.structure.hetero import validate_sets
from kagome.graph.structure.sets import Graph

ONE_SET: Final = ("pipe", "chunks", "skip_drift", "adaptive_bits", "decouple")
"""Settings that serve graphs of one vertex set only."""


def from_hetero(data: HeteroData, settings: Run, channel: Channel) -> tuple[SetsPartition, Meta]:
    """Return this rank's part of a graph of several vertex sets, with attributes of own rows.

    Args:
        data: The graph, the same on every rank.
        settings: The run's settings.
        channel: The graph group; rank 0 partitions and broadcasts the owners.

    Returns:
        The part, and what all ranks know of the graph. Its numbers of vertices and labels are the target's;
        its edges, and the quality of the cut, those of all sets.

    Raises:
        ConfigError: For settings that serve one vertex set only.
        DataError: If the data has a fault.
        PartitionError: If the ranks have different graphs.

    Cost:
        One number a vertex to each rank.
    """
    refuse_for_sets(settings.parallel, channel.size, "the settings of Parallel")
    held = validate_sets(data, target=settings.train.target_type, split=settings.data.split)
    method, seed = cutter_of(settings.parallel, channel.size), settings.train.seed
    cut = hashlib.blake2b(f"{method} {seed} {channel.size}".encode(), digest_size=4).hexdigest()
    mark = f"{held.fingerprint()}-{cut}"
    owners = owners_of(held.graph, mark, channel, method, seed)

    def measured() -> Quality:
        edge_index = joined_edges(held.graph)
        owner = torch.cat([*owners.values()])
        graph = Data(edge_index=edge_index, num_nodes=owner.numel())
        return store.measure(graph, owner, channel.size, fingerprint=mark, method=method, seed=seed)[
            0
        ].quality

    quality = by_first(channel, measured, "measure the cut", [Quality])
    meta = Meta(
        fingerprint=mark,
        method=method,
        seed=seed,
        num_parts=channel.size,
        num_nodes=held.graph.vertices[held.target].count,
        num_edges=sum(each.index.size(1) for each in held.graph.edges.values()),
        features=_columns(held.nodes[held.target].get("x")),
        labels=held.labels,
        notes=(*held.notes, f"scores and labels are those of {held.target}, one of {_listed(held.graph)}."),
        quality=quality,
    )
    return extract_sets(held.graph, owners, channel.rank, channel.size, held, mark), meta


def refuse_target(part: Part, target: str | None) -> None:
    """Refuse the name of a vertex type for a graph that has one.

    Raises:
        ConfigError: If there is a name.
    """
    if target is not None and isinstance(part, Partition):
        raise ConfigError(
            f"a graph of several vertex types for train.target_type={target!r}",
            "one of a single type",
            hint="leave it out, or a HeteroData",
        )


def _columns(x: Tensor | None) -> int:
    return 0 if x is None else x.size(-1) if x.dim() > 1 else 1


def _listed(graph: Graph) -> str:
    return ", ".join(f"{each.count:,} {name}" for name, each in graph.vertices.items())


def cutter_of(parallel: Parallel, parts: int) -> str:
    """Return the partitioner's name; METIS by default."""
    method = parallel.cutter(parts).replace(AUTO, "metis")
    # With one part for all ranks, each needs a share of each set.
    return f"{method}/{parallel.tensor}" if parallel.tensor > 1 and "/" not in method else method


def refuse_for_sets(parallel: Parallel, ranks: int, where: str) -> None:
    """Refuse settings that serve graphs of one vertex set only.

    Raises:
        ConfigError: Naming all of them, and what works.
    """
    plain = Parallel()
    refused = {
        name: getattr(parallel, name) for name in ONE_SET if getattr(parallel, name) != getattr(plain, name)
    }
    if refused:
        raise ConfigError(
            "graph parallelism, with exact rows or not, or slices, for a graph of several vertex sets",
            ", ".join(f"{name}={value!r}" for name, value in refused.items()),
            where=where,
            hint=f"Parallel(graph={ranks})",
        )


def part_of_sets(graph: Graph, channel: Channel, method: str, seed: int) -> SetsPartition:
    """Return this rank's part of a graph of several sets, whose attributes are arguments of the model.

    Raises:
        PartitionError: If the ranks have different graphs.
    """
    owners = owners_of(graph, sets_fingerprint(graph), channel, method, seed)
    return extract_sets(graph, owners, channel.rank, channel.size)


def owners_of(graph: Graph, mark: str, channel: Channel, method: str, seed: int) -> dict[str, Tensor]:
    """Return the part of each vertex of each set; rank 0 assigns the vertices. All ranks call it.

    Args:
        graph: The graph, the same on all ranks.
        mark: Digits that name it.
        channel: The graph group.
        method: The partitioner's name.
        seed: The partitioner's seed.

    Raises:
        PartitionError: If the ranks have different graphs.
    """
    # Compared before any message whose size depends on the graph: gloo aborts if sizes differ.
    marks = channel.gather_objects(mark, "compare the ranks' graphs")
    if len(set(marks)) > 1:
        raise PartitionError(
            "the same graph on every rank",
            f"another on rank {channel.rank} than elsewhere",
            hint="seed whatever makes the graph, or load it from one file",
        )
    counts = [each.count for each in graph.vertices.values()]
    # [all vertices]: the part of each, the sets one after the other.
    owner = torch.zeros(sum(counts), dtype=torch.int64, device=channel.device)
    if channel.rank == 0 and channel.size > 1:
        owner = torch.cat([*assign_sets(graph, method, channel.size, seed).values()]).to(channel.device)
    owner = channel.broadcast(owner, 0, action="broadcast of the partition").cpu()
    return dict(zip(graph.vertices, owner.split(counts), strict=True))
