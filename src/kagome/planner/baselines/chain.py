"""Chain: what planners of sequential pipelines share - down-sets, a time limit, the stages between cuts.

Where it sits: under ``pipedream``, ``piper`` and ``bapipe``, which differ in their dynamic program.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kagome.errors import PlanError
from kagome.planner.baselines.downsets import Downsets, downsets
from kagome.planner.stages.devices import StageCost
from kagome.planner.stages.plan import PlannedStage, StagePlan

Cut = tuple[int, int, int]
"""A stage: the down-set before it, the one behind it, and its devices."""


@dataclass(frozen=True, eq=False)
class ChainPlanner(ABC):
    """A planner of stages in a chain.

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
        sets = self._sets(deadline)
        cuts = self._cuts(sets, deadline)
        if cuts is None:
            devices = self.cost.devices
            raise PlanError(
                f"the model fits {devices.count} devices of {devices.memory / 2**30:.3g} GiB",
                "no chain of stages does",
                hint="take more devices, or smaller micro-batches",
            )
        operators, stages = self.cost.graph.operators, []
        for inner, outer, devices_of in cuts:
            members = sets.sets[outer] & ~sets.sets[inner]
            names = tuple(operator.name for n, operator in enumerate(operators) if members >> n & 1)
            stages.append(PlannedStage(names, devices_of, self.micro_batch))
        return StagePlan(self.cost.batch, tuple(stages))

    def _sets(self, deadline: float | None) -> Downsets:
        """Where it may cut."""
        return downsets(self.cost, self.micro_batch, most=self.most, deadline=deadline)

    @abstractmethod
    def _cuts(self, sets: Downsets, deadline: float | None) -> list[Cut] | None:
        """The best stages, the first one first; None where nothing fits."""


def in_time(numbers: Iterable[int], deadline: float | None) -> Iterator[int]:
    """Numbers of down-sets, one after the other.

    Raises:
        PlanError: After the deadline.
    """
    for done, number in enumerate(numbers):
        if deadline is not None and time.monotonic() > deadline:
            raise PlanError("the search ends in its time", f"it does not, {done} down-sets on")
        yield number
