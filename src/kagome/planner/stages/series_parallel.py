"""Series-parallel tree: operators decomposed into sequences and into branches that run side by side.

Where it sits: ``graphpipe`` searches over this tree.

::

    a ─> b ─┐                    Series(Parallel(Series(a, b), Series(c, d)), e)
    c ─> d ─┴─> e

Of two operators, one comes before the other or neither does. Two sets are parallel if no operator of one
comes before any of the other. They are in series if all operators of one come before all of the other. If
neither kind of cut is left (a graph like an N), the operators form a series in the order of the graph, and
their branches are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kagome.planner.stages.operator_costs import OperatorGraph


@dataclass(frozen=True)
class SeriesParallelTree:
    """A node of the series-parallel tree.

    Args:
        kind: ``leaf``, ``series`` or ``parallel``.
        names: All operators below the node, in the graph's order.
        children: The child nodes; a leaf has none.
        forced: Whether it is a series of operators whose branches the tree does not show.
        rows: For a parallel node and for the root, all operators below in one series, once branch by branch
            and once level by level. A stage may then hold the ends of several branches.
    """

    kind: str
    names: tuple[str, ...]
    children: tuple[SeriesParallelTree, ...] = ()
    forced: bool = False
    rows: tuple[SeriesParallelTree, ...] = ()

    def leaves(self) -> Iterator[str]:
        """Yield the operators in the order of the tree."""
        if self.kind == "leaf":
            yield self.names[0]
        for child in self.children:
            yield from child.leaves()


def tree_of(graph: OperatorGraph) -> SeriesParallelTree:
    """Decompose a graph of operators into its series-parallel tree.

    Cost: the square of the number of operators, in bits.
    """
    names = [operator.name for operator in graph.operators]
    place = {name: number for number, name in enumerate(names)}
    # Operators are in topological order, so the masks of all that an operator reads are complete here.
    below = [0] * len(names)  # bit masks: all operators that each one depends on, directly or indirectly
    for number, operator in enumerate(graph.operators):
        for read in operator.reads:
            below[number] |= below[place[read]] | 1 << place[read]
    above = [0] * len(names)
    # The transposed relation: everything that depends on an operator.
    for number in range(len(names)):
        for other in _bits(below[number]):
            above[other] |= 1 << number
    # Bit j of related[i] says that i and j are ordered, in either direction.
    related = [one | two for one, two in zip(below, above, strict=True)]
    # The level of an operator is the length of the longest path to it.
    levels: dict[str, int] = {}
    for operator in graph.operators:
        levels[operator.name] = 1 + max((levels[read] for read in operator.reads), default=0)
    found = _tree(names, list(range(len(names))), below, related)
    return _with_rows(found, levels, root=True)


def _with_rows(
    node: SeriesParallelTree, levels: Mapping[str, int], *, root: bool = False
) -> SeriesParallelTree:
    children = tuple(_with_rows(child, levels) for child in node.children)
    # A series of single operators at the root is already its own row; any other series
    # has rows in the parallel nodes below it.
    if node.kind == "leaf" or not (node.kind == "parallel" or (root and any(c.children for c in children))):
        return replace(node, children=children)
    # Two linear orders of the same operators, for stages that hold the ends of several branches:
    #    a ─> b ─┐      branch by branch   a b c d        a stage "b c": the end of one, the start of the next
    #    c ─> d ─┴─>    level by level     a c b d        a stage "a c": the starts of both
    # Both are equal if every branch is a single operator; dict.fromkeys keeps one of them then.
    by_branch = list(node.leaves())
    orders = dict.fromkeys((tuple(by_branch), tuple(sorted(by_branch, key=levels.__getitem__))))
    rows = (
        SeriesParallelTree(
            "series", order, tuple(SeriesParallelTree("leaf", (name,)) for name in order), True
        )
        for order in orders
    )
    return replace(node, children=children, rows=tuple(rows))


def _tree(
    names: Sequence[str], members: list[int], below: Sequence[int], related: Sequence[int]
) -> SeriesParallelTree:
    own = tuple(names[number] for number in members)
    if len(members) == 1:
        return SeriesParallelTree("leaf", own)
    # The parts of the comparability graph. If it falls apart, no operator of one part is ordered with any of
    # another: the parts are parallel. If its complement falls apart, every operator of one part is ordered
    # with all of another: the parts are in series. If neither does, the order contains an N
    #    a ─> c
    #      ╲          (a before c and d, b before d alone)
    #    b ─> d
    # and no tree shows its branches.
    everyone = sum(1 << number for number in members)
    side_by_side = _components(members, lambda number: related[number] & everyone)
    if len(side_by_side) > 1:
        return SeriesParallelTree(
            "parallel", own, tuple(_tree(names, part, below, related) for part in side_by_side)
        )
    in_a_row = _components(members, lambda number: everyone & ~related[number])
    if len(in_a_row) > 1:
        # Of two such parts, all operators of one come before all of the other.
        # Parts in series: the part that depends on fewer operators comes first.
        in_a_row.sort(key=lambda part: bin(below[part[0]] & everyone).count("1"))
        return SeriesParallelTree(
            "series", own, _flat(_tree(names, part, below, related) for part in in_a_row)
        )
    # Neither kind of cut: the operators in the graph's order, which is topological, are a valid series.
    return SeriesParallelTree(
        "series", own, tuple(SeriesParallelTree("leaf", (name,)) for name in own), forced=True
    )


def _flat(children: Iterator[SeriesParallelTree]) -> tuple[SeriesParallelTree, ...]:
    """Replace a forced series among the children by its own children: a series in a series is one series."""
    found: list[SeriesParallelTree] = []
    for child in children:
        found.extend(child.children if child.forced else (child,))
    return tuple(found)


def _components(members: Sequence[int], near: Callable[[int], int]) -> list[list[int]]:
    """Return the connected components of some operators, in order."""
    left, found = sum(1 << number for number in members), []
    for number in members:
        if not left >> number & 1:
            continue
        # Breadth-first search on bit masks: `edge` has the operators that the last step added.
        part, edge = 0, 1 << number
        while edge:
            part |= edge
            left &= ~edge
            edge, grown = 0, edge
            for one in _bits(grown):
                edge |= near(one) & left
        found.append(list(_bits(part)))
    return found


def _bits(numbers: int) -> Iterator[int]:
    while numbers:
        # The lowest bit that is set, by two's complement.
        low = numbers & -numbers
        yield low.bit_length() - 1
        numbers ^= low
