"""Parts: this rank's part of the graph that a user gave, of one vertex set or of several.

Where it sits: ``shard`` takes the part before it puts the model on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from kagome.comm.channel import Channel
from kagome.comm.mesh import Mesh
from kagome.components.model_setup import call_once, few_of_sets, is_lazy
from kagome.config import Parallel
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import SetsPartition
from kagome.graph.partition.store import Meta
from kagome.graph.structure.sets import Graph
from kagome.train import data as source
from kagome.train.sets_source import cutter_of, part_of_sets, refuse_for_sets


def part_of(
    graph: Data | HeteroData | Graph | str | Path,
    parallel: Parallel,
    mesh: Mesh,
    seed: int,
    chunks: int | None,
) -> tuple[Partition | SetsPartition, Sequence[str]]:
    """Return this rank's part of a graph, and notes for the user."""
    method = parallel.cutter(mesh.graph.size)

    def take(channel: Channel) -> tuple[Partition, Meta]:
        if isinstance(graph, str | Path):
            found = source.from_folder(graph, channel)
            source.refuse_other_weights(graph, found[1], method)
            return found
        given = without_edge_labels(graph) if isinstance(graph, Data) else graph
        return source.from_data(given, channel, method=method, seed=seed, reuse=parallel.reuse)

    if isinstance(graph, HeteroData | Graph):
        refuse_for_sets(parallel, mesh.graph.size, "kagome.shard(parallel=...)")
        sets, cutter = Graph.of(graph), cutter_of(parallel, mesh.graph.size)
        return part_of_sets(sets, mesh.graph, cutter, seed), ()
    part, meta = source.for_all_stages(take, mesh, chunks)
    return part, meta.notes


def without_edge_labels(graph: Data) -> Data:
    """Return a graph without labels and masks of edges, which the user's own loop places by itself."""
    edges, vertices = graph.num_edges, graph.num_nodes
    of_edges = [
        name
        for name in ("y", "train_mask", "val_mask", "test_mask")
        if isinstance(graph.get(name), Tensor) and graph[name].shape[:1] == (edges,) != (vertices,)
    ]
    if not of_edges:
        return graph
    rest = copy(graph)
    for name in of_edges:
        del rest[name]
    return rest


def materialise_sets(
    model: nn.Module, graph: object, part: SetsPartition, device: torch.device, *, cut: bool
) -> None:
    """Let lazy layers take their shapes from a few rows of a ``HeteroData``.

    Args:
        model: The user's module.
        graph: The graph as the user gave it.
        part: This rank's part, whose attributes are arguments of the model.
        device: The device of the model.
        cut: Whether the model has cut tables, whose own rows other inputs do not fit.

    Raises:
        ModelError: If a layer is lazy and the graph does not say its shape.
    """
    if isinstance(graph, HeteroData) and is_lazy(model) and not cut:
        counts = dict(zip(part.names, part.sizes, strict=True))
        counts |= {each.name: each.part.num_edges for each in part.edges}
        rows = {
            kind: {name: value for name, value in held.items() if _has_rows(name, value, counts[kind])}
            for kind, held in Graph.attributes(graph).items()
        }
        nodes, edges = (
            [rows[name] for name in names] for names in (part.names, [e.name for e in part.edges])
        )
        # A forward that asks for other names is refused below.
        with suppress(ModelError):
            call_once(model, few_of_sets(part, nodes, edges, device))
    _refuse_lazy(model)


def _has_rows(name: str, value: object, count: int) -> bool:
    return name != "edge_index" and isinstance(value, Tensor) and value.shape[:1] == (count,)


def _refuse_lazy(model: nn.Module) -> None:
    """Refuse lazy layers, whose shapes would have to be found on a part.

    Raises:
        ModelError: Naming the first of them.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                "parameters that have a shape, for a graph of several vertex sets",
                f"{name}, whose layer waits for its first input (in_channels=-1)",
                hint="with torch.no_grad(): model(...), before kagome.shard, with what net(...) will get, or "
                "with a few rows of each set and edges between them",
            )


def whole_of_one_set(
    part: Partition | SetsPartition, given: Data | HeteroData | Graph | None
) -> tuple[Partition, Data | None]:
    """Return a part of a graph of one vertex set; stages and chunks take no other."""
    assert isinstance(part, Partition)
    return part, given if isinstance(given, Data) else None
