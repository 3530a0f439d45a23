"""Shard: put a user's model on this rank's part of a graph, for a training loop of the user's own.

Where it sits: the public function ``kagome.shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch_geometric.data import Data

from kagome.comm.mesh import open_mesh
from kagome.components.model_setup import broadcast_weights, materialise
from kagome.components.parallelize import PartOptions, parallelize
from kagome.components.wrappers import as_written, refuse_empty, refuse_no_module, unwrapped
from kagome.config import Parallel, Train
from kagome.config.fields import check_kind
from kagome.errors import ConfigError
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.report.progress import warn
from kagome.sharding.cut_tables import tables_in
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
    graph: Data | str | Path,
    *,
    parallel: Parallel | None = None,
    mesh: DeviceMesh | None = None,
    beside: Sequence[nn.Module] = (),
    cut: bool | Sequence[str] = False,
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
        graph: A PyG ``Data`` with ``edge_index``, the same on all ranks, or the folder of a saved partition.
        parallel: How to split: ``Parallel(graph=4)``; by default one part for each rank.
        mesh: The ranks that share the graph, if they are not all: one axis of your ``DeviceMesh``, such as
            ``mesh["graph"]``. ``DistributedDataParallel`` may stand around the result, over the other axis.
        beside: Modules of your loop that run outside of the model on its rows, such as a predictor of pairs:
            they get rank 0's weights, and their gradients are summed too.
        cut: Names of parameters with a row for each vertex or edge, such as ``("embedding.weight",)``: each
            rank holds, trains and saves its own rows alone. True takes all embeddings, and parameters of your
            own modules, with so many rows. On other ranks than 0 they may be on the ``meta`` device. Norms
            of their gradients are taken by :meth:`ShardedModel.clip_grad_norm_`, not by torch's.
        seed: The seed of dropout and of the partition.
        fast: Whether kernels reduce messages; if off, all runs as PyG runs it.
        recompute: Whether each layer keeps its inputs only, and runs again in backward.
        timeout: Seconds that a rank waits for another.
        log: Called with each note.

    Returns:
        A module that takes what the model takes, and gives this rank's rows.

    Raises:
        ConfigError: If the settings need what only :class:`kagome.Trainer` does, or a name in ``cut`` is of
            no parameter with the graph's rows.
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
    check_kind("graph", graph, Data | str | Path)
    check_kind("mesh", mesh, DeviceMesh | None)
    group = _group_of(mesh)
    parallel = parallel or Parallel()
    _refuse_unserved(parallel)
    model = unwrapped(model, empty=cut is not False)
    train = Train(seed=seed, timeout=timeout)
    with ExitStack() as stack:
        ranks = stack.enter_context(open_mesh(parallel, timeout=timeout, log=log, group=group))

        def take(channel: Any) -> Any:
            if isinstance(graph, str | Path):
                return source.from_folder(graph, channel)
            method = parallel.cutter(channel.size)
            return source.from_data(graph, channel, method=method, seed=seed, reuse=parallel.reuse)

        part, meta = source.for_all_stages(take, ranks)
        for note in (*ranks.notes, *meta.notes):
            log(note)
        tables = tables_in(model, cut, part, ranks.graph)
        # Tables have rank 0's numbers soon; other weights must have their own.
        refuse_empty(model, tables.parameters)
        stack.callback(tables.undo)
        # Before the model moves: a table that does not fit on one device is never there as a whole.
        tables.cut(ranks.device)
        model = model.to(ranks.device)
        materialise(model, part, ranks.device)
        for module in (model, *beside):
            broadcast_weights(module.to(ranks.device), ranks.world, tables.parameters)
        fitted = parallel.fit(ranks.size)
        exchange = CompressedExchange(ranks.graph, fitted, seed)
        given = graph if isinstance(graph, Data) else None
        options = PartOptions.of(train, ranks.device, fitted, fast=fast, recompute=recompute)
        net = parallelize(model, part, exchange, options)
        tables.place(net.scope)
        stack.enter_context(net)
        return ShardedModel(model, net, ranks, part, given, beside, stack.pop_all(), tables)


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
