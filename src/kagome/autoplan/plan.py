"""Planning: what ``kagome plan`` and ``plan="auto"`` answer.

Where it sits: it puts a ``Workload`` together from settings, and a cluster from a file or from the machine.
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
from torch_geometric.data import Data

from kagome import config
from kagome.autoplan.workload import Workload
from kagome.comm.channel import Channel
from kagome.components.model_setup import few_rows, materialise
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
from kagome.planner.cluster import GIB, Cluster
from kagome.profile.cache import MeasurementCache, opened
from kagome.profile.contention import crowding
from kagome.profile.run_mode import RunMode
from kagome.profile.synthetic_graphs import GraphSize
from kagome.train.data import for_model, from_data

LOCAL = 4e9
"""Bytes a second that ranks of one host hand over in shared memory, roughly: two copies."""


def here(ranks: int, rate: float, kept: MeasurementCache | None = None) -> Cluster:
    """The machine at hand as a cluster.

    Args:
        ranks: Local ranks.
        rate: Bytes a second that one rank hands another.
        kept: Where it is looked for what was measured before.
    """
    free = available_bytes()
    memory = (64 * GIB if free is None else float(free)) / ranks
    free_cores = len(cores())
    crowded = crowding(min(ranks, free_cores), kept or MeasurementCache())
    return Cluster("this machine", 1, ranks, memory, 1.0, rate, rate, 1e-4, crowded, free_cores)


def _threads(ranks: int) -> int:
    """Of each of so many local ranks, as ``launch`` would have it."""
    return chosen_threads(os.environ) or local(ranks)


@as_written
def studied(
    asked: PlanCommand,
    build: Callable[[Partition, Meta, Channel], nn.Module],
    kept: MeasurementCache,
    *,
    data: Data | None = None,
) -> tuple[Workload, list[str]]:
    """Measure what ``kagome plan`` is asked about, for plans on any cluster.

    Args:
        asked: Its flags; of the cluster's only whether there is one.
        build: Makes the model.
        kept: Where it is looked for what was measured before.
        data: The graph, in place of the one that the flags name.

    Returns:
        The study, and notes for people.

    Raises:
        PlanError: If a graph is given by one of its two numbers alone.
        KagomeError: What loading the graph or building the model raises.
    """
    alone = Channel(None, "cpu")
    if (asked.vertices is None) is not (asked.edges is None):
        raise PlanError(
            "a graph that is not there is told by --vertices and --edges",
            f"--vertices {asked.vertices} --edges {asked.edges}",
        )
    seed, built_in = asked.train.seed, data is None
    if asked.vertices is not None and asked.edges is not None:
        graph = GraphSize(asked.vertices, asked.edges)
        data = like(graph, asked.features, asked.classes, seed)
    else:
        data = load_data(asked.data) if data is None else data
        graph = GraphSize(int(data.num_nodes or 0), int(data.edge_index.size(1)), data)
    part, meta = from_data(data, alone, method="contiguous", seed=seed)
    if built_in:
        part, meta = for_model(asked.model.name, part, meta)
    torch.manual_seed(seed)
    model = unwrapped(build(part, meta, alone))
    device = torch.device("cpu")
    materialise(model, part, device)
    first, notes = None, []
    if "decoupled" in asked.allow:
        try:
            first = decouple(model, few_rows(part, device))
        except ModelError as error:
            notes.append(f"not decoupled: {error}")
    torch.set_num_threads(_threads(asked.devices) if asked.cluster is None else 1)
    run = asked.model
    way = RunMode(True, fast=run.fast, recompute=run.recompute, amp=asked.train.amp == "bf16", seed=seed)
    optimizer = torch.optim.Adam(trained(model), lr=asked.train.lr)
    most = _threads(1) if asked.cluster is None else 1
    with told():
        study = Workload.of(model, optimizer, part, graph, decoupled=first, way=way, most=most, kept=kept)
    return study, notes


def planned(
    asked: PlanCommand,
    build: Callable[[Partition, Meta, Channel], nn.Module],
    *,
    data: Data | None = None,
) -> Plans:
    """Answer ``kagome plan``.

    Args:
        asked: Its flags.
        build: Makes the model.
        data: The graph, in place of the one that the flags name.

    Raises:
        PlanError: If nothing fits, or a graph is given by one of its two numbers alone.
        KagomeError: What loading the graph or building the model raises.
    """
    named = None if asked.cluster is None else Cluster.load(asked.cluster)
    kept = opened(asked.reuse)
    study, notes = studied(asked, build, kept, data=data)
    found = study.plans(named or here(asked.devices, LOCAL, kept), asked.allow)
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
    """Predict what each cut of a model on a graph would cost, and say which is best and why.

    It is what ``kagome plan`` prints. ``Path("plan.json").write_text(plans.to_json())`` makes a file that
    ``Parallel(plan="plan.json")`` takes.

    Args:
        model: The user's module; it stays as it is.
        data: The graph.
        devices: Local ranks to plan for, where no cluster is named.
        cluster: A cluster's TOML file, or the name of a built-in one (``kagome plan --help``).
        allow: What may be taken beside exact strategies: see :class:`kagome.Parallel`.
        train: Learning rate, seed and precision of the run.
        fast: Whether messages are reduced by kernels.
        recompute: Whether layers are run again in backward.
        reuse: Take what was measured on this machine within a day.

    Returns:
        The plans that fit, best first, and those that do not.

    Raises:
        PlanError: If nothing fits.
        ConfigError: If an argument is of another kind.
        DataError: If the graph has a fault.
        ModelError: If the model is none, has no weights to train, or fails on the graph.

    Cost:
        A second or a few: steps of the model on a sample are timed here.
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
    data, threads = validate(data)[0], torch.get_num_threads()
    try:
        return planned(asked, lambda part, meta, channel: copied(model), data=data)
    finally:
        torch.set_num_threads(threads)


