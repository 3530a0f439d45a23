"""Graphpipe: pipelines whose stages form a DAG - the least bottleneck, then the fewest samples in flight.

Where it sits: one of three stage planners beside ``pipedream`` and ``piper``; all count costs by ``devices``.

::

    T, seconds a sample ──> is there a plan of which no stage takes longer?  ──> halve the gap
    a tree of series and parallel parts, from the loss backwards:
        a stage over children i..k in a row, given what the rest of the row holds
        a branch by itself, given what comes behind the branches

A stage is children of one node of the tree that stand next to each other, any of a few branches, or operators
that stand next to each other in a row of all below a node; the plans searched are those. Stages that hold
pieces of several branches are beyond them, unless a row has them side by side. In a row a stage counts as
ahead of the next one, read or not. What is kept of a part is the fewest devices for each number of samples in
flight at its head: more devices than a bottleneck asks for buy nothing but memory.

Source: GraphPipe, ASPLOS 2025: series-parallel decomposition, binary search on the bottleneck, dynamic
program over part, devices and the successor's schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

from kagome.errors import PlanError
from kagome.planner.devices import StageCost
from kagome.planner.groups import Facts, Group, Head, Heads, everything, groups, runs
from kagome.planner.series import Tree, tree_of
from kagome.planner.stageplan import PlannedStage, StagePlan
from kagome.planner.trial import trial

FEW = 6
"""Of so many branches any may share a stage; of more, those that stand next to each other."""


@dataclass(frozen=True, eq=False)
class Part:
    """A plan for a part of the tree and all that comes behind it there.

    Args:
        devices: How many it takes.
        heads: What its first stages hold: what a stage before it must be ahead of.
        stage: A stage of its own, if it has one.
        parts: What it is made of besides.
    """

    devices: int
    heads: Heads
    stage: PlannedStage | None = None
    parts: tuple[Part, ...] = ()

    def stages(self) -> Iterator[PlannedStage]:
        """All its stages."""
        if self.stage is not None:
            yield self.stage
        for part in self.parts:
            yield from part.stages()


@dataclass(frozen=True, eq=False)
class Search:
    """One question: is there a plan of which no stage takes more than so many seconds a sample.

    Args:
        facts: Of the model and the devices.
        bottleneck: Seconds a sample.
        total: The least seconds a sample that all operators take.
    """

    facts: Facts
    bottleneck: float
    total: float
    _known: dict[tuple[int, int, Heads], list[Part]] = field(default_factory=dict)

    def solve(self, node: Tree, behind: Heads) -> list[Part]:
        """Plans for a node, given what is held behind it; of which none beats another in everything."""
        if node.kind == "leaf":
            return self._best(self._stage(self.facts.group(node, 0), Part(0, behind), behind))
        if not node.rows:
            return self._from(node, everything(node), behind)
        ways = (node, *node.rows)
        return self._best(part for way in ways for part in self._from(way, everything(way), behind))

    def _from(self, node: Tree, left: int, behind: Heads) -> list[Part]:
        """Plans for those of a node's children that are left, as bits; in a row they are the last ones."""
        if not left:
            return [Part(0, behind if node.kind == "series" else ())]
        key = id(node), left, behind
        if key not in self._known:
            way, room = self._series if node.kind == "series" else self._parallel, self._room(node, left)
            self._known[key] = self._best(p for p in way(node, left, behind) if p.devices <= room)
        return self._known[key]

    def _room(self, node: Tree, left: int) -> int:
        """Devices that are left for some of a node's children: all other operators need some too."""
        others = self.total - self.facts.group(node, left).lightest
        return self.facts.cost.devices.count - int(others / self.bottleneck * (1 - 1e-9))

    def _series(self, node: Tree, left: int, behind: Heads) -> Iterator[Part]:
        most = self.bottleneck * self.facts.cost.devices.count * (1 + 1e-9)
        for taken in runs(left):
            group = self.facts.group(node, taken)
            if group.lightest > most:
                break  # more operators only compute longer; they may send less
            if self._fits(group):
                for rest in self._from(node, left & ~taken, behind):
                    yield from self._stage(group, rest, rest.heads)
        first = left & -left
        child = node.children[first.bit_length() - 1]
        if child.kind != "leaf":
            for rest in self._from(node, left & ~first, behind):
                for part in self.solve(child, rest.heads):
                    yield Part(part.devices + rest.devices, part.heads, None, (part, rest))

    def _parallel(self, node: Tree, left: int, behind: Heads) -> Iterator[Part]:
        empty = Part(0, behind)
        for taken in groups(left) if left.bit_count() <= FEW else runs(left):
            group = self.facts.group(node, taken)
            if self._fits(group):
                alone = self._best(self._stage(group, empty, behind))
                yield from self._beside(alone, self._from(node, left & ~taken, behind))
        first = left & -left
        child = node.children[first.bit_length() - 1]
        if child.kind != "leaf":
            yield from self._beside(self.solve(child, behind), self._from(node, left & ~first, behind))

    def _beside(self, one: Sequence[Part], two: Sequence[Part]) -> Iterator[Part]:
        for a in one:
            for b in two:
                yield Part(a.devices + b.devices, merged((*a.heads, *b.heads)), None, (a, b))

    def _stage(self, group: Group, rest: Part, readers: Heads) -> Iterator[Part]:
        """A stage before the rest."""
        devices, memory = self.facts.cost.devices, self.facts.cost.devices.memory
        most = devices.count - rest.devices
        for size in self.facts.sizes:
            need = self._devices(group, size)
            if need is None or need > most:
                continue
            k, held = self.facts.turns(size, readers)
            if group.fixed + group.kept * held / need > memory:
                if group.fixed >= memory:
                    continue
                need = max(need, ceil(group.kept * held / (memory - group.fixed)))
            if need <= min(most, size):
                stage = PlannedStage(group.names, need, size, k)
                yield Part(need + rest.devices, ((held, size),), stage, (rest,))

    def _fits(self, group: Group) -> bool:
        return any(self._devices(group, size) is not None for size in self.facts.sizes)

    def _devices(self, group: Group, size: int) -> int | None:
        """The fewest devices with which a stage is fast enough."""
        for devices, seconds in enumerate(self.facts.seconds(group, size), start=1):
            if seconds <= self.bottleneck:
                return devices
        return None

    def _best(self, parts: Iterable[Part]) -> list[Part]:
        """Those that no other one beats: fewer devices, less held, with micro-batches of the same sizes."""
        kept: dict[tuple[int, ...], list[Part]] = {}
        for part in parts:
            if part.devices > self.facts.cost.devices.count:
                continue
            group = kept.setdefault(tuple(size for _, size in part.heads), [])
            if any(_beats(other, part) for other in group):
                continue
            group[:] = [other for other in group if not _beats(part, other)]
            group.append(part)
        return [part for group in kept.values() for part in group]


