"""Groups: children of a node of the tree taken as one stage, and what is known of them for any bottleneck.

Where it sits: under ``graphpipe``, which asks for the same ones again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kagome.planner.devices import StageCost
from kagome.planner.series import Tree
from kagome.schedule.dag import Turns, window

Head = tuple[int, int]
"""Samples that a stage holds, and its micro-batch."""
Heads = tuple[Head, ...]


@dataclass(frozen=True, eq=False)
class Group:
    """Some children of a node as one stage.

    Args:
        names: Their operators.
        lightest: The least seconds a sample that they take on one device.
        fixed: Bytes of a replica without samples.
        kept: Bytes of a sample.
        seconds: By micro-batch: seconds a sample by devices, as far as they were asked for.
    """

    names: tuple[str, ...]
    lightest: float
    fixed: float
    kept: float
    seconds: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Facts:
    """What does not depend on the bottleneck: shared by all questions.

    Args:
        cost: Of any stage.
        sizes: Micro-batches that stages may have.
        lightest: The least seconds a sample that an operator takes, by its name.
    """

    cost: StageCost
    sizes: tuple[int, ...]
    lightest: dict[str, float]
    _groups: dict[tuple[int, int], Group] = field(default_factory=dict)
    _turns: dict[tuple[int, Heads], tuple[int, int]] = field(default_factory=dict)

    def group(self, node: Tree, taken: int) -> Group:
        """Some children of a node, as bits."""
        key = id(node), taken
        if key not in self._groups:
            names = names_of(node, taken)
            empty = self.cost.memory(names, 1, 0)
            self._groups[key] = Group(
                names,
                sum(self.lightest[name] for name in names),
                empty,
                self.cost.memory(names, 1, 1) - empty,
            )
        return self._groups[key]

    def seconds(self, group: Group, size: int) -> list[float]:
        """Seconds a sample of a stage by devices."""
        if size not in group.seconds:
            most = min(self.cost.devices.count, size)
            group.seconds[size] = [self.cost.per_sample(group.names, d, size) for d in range(1, most + 1)]
        return group.seconds[size]

    def turns(self, size: int, readers: Heads) -> tuple[int, int]:
        """A stage's k, and what it holds, before readers that hold so much."""
        key = size, readers
        if key not in self._turns:
            k = max(1, *(reader // size for _, reader in readers)) if readers else 1
            held = window(Turns(size, k), [(h, Turns(s)) for h, s in readers], self.cost.batch)
            self._turns[key] = k, held
        return self._turns[key]


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
