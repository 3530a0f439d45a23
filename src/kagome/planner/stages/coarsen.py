"""Coarsening: merges chains of small operators, so that a search has fewer of them.

Where it sits: between the measured operators and the planners. A plan of the coarse graph is translated back
into one of the fine graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from kagome.planner.stages.operator_costs import Operator, OperatorGraph, Table, at
from kagome.planner.stages.plan import StagePlan
from kagome.planner.stages.series_parallel import SeriesParallelTree, tree_of


@dataclass(frozen=True)
class Coarse:
    """A coarse graph, in which an operator may stand for several of the fine graph.

    Args:
        graph: The coarse graph.
        members: For each operator of the coarse graph, by name, its operators in the fine graph.
    """

    graph: OperatorGraph
    members: Mapping[str, tuple[str, ...]]

    def spelled_out(self, plan: StagePlan) -> StagePlan:
        """Translate a plan of the coarse graph into one of the fine graph."""
        stages = (
            replace(stage, operators=tuple(one for name in stage.operators for one in self.members[name]))
            for stage in plan.stages
        )
        return replace(plan, stages=tuple(stages))


def fused(graph: OperatorGraph, pairs: Iterable[tuple[str, str]]) -> Coarse:
    """Merge operators that must be in one stage, and those that lie on a path between them.

    Args:
        graph: The graph of operators.
        pairs: Pairs of operators that must be in one stage.

    Returns:
        The groups, in topological order.
    """
    place = {operator.name: number for number, operator in enumerate(graph.operators)}
    # A group is named after its last operator in the graph's order.
    whose = {name: name for name in place}

    def join(names: Iterable[str]) -> None:
        groups = {whose[name] for name in names}
        last = max(groups, key=place.__getitem__)
        whose.update({name: last for name, group in whose.items() if group in groups})

    for pair in pairs:
        join(pair)
    # Merging two operators makes a cycle of groups where a path between them leads through others:
    #    a ─> b ─> c   with (a, c) in one group:   {a, c} ─> {b} ─> {a, c}
    # A stage cannot wait for a stage that waits for it, so the whole cycle becomes one group.
    # Each round has fewer groups, so this ends.
    while True:
        # For each group, the groups that it reads.
        before: dict[str, set[str]] = {group: set() for group in whose.values()}
        for operator in graph.operators:
            before[whose[operator.name]] |= {whose[read] for read in operator.reads} - {whose[operator.name]}
        sorter = TopologicalSorter(before)
        try:
            sorter.prepare()
            break
        except CycleError as error:
            join(error.args[1])  # operators after some members of a group and before others
    # Of the groups that are ready, the first in the graph's order comes next, so that a graph without pairs
    # stays as it is. TopologicalSorter alone would give any order.
    operators, ready = list[Operator](), set(sorter.get_ready())
    members = {group: tuple(name for name in place if whose[name] == group) for group in before}
    while ready:
        group = min(ready, key=place.__getitem__)
        operators.append(_joined(graph, group, members[group], whose))
        sorter.done(group)
        ready = ready - {group} | set(sorter.get_ready())
    return Coarse(OperatorGraph(tuple(operators)), members)


def coarsened(graph: OperatorGraph, most: int) -> Coarse:
    """Merge neighbours in a series, the lightest pair first, until there are few enough operators.

    Two operators are neighbours if they are next to each other in a series of the tree, so that all others
    come before both, after both, or beside both, and if the second alone reads the first. A group then sends
    what one operator sends, so a cut carries the same bytes. Branches stay unchanged.

    Args:
        graph: The fine graph.
        most: The most operators wanted; more remain if no two are neighbours.
    """
    rows = list(_rows(tree_of(graph)))
    # Times at the largest measured size; smaller ones are mostly the fixed cost of a call.
    weight = {operator.name: operator.seconds(operator.forward[-1][0]) for operator in graph.operators}
    members: dict[str, tuple[str, ...]] = {o.name: (o.name,) for o in graph.operators}
    # A group has the name of its last member, so `two` names the merged group too.
    while len(members) > most:
        pairs = [
            (weight[one] + weight[two], number, place)
            for number, row in enumerate(rows)
            for place, (one, two) in enumerate(pairwise(row))
            if _alone(graph, members[one], members[two])
        ]
        if not pairs:
            break
        total, number, place = min(pairs)
        one, two = rows[number][place : place + 2]
        rows[number][place : place + 2] = [two]
        members[two], weight[two] = members.pop(one) + members[two], total
    whose = {name: coarse for coarse, names in members.items() for name in names}
    # A group takes the place of its last member: whatever its members read comes before that.
    operators = (
        _joined(graph, operator.name, members[operator.name], whose)
        for operator in graph.operators
        if operator.name in members
    )
    return Coarse(OperatorGraph(tuple(operators)), members)


def _alone(graph: OperatorGraph, one: Sequence[str], two: Sequence[str]) -> bool:
    """Return whether the second group alone reads the outputs of the first."""
    return all(reader in one or reader in two for name in one for reader in graph.readers[name])


def _rows(node: SeriesParallelTree) -> Iterator[list[str]]:
    """Yield each run of leaves that are next to each other in a series."""
    row: list[str] = []
    for child in node.children:
        if node.kind == "series" and child.kind == "leaf":
            row.append(child.names[0])
            continue
        if row:
            yield row
            row = []
        yield from _rows(child)
    if row:
        yield row


def _joined(graph: OperatorGraph, name: str, names: Sequence[str], whose: Mapping[str, str]) -> Operator:
    each = [graph.by_name[one] for one in names]
    # A value that is read within the group alone is not sent.
    given = [one for one in each if any(whose[reader] != name for reader in graph.readers[one.name])]
    reads = dict.fromkeys(whose[read] for one in each for read in one.reads)
    return Operator(
        name,
        tuple(read for read in reads if read != name),
        _sum([one.forward for one in each]),
        _sum([one.backward for one in each]),
        weights=sum(one.weights for one in each),
        output=sum(one.output for one in given),
        kept=sum(one.kept for one in each),
        least=max(one.least for one in each),
        first_half=_halves(each, 0),
        second_half=_halves(each, 1),
    )


def _halves(operators: Sequence[Operator], half: int) -> Table:
    """Return the seconds of a half of all their backwards; () if it was measured of none."""
    # An operator without a measure has its halves by the whole backward.
    sizes = sorted({size for one in operators for size, _ in one.first_half})
    return tuple((size, sum(one.halves(size)[half] for one in operators)) for size in sizes)


def _sum(tables: Sequence[Table]) -> Table:
    # At all sizes of all tables: between two of them every table is linear, and so is the sum.
    sizes = sorted({size for table in tables for size, _ in table})
    return tuple((size, sum(at(table, size) for table in tables)) for size in sizes)
