"""Plan simulation: runs a stage plan on simulated devices, to find its seconds and memory.

Where it sits: on top of ``schedule.simulator``; planners and benchmarks compare plans by its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kagome.planner.stages.devices import StageCost
from kagome.planner.stages.plan import StagePlan
from kagome.schedule.actions import Action, ActionKind
from kagome.schedule.schedules import Shape, windows
from kagome.schedule.simulator import Simulation, simulate


@dataclass(frozen=True, eq=False)
class PlanSimulation:
    """The result of a simulated batch.

    Args:
        shape: The micro-batches of each stage, and the links between stages.
        run: The simulation.
        seconds: Seconds of a batch, with the sums of gradients.
        memory: Bytes of a replica of each stage.
    """

    shape: Shape
    run: Simulation
    seconds: float
    memory: tuple[float, ...]

    @property
    def throughput(self) -> float:
        """The number of samples per second."""
        return len(self.shape.order) / self.seconds

    @property
    def depth(self) -> int:
        """The number of stages on the longest path."""
        found = [1] * self.shape.stages
        # Readers have larger numbers, so their depth is known.
        for stage in range(len(found) - 1, -1, -1):
            found[stage] = 1 + max((found[other] for other in self.shape.readers(stage)), default=0)
        return max(found)


def trial(cost: StageCost, plan: StagePlan, *, sequential: bool = False) -> PlanSimulation:
    """Simulate one batch of a plan.

    Args:
        cost: The cost of any set of operators as a stage.
        plan: The plan.
        sequential: Whether each stage waits for the one before it, even if it does not read it, and values
            are passed from stage to stage, as in pipelines without branches.
    """
    shape, carried = flow(cost, plan, sequential=sequential)
    seconds = [
        dict(zip((ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W), (*passes, *halves), strict=True))
        for passes, halves in (
            (cost.compute(*stage), cost.halves(*stage))
            for stage in ((s.operators, s.devices, s.micro_batch) for s in plan.stages)
        )
    ]

    def compute(action: Action) -> float:
        return seconds[action.stage][action.kind]

    def transfer(action: Action) -> float:
        # A gradient is as large as the value, so both directions of a link look up the same bytes.
        way = min(action.stage, action.other), max(action.stage, action.other)
        return message(cost, plan, way, carried.get(way, 0.0) * shape.unit(*way))

    run = simulate(
        plan.programs(shape),
        compute,
        transfer=transfer,
        size=lambda action: shape.size(action.stage),
        paired=True,
    )
    # Gradients are summed after the last micro-batch, all stages at once.
    sync = max(cost.sync(stage.operators, stage.devices) for stage in plan.stages)
    # Zero bubble holds samples until W, which may be more than under kFkB.
    held = [max(most, int(found)) for most, found in zip(windows(shape, plan.k), run.held, strict=True)]
    memory = tuple(
        cost.memory(stage.operators, stage.devices, samples)
        for stage, samples in zip(plan.stages, held, strict=True)
    )
    return PlanSimulation(shape, run, run.seconds + sync, memory)


def flow(
    cost: StageCost, plan: StagePlan, *, sequential: bool = False
) -> tuple[Shape, dict[tuple[int, int], float]]:
    """Return the shape of a plan, and the bytes per sample on each link between stages."""
    shape = plan.shape(cost.graph)
    if sequential:
        links = tuple((stage, stage + 1) for stage in range(len(plan.stages) - 1))
        shape = replace(shape, links=links)
    place = {name: number for number, stage in enumerate(plan.stages) for name in stage.operators}
    carried: dict[tuple[int, int], float] = {}
    for operator in cost.graph.operators:
        readers = {place[name] for name in cost.graph.readers[operator.name]} - {place[operator.name]}
        # In a chain a value that a later stage reads is passed on by
        # every stage in between, once for all readers:
        #    stage 0 ── x ──> stage 1 ── x ──> stage 2       where stages 1 and 2 both read x
        if sequential and readers:
            hops = range(place[operator.name], max(readers))
            ways = [(stage, stage + 1) for stage in hops]
        else:
            ways = [(place[operator.name], reader) for reader in readers]
        for way in ways:
            carried[way] = carried.get(way, 0.0) + operator.output
    return shape, carried


def message(cost: StageCost, plan: StagePlan, way: tuple[int, int], size: float) -> float:
    """Return the seconds of a message between two stages; the replicas of the narrower stage share it."""
    lanes = min(plan.stages[way[0]].devices, plan.stages[way[1]].devices)
    return cost.devices.latency + size / lanes / cost.devices.bandwidth


def estimate(cost: StageCost, plan: StagePlan, *, split: bool = False, sequential: bool = False) -> float:
    """Return a lower bound on the seconds of a batch that :func:`trial` finds, without running the programs.

    It is the maximum over stages and links of the sum of three times: until the first samples arrive, while
    the stage is busy with the batch or waits for gradients of the samples that it holds, and until the
    gradients of its last samples reach the sources.

    Args:
        cost: The cost of any set of operators as a stage.
        plan: The plan.
        split: Whether backward is done in two halves, in any order; else under kFkB.
        sequential: Whether stages form a chain; see :func:`trial`.

    Cost: a few steps for each stage and link.
    """
    shape, carried = flow(cost, plan, sequential=sequential)
    return _estimates(cost, plan, shape, carried, split=split)(windows(shape, plan.k))


def _estimates(
    cost: StageCost, plan: StagePlan, shape: Shape, carried: Mapping[tuple[int, int], float], *, split: bool
) -> Callable[[Sequence[int]], float]:
    """Return :func:`estimate` as a function of the stages' windows; all else does not depend on k."""
    forward, backward = zip(
        *(cost.compute(s.operators, s.devices, s.micro_batch) for s in plan.stages), strict=True
    )
    weights = (0.0,) * len(plan.stages)
    if split:
        # Sources wait for the first half alone. Of the last micro-batch, a stage without sources has the
        # second half to do after that.
        backward, weights = zip(
            *(cost.halves(s.operators, s.devices, s.micro_batch) for s in plan.stages), strict=True
        )
    begin = [0.0] * len(plan.stages)
    drain = [0.0 if shape.sources(stage) else half for stage, half in enumerate(weights)]
    hops = {
        way: message(cost, plan, way, carried.get(way, 0.0) * shape.unit(*way)) for way in shape.all_links
    }
    fixed = 0.0
    # In order of the reader, so that begin[one] and drain[one] are final: sources have smaller numbers.
    for one, other in sorted(shape.all_links, key=lambda link: link[1]):
        # The first micro-batch of the reader covers this many of its source's, and so does the last.
        many = max(1, shape.size(other) // shape.size(one))
        hop = hops[one, other]
        begin[other] = max(begin[other], begin[one] + many * forward[one] + hop)
        drain[other] = max(drain[other], hop + many * backward[one] + drain[one])
    batch = len(shape.order)
    for one, other in shape.all_links:
        # A link that is busy all the time, between the first forward and the last backward at its ends.
        messages = batch // shape.unit(one, other)
        busy = forward[one] + messages * hops[one, other] + forward[other] + backward[other]
        fixed = max(fixed, begin[one] + busy + drain[other])
    sync = max(cost.sync(stage.operators, stage.devices) for stage in plan.stages)
    readers = [
        [(other, 2 * hops[stage, other]) for other in shape.readers(stage)] for stage in range(shape.stages)
    ]

    def seconds(window: Sequence[int]) -> float:
        most, trip = fixed, [0.0] * len(plan.stages)
        # A micro-batch starts once the one before it by the length of the window has come back.
        for stage in range(len(plan.stages) - 1, -1, -1):
            size, own = shape.size(stage), forward[stage] + backward[stage]  # without the second half
            beyond = max(
                (there_and_back + trip[other] for other, there_and_back in readers[stage]), default=0.0
            )
            # The least time from a micro-batch's forward until its gradient is computed.
            trip[stage] = own + beyond
            count = batch // size
            # Either the stage computes all the time, or it waits a whole trip for every window of
            # micro-batches.
            rounds = (count - 1) // (window[stage] // size)
            most = max(most, begin[stage] + max(count * own, (rounds + 1) * trip[stage]) + drain[stage])
            most = max(most, begin[stage] + count * (own + weights[stage]))
        return most + sync

    return seconds


def longer_turns(
    cost: StageCost, plan: StagePlan, *, split: bool = False, sequential: bool = False
) -> Iterator[tuple[float, StagePlan]]:
    """Yield a plan with its k, twice its k, and so on while that helps and fits, each with an estimate.

    A window that is large enough if messages take no time is too small if they do take time. With more
    samples in flight, messages travel while stages compute.

    Args:
        cost: The cost of any set of operators as a stage.
        plan: The plan.
        split: Whether backward is done in two halves; see :func:`estimate`.
        sequential: Whether stages form a chain; see :func:`trial`.
    """
    before = float("inf")
    shape, carried = flow(cost, plan, sequential=sequential)
    found = _estimates(cost, plan, shape, carried, split=split)
    while True:
        seconds = found(windows(shape, plan.k))
        yield seconds, plan
        if seconds >= before:
            return  # the last plan was yielded too: it may be better than its estimate
        before = seconds
        # All stages at once: a longer turn of one stage alone makes its neighbours wait.
        plan = replace(plan, stages=tuple(replace(stage, k=2 * stage.k) for stage in plan.stages))
        for stage, samples in zip(plan.stages, windows(shape, plan.k), strict=True):
            if cost.memory(stage.operators, stage.devices, samples) > cost.devices.memory:
                return
