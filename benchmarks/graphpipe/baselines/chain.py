"""Chain planner: what planners of sequential pipelines share, from down-sets to a time limit.

Where it sits: ``pipedream``, ``piper`` and ``bapipe`` build on it; they differ in their dynamic program.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphpipe.baselines.downsets import Downsets, downsets

from kagome.errors import PlanError
from kagome.planner.stages.devices import StageCost
from kagome.planner.stages.plan import PlannedStage, StagePlan

Cut = tuple[int, int, int]
"""A stage: the number of the down-set before it, of the one that ends with it, and its devices."""


@dataclass(frozen=True, eq=False)
class ChainPlanner(ABC):
    """Base class of planners whose stages form a chain.

    Args:
        cost: The cost of any set of operators as a stage.
        micro_batch: The micro-batch size of all stages.
        most: The most down-sets to look at.
        seconds: The most seconds to search; None for no limit.
    """

    cost: StageCost
    micro_batch: int
    most: int = 100_000
    seconds: float | None = None

    def plan(self) -> StagePlan:
        """Find the plan with the smallest bottleneck.

        Raises:
            PlanError: If there are too many down-sets, the search takes too long, or no plan fits.

        Cost: the square of the number of down-sets, times devices squared.
        """
        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        sets = self._sets(deadline)
        cuts = self._cuts(sets, deadline)
        if cuts is None:
            devices = self.cost.devices
            raise PlanError(
                f"a chain of stages that fits {devices.count} devices of {devices.memory / 2**30:.3g} GiB",
                "none",
                hint="take more devices, or smaller micro-batches",
            )
        operators, stages = self.cost.graph.operators, []
        for inner, outer, devices_of in cuts:
            # A stage is the difference of two down-sets, one within the other.
            members = sets.sets[outer] & ~sets.sets[inner]
            names = tuple(operator.name for n, operator in enumerate(operators) if members >> n & 1)
            stages.append(PlannedStage(names, devices_of, self.micro_batch))
        return StagePlan(self.cost.batch, tuple(stages))

    def _sets(self, deadline: float | None) -> Downsets:
        """Return the down-sets at which the planner may cut."""
        return downsets(self.cost, self.micro_batch, most=self.most, deadline=deadline)

    @abstractmethod
    def _cuts(self, sets: Downsets, deadline: float | None) -> list[Cut] | None:
        """Find the best stages, in order; None if no plan fits."""


def in_time(numbers: Iterable[int], deadline: float | None) -> Iterator[int]:
    """Yield the numbers of down-sets until the deadline.

    Raises:
        PlanError: If the deadline has passed.
    """
    for done, number in enumerate(numbers):
        if deadline is not None and time.monotonic() > deadline:
            raise PlanError("the search to end in its time", f"{done} down-sets and no end")
        yield number
