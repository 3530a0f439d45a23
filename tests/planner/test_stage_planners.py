"""Stage planners: their trees, their plans against brute force, and against each other."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kagome.errors import PlanError
from kagome.planner.stages.coarsen import coarsened, fused
from kagome.planner.stages.devices import Devices, StageCost
from kagome.planner.stages.graphpipe import GraphPipe
from kagome.planner.stages.operator_costs import Operator, OperatorGraph
from kagome.planner.stages.operator_groups import GroupFacts
from kagome.planner.stages.plan import PlannedStage, StagePlan
from kagome.planner.stages.series_parallel import SeriesParallelTree, tree_of
from kagome.planner.stages.simulate_plan import estimate, longer_turns, trial
from kagome.schedule.schedules import Shape, windows

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from graphpipe.baselines.bapipe import BaPipe
from graphpipe.baselines.downsets import downsets, per_sample, prefixes
from graphpipe.baselines.pipedream import PipeDream
from graphpipe.baselines.piper import Piper


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


def shown(node: SeriesParallelTree) -> str:
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


Stages = list[tuple[str, ...]]
Links = set[tuple[tuple[str, ...], tuple[str, ...]]]


def family(node: SeriesParallelTree) -> Iterator[tuple[Stages, Links]]:
    """All ways to make stages of a node, as the planner's page says, and which it counts as next in a row."""
    if node.kind == "leaf":
        yield [node.names], set()
        return
    for way in (node, *node.rows):
        yield from children(way, tuple(range(len(way.children))))


def children(node: SeriesParallelTree, left: tuple[int, ...]) -> Iterator[tuple[Stages, Links]]:
    if not left:
        yield [], set()
        return
    row = node.kind == "series"
    if row:
        taken = [left[: last + 1] for last in range(len(left))]
    else:
        taken = [(left[0], *more) for size in range(len(left)) for more in combinations(left[1:], size)]
    for some in taken:
        stage = tuple(name for child in some for name in node.children[child].names)
        for rest in children(node, tuple(child for child in left if child not in some)):
            yield beside_or_before(([stage], set()), rest, row=row)
    for inner in family(node.children[left[0]]) if node.children[left[0]].children else ():
        for rest in children(node, left[1:]):
            yield beside_or_before(inner, rest, row=row)


def beside_or_before(
    one: tuple[Stages, Links], two: tuple[Stages, Links], *, row: bool
) -> tuple[Stages, Links]:
    """In a row the last stages of one come before the first of the other, whether these read them or not."""
    last = [stage for stage in one[0] if all(stage != source for source, _ in one[1])]
    first = [stage for stage in two[0] if all(stage != reader for _, reader in two[1])]
    return one[0] + two[0], one[1] | two[1] | (set(product(last, first)) if row else set())


def in_order(graph: OperatorGraph, stages: Stages, row: Links) -> tuple[Stages, set[tuple[int, int]]] | None:
    """Stages, sources first, and their links; None if they need each other in a circle."""
    place = {stage: number for number, stage in enumerate(stages)}
    of = {name: number for number, names in enumerate(stages) for name in names}
    reads = {(of[r], of[o.name]) for o in graph.operators for r in o.reads if of[r] != of[o.name]}
    links = reads | {(place[one], place[two]) for one, two in row}
    done: list[int] = []
    while len(done) < len(stages):
        ready = [
            n for n in range(len(stages)) if n not in done and {s for s, t in links if t == n} <= set(done)
        ]
        if not ready:
            return None
        done.append(ready[0])
    return [stages[number] for number in done], {(done.index(one), done.index(two)) for one, two in links}


