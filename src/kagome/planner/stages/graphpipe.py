"""GraphPipe: plans stages that form a DAG, by the smallest bottleneck and the fewest samples in flight.

Where it sits: ``pipelining.dag`` plans with it; ``devices`` counts the costs of a stage.

::

    T, seconds per sample ──> is there a plan of which no stage takes longer?  ──> halve the gap
    a tree of series and parallel parts, from the loss backwards:
        a stage over children i..k of a series, given what the rest of the series holds
        a branch by itself, given what comes after the branches

A stage consists of children of one tree node that are next to each other, of any of a few branches, or of
operators that are next to each other in a series of all operators below a node. The search covers these
plans. It does not cover stages with pieces of several branches, unless such a series has them side by side.
In a series a stage counts as ahead of the next one, whether that reads it or not. For each part the search
keeps the fewest samples in flight at its head for each number of devices (``graphpipe_search``): beyond those
that a bottleneck requires, more devices only save memory.

Source: GraphPipe, ASPLOS 2025: series-parallel decomposition, binary search on the bottleneck, dynamic
program over part, devices and the successor's schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kagome.errors import PlanError
from kagome.planner.stages import graphpipe_search
from kagome.planner.stages.devices import StageCost
from kagome.planner.stages.operator_groups import Floats, GroupFacts, Groups, Ints, run
from kagome.planner.stages.ordering import seconds_of, zero_bubble_of
from kagome.planner.stages.plan import DagSchedule, PlannedStage, StagePlan
from kagome.planner.stages.series_parallel import SeriesParallelTree, tree_of
from kagome.planner.stages.simulate_plan import longer_turns
from kagome.schedule.schedules import windows


class TreePlans(ABC):
    """Plans for a part of the tree and, in a series, for all that follows; see ``graphpipe_search``."""

    held: Floats

    @abstractmethod
    def stages(self, devices: int, reader: int) -> Iterator[PlannedStage]:
        """Yield the stages of the part in one plan.

        Args:
            devices: The number of devices of the plan.
            reader: The largest micro-batch at its head, as an index of the sizes.
        """


@dataclass(eq=False)
class SearchRow(TreePlans):
    """The plans of a series of children.

    Args:
        search: The search that they belong to.
        groups: The groups of the children.
        tables: Samples held, by the child that a plan begins with.
        how: For each entry, where its first stage ends, and the rest; see ``graphpipe_search.in_a_row``.
        inner: The children's own plans, by child and by devices and micro-batch of the rest.
    """

    search: Search
    groups: Groups
    tables: Floats
    how: Ints
    inner: dict[tuple[int, int, int], TreePlans] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = self.tables[0]

    def stages(self, devices: int, reader: int) -> Iterator[PlannedStage]:
        """Yield the stages of the series in one plan; see :class:`TreePlans`."""
        child, children = 0, len(self.groups.children)
        while child < children:
            end, less, behind = (int(value) for value in self.how[child, devices, reader])
            # `end` is -1 if the first child has its own plan; see graphpipe_search.before.
            if end > 0:
                names = self.groups.names(run(child, end, children))
                yield self.search.stage(names, devices - less, reader, behind)
            else:
                yield from self.inner[child, less, behind].stages(devices - less, reader)
                end = child + 1
            child, devices, reader = end, less, behind


@dataclass(eq=False)
class SideBySide(TreePlans):
    """The plans of parallel branches.

    Args:
        search: The search that they belong to.
        node: The parent of the branches.
        behind: The micro-batch of what follows all branches, as an index of the sizes.
        tables: Samples held, by state.
        how: For each entry, the option taken, and the rest; see ``graphpipe_search.side_by_side``.
        inner: The children's own plans.
    """

    search: Search
    node: SeriesParallelTree
    behind: int
    tables: Floats
    how: Ints
    inner: dict[int, TreePlans]

    def __post_init__(self) -> None:
        self.held = self.tables[-1]

    def stages(self, devices: int, reader: int) -> Iterator[PlannedStage]:
        """Yield the stages of all branches in one plan; see :class:`TreePlans`."""
        facts = self.search.facts
        states, groups = facts.states(self.node), facts.groups(self.node)
        state = len(self.tables) - 1
        while state:
            option, taken, own, other = (int(value) for value in self.how[state, devices, reader])
            group = int(states.group[option])
            # A negative group stands for a child that is planned by itself; see operator_groups.States.
            if group < 0:
                yield from self.inner[-1 - group].stages(taken, own)
            else:
                yield self.search.stage(groups.names(group), taken, own, self.behind)
            state, devices, reader = int(states.rest[option]), devices - taken, other


class Either(TreePlans):
    """The best of several ways to plan one part."""

    def __init__(self, ways: Sequence[TreePlans]) -> None:
        # Ways may be better at different numbers of devices, so the choice is made for each entry.
        tables = np.array([way.held for way in ways])
        self._ways, self._which = ways, tables.argmin(axis=0)
        self.held = tables.min(axis=0)
        graphpipe_search.trim(self.held)

    def stages(self, devices: int, reader: int) -> Iterator[PlannedStage]:
        """Yield the stages of the best plan; see :class:`TreePlans`."""
        return self._ways[int(self._which[devices, reader])].stages(devices, reader)


class Search:
    """A search for plans of which no stage takes longer than a bottleneck.

    Args:
        facts: The facts about the model and the devices.
        bottleneck: The most seconds per sample that a stage may take.
        places: The micro-batches that stages may have, as indices of the facts' sizes.
    """

    def __init__(self, facts: GroupFacts, bottleneck: float, places: Sequence[int]) -> None:
        self.facts, self.bottleneck, self.places = facts, bottleneck, tuple(places)
        # Index 0 is "no stage", so sizes here are shifted by one against `places`.
        self.sizes = np.array([0, *(facts.sizes[place] for place in places)], dtype=float)
        self._needs: dict[int, Ints] = {}
        self._known: dict[tuple[int, float, int], TreePlans] = {}

    def solve(self, node: SeriesParallelTree, held: float, behind: int) -> TreePlans:
        """Find the plans for a node, given the samples held after it and their micro-batch, as an index."""
        # What follows a node matters to it by these two numbers alone; see graphpipe_search.
        key = id(node), held, behind
        if key not in self._known:
            ways = [
                self._side_by_side(way, held, behind)
                if way.kind == "parallel"
                else self._row(way, held, behind)
                for way in (node, *node.rows)
            ]
            self._known[key] = ways[0] if len(ways) == 1 else Either(ways)
        return self._known[key]

    def stage(self, names: tuple[str, ...], devices: int, size: int, reader: int) -> PlannedStage:
        """Make a stage before a reader; both micro-batches are indices of the sizes."""
        # The k micro-batches of one turn cover one micro-batch of the reader.
        own, other = int(self.sizes[size]), int(self.sizes[reader])
        return PlannedStage(names, devices, own, max(1, other // own))

    def _need(self, node: SeriesParallelTree, groups: Groups) -> Ints:
        if id(node) not in self._needs:
            self._needs[id(node)] = groups.need(self.bottleneck, self.places)
        return self._needs[id(node)]

    @property
    def _most(self) -> int:
        return self.facts.cost.devices.count

    def _row(self, node: SeriesParallelTree, held: float, behind: int) -> SearchRow:
        groups, cost = self.facts.groups(node), self.facts.cost
        children = len(groups.children)
        tables = np.full((children + 1, self._most + 1, self.sizes.size), np.inf)
        # Behind the last child: no device is used yet, and the reader is what follows the whole series.
        tables[children, 0, behind] = held
        how = np.zeros((*tables.shape, 3), dtype=np.int64)
        found = SearchRow(self, groups, tables, how)
        need, end = self._need(node, groups), children

        def up_to(first: int, end: int) -> None:
            graphpipe_search.in_a_row(
                tables, how, first, end, need, groups.fixed, groups.kept, self.sizes,
                float(cost.devices.memory), float(cost.batch),
            )  # fmt: skip

        # From the loss backwards. Runs of leaves are filled by one compiled loop; at a child with children of
        # its own, its plans are added before every plan of the rest:
        #    children   a  b  (c | d)  e  f      up_to(2, 5)   stages that begin with (c | d), e or f
        #    place      0  1     2     3  4      before        plans of the branches c and d
        #                                        up_to(0, 2)   stages that begin with a or b
        for child in range(children - 1, -1, -1):
            if not groups.children[child].children:
                continue
            # A stage may also take this child whole, alone or with the children after it.
            up_to(child, end)
            end = child
            for devices, reader, now in _entries(tables[child + 1]):
                own = self.solve(groups.children[child], now, reader)
                found.inner[child, devices, reader] = own
                graphpipe_search.before(tables[child], how[child], own.held, devices, reader)
            graphpipe_search.trim(tables[child])
        up_to(0, end)
        return found

    def _side_by_side(self, node: SeriesParallelTree, held: float, behind: int) -> SideBySide:
        states, groups, cost = self.facts.states(node), self.facts.groups(node), self.facts.cost
        tables = np.full((states.begins.size - 1, self._most + 1, self.sizes.size), np.inf)
        # State 0, with no branch left, has one plan: no device and no stage.
        tables[0, 0, 0] = 0.0
        how = np.zeros((*tables.shape, 4), dtype=np.int64)
        inner = {
            place: self.solve(child, held, behind)
            for place, child in enumerate(node.children)
            if child.children
        }
        # Compiled loops take arrays, so the branches' plans are copied into one; a leaf has none of its own.
        own = np.full((len(node.children), *tables.shape[1:]), np.inf)
        for place, plans in inner.items():
            own[place] = plans.held
        graphpipe_search.side_by_side(
            tables, how, states.begins, states.group, states.rest, own, self._need(node, groups),
            groups.fixed, groups.kept, self.sizes, held, self.sizes[behind],
            float(cost.devices.memory), float(cost.batch),
        )  # fmt: skip
        return SideBySide(self, node, behind, tables, how, inner)


def _entries(held: Floats) -> list[tuple[int, int, float]]:
    """List the devices, micro-batch and held samples of each plan in a table."""
    places = zip(*np.nonzero(np.isfinite(held)), strict=True)
    return [(int(devices), int(reader), float(held[devices, reader])) for devices, reader in places]


MARGIN = 1.1
"""How much faster than kFkB zero bubble must be by forecast. On two ranks of a core each, it was up to
an eighth less fast than forecast."""


@dataclass(frozen=True, eq=False)
class GraphPipe:
    """GraphPipe's planner of stages that form a DAG.

    Args:
        cost: The cost of any set of operators as a stage.
        sizes: The micro-batch sizes that stages may have; each divides the next, and all divide the batch.
        tolerance: The share by which a plan may be slower than the fastest, and its bottleneck larger than
            the smallest.
        schedules: The schedules that a plan may have.
    """

    cost: StageCost
    sizes: tuple[int, ...]
    tolerance: float = 0.01
    schedules: tuple[DagSchedule, ...] = ("kfkb",)

    @cached_property
    def tree(self) -> SeriesParallelTree:
        """The series-parallel tree of the operators."""
        return tree_of(self.cost.graph)

    @cached_property
    def facts(self) -> GroupFacts:
        """The costs of groups of operators."""
        return GroupFacts(self.cost, tuple(sorted(self.sizes)))

    def plan(self) -> StagePlan:
        """Return the fastest simulated plan of all that the search finds, with one micro-batch size or mixed.

        The bottleneck does not show how long a pipeline takes to fill, which is the cost of large
        micro-batches and of many stages. Therefore plans are simulated.

        Raises:
            PlanError: If no plan fits the memory of the devices.
        """
        plans = [plan for size in self.sizes for plan in self._ever_better((size,))]
        found = self._fastest(plans)
        if found is None:
            return self.least(self.sizes)
        seconds, best = found
        size = best.stages[0].micro_batch
        # With mixed sizes the search takes longer with every size, and the best
        # mix is expected near the best single size.
        near = tuple(other for other in self.sizes if size // 2 <= other <= size * 2)
        # Plans with a larger bottleneck than this are slower, no matter how soon they fill.
        mixed = self._ever_better(near, below=seconds / self.cost.batch)
        seconds, best = self._fastest(mixed, seconds) or (seconds, best)
        if "zero-bubble" not in self.schedules:
            return best
        # Of all plans anew: without the bubbles of a long pipeline other plans are the fastest.
        limit = seconds / MARGIN if "kfkb" in self.schedules else float("inf")
        split = self._fastest([*plans, *mixed], limit, split=True)
        return self.scheduled(best if split is None else split[1], seconds)

    def scheduled(self, plan: StagePlan, kfkb: float | None = None) -> StagePlan:
        """Return a plan with the schedule of the better forecast, and why.

        Args:
            plan: The plan.
            kfkb: The seconds of a batch to compare with; by default this plan's under kFkB.
        """
        if "zero-bubble" not in self.schedules:
            return plan
        whole = seconds_of(self.cost, plan) if kfkb is None else kfkb
        split = seconds_of(self.cost, plan, split=True)
        why = f"forecast of a batch: {split:.4g} s with zero-bubble, {whole:.4g} s with kfkb"
        if "kfkb" in self.schedules and split * MARGIN >= whole:
            return plan.with_orders([""] * len(plan.stages), f"{why}, kept unless {MARGIN - 1:.0%} slower")
        return zero_bubble_of(self.cost, plan, why=why)

    def _fastest(
        self, plans: Sequence[StagePlan], limit: float = float("inf"), *, split: bool = False
    ) -> tuple[float, StagePlan] | None:
        """Return the fastest simulated plan below a limit, with any k, and its seconds.

        An estimate is never above the simulated time, so the first plans simulated rule out most others.

        Args:
            plans: The plans.
            limit: The seconds of a batch that it must stay below.
            split: Whether it is run under zero bubble; else under kFkB.
        """
        best: tuple[float, StagePlan] | None = None
        each = (one for plan in dict.fromkeys(plans) for one in longer_turns(self.cost, plan, split=split))
        # The order is that of the estimates, so no later plan can be better once one is not.
        for soonest, plan in sorted(each, key=lambda pair: pair[0]):
            if soonest * (1 + self.tolerance) >= limit:
                break
            seconds = seconds_of(self.cost, plan, split=split)
            if seconds < limit:
                limit, best = seconds, (seconds, plan)
        return best

    def whole(self) -> StagePlan:
        """Return the plan, with unused devices given to the slowest stages that can take one more.

        If no stage can take one, because replicas of a batch norm need two samples each, a stage is halved.

        Raises:
            PlanError: If there are more devices than stages can take, or no plan fits the memory.
        """
        found = plan = self.plan()
        while plan.devices < self.cost.devices.count:
            more = self._wider(plan) or self._longer(plan)
            if more is None:
                raise PlanError(
                    f"a plan with work for {self.cost.devices.count} devices",
                    f"work for {plan.devices}",
                    hint="a larger batch, or fewer devices",
                )
            plan = more
        # Wider stages have other times, and halves of a stage no order of their own.
        return plan if plan is found else self.scheduled(plan)

    def _wider(self, plan: StagePlan) -> StagePlan | None:
        """Return the plan with one more device for its slowest stage that can take one; None if none can."""
        taking = [
            number
            for number, stage in enumerate(plan.stages)
            if self.cost.fits(stage.operators, stage.devices + 1, stage.micro_batch)
        ]
        if not taking:
            return None
        slowest = max(taking, key=lambda n: self.seconds(plan.stages[n]))
        stages = list(plan.stages)
        stages[slowest] = replace(stages[slowest], devices=stages[slowest].devices + 1)
        return replace(plan, stages=tuple(stages))

    def _longer(self, plan: StagePlan) -> StagePlan | None:
        """Halve the slowest stage of several operators, with one more device for the second half.

        The halves can follow each other, because no operator outside a stage lies between two of its own.
        """
        several = [number for number, stage in enumerate(plan.stages) if len(stage.operators) > 1]
        if not several:
            return None
        number = max(several, key=lambda n: self.seconds(plan.stages[n]))
        stage = plan.stages[number]
        names = [each.name for each in self.cost.graph.operators if each.name in stage.operators]
        # All cuts of the stage's operators in topological order, the most
        # even first; the first that fits memory wins.
        halves = [
            (
                replace(stage, operators=tuple(names[:at])),
                replace(stage, operators=tuple(names[at:]), devices=1),
            )
            for at in range(1, len(names))
        ]
        plans = [
            replace(plan, stages=(*plan.stages[:number], *pair, *plan.stages[number + 1 :]))
            for pair in sorted(halves, key=lambda pair: max(map(self.seconds, pair)))
        ]
        return next(filter(self._fits_memory, plans), None)

    def _fits_memory(self, plan: StagePlan) -> bool:
        held = windows(plan.shape(self.cost.graph), plan.k)
        return all(
            self.cost.memory(stage.operators, stage.devices, samples) <= self.cost.devices.memory
            for stage, samples in zip(plan.stages, held, strict=True)
        )

    def least(self, sizes: tuple[int, ...]) -> StagePlan:
        """Return the plan with the smallest bottleneck.

        Args:
            sizes: The micro-batch sizes that stages may have.

        Raises:
            PlanError: If no plan fits the memory of the devices.
        """
        plans = self._ever_better(sizes)
        if not plans:
            need = self.cost.memory(self.tree.names, 1, min(sizes))
            devices = self.cost.devices
            raise PlanError(
                f"a cut that fits {devices.count} devices of {devices.memory / 2**30:.3g} GiB",
                f"none; on one device the model would need {need / 2**30:.3g} GiB",
                hint="take more devices, or smaller micro-batches",
            )
        return plans[-1]

    def _ever_better(self, sizes: tuple[int, ...], *, below: float = float("inf")) -> list[StagePlan]:
        """Return plans of ever smaller bottleneck, starting below a limit; empty if there are none.

        Source: GraphPipe, binary search on time per sample.
        """
        # Between a plan on one device, which always fits in time, and a perfect split of all work.
        places = [self.facts.sizes.index(size) for size in sorted(sizes)]
        high = max(self.cost.per_sample(self.tree.names, 1, s) for s in sizes) * 1.01
        low, high = float(self.facts.lightest.sum()) / self.cost.devices.count, min(high, below)
        found = self._ask(high, places)
        if found is None:
            return []
        plans = [found]
        # The plan found may be faster than what was asked for, which saves steps of the search.
        high = min(high, self.bottleneck(found))
        while high > low * (1 + self.tolerance):
            # The geometric mean, because the tolerance is a ratio.
            middle = (low * high) ** 0.5
            better = self._ask(middle, places)
            if better is None:
                low = middle
            else:
                plans.append(better)
                high = min(middle, self.bottleneck(better))
        return plans

    def _ask(self, bottleneck: float, places: Sequence[int]) -> StagePlan | None:
        plans = Search(self.facts, bottleneck, places).solve(self.tree, 0.0, 0)
        entries = _entries(plans.held)
        if not entries:
            return None
        # Of all plans within the bottleneck: the fewest samples in flight, then the fewest devices.
        devices, reader, _ = min(entries, key=lambda entry: (entry[2], entry[0]))
        stages = tuple(plans.stages(devices, reader))
        return StagePlan(self.cost.batch, sorted_stages(self.cost, stages))

    def bottleneck(self, plan: StagePlan) -> float:
        """Return the seconds per sample of a plan's slowest stage."""
        return max(map(self.seconds, plan.stages))

    def seconds(self, stage: PlannedStage) -> float:
        """Return the seconds per sample of a stage."""
        return self.cost.per_sample(stage.operators, stage.devices, stage.micro_batch)


def sorted_stages(cost: StageCost, stages: Sequence[PlannedStage]) -> tuple[PlannedStage, ...]:
    """Sort stages so that sources come before their readers."""
    place = {name: number for number, stage in enumerate(stages) for name in stage.operators}
    needs: list[set[int]] = [set() for _ in stages]
    for operator in cost.graph.operators:
        for read in operator.reads:
            if place[read] != place[operator.name]:
                needs[place[operator.name]].add(place[read])
    found: list[int] = []
    while len(found) < len(stages):
        # Of several ready stages, the one that the search found first comes first.
        ready = [n for n in range(len(stages)) if n not in found and needs[n] <= set(found)]
        found.append(ready[0])
    return tuple(stages[number] for number in found)
