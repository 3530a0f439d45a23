"""Ordering: how long a batch takes under kFkB, and the order of zero bubble, by one compiled loop.

Where it sits: ``graphpipe`` asks for the seconds of many plans, of which ``simulate_plan`` then shows the
best in full. Programs of actions say the same at many times the cost.

::

    I   gradients of a stage's inputs, for which its sources wait       I > F > W: a stage takes the first
    F   forward, unless a window of samples is on its way               that can begin now. W is taken where
    W   gradients of its weights, for which nobody waits                it would wait, so it fills the gaps.

From F to I a stage has as many samples as under kFkB, and from F to W at most as many as the stage that holds
the most under kFkB, as far as its memory allows.

Source: list scheduling. The halves are those of zero bubble pipelines (Qi et al., ICLR 2024), the bound on
samples is that of their H1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kagome.kernels.base.jit import compiled
from kagome.planner.stages.devices import StageCost
from kagome.planner.stages.operator_groups import Floats, Ints
from kagome.planner.stages.plan import PlannedStage, StagePlan
from kagome.planner.stages.simulate_plan import flow, message
from kagome.schedule.schedules import windows

Flags = NDArray[np.bool_]


def seconds_of(cost: StageCost, plan: StagePlan, *, split: bool = False, sequential: bool = False) -> float:
    """Return the seconds of a batch, which are those that ``simulate_plan.trial`` finds.

    Args:
        cost: The cost of any set of operators as a stage.
        plan: The plan.
        split: Whether under zero bubble, in the order of :func:`zero_bubble_of`; else under kFkB.
        sequential: Whether stages form a chain; see ``simulate_plan.trial``.

    Cost: a few steps for each action and stage.
    """
    return _ordered(cost, plan, split=split, sequential=sequential)[0]


def zero_bubble_of(cost: StageCost, plan: StagePlan, *, why: str = "", sequential: bool = False) -> StagePlan:
    """Return a plan with orders for zero bubble, and the reason for them."""
    _, found = _ordered(cost, plan, split=True, sequential=sequential)
    orders = ["".join(" FIW"[letter] for letter in row if letter) for row in found.tolist()]
    return plan.with_orders(orders, why)


def _ordered(cost: StageCost, plan: StagePlan, *, split: bool, sequential: bool) -> tuple[float, Ints]:
    shape, carried = flow(cost, plan, sequential=sequential)
    links, batch, held = shape.all_links, len(shape.order), windows(shape, plan.k)
    sizes = np.array([shape.size(stage) for stage in range(shape.stages)], dtype=np.int64)
    times = np.zeros((shape.stages, 3))
    for number, stage in enumerate(plan.stages):
        forward, backward = cost.compute(stage.operators, stage.devices, stage.micro_batch)
        halves = cost.halves(stage.operators, stage.devices, stage.micro_batch) if split else (backward, 0.0)
        times[number] = forward, *halves
    orders = np.zeros((shape.stages, 3 * batch // int(sizes.min())), dtype=np.int64)
    seconds = ordered(
        np.array(links, dtype=np.int64).reshape(len(links), 2),
        np.array([message(cost, plan, way, carried.get(way, 0.0) * shape.unit(*way)) for way in links]),
        sizes,
        np.array(held, dtype=np.int64),
        np.array(
            [
                _room(cost, stage, samples, max(held))
                for stage, samples in zip(plan.stages, held, strict=True)
            ],
            dtype=np.int64,
        ),
        np.array(plan.k, dtype=np.int64),
        times,
        batch,
        split,
        orders,
    )
    sync = max(cost.sync(stage.operators, stage.devices) for stage in plan.stages)
    return float(seconds) + sync, orders


def _room(cost: StageCost, stage: PlannedStage, least: int, most: int) -> int:
    """Return how many samples a stage may hold, in whole micro-batches: all of the most, or what fits."""
    fixed, one = (cost.memory(stage.operators, stage.devices, held) for held in (0, 1))
    free, kept = max(0.0, cost.devices.memory - fixed), one - fixed
    if kept * most > free:
        most = max(least, int(free / kept))
    return most - most % stage.micro_batch


@compiled
def ordered(
    links: Ints,
    hops: Floats,
    sizes: Ints,
    window: Ints,
    room: Ints,
    turn: Ints,
    times: Floats,
    batch: int,
    split: bool,
    orders: Ints,
) -> float:
    """Go through a batch action by action, always the one that can begin first; return its seconds.

    Args:
        links: The pairs of stages of which the second reads the first.
        hops: The seconds of a message on each link, in either direction.
        sizes: The samples of a micro-batch of each stage.
        window: The most samples of each stage between F and I.
        room: The most between F and W.
        turn: The k of each stage.
        times: The seconds of F, I and W of each stage.
        batch: The number of samples in a batch.
        split: Whether each stage chooses its order, with W in the gaps; else it follows kFkB, and I is the
            whole backward.
        orders: What each stage does if it chooses, written here: 1 for F, 2 for I, 3 for W, then zeros.

    Shapes:
        links ``[links, 2]``; hops ``[links]``; sizes, window, room and turn ``[stages]``; times
        ``[stages, 3]``;
        orders ``[stages, 3 * the most micro-batches]``.
    """
    stages, never = sizes.size, np.inf
    come = np.full((2, links.shape[0], batch // sizes.min()), never)
    free, busy = np.zeros(stages), np.zeros((2, links.shape[0]))
    done = np.zeros((stages, 3), dtype=np.int64)
    start, what = np.zeros(stages), np.zeros(stages, dtype=np.int64)
    stale = np.ones(stages, dtype=np.bool_)
    while True:
        now, at = never, -1
        for stage in range(stages):
            # A stage's choice changes only when it has acted, or a message to it has been sent.
            if stale[stage]:
                stale[stage] = False
                size, count = sizes[stage], batch // sizes[stage]
                forward, inputs = done[stage, 0], done[stage, 1]
                ready, back = never, never
                held = (forward - done[stage, 2]) * size
                if forward < count and (forward - inputs) * size < window[stage] and held < room[stage]:
                    ready = max(free[stage], arrival(links, sizes, come, stage, 0, forward))
                if inputs < forward:
                    back = max(free[stage], arrival(links, sizes, come, stage, 1, inputs))
                if split:
                    kind = 1 if back <= ready else 0
                    # Only a later start than now leaves a gap.
                    if min(ready, back) > free[stage] and done[stage, 2] < inputs:
                        kind = 2
                else:
                    # A window of forwards, then k backward and k forward in turn, then what is left.
                    beyond = forward - window[stage] // size
                    turns = max(beyond, 0) // turn[stage] + 1
                    drain = forward == count or (beyond >= 0 and inputs < turns * turn[stage])
                    kind = 1 if drain else 0
                what[stage] = kind
                start[stage] = free[stage] if kind == 2 else back if kind == 1 else ready
            if start[stage] < now:
                now, at = start[stage], stage
        if at < 0:
            return float(free.max())
        kind, number = what[at], done[at, what[at]]
        if split:
            orders[at, done[at].sum()] = kind + 1
        elif kind == 1:
            done[at, 2] += 1  # a whole backward frees what was held
        done[at, kind] += 1
        free[at] = now + times[at, kind]
        stale[at] = True
        if kind != 2:
            send(links, sizes, hops, come, busy, stale, at, kind, number, free[at])


@compiled
def arrival(links: Ints, sizes: Ints, come: Floats, stage: int, kind: int, number: int) -> float:
    """Return when a micro-batch of a stage has all that it reads, or all gradients of what it gave.

    Args:
        links: The pairs of stages of which the second reads the first.
        sizes: The samples of a micro-batch of each stage.
        come: When each message has come, by direction, link and number.
        stage: The stage.
        kind: 0 for what its forward reads, 1 for gradients.
        number: The micro-batch.
    """
    last = 0.0
    for link in range(links.shape[0]):
        if links[link, 1 - kind] == stage:
            each = sizes[stage] // min(sizes[stage], sizes[links[link, kind]])
            # Messages of a link arrive in order, so the last one that a micro-batch needs decides.
            last = max(last, come[kind, link, (number + 1) * each - 1])
    return last


@compiled
def send(
    links: Ints,
    sizes: Ints,
    hops: Floats,
    come: Floats,
    busy: Floats,
    stale: Flags,
    stage: int,
    kind: int,
    number: int,
    now: float,
) -> None:
    """Send what a micro-batch's forward gave, or the gradients of what it read; mark stages that wait for it.

    Args:
        links: The pairs of stages of which the second reads the first.
        sizes: The samples of a micro-batch of each stage.
        hops: The seconds of a message on each link.
        come: When each message comes, written here.
        busy: Until when each link is occupied in each direction, written here.
        stale: Which stages must choose anew, written here.
        stage: The stage.
        kind: 0 for its forward, 1 for gradients.
        number: The micro-batch.
        now: When the messages begin.
    """
    for link in range(links.shape[0]):
        if links[link, kind] != stage:
            continue
        other = links[link, 1 - kind]
        each = sizes[stage] // min(sizes[stage], sizes[other])
        for unit in range(number * each, (number + 1) * each):
            # A link carries one message at a time in each direction.
            busy[kind, link] = max(busy[kind, link], now) + hops[link]
            come[kind, link, unit] = busy[kind, link]
        stale[other] = True
