"""Stage planners: their trees, their plans against brute force, and against each other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kagome.errors import PlanError
from kagome.planner.coarse import coarsened
from kagome.planner.devices import Devices, StageCost
from kagome.planner.downsets import downsets
from kagome.planner.graphpipe import GraphPipe
from kagome.planner.operators import Operator, OperatorGraph
from kagome.planner.pipedream import PipeDream
from kagome.planner.piper import Piper
from kagome.planner.series import Tree, tree_of
from kagome.planner.stageplan import PlannedStage, StagePlan, links_of
from kagome.planner.trial import trial
from kagome.schedule.dag import DagShape, Turns, windows


def operator(name: str, reads: Sequence[str] = (), seconds: float = 1.0, **more: int) -> Operator:
    """An operator whose time goes up with samples from 4 on."""
    table = tuple((size, seconds * max(size, 4) / 12) for size in (1, 2, 4, 8, 16, 32))
    twice = tuple((size, 2 * value) for size, value in table)
    return Operator(name, tuple(reads), table, twice, **{"weights": 8, "output": 4, "kept": 4, **more})


def towers(count: int, depth: int, tail: int, **more: int) -> OperatorGraph:
    """Branches of equal depth, joined, and what follows."""
    found = [
        operator(f"t{t}.{d}", [f"t{t}.{d - 1}"] if d else [], **more)
        for t in range(count)
        for d in range(depth)
    ]
    found.append(operator("join", [f"t{t}.{depth - 1}" for t in range(count)], 0.1, **more))
    for d in range(tail):
        found.append(operator(f"h{d}", [f"h{d - 1}" if d else "join"], **more))
    return OperatorGraph(tuple(found))


def shown(node: Tree) -> str:
    if node.kind == "leaf":
        return node.names[0]
    mark = {"series": "", "parallel": "|"}[node.kind]
    return f"{mark}({' '.join(map(shown, node.children))})"


@pytest.mark.parametrize(
    ("reads", "tree"),
    [
        ({"a": "", "b": "a", "c": "b"}, "(a b c)"),
        ({"a": "", "b": "a", "c": "", "d": "c", "e": "bd"}, "(|((a b) (c d)) e)"),
        ({"a": "", "b": "", "c": "ab", "d": "ab"}, "(|(a b) |(c d))"),
        ({"a": "", "b": "a", "c": "a", "d": "bc", "e": "ad"}, "(a |(b c) d e)"),
        ({"a": "", "b": "", "c": "a", "d": "ab", "e": "cd"}, "(a b c d e)"),  # an N, in a row
    ],
)
def test_trees(reads: dict[str, str], tree: str) -> None:
    found = tree_of(OperatorGraph(tuple(operator(name, tuple(of)) for name, of in reads.items())))
    assert shown(found) == tree
    assert sorted(found.leaves()) == sorted(reads)


# Brute force --------------------------------------------------------------------------------------


def partitions(names: Sequence[str]) -> Iterator[list[list[str]]]:
    """All ways to put names into groups."""
    if not names:
        yield []
        return
    first, *rest = names
    for found in partitions(rest):
        yield [[first], *found]
        for place in range(len(found)):
            yield [*found[:place], [first, *found[place]], *found[place + 1 :]]


def family(node: Tree) -> Iterator[list[list[str]]]:
    """All ways to make stages of a node, as the planner's page says."""
    if node.kind == "leaf":
        yield [list(node.names)]
        return
    for way in (node, *node.rows):
        yield from children(way, tuple(range(len(way.children))))


def children(node: Tree, left: tuple[int, ...]) -> Iterator[list[list[str]]]:
    if not left:
        yield []
        return
    if node.kind == "series":
        taken = [left[: last + 1] for last in range(len(left))]
    else:
        taken = [(left[0], *more) for size in range(len(left)) for more in combinations(left[1:], size)]
    for some in taken:
        stage = [name for child in some for name in node.children[child].names]
        for rest in children(node, tuple(child for child in left if child not in some)):
            yield [stage, *rest]
    for inner in family(node.children[left[0]]) if node.children[left[0]].children else ():
        for rest in children(node, left[1:]):
            yield [*inner, *rest]