def _beats(one: Part, other: Part) -> bool:
    return one.devices <= other.devices and all(
        a[0] <= b[0] for a, b in zip(one.heads, other.heads, strict=True)
    )


def merged(heads: Iterable[Head]) -> Heads:
    """Of heads with one micro-batch the one that holds most: what comes before must be ahead of it."""
    most: dict[int, int] = {}
    for held, size in heads:
        most[size] = max(held, most.get(size, 0))
    return tuple(sorted((held, size) for size, held in most.items()))


@dataclass(frozen=True, eq=False)
class GraphPipe:
    """The planner.

    Args:
        cost: Of any stage.
        sizes: Micro-batches that stages may have: divisors of the batch, each of the next.
        tolerance: How far above the least bottleneck a plan may be, as a share.
    """

    cost: StageCost
    sizes: tuple[int, ...]
    tolerance: float = 0.01

    @cached_property
    def tree(self) -> Tree:
        """The operators as a tree."""
        return tree_of(self.cost.graph)

    def plan(self) -> StagePlan:
        """Of the plans that the search meets, with one micro-batch and with any, the fastest in a trial.

        A bottleneck says nothing of how long a pipeline takes to fill: that is what large micro-batches and
        many stages cost.

        Raises:
            PlanError: If none fits the memory of the devices.
        """
        found: dict[int, tuple[float, StagePlan]] = {}
        for size in self.sizes:
            with suppress(PlanError):
                found[size] = self._fastest(self._ever_better((size,)))
        if not found:
            return self.least(self.sizes)
        best = min(found, key=lambda size: found[size][0])
        near = tuple(size for size in self.sizes if best // 2 <= size <= best * 2)
        mixed = self._fastest(self._ever_better(near), found[best][0])
        return mixed[1] if mixed[0] < found[best][0] else found[best][1]

    def _fastest(self, plans: Sequence[StagePlan], limit: float = float("inf")) -> tuple[float, StagePlan]:
        """Seconds of the fastest plan, and it; of several with less than a limit, if there are such."""
        best = limit, plans[-1]
        for plan in reversed(plans):
            if self.cost.batch * self.bottleneck(plan) >= best[0]:
                break  # nor can those before it be faster
            seconds = trial(self.cost, plan).seconds
            best = min(best, (seconds, plan), key=lambda each: each[0])
        return best

    def whole(self) -> StagePlan:
        """The plan, with devices that it has no use for given to the slowest stages that can take one more.

        Raises:
            PlanError: If there are devices that no stage can take, or none fits the memory.
        """
        plan = self.plan()
        while plan.devices < self.cost.devices.count:
            taking = [n for n, stage in enumerate(plan.stages) if stage.devices < stage.micro_batch]
            if not taking:
                raise PlanError(
                    f"{self.cost.devices.count} devices share the work",
                    f"the plan has work for {plan.devices}",
                    hint="a larger batch, or fewer devices",
                )
            slowest = max(taking, key=lambda n: self.seconds(plan.stages[n]))
            stages = list(plan.stages)
            stages[slowest] = replace(stages[slowest], devices=stages[slowest].devices + 1)
            plan = replace(plan, stages=tuple(stages))
        return plan

    def least(self, sizes: tuple[int, ...]) -> StagePlan:
        """The plan with the least bottleneck.

        Args:
            sizes: Micro-batches that stages may have.

        Raises:
            PlanError: If none fits the memory of the devices.
        """
        return self._ever_better(sizes)[-1]

    def _ever_better(self, sizes: tuple[int, ...]) -> list[StagePlan]:
        """Plans of ever smaller bottleneck.

        Raises:
            PlanError: If none fits the memory of the devices.

        Source: GraphPipe, binary search on time per sample.
        """
        devices, names = self.cost.devices.count, self.tree.names
        facts = Facts(self.cost, sizes, self._lightest(sizes))
        low, high = (
            sum(facts.lightest.values()) / devices,
            max(self.cost.per_sample(names, 1, s) for s in sizes) * 1.01,
        )
        found = self._ask(facts, high)
        if found is None:
            need = self.cost.memory(names, 1, min(sizes))
            raise PlanError(
                f"the model fits {devices} devices of {self.cost.devices.memory / 2**30:.3g} GiB",
                f"no cut does; on one device it would need {need / 2**30:.3g} GiB",
                hint="take more devices, or smaller micro-batches",
            )
        plans = [found]
        while high > low * (1 + self.tolerance):
            middle = (low * high) ** 0.5
            better = self._ask(facts, middle)
            if better is None:
                low = middle
            else:
                plans.append(better)
                high = min(middle, self.bottleneck(better))
        return plans

    def _lightest(self, sizes: tuple[int, ...]) -> dict[str, float]:
        """The least seconds a sample of each operator, on any number of devices."""
        shares = sorted({-(-size // d) for size in sizes for d in range(1, self.cost.devices.count + 1)})
        return {
            name: min(sum(self.cost.passes(name, share)) / share for share in shares)
            for name in self.tree.names
        }

    def _ask(self, facts: Facts, bottleneck: float) -> StagePlan | None:
        parts = Search(facts, bottleneck, sum(facts.lightest.values())).solve(self.tree, ())
        if not parts:
            return None
        best = min(parts, key=lambda part: (max(held for held, _ in part.heads), part.devices))
        return StagePlan(self.cost.batch, sorted_stages(self.cost, tuple(best.stages())))

    def bottleneck(self, plan: StagePlan) -> float:
        """Seconds a sample of a plan's slowest stage."""
        return max(map(self.seconds, plan.stages))

    def seconds(self, stage: PlannedStage) -> float:
        """Seconds a sample of a stage."""
        return self.cost.per_sample(stage.operators, stage.devices, stage.micro_batch)


def sorted_stages(cost: StageCost, stages: Sequence[PlannedStage]) -> tuple[PlannedStage, ...]:
    """Stages in an order in which sources come first."""
    place = {name: number for number, stage in enumerate(stages) for name in stage.operators}
    needs: list[set[int]] = [set() for _ in stages]
    for operator in cost.graph.operators:
        for read in operator.reads:
            if place[read] != place[operator.name]:
                needs[place[operator.name]].add(place[read])
    found: list[int] = []
    while len(found) < len(stages):
        ready = [n for n in range(len(stages)) if n not in found and needs[n] <= set(found)]
        found.append(ready[0])
    return tuple(stages[number] for number in found)
