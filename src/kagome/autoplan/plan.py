"""Plan: the implementation of ``kagome plan``, ``kagome.plan`` and ``plan="auto"``.

Where it sits: it makes a ``Workload`` from settings, and a ``Cluster`` from a file or the machine at hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data, HeteroData

from kagome import config
from kagome.autoplan.local_gpus import local_gpus
from kagome.autoplan.workload import Workload
from kagome.comm.channel import Channel
from kagome.components.model_setup import few_rows, materialise
from kagome.components.parallelize import CPU, PartOptions
from kagome.components.wrappers import as_written, refuse_no_module, unwrapped
from kagome.config import Allowed, Run, Train
from kagome.config.commands import PlanCommand
from kagome.config.fields import check_kind
from kagome.errors import ModelError, PlanError
from kagome.graph.datasets.load import load_data
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.store import Meta
from kagome.graph.structure.validate import validate
from kagome.launch.host_memory import available_bytes
from kagome.launch.threads import chosen as chosen_threads, cores, local
from kagome.model.copies import copied
from kagome.model.decouple.decouple import decouple
from kagome.model.forward_call import told
from kagome.objective.optimizers import trained
from kagome.planner.candidates import Candidate, Plans
from kagome.planner.cluster import GIB, LOCAL, Cluster
from kagome.profile.cache import MeasurementCache, opened
from kagome.profile.contention import crowding
from kagome.profile.synthetic_graphs import GraphSize
from kagome.train.data import for_model, from_data


def here(ranks: int, rate: float, kept: MeasurementCache | None = None) -> Cluster:
    """Describe the machine at hand as a cluster.

    Args:
        ranks: The number of local ranks.
        rate: Bytes per second from one rank to another.
        kept: The cache to look up earlier measurements in.
    """
    free = available_bytes()
    # Ranks of one host share what is free. If the system does not say, no plan is refused for memory.
    memory = (64 * GIB if free is None else float(free)) / ranks
    free_cores = len(cores())
    crowded = crowding(min(ranks, free_cores), kept or MeasurementCache())
    # Bandwidth within and between hosts is the same: there is one host. 1e-4 is the latency in seconds.
    return Cluster("this machine", 1, ranks, memory, 1.0, rate, rate, 1e-4, crowded, free_cores)


def _threads(ranks: int) -> int:
    """Return the number of threads that ``launch`` would give each local rank."""
    # OMP_NUM_THREADS, or a share of the cores.
    return chosen_threads(os.environ) or local(ranks)


@as_written
def studied(
    asked: PlanCommand,
    build: Callable[[Partition, Meta, Channel], nn.Module],
    kept: MeasurementCache,
    *,
    data: Data | None = None,
    gpus: bool = False,
) -> tuple[Workload, list[str]]:
    """Measure the model and graph that ``kagome plan`` is asked about, for plans on any cluster.

    Args:
        asked: The flags of the command; of the cluster only whether one is named.
        build: Makes the model.
        kept: The cache to look up earlier measurements in.
        data: The graph, in place of the one that the flags name.
        gpus: Whether the plans are for GPUs of this machine.

    Returns:
        The measured workload, and notes for the user.

    Raises:
        PlanError: If a graph is given by one of its two numbers alone.
        KagomeError: Any error of loading the graph or building the model.
    """
    alone = Channel(None, "cpu")
    if (asked.vertices is None) is not (asked.edges is None):
        raise PlanError(
            "both --vertices and --edges for a graph that is not there",
            f"--vertices {asked.vertices} --edges {asked.edges}",
        )
    seed, built_in = asked.train.seed, data is None
    if asked.vertices is not None and asked.edges is not None:
        graph = GraphSize(asked.vertices, asked.edges)
        data = like(graph, asked.features, asked.classes, seed)
    else:
        data = load_data(asked.data) if data is None else data
        if isinstance(data, HeteroData):
            raise PlanError(
                "a graph of one vertex set",
                f"a HeteroData with {len(data.node_types)} kinds of vertices",
                where="kagome plan",
                hint="kagome train --parallel.graph: its parts are cut without a plan",
            )
        graph = GraphSize(int(data.num_nodes or 0), int(data.edge_index.size(1)), data)
    part, meta = from_data(data, alone, method="contiguous", seed=seed)
    if built_in:
        made, meta = for_model(asked.model.name, part, meta)
        assert isinstance(made, Partition)
        part = made
    torch.manual_seed(seed)
    model = unwrapped(build(part, meta, alone))
    materialise(model, part, CPU)
    first, notes = None, []
    if "decoupled" in asked.allow:
        try:
            first = decouple(model, few_rows(part, CPU))
        except ModelError as error:
            notes.append(f"not decoupled: {error}")
    # Rates are those of one rank among all: with its share of the cores here, or one core,
    # which a cluster's `speed` is relative to.
    on_cores = asked.cluster is None and not gpus
    torch.set_num_threads(_threads(asked.devices) if on_cores else 1)
    run = asked.model
    options = PartOptions.of(asked.train, fast=run.fast, recompute=run.recompute)
    optimizer = torch.optim.Adam(trained(model), lr=asked.train.lr)
    most = _threads(1) if on_cores else 1
    with told():
        study = Workload.of(
            model, optimizer, part, graph, decoupled=first, options=options, most=most, kept=kept
        )
    return study, notes


def planned(
    asked: PlanCommand,
    build: Callable[[Partition, Meta, Channel], nn.Module],
    *,
    data: Data | None = None,
    eases: bool = True,
) -> Plans:
    """Measure, predict and rank the plans that ``kagome plan`` prints.

    Args:
        asked: The flags of the command.
        build: Makes the model.
        data: The graph, in place of the one that the flags name.
        eases: Whether plans that do not fit may hold fewer activations.

    Raises:
        PlanError: If no plan fits, or if a graph is given by one of its two numbers alone.
        KagomeError: Any error of loading the graph or building the model.
    """
    # Before anything is measured, which takes a minute: a wrong name of a cluster ends here.
    named = None if asked.cluster is None else Cluster.load(asked.cluster)
    kept = opened(asked.reuse)
    gpus = local_gpus(asked.devices) if named is None else None
    study, notes = studied(asked, build, kept, data=data, gpus=gpus is not None)
    found = study.plans(named or gpus or here(asked.devices, LOCAL, kept), asked.allow, eases=eases)
    if gpus is not None:
        notes.append(
            f"{gpus.name}: layers were timed on a core, and a GPU counts as {gpus.speed:,.0f} of them, the "
            "ratio of their memory bandwidths; compare plans with each other, and not with a clock"
        )
    if kept.reused:
        notes.append("what was measured here within a day is used again (--no-reuse measures anew)")
    if kept.doubtful:
        notes.append(
            f"other programs compute here: two measurements differed by {max(kept.doubtful.values()):.0%}, "
            "so seconds are as uncertain, and nothing of them is kept"
        )
    return replace(found, facts={**found.facts, "notes": notes})


def plan(
    model: nn.Module,
    data: Data,
    *,
    devices: int = 2,
    cluster: str | None = None,
    allow: tuple[Allowed, ...] = (),
    train: Train | None = None,
    fast: bool = True,
    recompute: bool = False,
    reuse: bool = True,
) -> Plans:
    """Predict what each way to split a model and a graph costs, and explain which is best.

    ``kagome plan`` prints the result. ``Path("plan.json").write_text(plans.to_json())`` writes a file that
    ``Parallel(plan="plan.json")`` reads.

    Args:
        model: The user's module; it stays unchanged.
        data: The graph.
        devices: The number of local ranks to plan for if no cluster is named.
        cluster: A cluster's TOML file, or the name of a built-in cluster (``kagome plan --help``).
        allow: The inexact methods that plans may use; see :class:`kagome.Parallel`.
        train: The learning rate, seed and precision of the run.
        fast: Whether kernels reduce messages.
        recompute: Whether layers run again in backward.
        reuse: Whether to reuse measurements made on this machine within a day.

    Returns:
        The plans that fit, best first, and those that do not.

    Raises:
        PlanError: If no plan fits.
        ConfigError: If an argument has the wrong type.
        DataError: If the graph is invalid.
        ModelError: If the model is not a module, has no weights to train, or fails on the graph.

    Cost:
        A few seconds: steps of the model on a sample are timed on this machine.

    Example:
        >>> import kagome
        >>> from torch_geometric.nn import GCN
        >>> data = kagome.load("sbm:vertices=60,degree=4,features=6,classes=3,communities=3")
        >>> plans = kagome.plan(GCN(6, 8, num_layers=2, out_channels=3), data, devices=2)
        >>> "graph=2" in [plan.name for plan in plans.fitting]
        True
    """
    refuse_no_module(model, "plan(model, ...)")
    check_kind("plan.devices", devices, int)
    check_kind("plan.cluster", cluster, str | Path | None)
    asked = PlanCommand(
        model=config.Model(fast=fast, recompute=recompute),
        train=Train() if train is None else train,
        devices=int(devices),
        cluster=None if cluster is None else str(cluster),
        allow=allow,
        reuse=reuse,
    )
    # As a function of the API this must leave the caller's threads as they were.
    data, threads = validate(data)[0], torch.get_num_threads()
    try:
        return planned(asked, lambda part, meta, channel: copied(model), data=data)
    finally:
        torch.set_num_threads(threads)


def chosen(
    settings: Run, ranks: int, build: Callable[[Partition, Meta, Channel], nn.Module]
) -> tuple[Run, Plans]:
    """Replace ``plan="auto"`` in settings by the best plan for the local ranks, and print the reason.

    Args:
        settings: The settings of a run.
        ranks: The number of local ranks that may be started.
        build: Makes the model.

    Returns:
        The settings and the ranked plans. The first plan is the one chosen; it uses all ranks, or fewer where
        that is faster.

    Raises:
        PlanError: If no plan fits.
    """
    # A saved partition has a fixed number of parts, and planning needs the edges of the whole graph.
    if settings.data.partition is not None:
        raise PlanError(
            "a graph that plan='auto' can cut",
            f"{settings.data.partition}, which is cut already",
            hint="leave --parallel.plan out, or name the graph itself",
        )
    cut = settings.parallel
    asked = PlanCommand(
        data=settings.data,
        model=replace(settings.model, recompute=settings.recomputes),
        train=settings.train,
        devices=ranks,
        allow=cut.allow,
        reuse=cut.reuse,
    )
    # A user who says what becomes of activations has chosen; only "auto" is left to the planner.
    found = planned(asked, build, eases=cut.activations == "auto")
    best = found.fitting[0]
    # Someone who asked for 8 ranks and sees 4 wants to know why.
    fewer = f" {_fewer(best, found.fitting, ranks)}" if best.ranks < ranks else ""
    print(f"kagome: {best.name}: {best.reason}.{fewer}", file=sys.stderr)
    # Someone who has allowed late rows and gets none wants to know that, too.
    late = next(((one, why) for one, why in found.refused if "max_age" in one.settings), None)
    if late is not None:
        print(f"kagome: {late[0].name} is not taken: {late[1]}.", file=sys.stderr)
    mesh: dict[str, Any] = dict(best.settings)
    parallel = replace(cut, plan="manual", allow=(), **mesh)
    return replace(settings, parallel=parallel), found


def _fewer(best: Candidate, fitting: Sequence[Candidate], ranks: int) -> str:
    """Explain why not all ranks are started."""
    full = next((one for one in fitting if one.ranks == ranks), None)
    if full is None:
        why = "no cut over all of them fits"
    else:
        ratio = full.epoch_seconds / best.epoch_seconds
        why = f"with all of them {full.name} would take {ratio:.2f} times as long"
    return f"{best.ranks} of {ranks} ranks are started: {why}."


def like(graph: GraphSize, features: int, classes: int, seed: int) -> Data:
    """Make a small random graph with the given mean degree, number of features and number of classes."""
    generator = torch.Generator().manual_seed(seed)
    # The model must run on it, and its attributes must have the right widths; its edges matter little.
    n = min(graph.vertices, 2_000)
    e = max(1, round(graph.edges * n / max(graph.vertices, 1)))
    third = torch.arange(n) % 3
    return Data(
        x=torch.randn(n, features, generator=generator),
        y=torch.arange(n) % classes,
        edge_index=torch.randint(0, n, (2, e), generator=generator),
        train_mask=third == 0,
        val_mask=third == 1,
        test_mask=third == 2,
    )
