"""Shard: put a user's model on this rank's part of a graph, for a training loop of the user's own.

Where it sits: the public function ``kagome.shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch_geometric.data import Data, HeteroData

from kagome.comm.mesh import Mesh, open_mesh
from kagome.components.model_setup import broadcast_weights, materialise
from kagome.components.parallelize import PartOptions, parallelize
from kagome.components.wrappers import as_written, refuse_empty, refuse_no_module, unwrapped
from kagome.config import Parallel, Train
from kagome.config.fields import check_kind
from kagome.errors import ConfigError
from kagome.graph.partition.partition import Partition
from kagome.graph.structure.sets import Graph
from kagome.profile.host_forecast import host_forecast
from kagome.report.progress import warn
from kagome.sharding.loop_settings import (
    exchange_of,
    is_staged,
    note_unwatched,
    refuse_beside_stages,
    refuse_unserved,
)
from kagome.sharding.module import ShardedModel
from kagome.sharding.parts import materialise_sets, part_of, whole_of_one_set
from kagome.sharding.pipelined import PipelinedModel
from kagome.sharding.rows.cut_tables import refuse_uncuttable, tables_in


@as_written
def shard(
    model: nn.Module,
    graph: Data | HeteroData | Graph | str | Path,
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
) -> ShardedModel | PipelinedModel:
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
        A module that takes what the model takes, and gives this rank's rows. With stages or chunks
        (``Parallel(pipe=2)``) it has ``train_step`` and ``eval_step`` in place of ``net(...)``.

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
    check_kind("graph", graph, Data | HeteroData | Graph | str | Path)
    check_kind("mesh", mesh, DeviceMesh | None)
    group = _group_of(mesh)
    parallel = parallel or Parallel()
    refuse_unserved(parallel)
    _refuse_unfit(parallel, mesh)
    if is_staged(parallel):
        again = recompute or parallel.activations == "recompute"
        refuse_beside_stages(beside, mesh, recompute=again, tensor=parallel.tensor)
    model = unwrapped(model, empty=cut is not False)
    train = Train(seed=seed, timeout=timeout)
    with ExitStack() as stack:
        ranks = stack.enter_context(open_mesh(parallel, timeout=timeout, log=log, group=group))

        fitted = parallel.fit(ranks.size)
        part, notes = part_of(graph, parallel, ranks, seed, fitted.chunks)
        for note in (*ranks.notes, *notes):
            log(note)
        refuse_uncuttable(cut, staged=is_staged(fitted))
        tables = tables_in(model, cut, part, ranks.graph)
        # Tables have rank 0's numbers soon; other weights must have their own.
        refuse_empty(model, tables.parameters)
        stack.callback(tables.undo)
        # Before the model moves: a table that does not fit on one device is never there as a whole.
        tables.cut(ranks.device)
        model = model.to(ranks.device)
        if isinstance(part, Partition):
            materialise(model, part, ranks.device)
        else:
            materialise_sets(model, graph, part, ranks.device, cut=bool(tables))
        for module in (model, *beside):
            broadcast_weights(module.to(ranks.device), ranks.world, tables.parameters)
        given = None if isinstance(graph, str | Path) else graph
        if is_staged(fitted):
            part, given = whole_of_one_set(part, given)
            return _in_stages(model, part, ranks, fitted, train, given, stack, fast=fast, log=log)
        exchange, steps = exchange_of(fitted, ranks, seed, log)
        options = PartOptions.of(train, ranks.device, fitted, fast=fast, recompute=recompute)
        for note in host_forecast(model, part, ranks.graph, fitted, options):
            log(note)
        net = parallelize(model, part, exchange, options)
        tables.place(net.scope)
        stack.enter_context(net)
        return ShardedModel(
            model,
            net,
            ranks,
            given,
            beside,
            stack.pop_all(),
            tables,
            steps=steps,
            codec_weights=fitted.codec_weights,
        )


def _in_stages(
    model: nn.Module,
    part: Partition,
    ranks: Mesh,
    parallel: Parallel,
    train: Train,
    given: Data | None,
    stack: ExitStack,
    *,
    fast: bool,
    log: Callable[[str], None],
) -> PipelinedModel:
    """Return a model in stages; what is open closes with it."""
    # The model holds the stack that closes it before the mesh is moved there: until then an error closes the
    # mesh here.
    inner = ExitStack()
    net = PipelinedModel(model, part, ranks, parallel, train, given, inner, fast=fast)
    for note in net.take_notes():
        log(note)
    note_unwatched(parallel, log)
    inner.push(stack.pop_all())
    return net


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


def _refuse_unfit(parallel: Parallel, mesh: DeviceMesh | None) -> None:
    """Refuse a mesh whose size is not that of the settings.

    Raises:
        ConfigError: Naming both.
    """
    if mesh is None or parallel.graph is None:
        return
    need = parallel.graph * parallel.tensor * parallel.pipe
    if need != mesh.size():
        raise ConfigError(
            f"a mesh of {need} ranks for graph={parallel.graph}"
            + (f", tensor={parallel.tensor}" if parallel.tensor > 1 else ""),
            f"one of {mesh.size()}: {mesh.mesh_dim_names or tuple(mesh.shape)}",
            where="kagome.shard(parallel=..., mesh=...)",
            hint="leave graph out, or give the axis of the DeviceMesh whose ranks share the graph",
        )