def brute(cost: StageCost, sizes: Sequence[int], ways: Iterable[tuple[Stages, Links]]) -> float:
    """The least bottleneck of some stage graphs, on any numbers of devices, in any micro-batches."""
    best = float("inf")
    for stages, row in ways:
        found = in_order(cost.graph, stages, row) if len(stages) <= cost.devices.count else None
        if found is None:
            continue
        ordered, links = found
        for chosen in product(sizes, repeat=len(ordered)):
            readers = [[chosen[two] for one, two in links if one == stage] for stage in range(len(ordered))]
            k = [max(1, max(reads, default=0) // size) for size, reads in zip(chosen, readers, strict=True)]
            shape = Shape(len(ordered), range(cost.batch), tuple(sorted(links)), sizes=chosen)
            held = windows(shape, k)
            for devices in product(range(1, cost.devices.count + 1), repeat=len(ordered)):
                each = list(zip(ordered, devices, chosen, held, strict=True))
                if sum(devices) > cost.devices.count or not all(cost.fits(*one[:3]) for one in each):
                    continue
                if all(cost.memory(names, d, h) <= cost.devices.memory for names, d, _, h in each):
                    best = min(best, max(cost.per_sample(names, d, size) for names, d, size, _ in each))
    return best


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
                least=draw(st.sampled_from([1, 1, 2, 3])),
            )
        )
    memory = draw(st.sampled_from([1e9, 400.0]))
    return StageCost(OperatorGraph(tuple(found)), Devices(draw(st.integers(1, 3)), memory, 100.0), 16)


@settings(deadline=None, max_examples=150)
@given(cost=small(), sizes=st.sampled_from([(2,), (4,), (2, 4)]))
def test_the_bottleneck_is_the_least_there_is(cost: StageCost, sizes: tuple[int, ...]) -> None:
    """Of all stages that the planner's page names; any better one has pieces of several branches."""
    planner = GraphPipe(cost, sizes, tolerance=1e-3)
    least = brute(cost, sizes, family(planner.tree))
    if least == float("inf"):
        with pytest.raises(PlanError):
            planner.least(sizes)
        return
    plan = planner.least(sizes)
    assert plan.devices <= cost.devices.count
    for stage, held in zip(plan.stages, windows(plan.shape(cost.graph), plan.k), strict=True):
        assert cost.memory(stage.operators, stage.devices, held) <= cost.devices.memory
        assert cost.fits(stage.operators, stage.devices, stage.micro_batch)
    assert planner.bottleneck(plan) <= least * (1 + 2e-3)


def test_devices_without_use_do_not_thin_a_replica() -> None:
    """The slowest stage would take the device that is left, but for its norm, which needs two samples."""
    found = [operator("o0", (), 0.5, weights=0), operator("o1", ["o0"], 9.0, weights=0, least=2)]
    cost = StageCost(OperatorGraph(tuple(found)), Devices(3, 1e9, 1e9), 8)
    for least, devices in ((1, (1, 2)), (2, (2, 1))):
        graph = OperatorGraph((found[0], replace(found[1], least=least)))
        plan = GraphPipe(replace(cost, graph=graph), (2,)).whole()
        assert tuple(stage.devices for stage in plan.stages) == devices
    with pytest.raises(PlanError, match="got work for 3"):
        GraphPipe(replace(cost, devices=Devices(4, 1e9, 1e9)), (2,)).whole()


def test_a_stage_is_halved_where_none_can_take_the_device_that_is_left() -> None:
    """A small operator stood with the norm behind it, replicas of which need two samples each."""
    found = [
        operator("o0", (), 0.01, weights=0, output=10**9),  # a cut behind it is dear
        operator("o1", ["o0"], 9.0, weights=0, least=2),
        operator("o2", ["o1"], 9.0, weights=0),
    ]
    graph = OperatorGraph(tuple(found))
    three = GraphPipe(StageCost(graph, Devices(3, 1e9, 1e9), 4), (2,)).whole()
    assert [(stage.operators, stage.devices) for stage in three.stages] == [(("o0", "o1"), 1), (("o2",), 2)]
    cost = StageCost(graph, Devices(4, 1e9, 1e9), 4)
    four = GraphPipe(cost, (2,)).whole()
    assert [(stage.operators, stage.devices) for stage in four.stages] == [
        (("o0",), 1),
        (("o1",), 1),
        (("o2",), 2),
    ]
    four.shape(graph)


