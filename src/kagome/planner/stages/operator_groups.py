"""Operator groups: children of a tree node taken as one stage, and the costs of all groups of a node at once.

Where it sits: ``graphpipe`` uses the same groups for every bottleneck that it tries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kagome.planner.stages.devices import StageCost
from kagome.planner.stages.series_parallel import SeriesParallelTree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FEW = 6
"""Most branches of which any subset may share a stage; of more, only branches next to each other may."""


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of one node's children, and their costs.

    Args:
        children: The node's children, or the node itself if it has none.
        members: The children of each group, as a bit mask.
        seconds: Seconds per sample of each group as a stage; infinite if a device would take fewer samples of
            a micro-batch than an operator needs.
        fixed: Bytes of a replica of each group without samples.
        kept: Bytes of each group per sample.

    Shapes:
        seconds ``[groups, micro-batches, devices]``; fixed and kept ``[groups]``.
    """

    children: tuple[SeriesParallelTree, ...]
    members: tuple[int, ...]
    seconds: Floats
    fixed: Floats
    kept: Floats

    def need(self, bottleneck: float, sizes: Sequence[int]) -> Ints:
        """Return the fewest devices, from a given number on, with which each group is fast enough; 0 if none.

        More devices may be slower, if the sums of gradients take longer than the time that they save.

        Args:
            bottleneck: The most seconds per sample that a stage may take.
            sizes: The micro-batches, as indices of the groups' second axis.

        Shapes:
            ``[groups, len(sizes), devices + 1]``; the last axis is the number of devices required at least.
        """
        # Example, fast with 2, 3 and 5 of 5 devices:
        #    devices      1  2  3  4  5
        #    fast         -  x  x  -  x
        #    need         2  2  3  5  5      the first fast number from here on, filled from the right
        # A search that needs more devices for memory thus looks up the next number that is fast too.
        fast = self.seconds[:, list(sizes)] <= bottleneck
        most = fast.shape[2]
        # The least fast number from each place on; `most + 1` stands for none.
        need = np.empty((*fast.shape[:2], most + 1), dtype=np.int64)
        need[..., 1:] = np.where(fast, np.arange(1, most + 1), most + 1)
        np.minimum.accumulate(need[..., :0:-1], axis=2, out=need[..., :0:-1])
        need[..., 0] = need[..., 1]  # a stage has at least one device
        need[need > most] = 0
        return need

    def names(self, group: int) -> tuple[str, ...]:
        """Return the operators of a group."""
        chosen = (child for place, child in enumerate(self.children) if self.members[group] >> place & 1)
        return tuple(name for child in chosen for name in child.names)


