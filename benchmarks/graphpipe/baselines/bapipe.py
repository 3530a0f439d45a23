"""BaPipe: plans stages of one width in a chain, balanced along one order of the operators.

Where it sits: beside ``pipedream`` and ``piper``, with the same costs. It has far fewer places to cut, so its
search is short on models with many branches too, but it does not use the branches.

Source: BaPipe, arXiv 2012.12544: stages are balanced by computing first, then layers are moved or grouped
where messages are the slowest. Both steps are one minimisation here: the smallest bottleneck of computing,
messages and the sum of gradients. Its choice among schedules comes down to 1F1B, the only one of its
synchronous schedules that Kagome's pipelines run. Pipelines that compute forward and backward at once, for
FPGAs, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from graphpipe.baselines.chain import ChainPlanner, Cut, in_time
from graphpipe.baselines.downsets import Downsets, memory, per_sample, prefixes


@dataclass(frozen=True, eq=False)
class BaPipe(ChainPlanner):
    """BaPipe's planner; see :class:`ChainPlanner` for its arguments."""

    def _sets(self, deadline: float | None) -> Downsets:
        return prefixes(self.cost, self.micro_batch)

    def _cuts(self, sets: Downsets, deadline: float | None) -> list[Cut] | None:
        count = self.cost.devices.count
        found = [
            self._balanced(sets, stages, count // stages)
            for stages in in_time(range(1, min(count, len(sets.sets) - 1) + 1), deadline)
            # All stages have the same number of replicas, and each replica needs a sample.
            if count % stages == 0 and count // stages <= self.micro_batch
        ]
        return min(found, key=lambda one: one[0], default=(np.inf, None))[1]

    def _balanced(self, sets: Downsets, stages: int, width: int) -> tuple[float, list[Cut] | None]:
        """Find the smallest bottleneck of stages of one width, and its cuts; None if nothing fits."""
        last, free = len(sets.sets) - 1, self.cost.devices.memory
        # best[i, j] is the smallest bottleneck of i stages over the first j operators:
        # best[i, j] = min over j' < j of max(best[i - 1, j'], seconds(j' to j)).
        best = np.full((stages + 1, last + 1), np.inf)
        best[0, 0] = 0.0
        whence = np.zeros((stages + 1, last + 1), dtype=np.int64)
        for stage in range(1, stages + 1):
            # Stage s of S holds S - s micro-batches under 1F1B; `stage` counts from 1 here.
            held = min((stages - stage + 1) * self.micro_batch, self.cost.batch)
            # The first `stage` stages have at least one operator each.
            for outer in range(stage, last + 1):
                inner = np.arange(stage - 1, outer)
                seconds = per_sample(self.cost, sets, inner, outer, width, self.micro_batch)
                slowest = np.maximum(best[stage - 1, inner], seconds)
                slowest[memory(sets, inner, outer, width, held) > free] = np.inf
                choice = int(slowest.argmin())
                best[stage, outer], whence[stage, outer] = slowest[choice], inner[choice]
        if not np.isfinite(best[stages, last]):
            return np.inf, None
        cuts: list[Cut] = []
        at = last
        for stage in range(stages, 0, -1):
            before = int(whence[stage, at])
            cuts.append((before, at, width))
            at = before
        return float(best[stages, last]), cuts[::-1]