def test_no_half_is_made_that_a_device_cannot_hold() -> None:
    """The first half holds a micro-batch more than the stage did."""
    found = [operator(name, (), 1.0, weights=0, kept=10, least=2) for name in ("o0",)]
    found += [operator("o1", ["o0"], 1.0, weights=0, kept=10, least=2)]
    graph = OperatorGraph(tuple(found))
    plan = StagePlan(8, (PlannedStage(("o0", "o1"), 1, 2),))
    halved = StagePlan(8, (PlannedStage(("o0",), 1, 2), PlannedStage(("o1",), 1, 2)))
    held = windows(halved.shape(graph), halved.k)
    roomy = StageCost(graph, Devices(2, 1e9, 1e9), 8)
    most = max(roomy.memory(s.operators, 1, samples) for s, samples in zip(halved.stages, held, strict=True))
    assert GraphPipe(replace(roomy, devices=Devices(2, most, 1e9)), (2,))._longer(plan) == halved
    assert GraphPipe(replace(roomy, devices=Devices(2, most - 1, 1e9)), (2,))._longer(plan) is None


@settings(deadline=None, max_examples=60)
@given(cost=small(), count=st.integers(1, 8))
def test_a_whole_plan_has_all_devices(cost: StageCost, count: int) -> None:
    cost = replace(cost, devices=replace(cost.devices, memory=1e15, count=count))
    if sum(4 // each.least for each in cost.graph.operators) < count:
        with pytest.raises(PlanError, match="a plan with work for"):
            GraphPipe(cost, (4,)).whole()
        return
    plan = GraphPipe(cost, (4,)).whole()
    assert plan.devices == cost.devices.count
    plan.shape(cost.graph)
    assert all(cost.fits(stage.operators, stage.devices, stage.micro_batch) for stage in plan.stages)


@settings(deadline=None, max_examples=60)
@given(cost=small(), data=st.data())
def test_what_cannot_be_apart_is_in_one_stage(cost: StageCost, data: st.DataObject) -> None:
    """Groups stand behind those that they read, and have all that is between their members."""
    names = list(cost.graph.by_name)
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=3))
    coarse = fused(cost.graph, pairs)
    assert sorted(name for group in coarse.members.values() for name in group) == sorted(names)
    home = {name: group for group, members in coarse.members.items() for name in members}
    assert all(home[one] == home[other] for one, other in pairs)
    stages = tuple(PlannedStage(coarse.members[o.name], 1, 2) for o in coarse.graph.operators)
    assert (
        StagePlan(16, stages).shape(cost.graph).links
        == StagePlan(16, tuple(PlannedStage((o.name,), 1, 2) for o in coarse.graph.operators))
        .shape(coarse.graph)
        .links
    )  # no stage reads a later one


def test_nothing_more_is_taken_together_than_must_be() -> None:
    row = [operator(name, [*before]) for name, before in (("a", ""), ("b", "a"), ("c", "b"), ("d", "a"))]
    groups = fused(OperatorGraph((*row, operator("e", ["c", "d"]))), [("a", "c")]).members.values()
    assert sorted(groups) == [("a", "b", "c"), ("d",), ("e",)]


def test_devices_that_memory_asks_for_are_not_too_slow() -> None:
    """Three operators fit two devices alone, on which the sum of gradients makes them slower than on one."""
    found = [
        operator("o0", (), 0.5, weights=40, kept=1),
        operator("o1", (), 0.5, weights=40, kept=10),
        operator("o2", (), 0.5, weights=0, kept=1),
        operator("o3", ("o0", "o1"), 1.0, weights=0, kept=1),
        operator("o4", (), 0.5, weights=0, kept=1),
    ]
    cost = StageCost(OperatorGraph(tuple(found)), Devices(3, 400.0, 100.0), 16)
    both = ("o0", "o1", "o2")
    assert cost.memory(both, 1, 8) > 400.0 >= cost.memory(both, 2, 8)  # two micro-batches in flight
    assert cost.per_sample(both, 2, 4) > cost.per_sample(both, 1, 4)
    planner = GraphPipe(cost, (4,), tolerance=1e-3)
    assert planner.bottleneck(planner.least((4,))) == pytest.approx(brute(cost, (4,), family(planner.tree)))


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


def test_the_least_bottleneck_is_not_always_the_fastest() -> None:
    """Twelve devices make stages of single operators that take long to fill: a coarser plan is faster."""
    cost = StageCost(towers(3, 6, 2), Devices(12, 1e9, 1e3), 64)
    planner = GraphPipe(cost, (4, 8, 16))
    least = max(trial(cost, planner.least((size,))).throughput for size in planner.sizes)
    assert trial(cost, planner.plan()).throughput > 1.02 * least