def chosen(
    settings: Run, ranks: int, build: Callable[[Partition, Meta, Channel], nn.Module]
) -> tuple[Run, Plans]:
    """Settings with the best cut for so many local ranks, or fewer, in place of ``plan="auto"``; says why.

    Args:
        settings: Of a run.
        ranks: That may be started.
        build: Makes the model.

    Returns:
        The settings, and the plans, of which the first is the one that was taken: on all ranks, or on fewer
        where that is faster.

    Raises:
        PlanError: If no cut fits.
    """
    if settings.data.partition is not None:
        raise PlanError(
            "plan='auto' chooses how a graph is cut",
            f"{settings.data.partition} is cut already",
            hint="leave --parallel.plan out, or name the graph itself",
        )
    cut = settings.parallel
    asked = PlanCommand(
        data=settings.data,
        model=settings.model,
        train=settings.train,
        devices=ranks,
        allow=cut.allow,
        reuse=cut.reuse,
    )
    found = planned(asked, build)
    best = found.fitting[0]
    fewer = f" {_fewer(best, found.fitting, ranks)}" if best.ranks < ranks else ""
    print(f"kagome: {best.name}: {best.reason}.{fewer}", file=sys.stderr)
    mesh: dict[str, Any] = dict(best.settings)
    parallel = replace(cut, plan="manual", allow=(), **mesh)
    return replace(settings, parallel=parallel), found


def _fewer(best: Candidate, fitting: Sequence[Candidate], ranks: int) -> str:
    """Why not all ranks are started."""
    full = next((one for one in fitting if one.ranks == ranks), None)
    if full is None:
        why = "no cut over all of them fits"
    else:
        ratio = full.epoch_seconds / best.epoch_seconds
        why = f"with all of them {full.name} would take {ratio:.2f} times as long"
    return f"{best.ranks} of {ranks} ranks are started: {why}."


def like(graph: GraphSize, features: int, classes: int, seed: int) -> Data:
    """A small graph with as many edges a vertex, features and classes."""
    generator = torch.Generator().manual_seed(seed)
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
