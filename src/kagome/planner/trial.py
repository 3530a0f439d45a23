"""Trial: a stage plan run on imaginary devices.

Where it sits: on ``schedule``; the planners' plans are compared by what it says.
"""

from __future__ import annotations

from dataclasses import dataclass

from kagome.planner.devices import StageCost
from kagome.planner.stageplan import StagePlan
from kagome.schedule.actions import Action, Kind
from kagome.schedule.dag import DagShape, dag, windows
from kagome.schedule.simulate import Run, simulate


@dataclass(frozen=True, eq=False)
class Trial:
    """What a simulated batch found.

    Args:
        shape: How stages take samples.
        run: The simulation.
        seconds: Of a batch, the sums of gradients included.
        memory: Bytes of a replica of each stage.
    """

    shape: DagShape
    run: Run
    seconds: float
    memory: tuple[float, ...]

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.shape.batch / self.seconds

    @property
    def depth(self) -> int:
        """Stages on the longest way."""
        found = [1] * len(self.shape.stages)
        for stage in range(len(found) - 1, -1, -1):
            found[stage] = 1 + max((found[other] for other in self.shape.readers(stage)), default=0)
        return max(found)


def trial(cost: StageCost, plan: StagePlan, *, sequential: bool = False) -> Trial:
    """Run a plan's programs once.

    Args:
        cost: Of any stage.
        plan: The plan.
        sequential: Each stage waits for the one before it, whether it reads it or not, and values go from
            stage to stage: how pipelines without branches run.
    """
    shape = plan.shape(cost.graph)
    if sequential:
        links = tuple((stage, stage + 1) for stage in range(len(plan.stages) - 1))
        shape = DagShape(shape.batch, shape.stages, links)
    passes = [cost.compute(s.operators, s.devices, s.micro_batch) for s in plan.stages]
    place = {name: number for number, stage in enumerate(plan.stages) for name in stage.operators}
    carried: dict[tuple[int, int], float] = {}
    for operator in cost.graph.operators:
        readers = {place[name] for name in cost.graph.readers[operator.name]} - {place[operator.name]}
        if sequential and readers:
            hops = range(place[operator.name], max(readers))
            ways = [(stage, stage + 1) for stage in hops]
        else:
            ways = [(place[operator.name], reader) for reader in readers]
        for way in ways:
            carried[way] = carried.get(way, 0.0) + operator.output

    def compute(action: Action) -> float:
        return passes[action.stage][0 if action.kind is Kind.F else 1]

    def transfer(action: Action) -> float:
        way = min(action.stage, action.other), max(action.stage, action.other)
        lanes = min(plan.stages[way[0]].devices, plan.stages[way[1]].devices)
        size = carried.get(way, 0.0) * shape.unit(*way) / lanes
        return cost.devices.latency + size / cost.devices.bandwidth

    run = simulate(dag(shape), compute, transfer=transfer, size=lambda a: shape.stages[a.stage].micro_batch)
    sync = max(cost.sync(stage.operators, stage.devices) for stage in plan.stages)
    held = windows(shape)
    memory = tuple(
        cost.memory(stage.operators, stage.devices, samples)
        for stage, samples in zip(plan.stages, held, strict=True)
    )
    return Trial(shape, run, run.seconds + sync, memory)
