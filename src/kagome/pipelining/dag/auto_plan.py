"""Automatic plan: measures operators and links on this machine, and searches for a plan of stages.

Where it sits: ``pipeline`` calls it for ``plan="auto"``. Rank 0 searches, and all ranks receive its plan.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.components.rank_zero import by_first
from kagome.errors import ModelError
from kagome.launch.host_memory import available_bytes
from kagome.model.operators.graph import Branches
from kagome.pipelining.dag.checks import too_few
from kagome.planner.stages.coarsen import coarsened, fused
from kagome.planner.stages.devices import Devices, StageCost
from kagome.planner.stages.graphpipe import GraphPipe
from kagome.planner.stages.operator_costs import OperatorGraph
from kagome.planner.stages.plan import SCHEDULES, DagSchedule, StagePlan
from kagome.profile.operators import joint_norms, measured

LARGEST: Final = 64
"""Number of samples of the largest micro-batch that is tried."""
MOST: Final = 60
"""Most operators that the search handles; where a model has more, chains are merged."""
PROBE: Final = 1 << 20
"""Number of floats in the all-reduce that measures the links."""


def sizes_of(batch: int, least: int = 1) -> tuple[int, ...]:
    """Return the micro-batch sizes to try: powers of two, at least ``least``, that divide the batch."""
    found = tuple(size for size in (2**power for power in range(LARGEST.bit_length())) if not batch % size)
    # Half of the batch at most, so that a pipeline has two micro-batches to overlap.
    return tuple(size for size in found if least <= size <= max(1, batch // 2)) or (
        1 if least == 1 else batch,
    )


def searched(
    model: nn.Module,
    branches: Branches,
    inputs: Mapping[str, Tensor],
    channel: Channel,
    batch: int,
    schedule: Literal["auto"] | DagSchedule = "auto",
) -> tuple[OperatorGraph, StagePlan]:
    """Measure operators and links, and search for a plan. All ranks call it.

    Args:
        model: The user's module.
        branches: The model's graph of operators.
        inputs: Sample inputs by name.
        channel: The channel between all ranks.
        batch: The number of samples in a batch.
        schedule: A schedule, or ``auto`` for the faster one by forecast.

    Returns:
        The operators with their costs, and the plan; the same on all ranks.

    Raises:
        PlanError: If no plan fits the memory, or a batch has fewer samples than there are ranks.

    Cost:
        Each operator a few times at a few sizes on rank 0, twice as often if zero bubble is a choice, and two
        all-reduces of 4 MiB over all ranks.
    """
    # Batch norms compute over the samples of a micro-batch, of which they need two.
    joint = joint_norms(model, branches)
    if joint and batch < 2:
        raise too_few(next(iter(joint.values())), batch, 1)
    sizes = sizes_of(batch, 2 if joint else 1)
    devices = Devices(channel.size, _memory(channel), bandwidth(channel))

    def search() -> tuple[str, ...]:
        schedules = tuple(name for name in SCHEDULES if schedule in ("auto", name))
        split = channel.size > 1 and "zero-bubble" in schedules
        try:
            graph = measured(model, branches, inputs, sizes, halves=split)
        except ModelError:
            # Some backwards cannot be done in two: a reentrant checkpoint's, and functions of a user's.
            if not split or schedule != "auto":
                raise
            schedules = ("kfkb",)
            graph = measured(model, branches, inputs, sizes)
        # fused: operators that must share a stage are one. coarsened: chains are merged until the search can
        # handle their number. `spelled_out` replaces both by the model's operators again.
        whole = fused(graph, branches.bound)
        coarse = coarsened(whole.graph, MOST)
        plan = GraphPipe(StageCost(coarse.graph, devices, batch), sizes, schedules=schedules).whole()
        return graph.to_json(), whole.spelled_out(coarse.spelled_out(plan)).to_json()

    operators, found = by_first(channel, search, "plan")
    return OperatorGraph.from_json(operators), StagePlan.from_json(found)


def scheduled(
    plan: StagePlan, operators: OperatorGraph, channel: Channel, schedule: Literal["auto"] | DagSchedule
) -> StagePlan:
    """Return a plan with a schedule: its own for ``auto``. All ranks call it, with the same plan.

    Cost:
        For a plan that has no orders and is to have zero bubble, two all-reduces of 4 MiB over all ranks.
    """
    if schedule in ("auto", plan.schedule):
        return plan
    if schedule == "kfkb":
        return plan.with_orders([""] * len(plan.stages))
    # Only ratios of times matter to an order, so rough costs will do.
    devices = Devices(channel.size, float("inf"), bandwidth(channel))
    planner = GraphPipe(StageCost(operators, devices, plan.batch), (), schedules=("zero-bubble",))
    return StagePlan.from_json(by_first(channel, lambda: planner.scheduled(plan).to_json(), "orders"))


def bandwidth(channel: Channel) -> float:
    """Measure the bytes per second between two ranks while all ranks communicate."""
    if channel.size == 1:
        return float("inf")
    numbers = torch.zeros(PROBE, device=channel.device)
    seconds = []
    # The first turn opens connections and takes longer.
    for turn in range(2):
        # A GPU's all-reduce returns when it has begun: to read a number of it is to wait for its end. And
        # what the GPU has been given before must not count.
        numbers[0].item()
        begun = time.perf_counter()
        channel.all_reduce(numbers, action=f"probe {turn} of links", kind="other")[0].item()
        seconds.append(time.perf_counter() - begun)
    # Each rank sends 2 (n - 1) / n of the bytes in an all-reduce of two rounds.
    return 2 * (channel.size - 1) / channel.size * numbers.nbytes / min(seconds)


def _memory(channel: Channel) -> float:
    """Return the bytes of memory that each rank may use: those of the rank with the least."""
    alone = channel.device.type != "cpu"
    free = torch.accelerator.get_memory_info(channel.device)[0] if alone else available_bytes()
    found: Any = channel.gather_objects((socket.gethostname(), free), "free memory")
    # The ranks of one host share its memory.
    ranks = Counter(host for host, _ in found)
    shares = (bytes_ / (1 if alone else ranks[host]) for host, bytes_ in found if bytes_ is not None)
    return min(shares, default=float("inf"))
