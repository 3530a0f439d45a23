"""Graphpipe: pipelines whose stages form a DAG - the least bottleneck, then the fewest samples in flight.

Where it sits: one of three stage planners beside ``pipedream`` and ``piper``; all count costs by ``devices``.

::

    T, seconds a sample ──> is there a plan of which no stage takes longer?  ──> halve the gap
    a tree of series and parallel parts, from the loss backwards:
        a stage over children i..k in a row, given what the rest of the row holds
        a branch by itself, given what comes behind the branches

A stage is children of one node of the tree that stand next to each other, any of a few branches, or operators
that stand next to each other in a row of all below a node; the plans searched are those. Stages that hold
pieces of several branches are beyond them, unless a row has them side by side. What is kept of a part is the
fewest devices for each number of samples in flight at its head: more devices than a bottleneck asks for buy
nothing but memory.

Source: GraphPipe, ASPLOS 2025: series-parallel decomposition, binary search on the bottleneck, dynamic
program over part, devices and the successor's schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from kagome.errors import PlanError
from kagome.planner.devices import StageCost
from kagome.planner.series import Tree, tree_of
from kagome.planner.stageplan import PlannedStage, StagePlan
from kagome.planner.trial import trial
from kagome.schedule.dag import Turns, window

Head = tuple[int, int]
"""Samples that a stage holds, and its micro-batch."""
Heads = tuple[Head, ...]
Table = dict[tuple[int, int, int], list[float]]
"""Node, its children as bits, micro-batch -> seconds a sample by devices."""
FEW = 6
"""Of so many branches any may share a stage; of more, those that stand next to each other."""


@dataclass(frozen=True, eq=False)
class Part:
    """A plan for a part of the tree and all that comes behind it there.

    Args:
        devices: How many it takes.
        heads: What its first stages hold: what a stage before it must be ahead of.
        stages: Its stages, sources first.
    """

    devices: int
    heads: Heads
    stages: tuple[PlannedStage, ...] = ()


@dataclass(frozen=True, eq=False)
class Search:
    """One question: is there a plan of which no stage takes more than so many seconds a sample.

    Args:
        cost: Of any stage.
        sizes: Micro-batches that stages may have.
        bottleneck: Seconds a sample.
        least: Shared by all questions.
        lightest: The least seconds a sample that an operator takes, by its name.
    """

    cost: StageCost
    sizes: tuple[int, ...]
    bottleneck: float
    least: Table
    lightest: dict[str, float]
    _known: dict[tuple[int, int, Heads], list[Part]] = field(default_factory=dict)
    _needed: dict[tuple[int, int, int], int | None] = field(default_factory=dict)

    def solve(self, node: Tree, behind: Heads) -> list[Part]:
        """Plans for a node, given what is held behind it; of which none beats another in everything."""
        if node.kind == "leaf":
            return self._best(self._stage(node, 0, Part(0, behind), behind))
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
        others = sum(self.lightest.values()) - sum(self.lightest[name] for name in names_of(node, left))
        return self.cost.devices.count - int(others / self.bottleneck * (1 - 1e-9))

    def _series(self, node: Tree, left: int, behind: Heads) -> Iterator[Part]:
        for taken in runs(left):
            if not self._fits(node, taken):
                break  # more operators only take longer
            for rest in self._from(node, left & ~taken, behind):
                yield from self._stage(node, taken, rest, rest.heads)
        first = left & -left
        child = node.children[first.bit_length() - 1]
        if child.kind != "leaf":
            for rest in self._from(node, left & ~first, behind):
                for part in self.solve(child, rest.heads):
                    yield Part(part.devices + rest.devices, part.heads, part.stages + rest.stages)

    def _parallel(self, node: Tree, left: int, behind: Heads) -> Iterator[Part]:
        empty = Part(0, behind)
        for taken in groups(left) if left.bit_count() <= FEW else runs(left):
            if self._fits(node, taken):
                alone = self._best(self._stage(node, taken, empty, behind))
                yield from self._beside(alone, self._from(node, left & ~taken, behind))
        first = left & -left
        child = node.children[first.bit_length() - 1]
        if child.kind != "leaf":
            yield from self._beside(self.solve(child, behind), self._from(node, left & ~first, behind))

    def _beside(self, one: Sequence[Part], two: Sequence[Part]) -> Iterator[Part]:
        for a in one:
            for b in two:
                yield Part(a.devices + b.devices, merged((*a.heads, *b.heads)), a.stages + b.stages)

    def _stage(self, node: Tree, taken: int, rest: Part, readers: Heads) -> Iterator[Part]:
        """A stage of some children, before the rest."""
        most = self.cost.devices.count - rest.devices
        names = names_of(node, taken)
        for size in self.sizes:
            devices = self._devices(node, taken, size)
            if devices is None or devices > most:
                continue
            k = max(1, *(reader // size for _, reader in readers)) if readers else 1
            turns = Turns(size, k)
            held = window(turns, [(h, Turns(s)) for h, s in readers], self.cost.batch)
            while devices <= most and self.cost.memory(names, devices, held) > self.cost.devices.memory:
                devices += 1
            if devices <= most and devices <= size:
                stage = PlannedStage(names, devices, size, k)
                yield Part(devices + rest.devices, ((held, size),), (stage, *rest.stages))

    def _fits(self, node: Tree, taken: int) -> bool:
        return any(self._devices(node, taken, size) is not None for size in self.sizes)

    def _devices(self, node: Tree, taken: int, size: int) -> int | None:
        """The fewest devices with which a stage is fast enough."""
        key = id(node), taken, size
        if key not in self._needed:
            if key not in self.least:
                names, most = names_of(node, taken), min(self.cost.devices.count, size)
                self.least[key] = [self.cost.per_sample(names, d, size) for d in range(1, most + 1)]
            each = enumerate(self.least[key], start=1)
            self._needed[key] = next((d for d, seconds in each if seconds <= self.bottleneck), None)
        return self._needed[key]

    def _best(self, parts: Iterable[Part]) -> list[Part]:
        """Those that no other one beats: fewer devices, less held, with micro-batches of the same sizes."""
        kept: dict[tuple[int, ...], list[Part]] = {}
        for part in parts:
            if part.devices > self.cost.devices.count:
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


def names_of(node: Tree, taken: int) -> tuple[str, ...]:
    """Operators of some children of a node."""
    if node.kind == "leaf":
        return node.names
    return tuple(
        name for place, child in enumerate(node.children) if taken >> place & 1 for name in child.names
    )


def everything(node: Tree) -> int:
    """All children of a node, as bits."""
    return (1 << len(node.children)) - 1


def runs(left: int) -> Iterator[int]:
    """The first of what is left, the first two, and so on, as bits."""
    taken = 0
    while left:
        taken |= left & -left
        left &= left - 1
        yield taken


def groups(left: int) -> Iterator[int]:
    """All groups of what is left that have the first of it, as bits."""
    first = left & -left
    others = some = left & ~first
    while True:
        yield first | some
        if not some:
            return
        some = (some - 1) & others


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
        """Of the plans with the least bottleneck, with one micro-batch and with any, the fastest in a trial.

        A bottleneck says nothing of how long a pipeline takes to fill: that is what large micro-batches cost.

        Raises:
            PlanError: If none fits the memory of the devices.
        """
        found: dict[int, StagePlan] = {}
        for size in self.sizes:
            with suppress(PlanError):
                found[size] = self.least((size,))
        if not found:
            return self.least(self.sizes)
        seconds = {size: trial(self.cost, plan).seconds for size, plan in found.items()}
        best = min(seconds, key=seconds.__getitem__)
        near = tuple(size for size in self.sizes if best // 2 <= size <= best * 2)
        mixed = self.least(near)
        return mixed if trial(self.cost, mixed).seconds < seconds[best] else found[best]

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

        Source: GraphPipe, binary search on time per sample.
        """
        devices, names = self.cost.devices.count, self.tree.names
        known: Table = {}
        low, high = (
            sum(self._lightest(sizes).values()) / devices,
            max(self.cost.per_sample(names, 1, s) for s in sizes) * 1.01,
        )
        found = self._ask(sizes, high, known)
        if found is None:
            need = self.cost.memory(names, 1, min(sizes))
            raise PlanError(
                f"the model fits {devices} devices of {self.cost.devices.memory / 2**30:.3g} GiB",
                f"no cut does; on one device it would need {need / 2**30:.3g} GiB",
                hint="take more devices, or smaller micro-batches",
            )
        while high > low * (1 + self.tolerance):
            middle = (low * high) ** 0.5
            better = self._ask(sizes, middle, known)
            if better is None:
                low = middle
            else:
                found, high = better, min(middle, self.bottleneck(better))
        return found

    def _lightest(self, sizes: tuple[int, ...]) -> dict[str, float]:
        """The least seconds a sample of each operator, on any number of devices."""
        shares = sorted({-(-size // d) for size in sizes for d in range(1, self.cost.devices.count + 1)})
        return {
            name: min(sum(self.cost.passes(name, share)) / share for share in shares)
            for name in self.tree.names
        }

    def _ask(self, sizes: tuple[int, ...], bottleneck: float, known: Table) -> StagePlan | None:
        parts = Search(self.cost, sizes, bottleneck, known, self._lightest(sizes)).solve(self.tree, ())
        if not parts:
            return None
        best = min(parts, key=lambda part: (max(held for held, _ in part.heads), part.devices))
        return StagePlan(self.cost.batch, sorted_stages(self.cost, best.stages))

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