@dataclass(frozen=True, eq=False)
class States:
    """The sets of a parallel node's children that may be left to plan, and the options in each.

    An option takes the first child that is left, together with others as one stage, or by itself.

    Args:
        begins: The number of the first option of each state, and the number of all options at the end. State
            0 has no child left, the last state has all.
        group: For each option, the group that it takes, or -1 - c if child c is planned by itself.
        rest: For each option, the state that it leaves.
        members: The groups that options refer to, as bit masks.
    """

    begins: Ints
    group: Ints
    rest: Ints
    members: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GroupFacts:
    """The facts that do not depend on the bottleneck, shared by all searches.

    Args:
        cost: The cost of any set of operators as a stage.
        sizes: The micro-batch sizes that stages may have.
    """

    cost: StageCost
    sizes: tuple[int, ...]
    _groups: dict[int, Groups] = field(default_factory=dict)
    _states: dict[int, States] = field(default_factory=dict)

    def groups(self, node: SeriesParallelTree) -> Groups:
        """Return a node's groups: runs of a series' children (see :func:`run`), else those of its states."""
        # By identity, because the hash of a node is that of its whole subtree. GraphPipe keeps the tree as
        # long as these facts, so no id is used again.
        if id(node) not in self._groups:
            children = node.children or (node,)
            # In a series only neighbours may share a stage, of parallel branches any.
            row = node.kind != "parallel"
            members = tuple(runs(len(children))) if row else self.states(node).members
            self._groups[id(node)] = self._counted(children, members)
        return self._groups[id(node)]

    def states(self, node: SeriesParallelTree) -> States:
        """Return the states of a parallel node."""
        if id(node) not in self._states:
            self._states[id(node)] = states_of(node)
        return self._states[id(node)]

    @cached_property
    def lightest(self) -> Floats:
        """The least seconds per sample of each operator, on any number of devices."""
        # A bound for the search, so it may be too small and never too large.
        shares = sorted({int(share) for share in self._shares.ravel()})
        names = [operator.name for operator in self.cost.graph.operators]
        each = [[sum(self.cost.passes(name, share)) / share for share in shares] for name in names]
        return np.asarray(np.array(each).min(axis=1))

    @cached_property
    def _shares(self) -> Ints:
        """The samples of a replica: ``[micro-batches, devices]``."""
        devices = np.arange(1, self.cost.devices.count + 1)
        # Rounded up, as in StageCost.compute.
        return np.asarray(-(-np.array(self.sizes)[:, None] // devices), dtype=np.int64)

    @cached_property
    def _passes(self) -> Floats:
        """Seconds of a micro-batch, forward and backward: ``[operators, micro-batches, devices]``."""
        shares = self._shares
        found = np.empty((len(self.cost.graph.operators), *shares.shape))
        for place, operator in enumerate(self.cost.graph.operators):
            for share in np.unique(shares):
                found[place][shares == share] = sum(self.cost.passes(operator.name, int(share)))
        return found

    @cached_property
    def _reads(self) -> Floats:
        """A matrix with 1 where the operator of the row is read by that of the column."""
        place = self._place
        found = np.zeros((len(place), len(place)))
        for operator in self.cost.graph.operators:
            for read in operator.reads:
                found[place[read], place[operator.name]] = 1.0
        return found

    @cached_property
    def _place(self) -> dict[str, int]:
        return {operator.name: place for place, operator in enumerate(self.cost.graph.operators)}

    def _counted(self, children: Sequence[SeriesParallelTree], members: tuple[int, ...]) -> Groups:
        """Compute the costs of many stages at once, as ``StageCost`` does for one."""
        link, batch, operators = self.cost.devices, self.cost.batch, self.cost.graph.operators
        # Everything is a product of 0/1 matrices, because a node may have thousands of groups.
        own = np.zeros((len(children), len(operators)))  # [children, operators]
        for number, child in enumerate(children):
            own[number, [self._place[name] for name in child.names]] = 1.0
        wide = -(-len(children) // 8)
        packed = np.array(bytearray(b"".join(one.to_bytes(wide, "little") for one in members)), np.uint8)
        bits = np.unpackbits(packed.reshape(len(members), wide), axis=1, bitorder="little")
        inside = bits[:, : len(children)].astype(float) @ own  # [groups, operators]
        weights, kept, output = (
            np.array([getattr(operator, name) for operator in operators], dtype=float)
            for name in ("weights", "kept", "output")
        )
        # The number of an operator's readers within each group. A group sends values that have readers
        # outside of it, and receives values of other operators that it reads.
        readers = inside @ self._reads.T  # [groups, operators]
        given = inside * (readers < self._reads.sum(axis=1)) @ output  # [groups], bytes per sample
        taken = (1 - inside) * (readers > 0) @ output
        # From here on [groups, micro-batches, devices], as in StageCost.per_sample.
        sizes = np.array(self.sizes, dtype=float)[:, None]
        devices = np.arange(1, link.count + 1, dtype=float)
        compute = np.tensordot(inside, self._passes, axes=1)
        carried = (given + taken)[:, None, None]
        traffic = np.where(carried > 0, link.latency + carried * sizes / devices / link.bandwidth, 0.0)
        of_weights = (inside @ weights)[:, None, None]
        sync = 2 * (devices - 1) / devices * of_weights / link.bandwidth
        seconds = np.maximum(compute, traffic) / sizes + sync / batch
        least = np.array([operator.least for operator in operators], dtype=float)
        # A replica with fewer samples than an operator needs makes the stage impossible, as in
        # StageCost.fits. That includes replicas without a sample.
        shares = (sizes // devices)[None]
        seconds[shares < (inside * least).max(axis=1)[:, None, None]] = np.inf
        fixed = np.array([self.cost.memory((operator.name,), 1, 0) for operator in operators], dtype=float)
        return Groups(tuple(children), members, seconds, inside @ fixed, inside @ kept)


def run(begin: int, end: int, children: int) -> int:
    """Return the number of a run of children, ``begin`` to before ``end``, among the groups of a series."""
    # Runs in the order of their begins: begin b has children - b of them, so those before are
    # b * children - b (b - 1) / 2.
    return begin * children - begin * (begin - 1) // 2 + end - begin - 1


def runs(children: int) -> Iterator[int]:
    """Yield all runs of children of a series as bit masks, in the order of :func:`run`."""
    for begin in range(children):
        for end in range(begin + 1, children + 1):
            yield (1 << end) - (1 << begin)


def states_of(node: SeriesParallelTree) -> States:
    """Enumerate the states of a parallel node and their options."""
    count = len(node.children)
    # A state is the set of branches that are not planned yet, as a bit mask. Every option takes the first of
    # them, so each way to group the branches is tried once, and not once for each order of its groups.
    options: dict[int, list[tuple[int | None, int]]] = {}
    waiting = [(1 << count) - 1]
    while waiting:
        left = waiting.pop()
        if left in options or not left:
            continue
        # All subsets of n branches make about 3^n / 2 options in all states together.
        taken = groups(left) if left.bit_count() <= FEW else first_of(left)
        options[left] = [(some, left & ~some) for some in taken]
        first = left & -left
        # A branch of a single operator has no plan of its own beside that of one stage.
        if node.children[first.bit_length() - 1].children:
            options[left].append((None, left & ~first))
        waiting += [rest for _, rest in options[left]]
    # An option leaves fewer bits, hence a smaller number: in this order the tables of the rest are complete.
    order = [0, *sorted(options)]
    number = {left: place for place, left in enumerate(order)}
    members: dict[int, int] = {}
    group, rest, begins = [], [], [0, 0]
    for left in order[1:]:
        for some, after in options[left]:
            child = (left & -left).bit_length() - 1
            group.append(-1 - child if some is None else members.setdefault(some, len(members)))
            rest.append(number[after])
        begins.append(len(group))
    numbers = [np.array(each, dtype=np.int64) for each in (begins, group, rest)]
    return States(numbers[0], numbers[1], numbers[2], tuple(members))


def first_of(left: int) -> Iterator[int]:
    """Yield the first child that is left, the first two, and so on, as bit masks."""
    taken = 0
    while left:
        taken |= left & -left
        left &= left - 1
        yield taken


def groups(left: int) -> Iterator[int]:
    """Yield all groups of the children left that contain the first one, as bit masks."""
    first = left & -left
    others = some = left & ~first
    while True:
        # Standard enumeration of all subsets of a mask, from the full one down to the empty one.
        yield first | some
        if not some:
            return
        some = (some - 1) & others
