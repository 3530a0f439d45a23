"""Piper: stages in a chain, by the dynamic program over down-sets from the last stage back.

Where it sits: beside ``graphpipe``, on the same costs; its stages pass on what later ones read.

Source: Piper, NeurIPS 2021: ``dp[set][k]`` over what stands before a cut; a stage on d devices with s data
parallel replicas from it on keeps ``ceil(s / d)`` micro-batches, and d divides the micro-batches of a batch.
Without its choice of tensor parallelism inside a layer, for which the cost tables have no figures: s and k
are then the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from kagome.errors import PlanError
from kagome.planner.devices import StageCost
from kagome.planner.downsets import downsets, memory, per_sample
from kagome.planner.pipedream import refuse_late
from kagome.planner.stageplan import PlannedStage, StagePlan


@dataclass(frozen=True, eq=False)
class Piper:
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
        count, last = self.cost.devices.count, len(sets.sets) - 1
        rest = np.full((last + 1, count + 1), np.inf)  # the slowest stage behind a cut, by devices there
        rest[last, :] = 0.0
        whence = np.zeros((last + 1, count + 1, 2), dtype=np.int64)
        micro_batches = self.cost.batch // self.micro_batch
        degrees = [d for d in range(1, min(count, self.micro_batch) + 1) if micro_batches % d == 0]
        for outer in range(last, 0, -1):
            refuse_late(deadline, last - outer, last)
            inner = sets.inside(outer)
            for d in degrees:
                seconds = per_sample(self.cost, sets, inner, outer, d, self.micro_batch)
                for k in range(d, count + 1):
                    if not np.isfinite(rest[outer, k - d]):
                        continue
                    held = min(-(-k // d) * self.micro_batch, self.cost.batch)
                    slowest = np.maximum(rest[outer, k - d], seconds)
                    slowest[memory(sets, inner, outer, d, held) > self.cost.devices.memory] = np.inf
                    better = slowest < rest[inner, k]
                    rest[inner[better], k] = slowest[better]
                    whence[inner[better], k] = outer, d
        k = int(rest[0].argmin())
        if not np.isfinite(rest[0, k]):
            raise PlanError(
                f"the model fits {count} devices of {self.cost.devices.memory / 2**30:.3g} GiB",
                "no chain of stages does",
                hint="take more devices, or smaller micro-batches",
            )
        stages, at = [], 0
        while at != last:
            outer, d = (int(value) for value in whence[at, k])
            members = sets.sets[outer] & ~sets.sets[at]
            names = tuple(o.name for n, o in enumerate(self.cost.graph.operators) if members >> n & 1)
            stages.append(PlannedStage(names, d, self.micro_batch))
            at, k = outer, k - d
        return StagePlan(self.cost.batch, tuple(stages))
