"""Piper: plans stages in a chain by a dynamic program over down-sets, from the last stage back.

Where it sits: beside ``planner.stages.graphpipe``, with the same costs. Its stages pass on the values that
later stages read.

Source: Piper, NeurIPS 2021: ``dp[set][k]`` over the operators before a cut. A stage on d devices, with s data
parallel replicas in it and the stages after it, keeps ``ceil(s / d)`` micro-batches; d divides the number of
micro-batches of a batch. Its choice of tensor parallelism inside a layer is left out, because the cost tables
have no figures for it; s and k are then the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from graphpipe.baselines.chain import ChainPlanner, Cut, in_time
from graphpipe.baselines.downsets import Downsets, memory, per_sample


@dataclass(frozen=True, eq=False)
class Piper(ChainPlanner):
    """Piper's planner; see :class:`ChainPlanner` for its arguments."""

    def _cuts(self, sets: Downsets, deadline: float | None) -> list[Cut] | None:
        count, last, free = self.cost.devices.count, len(sets.sets) - 1, self.cost.devices.memory
        rest = np.full((last + 1, count + 1), np.inf)  # the slowest stage after a cut, by devices used there
        rest[last, :] = 0.0
        whence = np.zeros((last + 1, count + 1, 2), dtype=np.int64)
        micro_batches = self.cost.batch // self.micro_batch
        # As the paper requires, replicas share the micro-batches of a batch evenly.
        degrees = [d for d in range(1, min(count, self.micro_batch) + 1) if micro_batches % d == 0]
        # Backwards: rest[outer] is final once all larger sets have been visited.
        for outer in in_time(range(last, 0, -1), deadline):
            inner = sets.inside(outer)
            for d in degrees:
                seconds = per_sample(self.cost, sets, inner, outer, d, self.micro_batch)
                for k in range(d, count + 1):
                    if not np.isfinite(rest[outer, k - d]):
                        continue
                    # In flight: one for each d of the devices from this stage on.
                    held = min(-(-k // d) * self.micro_batch, self.cost.batch)
                    slowest = np.maximum(rest[outer, k - d], seconds)
                    slowest[memory(sets, inner, outer, d, held) > free] = np.inf
                    # One stage may begin at many places; each keeps the best plan behind it.
                    better = slowest < rest[inner, k]
                    rest[inner[better], k] = slowest[better]
                    whence[inner[better], k] = outer, d
        at, left = 0, int(rest[0].argmin())
        if not np.isfinite(rest[0, left]):
            return None
        cuts: list[Cut] = []
        while at != last:
            outer, d = (int(value) for value in whence[at, left])
            cuts.append((at, outer, d))
            at, left = outer, left - d
        return cuts
