"""Downsets: all places at which a sequential pipeline can cut a graph of operators, or those along one order.

Where it sits: under ``pipedream`` and ``piper``, whose search is over all, and ``bapipe``. The number of all
is exponential in the branches of a model, which is what ``planner.stages.graphpipe`` avoids.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kagome.errors import PlanError
from kagome.planner.stages.devices import COPIES, StageCost

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Downsets:
    """Sets of operators that hold all that they need, by size; the first is empty, the last is everything.

    Args:
        sets: As bits, by the operators' numbers.
        compute: Seconds forward and backward of each set, by replicas: ``[sets, replicas]``.
        live: Bytes a sample that operators outside read from each set: what a cut there carries.
        weights: Bytes of weights of each set.
        kept: Bytes kept a sample of each set.
    """

    sets: tuple[int, ...]
    compute: Floats
    live: Floats
    weights: Floats
    kept: Floats

    def inside(self, number: int) -> npt.NDArray[np.intp]:
        """Numbers of the sets that are a proper part of one."""
        whole = self.sets[number]
        return np.fromiter((other for other in range(number) if not self.sets[other] & ~whole), dtype=np.intp)


def downsets(cost: StageCost, micro_batch: int, *, most: int, deadline: float | None = None) -> Downsets:
    """All of them.

    Args:
        cost: Of any stage.
        micro_batch: Samples of a micro-batch.
        most: No more than so many are made.
        deadline: On ``time.monotonic``'s clock.

    Raises:
        PlanError: If there are more, or it takes longer.
    """
    operators = cost.graph.operators
    place = {operator.name: number for number, operator in enumerate(operators)}
    needs = [sum(1 << place[read] for read in set(operator.reads)) for operator in operators]
    found, edge = {0}, [0]
    while edge:
        grown: set[int] = set()
        for one in edge:
            for number, need in enumerate(needs):
                if not one >> number & 1 and not need & ~one:
                    grown.add(one | 1 << number)
        edge = [one for one in grown if one not in found]
        found.update(edge)
        late = deadline is not None and time.monotonic() > deadline
        if len(found) > most or late:
            raise PlanError(
                f"a sequential planner looks at every place to cut, {most} at most here",
                f"{len(found)} sets of {len(operators)} operators" + (", and no more time" if late else ""),
                hint="take the planner graphpipe",
            )
    return _counted(cost, micro_batch, sorted(found, key=lambda one: (one.bit_count(), one)))


def prefixes(cost: StageCost, micro_batch: int) -> Downsets:
    """Those that hold the operators up to one, in their order: as many as there are operators, and none.

    Args:
        cost: Of any stage.
        micro_batch: Samples of a micro-batch.
    """
    count = len(cost.graph.operators)
    return _counted(cost, micro_batch, [(1 << size) - 1 for size in range(count + 1)])


def _counted(cost: StageCost, micro_batch: int, sets: Sequence[int]) -> Downsets:
    """Sets with what each of them costs."""
    operators = cost.graph.operators
    place = {operator.name: number for number, operator in enumerate(operators)}
    replicas = range(1, min(cost.devices.count, micro_batch) + 1)
    seconds = np.array([[sum(cost.compute([o.name], d, micro_batch)) for d in replicas] for o in operators])
    member = np.array([[one >> number & 1 for number in range(len(operators))] for one in sets], dtype=float)
    readers = [sum(1 << place[name] for name in cost.graph.readers[o.name]) for o in operators]
    live = np.array(
        [
            sum(o.output for n, o in enumerate(operators) if one >> n & 1 and readers[n] & ~one)
            for one in sets
        ],
        dtype=float,
    )
    return Downsets(
        tuple(sets),
        member @ seconds,
        live,
        member @ np.array([o.weights for o in operators], dtype=float),
        member @ np.array([o.kept for o in operators], dtype=float),
    )


def per_sample(
    cost: StageCost, sets: Downsets, inner: npt.NDArray[np.intp], outer: int, replicas: int, micro_batch: int
) -> Floats:
    """Seconds a sample of the stages between some sets and a larger one: as ``StageCost``, many at once.

    A sequential pipeline passes on what later stages read.
    """
    d, link = replicas, cost.devices
    compute = sets.compute[outer, d - 1] - sets.compute[inner, d - 1]
    carried = sets.live[inner] + sets.live[outer]
    traffic = np.where(carried > 0, link.latency + carried * micro_batch / d / link.bandwidth, 0.0)
    sync = 2 * (d - 1) / d * (sets.weights[outer] - sets.weights[inner]) / link.bandwidth
    return np.asarray(np.maximum(compute, traffic) / micro_batch + sync / cost.batch)


def memory(sets: Downsets, inner: npt.NDArray[np.intp], outer: int, replicas: int, held: float) -> Floats:
    """Bytes of each replica of those stages, with so many samples held by all of them."""
    kept = (sets.kept[outer] - sets.kept[inner]) * held / replicas
    return np.asarray(COPIES * (sets.weights[outer] - sets.weights[inner]) + kept)
