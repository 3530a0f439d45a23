"""Shard: put a user's model on this rank's part of a graph, for a training loop of the user's own.

Where it sits: the public function ``kagome.shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch_geometric.data import Data, HeteroData

from kagome.comm.channel import Channel
from kagome.comm.mesh import Mesh, open_mesh
from kagome.components.model_setup import broadcast_weights, materialise
from kagome.components.parallelize import PartOptions, parallelize
from kagome.components.wrappers import as_written, refuse_no_module, unwrapped
from kagome.config import Parallel, Train
from kagome.config.fields import check_kind
from kagome.errors import ConfigError, ModelError, PartitionError
from kagome.graph.partition.choice import is_auto
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import (
    SetsPartition,
    assign_sets,
    extract_sets,
    sets_fingerprint,
)
from kagome.graph.partition.store import Meta
from kagome.graph.sets import Graph
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.report.progress import warn
from kagome.sharding.module import ShardedModel
from kagome.train import data as source

SERVED: Final = frozenset(
    [
        "graph",
        "tensor",
        "partitioner",
        "reuse",
        "shared_memory",
        "memory_gib",
        "codec",
        "codec_backward",
    ]
)
"""The settings of ``Parallel`` that a loop of the user's own can have."""


@as_written
def shard(
    model: nn.Module,
    graph: Data | HeteroData | Graph | str | Path,
    *,
    parallel: Parallel | None = None,
    mesh: DeviceMesh | None = None,
    beside: Sequence[nn.Module] = (),
    seed: int = 0,
    fast: bool = True,
    recompute: bool = False,
    timeout: float = 300.0,
    log: Callable[[str], None] = warn,
) -> ShardedModel:
    """Put a model on this rank's part of a graph, as a module for your own training loop.

    All ranks call it alike, under ``torchrun`` or Slurm; in one process it is the plain model on the whole
    graph. After ``loss.backward()`` each parameter's ``.grad`` is the same on all ranks: the gradient of the
    mean of the ranks' losses, so that a loss from ``net.mean(...)`` counts once.

    Args:
        model: A module; it stays your own object, with the same parameters. On several ranks all get rank
            0's weights.
        graph: A PyG ``Data`` with ``edge_index``, the same on all ranks, or the folder of a saved partition;
            of several kinds of vertices, a ``HeteroData`` or a :class:`kagome.Graph`.
        parallel: How to split: ``Parallel(graph=4)``; by default one part for each rank.
        mesh: The ranks that share the graph, if they are not all: one axis of your ``DeviceMesh``, such as
            ``mesh["graph"]``. ``DistributedDataParallel`` may stand around the result, over the other axis.
        beside: Modules of your loop that run outside of the model on its rows, such as a predictor of pairs:
            they get rank 0's weights, and their gradients are summed too.
        seed: The seed of dropout and of the partition.
        fast: Whether kernels reduce messages; if off, all runs as PyG runs it.
        recompute: Whether each layer keeps its inputs only, and runs again in backward.
        timeout: Seconds that a rank waits for another.
        log: Called with each note.

    Returns:
        A module that takes what the model takes, and gives this rank's rows.

    Raises:
        ConfigError: If the settings need what only :class:`kagome.Trainer` does.
        DataError: If the graph is invalid.
        ModelError: If the model is sharded already, or has a layer that no split supports.

    Example:
        >>> import torch, kagome
        >>> from torch_geometric.nn import GCN
        >>> data = kagome.load("digits")
        >>> model = GCN(64, 16, num_layers=2, out_channels=10)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with kagome.shard(model, data) as net:
        ...     y = data.y[net.own()]
        ...     for _ in range(2):
        ...         out = net(data.x, data.edge_index)
        ...         loss = net.mean(torch.nn.functional.cross_entropy(out, y, reduction="none"))
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     out.shape
        torch.Size([1797, 10])
    """
    refuse_no_module(model, "shard(model, ...)")
    check_kind("parallel", parallel, Parallel | None)
    check_kind("graph", graph, Data | HeteroData | Graph | str | Path)
    check_kind("mesh", mesh, DeviceMesh | None)
    group = _group_of(mesh)
    parallel = parallel or Parallel()
    _refuse_unserved(parallel)
    model = unwrapped(model)
    train = Train(seed=seed, timeout=timeout)
    with ExitStack() as stack:
        ranks = stack.enter_context(open_mesh(parallel, timeout=timeout, log=log, group=group))

        part, notes = _part_of(graph, parallel, ranks, seed)
        for note in (*ranks.notes, *notes):
            log(note)
        model = model.to(ranks.device)
        if isinstance(part, Partition):
            materialise(model, part, ranks.device)
        else:
            _refuse_lazy(model)
        for module in (model, *beside):
            broadcast_weights(module.to(ranks.device), ranks.world)
        fitted = parallel.fit(ranks.size)
        exchange = CompressedExchange(ranks.graph, fitted, seed)
        given = None if isinstance(graph, str | Path) else graph
        options = PartOptions.of(train, ranks.device, fitted, fast=fast, recompute=recompute)
        net = parallelize(model, part, exchange, options)
        stack.enter_context(net)
        return ShardedModel(model, net, ranks, given, beside, stack.pop_all())


