"""PipeDream: plans stages in a chain by a dynamic program over down-sets, from the first stage on.

Where it sits: beside ``planner.stages.graphpipe``, with the same costs. Its stages pass on the values that
later stages read.

Source: PipeDream, SOSP 2019: ``A[j][m] = min over i, m' of max(A[i][m - m'], T(i to j, m'))`` over the
antichains of the operators, a stage's memory for ``ceil((M - m) / m') + 1`` micro-batches in flight. Adapted
here: gradients are summed once per batch, as in all pipelines of Kagome, and the transfer of activations
always counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from graphpipe.baselines.chain import ChainPlanner, Cut, in_time
from graphpipe.baselines.downsets import Downsets, memory, per_sample


@dataclass(frozen=True, eq=False)
class PipeDream(ChainPlanner):
    """PipeDream's planner; see :class:`ChainPlanner` for its arguments."""

    def _cuts(self, sets: Downsets, deadline: float | None) -> list[Cut] | None:
        count, batch, free = self.cost.devices.count, self.cost.batch, self.cost.devices.memory
        # A[j][m] of the paper: rows are down-sets by size, columns the devices used up to their end.
        best = np.full((len(sets.sets), count + 1), np.inf)
        # The empty set needs no device; columns above 0 let a plan leave devices unused.
        best[0, :] = 0.0
        whence = np.zeros((len(sets.sets), count + 1, 2), dtype=np.int64)
        for outer in in_time(range(1, len(sets.sets)), deadline):
            inner = sets.inside(outer)
            for d in range(1, min(count, self.micro_batch) + 1):
                seconds = per_sample(self.cost, sets, inner, outer, d, self.micro_batch)
                for m in range(d, count + 1):
                    # In flight: one for the stage, and one for each d of the devices behind it.
                    held = min((-(-(count - m) // d) + 1) * self.micro_batch, batch)
                    fits = memory(sets, inner, outer, d, held) <= free
                    slowest = np.where(fits, np.maximum(best[inner, m - d], seconds), np.inf)
                    choice = int(slowest.argmin())
                    if slowest[choice] < best[outer, m]:
                        best[outer, m] = slowest[choice]
                        whence[outer, m] = inner[choice], d
        # The first minimum has the fewest devices. The cuts are read from the last stage to the first.
        at, left = len(sets.sets) - 1, int(best[-1].argmin())
        if not np.isfinite(best[at, left]):
            return None
        cuts: list[Cut] = []
        while at:
            before, d = (int(value) for value in whence[at, left])
            cuts.append((before, at, d))
            at, left = before, left - d
        return cuts[::-1]