def in_order(graph: OperatorGraph, groups: list[list[str]]) -> list[list[str]] | None:
    """Groups, sources first; None if they read each other in a circle."""
    place = {name: number for number, names in enumerate(groups) for name in names}
    needs = [{place[r] for name in names for r in graph.by_name[name].reads} - {number}
             for number, names in enumerate(groups)]  # fmt: skip
    done: list[int] = []
    while len(done) < len(groups):
        ready = [n for n in range(len(groups)) if n not in done and needs[n] <= set(done)]
        if not ready:
            return None
        done.append(ready[0])
    return [groups[number] for number in done]


def series_parallel(graph: OperatorGraph, groups: list[list[str]]) -> bool:
    links = links_of(graph, groups)
    reads = [[str(one) for one, other in links if other == number] for number in range(len(groups))]
    tree = tree_of(OperatorGraph(tuple(operator(str(n), each) for n, each in enumerate(reads))))

    def forced(node: Tree) -> bool:
        return node.forced or any(map(forced, node.children))

    # A row of which each reads the one before is no forced one, whatever skips it.
    return not forced(tree) or all((n, n + 1) in links for n in range(len(groups) - 1))


def brute(cost: StageCost, size: int, stages: Iterable[list[list[str]]]) -> float:
    """The least bottleneck of some stage graphs, on any numbers of devices."""
    best = float("inf")
    for each in stages:
        ordered = in_order(cost.graph, each) if len(each) <= cost.devices.count else None
        if ordered is None:
            continue
        shape = DagShape(cost.batch, (Turns(size),) * len(ordered), links_of(cost.graph, ordered))
        held = windows(shape)
        for devices in product(range(1, cost.devices.count + 1), repeat=len(ordered)):
            if sum(devices) > cost.devices.count or max(devices) > size:
                continue
            if all(cost.memory(names, d, h) <= cost.devices.memory
                   for names, d, h in zip(ordered, devices, held, strict=True)):  # fmt: skip
                slowest = max(
                    cost.per_sample(names, d, size) for names, d in zip(ordered, devices, strict=True)
                )
                best = min(best, slowest)
    return best


def all_series_parallel(graph: OperatorGraph) -> Iterator[list[list[str]]]:
    """All stage graphs that are series-parallel."""
    for groups in partitions([o.name for o in graph.operators]):
        ordered = in_order(graph, groups)
        if ordered is not None and series_parallel(graph, ordered):
            yield ordered


@st.composite
def small(draw: st.DrawFn) -> StageCost:
    """A graph of up to five operators on up to three devices."""
    found: list[Operator] = []
    for number in range(draw(st.integers(2, 5))):
        before = [o.name for o in found]
        reads = draw(st.lists(st.sampled_from(before), unique=True, max_size=2)) if before else []
        found.append(
            operator(
                f"o{number}",
                reads,
                draw(st.sampled_from([0.5, 1.0, 3.0])),
                weights=draw(st.sampled_from([0, 40])),
                kept=draw(st.sampled_from([1, 10])),
            )
        )
    memory = draw(st.sampled_from([1e9, 400.0]))
    return StageCost(OperatorGraph(tuple(found)), Devices(draw(st.integers(1, 3)), memory, 100.0), 16)


@settings(deadline=None, max_examples=150)
@given(cost=small(), size=st.sampled_from([2, 4]))
def test_the_bottleneck_is_the_least_there_is(cost: StageCost, size: int) -> None:
    """Of all stages that the planner's page names; any better one has pieces of several branches."""
    planner = GraphPipe(cost, (size,), tolerance=1e-3)
    least = brute(cost, size, family(planner.tree))
    if least == float("inf"):
        with pytest.raises(PlanError):
            planner.least((size,))
        return
    plan = planner.least((size,))
    assert plan.devices <= cost.devices.count
    for stage, held in zip(plan.stages, windows(plan.shape(cost.graph)), strict=True):
        assert cost.memory(stage.operators, stage.devices, held) <= cost.devices.memory
    assert planner.bottleneck(plan) <= least * (1 + 2e-3)


# Against each other -------------------------------------------------------------------------------