def _part_of(
    graph: Data | HeteroData | Graph | str | Path, parallel: Parallel, mesh: Mesh, seed: int
) -> tuple[Partition | SetsPartition, Sequence[str]]:
    """Return this rank's part of a graph, and notes for the user."""
    method = parallel.cutter(mesh.graph.size)

    def take(channel: Channel) -> tuple[Partition, Meta]:
        if isinstance(graph, str | Path):
            return source.from_folder(graph, channel)
        return source.from_data(graph, channel, method=method, seed=seed, reuse=parallel.reuse)

    if isinstance(graph, HeteroData | Graph):
        sets = Graph.of(graph) if isinstance(graph, HeteroData) else graph
        return _sets_part(sets, parallel, mesh.graph, "metis" if is_auto(method) else method, seed), ()
    part, meta = source.for_all_stages(take, mesh)
    return part, meta.notes


def _sets_part(graph: Graph, parallel: Parallel, channel: Channel, method: str, seed: int) -> SetsPartition:
    """Return this rank's part of a graph of several sets; rank 0 assigns the vertices.

    Raises:
        PartitionError: If the ranks have different graphs.
        ConfigError: For settings that serve one vertex set only.
    """
    if parallel.tensor > 1:
        raise ConfigError(
            "graph parallelism for a graph of several vertex sets",
            f"tensor={parallel.tensor}",
            where="kagome.shard(parallel=...)",
            hint=f"Parallel(graph={channel.size})",
        )
    marks = channel.gather_objects(sets_fingerprint(graph), "compare the ranks' graphs")
    if len(set(marks)) > 1:
        raise PartitionError(
            "the same graph on every rank",
            f"another on rank {channel.rank} than elsewhere",
            hint="seed whatever makes the graph, or load it from one file",
        )
    counts = [each.count for each in graph.vertices.values()]
    owner = torch.zeros(sum(counts), dtype=torch.int64, device=channel.device)
    if channel.rank == 0 and channel.size > 1:
        owner = torch.cat([*assign_sets(graph, method, channel.size, seed).values()]).to(channel.device)
    owner = channel.broadcast(owner, 0, action="broadcast of the partition").cpu()
    owners = dict(zip(graph.vertices, owner.split(counts), strict=True))
    return extract_sets(graph, owners, channel.rank, channel.size)


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
                hint="call the model once, with torch.no_grad(), on a few rows of each set",
            )


def _group_of(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """Return the process group of a mesh of one axis.

    Raises:
        ConfigError: If it has several.
    """
    if mesh is None:
        return None
    if mesh.ndim != 1:
        raise ConfigError(
            "a mesh of one axis, whose ranks share the graph",
            f"one of {mesh.ndim}: {mesh.mesh_dim_names or tuple(mesh.shape)}",
            where="kagome.shard(mesh=...)",
            hint='mesh["graph"], an axis by its name',
        )
    return mesh.get_group()


def _refuse_unserved(parallel: Parallel) -> None:
    """Refuse settings of pipelines, of late rows, and of what a Trainer decides from epoch to epoch.

    Raises:
        ConfigError: Naming the first of them.
    """
    plain = Parallel()
    for field in fields(plain):
        value = getattr(parallel, field.name)
        if field.name not in SERVED and value != getattr(plain, field.name):
            raise ConfigError(
                "settings that a training loop of your own can have",
                f"{field.name}={value!r}",
                where="kagome.shard(parallel=...)",
                hint="Parallel(graph=...) or Parallel(tensor=...); kagome.Trainer takes all settings",
            )