def test_chains_of_a_chain_are_alike() -> None:
    """Without branches all three planners find the same bottleneck."""
    cost = StageCost(towers(1, 6, 2), Devices(3, 1e9, 1e3), 64)
    plans = [GraphPipe(cost, (4,), 1e-3).least((4,)), PipeDream(cost, 4).plan(), Piper(cost, 4).plan()]
    each = [GraphPipe(cost, (4,)).bottleneck(plan) for plan in plans]
    assert each == pytest.approx([each[0]] * 3, rel=2e-3)


@settings(deadline=None, max_examples=80)
@given(cost=small(), micro_batch=st.sampled_from([2, 4]))
def test_bapipe_balances_stages_of_one_width(cost: StageCost, micro_batch: int) -> None:
    """No cut of the operators' order into equal widths has a smaller bottleneck."""
    names = [operator.name for operator in cost.graph.operators]
    sets, count = prefixes(cost, micro_batch), cost.devices.count
    least = math.inf
    for stages in range(1, min(count, len(names)) + 1):
        width = count // stages
        if count % stages or width > micro_batch:
            continue
        for cuts in combinations(range(1, len(names)), stages - 1):
            ends = (0, *cuts, len(names))
            slowest = 0.0
            for stage, (inner, outer) in enumerate(pairwise(ends)):
                held = min((stages - stage) * micro_batch, cost.batch)
                if cost.memory(names[inner:outer], width, held) > cost.devices.memory:
                    slowest = math.inf
                (seconds,) = per_sample(cost, sets, np.array([inner]), outer, width, micro_batch)
                slowest = max(slowest, float(seconds))
            least = min(least, slowest)
    if least == math.inf:
        with pytest.raises(PlanError):
            BaPipe(cost, micro_batch).plan()
        return
    plan = BaPipe(cost, micro_batch).plan()
    assert [name for stage in plan.stages for name in stage.operators] == names
    assert len({stage.devices for stage in plan.stages}) == 1
    ends = np.cumsum([0, *(len(stage.operators) for stage in plan.stages)])
    found = [
        float(per_sample(cost, sets, np.array([inner]), int(outer), stage.devices, micro_batch)[0])
        for stage, (inner, outer) in zip(plan.stages, pairwise(ends), strict=True)
    ]
    assert max(found) == pytest.approx(least)


def test_downsets_are_counted_and_limited() -> None:
    cost = StageCost(towers(3, 4, 0), Devices(2, 1e9, 1e3), 64)
    assert len(downsets(cost, 4, most=1_000).sets) == 5**3 + 1
    with pytest.raises(PlanError, match="100 places to cut at most"):
        downsets(cost, 4, most=100)
    with pytest.raises(PlanError, match="no more time"):
        PipeDream(cost, 4, seconds=0.0).plan()


def test_what_fits_nowhere_is_refused_with_both_numbers() -> None:
    cost = StageCost(towers(2, 2, 1, weights=2**30), Devices(2, 2**30, 1e9), 64)
    for planner in (GraphPipe(cost, (4,)), PipeDream(cost, 4), Piper(cost, 4), BaPipe(cost, 4)):
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
        ((("t0.0",),), "in none"),
        ((("t0.0", "t0.0"), ("t1.0", "join", "h0")), "stages 0 and 0"),
        ((("join", "h0"), ("t0.0", "t1.0")), "reads 't0.0' in stage 1"),
    ]:
        with pytest.raises(PlanError, match=words):
            StagePlan(16, tuple(PlannedStage(names, 1, 4) for names in stages)).shape(graph)


def test_search_does_not_grow_with_the_ways_to_cut() -> None:
    """Six towers of five have more than 46,000 places to cut; few stages of them are looked at."""
    cost = StageCost(towers(6, 5, 2), Devices(8, 1e9, 1e3), 64)
    planner = GraphPipe(cost, (8,))
    assert planner.plan().devices <= 8
    evaluated = sum(len(groups.members) for groups in planner.facts._groups.values())
    assert len(downsets(cost, 8, most=100_000).sets) > 46_000 > 20 * evaluated


