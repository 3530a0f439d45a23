"""Pipedream: stages in a chain, by the dynamic program over down-sets from the first stage on.

Where it sits: beside ``graphpipe``, on the same costs; its stages pass on what later ones read.

Source: PipeDream, SOSP 2019: ``A[j][m] = min over i, m' of max(A[i][m - m'], T(i to j, m'))`` over the
antichains of the operators, a stage's memory for ``ceil((M - m) / m') + 1`` micro-batches in flight. Taken
over here: gradients are summed once a batch, as in all pipelines here, and activations always cost their way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from kagome.errors import PlanError
from kagome.planner.devices import StageCost
from kagome.planner.downsets import Downsets, downsets, memory, per_sample
from kagome.planner.stageplan import PlannedStage, StagePlan


@dataclass(frozen=True, eq=False)
class PipeDream:
    """The planner.

    Args:
        cost: Of any stage.
        micro_batch: Of all stages.
        most: Down-sets that it will look at.
        seconds: How long it may search; None without a limit.
    """

    cost: StageCost
    micro_batch: int
    most: int = 100_000
    seconds: float | None = None

    def plan(self) -> StagePlan:
        """The plan with the least bottleneck.

        Raises:
            PlanError: If there are too many down-sets, it takes too long, or nothing fits.

        Cost: the square of the number of down-sets, times devices squared.
        """
        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        sets = downsets(self.cost, self.micro_batch, most=self.most, deadline=deadline)
        count, all_ = self.cost.devices.count, len(sets.sets)
        best = np.full((all_, count + 1), np.inf)
        best[0, :] = 0.0
        whence = np.zeros((all_, count + 1, 2), dtype=np.int64)
        for outer in range(1, all_):
            refuse_late(deadline, outer, all_)
            inner = sets.inside(outer)
            for d in range(1, min(count, self.micro_batch) + 1):
                seconds = per_sample(self.cost, sets, inner, outer, d, self.micro_batch)
                for m in range(d, count + 1):
                    held = (-(-(count - m) // d) + 1) * self.micro_batch
                    fits = (
                        memory(sets, inner, outer, d, min(held, self.cost.batch)) <= self.cost.devices.memory
                    )
                    slowest = np.where(fits, np.maximum(best[inner, m - d], seconds), np.inf)
                    choice = int(slowest.argmin())
                    if slowest[choice] < best[outer, m]:
                        best[outer, m] = slowest[choice]
                        whence[outer, m] = inner[choice], d
        return chain(self.cost, self.micro_batch, sets, best, whence)


def chain(
    cost: StageCost, micro_batch: int, sets: Downsets, best: np.ndarray, whence: np.ndarray
) -> StagePlan:
    """The stages that a table leads to, from the last one back.

    Raises:
        PlanError: If no way fits.
    """
    at, left = len(sets.sets) - 1, int(best[-1].argmin())
    if not np.isfinite(best[at, left]):
        raise PlanError(
            f"the model fits {cost.devices.count} devices of {cost.devices.memory / 2**30:.3g} GiB",
            "no chain of stages does",
            hint="take more devices, or smaller micro-batches",
        )
    stages: list[PlannedStage] = []
    while sets.sets[at]:
        inner, d = (int(value) for value in whence[at, left])
        members = sets.sets[at] & ~sets.sets[inner]
        names = tuple(o.name for n, o in enumerate(cost.graph.operators) if members >> n & 1)
        stages.append(PlannedStage(names, d, micro_batch))
        at, left = inner, left - d
    return StagePlan(cost.batch, tuple(reversed(stages)))


def refuse_late(deadline: float | None, done: int, all_: int) -> None:
    """Stop a search that takes too long.

    Raises:
        PlanError: After the deadline.
    """
    if deadline is not None and time.monotonic() > deadline:
        raise PlanError("the search ends in its time", f"{done} of {all_} down-sets are done")