def test_branches_run_at_the_same_time_and_hold_less() -> None:
    """Against the best chain: no slower, and fewer samples in flight."""
    graph = towers(3, 3, 2, weights=4_000)
    cost = StageCost(graph, Devices(6, 1e9, 1e4), 256)
    plan = GraphPipe(cost, (4, 8, 16)).plan()
    found = trial(cost, plan)
    for planner in (PipeDream, Piper):
        chains = [planner(cost, size).plan() for size in (4, 8, 16)]
        chain = min((trial(cost, each, sequential=True) for each in chains), key=lambda t: t.seconds)
        assert found.throughput >= chain.throughput
        assert found.depth <= chain.depth
    assert found.run.bubble < 0.5


def test_chains_of_a_chain_are_alike() -> None:
    """Without branches all three planners find the same bottleneck."""
    cost = StageCost(towers(1, 6, 2), Devices(3, 1e9, 1e3), 64)
    plans = [GraphPipe(cost, (4,), 1e-3).least((4,)), PipeDream(cost, 4).plan(), Piper(cost, 4).plan()]
    each = [GraphPipe(cost, (4,)).bottleneck(plan) for plan in plans]
    assert each == pytest.approx([each[0]] * 3, rel=2e-3)


def test_downsets_are_counted_and_limited() -> None:
    cost = StageCost(towers(3, 4, 0), Devices(2, 1e9, 1e3), 64)
    assert len(downsets(cost, 4, most=1_000).sets) == 5**3 + 1
    with pytest.raises(PlanError, match="100 at most"):
        downsets(cost, 4, most=100)
    with pytest.raises(PlanError, match="no more time"):
        PipeDream(cost, 4, seconds=0.0).plan()


def test_what_fits_nowhere_is_refused_with_both_numbers() -> None:
    cost = StageCost(towers(2, 2, 1, weights=2**30), Devices(2, 2**30, 1e9), 64)
    for planner in (GraphPipe(cost, (4,)), PipeDream(cost, 4), Piper(cost, 4)):
        with pytest.raises(PlanError, match="2 devices of 1 GiB"):
            planner.plan()


def test_a_plan_is_a_file_that_can_be_edited(tmp_path: object) -> None:
    graph = towers(2, 1, 1)
    plan = StagePlan(16, (PlannedStage(("t0.0",), 1, 4), PlannedStage(("t1.0", "join", "h0"), 2, 4, 2)))
    assert StagePlan.from_json(plan.to_json()) == plan
    assert OperatorGraph.from_json(graph.to_json()) == graph
    assert plan.shape(graph).links == ((0, 1),)
    with pytest.raises(PlanError, match="JSON"):
        StagePlan.from_json("{}")
    for stages, words in [
        ((("t0.0",),), "are in none"),
        ((("t0.0", "t0.0"), ("t1.0", "join", "h0")), "stages 0 and 0"),
        ((("join", "h0"), ("t0.0", "t1.0")), "reads 't0.0' in stage 1"),
    ]:
        with pytest.raises(PlanError, match=words):
            StagePlan(16, tuple(PlannedStage(names, 1, 4) for names in stages)).shape(graph)


def test_search_does_not_grow_with_the_ways_to_cut() -> None:
    """Six towers of four have more than fifteen thousand places to cut; the tree has thirty leaves."""
    cost = StageCost(towers(6, 4, 2), Devices(8, 1e9, 1e3), 64)
    begun = time.monotonic()
    assert GraphPipe(cost, (8,)).plan().devices <= 8
    assert time.monotonic() - begun < 30


@settings(deadline=None, max_examples=60)
@given(cost=small(), most=st.integers(1, 4))
def test_what_is_taken_together_costs_what_its_members_do(cost: StageCost, most: int) -> None:
    """And cuts of the coarse graph are cuts of the fine one, with the same bytes."""
    coarse = coarsened(cost.graph, most)
    assert sorted(name for names in coarse.members.values() for name in names) == sorted(cost.graph.by_name)
    other = replace(cost, graph=coarse.graph)
    try:
        plan = GraphPipe(other, (2,)).least((2,))
    except PlanError:
        return
    fine = coarse.spelled_out(plan)
    assert fine.shape(cost.graph) == plan.shape(coarse.graph)
    for one, two in zip(plan.stages, fine.stages, strict=True):
        assert sum(other.compute(one.operators, 1, 2)) == pytest.approx(
            sum(cost.compute(two.operators, 1, 2))
        )
        assert other.graph.crossing(one.operators) == cost.graph.crossing(two.operators)
        assert other.memory(one.operators, 1, 2) == cost.memory(two.operators, 1, 2)