@settings(deadline=None, max_examples=60)
@given(cost=small())
def test_groups_cost_what_stages_do(cost: StageCost) -> None:
    """All of a node's groups at once, as one stage after the other is counted."""
    facts, sizes = GroupFacts(cost, (2, 4)), (2, 4)
    tree = tree_of(cost.graph)
    for node in (tree, *tree.rows, *tree.children):
        groups = facts.groups(node)
        for place in range(len(groups.members)):
            names = groups.names(place)
            assert groups.fixed[place] == cost.memory(names, 1, 0)
            assert groups.fixed[place] + groups.kept[place] == cost.memory(names, 1, 1)
            for size, row in zip(sizes, groups.seconds[place], strict=True):
                for devices, seconds in enumerate(row, start=1):
                    fits = cost.fits(names, devices, size)
                    alone = cost.per_sample(names, devices, size) if fits else math.inf
                    assert seconds == pytest.approx(alone)


@settings(deadline=None, max_examples=100)
@given(cost=small(), sizes=st.sampled_from([(2,), (4,), (2, 4)]), k=st.integers(1, 3), chain=st.booleans())
def test_an_estimate_is_never_above_a_trial(
    cost: StageCost, sizes: tuple[int, ...], k: int, chain: bool
) -> None:
    try:
        plan = GraphPipe(cost, sizes).least(sizes)
    except PlanError:
        return
    plan = replace(plan, stages=tuple(replace(stage, k=k * stage.k) for stage in plan.stages))
    found = trial(cost, plan, sequential=chain).seconds
    assert estimate(cost, plan, sequential=chain) <= found * (1 + 1e-9)


def test_an_estimate_is_near_a_trial() -> None:
    """Where links are slow too, and where windows make stages wait."""
    for bandwidth, size in product((1e1, 1e2, 1e4), (4, 16)):
        cost = StageCost(towers(3, 4, 2), Devices(8, 1e9, bandwidth), 256)
        plan = GraphPipe(cost, (size,)).least((size,))
        assert estimate(cost, plan) > 0.85 * trial(cost, plan).seconds


def test_more_samples_are_in_flight_where_messages_take_long_and_memory_allows() -> None:
    graph = towers(3, 4, 2)
    roomy = StageCost(graph, Devices(8, 1e9, 8.0), 256)
    plan = GraphPipe(roomy, (4,)).plan()
    assert max(stage.k for stage in plan.stages) > 1
    once = replace(plan, stages=tuple(replace(stage, k=1) for stage in plan.stages))
    assert trial(roomy, plan).seconds < 0.9 * trial(roomy, once).seconds
    held = max(trial(roomy, once).memory)
    tight = StageCost(graph, Devices(8, held, 8.0), 256)
    for _, one in longer_turns(tight, once):
        assert max(trial(tight, one).memory) <= held
    quick = StageCost(graph, Devices(8, 1e9, 1e9), 256)
    assert max(stage.k for stage in GraphPipe(quick, (4,)).plan().stages) == 1


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
        assert other.graph.boundary_bytes(one.operators) == cost.graph.boundary_bytes(two.operators)
        assert other.memory(one.operators, 1, 2) == cost.memory(two.operators, 1, 2)


def test_what_others_read_too_is_not_taken_together() -> None:
    """A group would give away two outputs, of which a stage that reads one would be told both."""
    first = [operator("a", [], 1.0), operator("b", ["a"], 1.0)]
    rest = [operator("c", ["b"], 1.0), operator("d", ["c", "a"], 1.0)]
    members = coarsened(OperatorGraph((*first, *rest)), 2).members.values()
    assert sorted(members) == [("a",), ("b", "c", "d")]
    alone = coarsened(OperatorGraph((*first, operator("c", ["b"], 1.0))), 1).members
    assert list(alone.values()) == [("a", "b", "c")]


def test_operators_measured_at_other_sizes_are_added_at_their_own() -> None:
    """Rows were added place by place, under the first operator's sizes."""
    one = Operator("one", (), ((1, 1.0), (4, 4.0)), ((1, 2.0), (4, 8.0)))
    two = Operator("two", ("one",), ((2, 10.0), (8, 40.0)), ((2, 20.0), (8, 80.0)))
    coarse = coarsened(OperatorGraph((one, two)), 1)
    (both,) = coarse.graph.operators
    for samples in (1, 2, 3, 4, 6, 8, 16):
        assert both.seconds(samples) == pytest.approx(one.seconds(samples) + two.seconds(samples))
