"""Coarse: chains of small operators taken together, so that a search has fewer of them.

Where it sits: between measured operators and the planners; a plan of the coarse graph is spelled out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from kagome.planner.stages.operator_costs import Operator, OperatorGraph
from kagome.planner.stages.plan import StagePlan
from kagome.planner.stages.series_parallel import SeriesParallelTree, tree_of


@dataclass(frozen=True)
class Coarse:
    """A graph of which some operators stand for several.

    Args:
        graph: The coarse one.
        members: Operators of the fine one, by the coarse one's names.
    """

    graph: OperatorGraph
    members: Mapping[str, tuple[str, ...]]

    def spelled_out(self, plan: StagePlan) -> StagePlan:
        """A plan of the coarse graph as one of the fine graph."""
        stages = (
            replace(stage, operators=tuple(one for name in stage.operators for one in self.members[name]))
            for stage in plan.stages
        )
        return replace(plan, stages=tuple(stages))


def fused(graph: OperatorGraph, pairs: Iterable[tuple[str, str]]) -> Coarse:
    """Take operators together that one stage must have, with all that would be before and behind them.

    Args:
        graph: The operators.
        pairs: Two each that cannot be apart.

    Returns:
        Groups in an order in which those that are read come first.
    """
    place = {operator.name: number for number, operator in enumerate(graph.operators)}
    whose = {name: name for name in place}

    def join(names: Iterable[str]) -> None:
        groups = {whose[name] for name in names}
        last = max(groups, key=place.__getitem__)
        whose.update({name: last for name, group in whose.items() if group in groups})

    for pair in pairs:
        join(pair)
    while True:
        before: dict[str, set[str]] = {group: set() for group in whose.values()}
        for operator in graph.operators:
            before[whose[operator.name]] |= {whose[read] for read in operator.reads} - {whose[operator.name]}
        sorter = TopologicalSorter(before)
        try:
            sorter.prepare()
            break
        except CycleError as error:
            join(error.args[1])  # what is behind some of a group and before others of it
    operators, ready = list[Operator](), set(sorter.get_ready())
    members = {group: tuple(name for name in place if whose[name] == group) for group in before}
    while ready:
        group = min(ready, key=place.__getitem__)
        operators.append(_joined(graph, group, members[group], whose))
        sorter.done(group)
        ready = ready - {group} | set(sorter.get_ready())
    return Coarse(OperatorGraph(tuple(operators)), members)


def coarsened(graph: OperatorGraph, most: int) -> Coarse:
    """Take neighbours in a row together, the lightest pair first, until there are few enough.

    Two operators are neighbours if they stand next to each other in a row of the tree, so that all others
    come before both, after both, or beside both, and if nothing but the second reads the first: a group gives
    away what one operator does, so a cut sends the same bytes. Branches stay as they are.

    Args:
        graph: The fine graph.
        most: Operators that are wanted; more stay where no two are neighbours.
    """
    rows = list(_rows(tree_of(graph)))
    weight = {operator.name: operator.seconds(operator.forward[-1][0]) for operator in graph.operators}
    members: dict[str, tuple[str, ...]] = {o.name: (o.name,) for o in graph.operators}
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
    # A group stands where its last member stood: what any of them reads comes before all of them.
    operators = (
        _joined(graph, operator.name, members[operator.name], whose)
        for operator in graph.operators
        if operator.name in members
    )
    return Coarse(OperatorGraph(tuple(operators)), members)


def _alone(graph: OperatorGraph, one: Sequence[str], two: Sequence[str]) -> bool:
    """Whether what one group gives away goes to another alone."""
    return all(reader in one or reader in two for name in one for reader in graph.readers[name])


def _rows(node: SeriesParallelTree) -> Iterator[list[str]]:
    """Leaves that stand next to each other in a row."""
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
    )


def _sum(tables: Sequence[tuple[tuple[int, float], ...]]) -> tuple[tuple[int, float], ...]:
    return tuple((rows[0][0], sum(seconds for _, seconds in rows)) for rows in zip(*tables, strict=True))
