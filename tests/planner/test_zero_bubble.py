"""Zero bubble: orders are whole and bounded, and the compiled loop says what the simulator says."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings, strategies as st

from kagome.errors import PlanError, ScheduleError
from kagome.planner.stages.coarsen import coarsened
from kagome.planner.stages.devices import Devices, StageCost
from kagome.planner.stages.graphpipe import GraphPipe
from kagome.planner.stages.operator_costs import Operator, OperatorGraph
from kagome.planner.stages.ordering import seconds_of, zero_bubble_of
from kagome.planner.stages.plan import PlannedStage, StagePlan
from kagome.planner.stages.simulate_plan import estimate, trial
from kagome.schedule.actions import ActionKind, from_text, to_text
from kagome.schedule.schedules import Shape, windows, zero_bubble
from kagome.schedule.simulator import simulate


@st.composite
def planned(draw: st.DrawFn) -> tuple[StageCost, StagePlan]:
    """Stages of one or two operators that read each other, in micro-batches of several sizes."""
    operators: list[Operator] = []
    stages: list[PlannedStage] = []
    for number in range(draw(st.integers(1, 5))):
        before = [one.name for one in operators]
        reads = draw(st.lists(st.sampled_from(before), unique=True, max_size=3)) if before else []
        names = []
        for part in range(draw(st.integers(1, 2))):
            forward, backward = draw(st.integers(1, 9)), draw(st.integers(1, 9))
            halves = draw(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)))
            operators.append(
                Operator(
                    f"o{number}.{part}",
                    tuple(reads) if not names else (names[-1],),
                    ((1, float(forward)),),
                    ((1, float(backward)),),
                    weights=draw(st.sampled_from([0, 8])),
                    output=draw(st.sampled_from([0, 1, 30])),
                    first_half=((1, float(halves[0])),) if halves else (),
                    second_half=((1, float(halves[1])),) if halves else (),
                )
            )
            names.append(operators[-1].name)
        size = 2 ** draw(st.integers(0, 3))
        stages.append(PlannedStage(tuple(names), draw(st.integers(1, 2)), size, draw(st.integers(1, 3))))
    batch = 8 * draw(st.integers(1, 3))
    devices = sum(stage.devices for stage in stages)
    cost = StageCost(OperatorGraph(tuple(operators)), Devices(devices, 1e9, 5.0, 0.25), batch)
    return cost, StagePlan(batch, tuple(stages))


@settings(deadline=None, max_examples=100)
@given(drawn=planned())
def test_the_compiled_loop_has_the_simulators_times(drawn: tuple[StageCost, StagePlan]) -> None:
    cost, plan = drawn
    for sequential in (False, True):
        whole = trial(cost, plan, sequential=sequential).seconds
        assert seconds_of(cost, plan, sequential=sequential) == whole
        ordered = zero_bubble_of(cost, plan, sequential=sequential)
        split = trial(cost, ordered, sequential=sequential).seconds
        assert seconds_of(cost, plan, split=True, sequential=sequential) == pytest.approx(split, 1e-12)
        assert estimate(cost, plan, split=True, sequential=sequential) <= split * (1 + 1e-12)
        assert ordered.schedule == "zero-bubble"
        assert StagePlan.from_json(ordered.to_json()) == ordered


@settings(deadline=None, max_examples=100)
@given(drawn=planned())
def test_orders_are_whole_and_within_their_bounds(drawn: tuple[StageCost, StagePlan]) -> None:
    cost, plan = drawn
    ordered = zero_bubble_of(cost, plan)
    shape = plan.shape(cost.graph)
    programs = ordered.programs(shape)
    assert from_text(to_text(programs)) == programs
    window = windows(shape, plan.k)
    for stage, program in enumerate(programs):
        chunks = list(shape.chunks(stage))
        places = {
            kind: [(a.chunk, place) for place, a in enumerate(program) if a.kind is kind]
            for kind in (ActionKind.F, ActionKind.I, ActionKind.W)
        }
        for found in places.values():
            assert [chunk for chunk, _ in found] == chunks, "each once, in order"
        for one, other in ((ActionKind.F, ActionKind.I), (ActionKind.I, ActionKind.W)):
            pairs = zip(places[one], places[other], strict=True)
            assert all(before < after for (_, before), (_, after) in pairs)
        assert not [a for a in program if a.kind is ActionKind.B]
        held = simulate(programs, lambda action: 1.0, size=lambda a: shape.size(a.stage)).held[stage]
        assert held <= max(window)
        ahead = [{"F": 1, "I": -1}.get(letter, 0) for letter in ordered.stages[stage].order]
        assert max(accumulate(ahead)) * shape.size(stage) <= window[stage]


def chain(stages: int, batch: int) -> tuple[StageCost, StagePlan]:
    operators = [
        Operator(f"o{n}", (f"o{n - 1}",) if n else (), ((1, 1.0), (2, 2.0)), ((1, 2.0), (2, 4.0)), weights=8)
        for n in range(stages)
    ]
    cost = StageCost(OperatorGraph(tuple(operators)), Devices(stages, 1e9, 1e9), batch)
    return cost, StagePlan(batch, tuple(PlannedStage((one.name,)) for one in operators))


def test_the_bubble_of_a_chain_is_a_third() -> None:
    """Zero bubble pipelines, H1: (p - 1) (F + I - W) in place of (p - 1) (F + I + W), all three equal."""
    cost, plan = chain(4, 8)
    whole = trial(cost, plan)
    split = trial(cost, zero_bubble_of(cost, plan))
    busy = 8 * 3.0
    assert whole.seconds - busy == 3 * 3.0
    assert split.seconds - busy == 3 * 1.0
    assert whole.run.held == (4, 3, 2, 1)
    assert split.run.held == (4, 4, 4, 4)


def test_measured_halves_count_where_a_stage_reads_another() -> None:
    cost, plan = chain(3, 8)
    # Two walks cost more than one: 1.5 s and 1.25 s, in place of 2 s.
    split = {"first_half": ((1, 1.5), (2, 3.0)), "second_half": ((1, 1.25), (2, 2.5))}
    operators = tuple(replace(one, **split) for one in cost.graph.operators)
    dear = replace(cost, graph=OperatorGraph(operators))
    assert OperatorGraph.from_json(dear.graph.to_json()) == dear.graph
    assert cost.halves(["o1"], 1, 1) == (1.0, 1.0)
    assert dear.halves(["o1"], 1, 1) == (1.5, 1.25)
    # The first stage reads no other one: its backward is one walk.
    assert dear.halves(["o0"], 1, 1) == (0.0, 2.0)
    assert dear.halves(["o0", "o1"], 1, 2) == (0.0, 8.0)
    assert trial(dear, zero_bubble_of(dear, plan)).seconds > trial(dear, plan).seconds
    chosen = GraphPipe(dear, (1, 2), schedules=("kfkb", "zero-bubble")).plan()
    assert chosen.schedule == "kfkb"
    joined = coarsened(dear.graph, 1).graph
    assert joined.operators[0].halves(2) == (9.0, 7.5)
    mixed = OperatorGraph((*operators[:2], cost.graph.operators[2]))
    assert coarsened(mixed, 1).graph.operators[0].halves(1) == (4.0, 3.5)


def test_a_stage_without_memory_does_its_weights_sooner() -> None:
    """The last stage has room for two samples, where the first may hold four."""
    cost, plan = chain(4, 8)
    operators = (*cost.graph.operators[:-1], replace(cost.graph.operators[-1], kept=100))
    tight = replace(cost, graph=OperatorGraph(operators), devices=Devices(4, 4 * 8 + 250.0, 1e9))
    split = trial(tight, zero_bubble_of(tight, plan))
    assert split.run.held[-1] == 2
    assert max(split.memory) <= 4 * 8 + 250.0
    assert trial(cost, zero_bubble_of(cost, plan)).seconds < split.seconds < trial(cost, plan).seconds


def test_the_search_takes_zero_bubble_where_it_is_faster_and_says_why() -> None:
    cost, _ = chain(4, 8)
    whole = GraphPipe(cost, (1, 2)).plan()
    both = GraphPipe(cost, (1, 2), schedules=("kfkb", "zero-bubble")).plan()
    assert (whole.schedule, whole.why, both.schedule) == ("kfkb", "", "zero-bubble")
    assert trial(cost, both).seconds * 1.05 < trial(cost, whole).seconds
    assert f"{trial(cost, both).seconds:.4g} s with zero-bubble" in both.why
    assert f"{trial(cost, whole).seconds:.4g} s with kfkb" in both.why
    # One device has no bubble.
    alone = replace(cost, devices=Devices(1, 1e9, 1e9))
    one = GraphPipe(alone, (1, 2), schedules=("kfkb", "zero-bubble")).plan()
    assert one.schedule == "kfkb"
    assert "kept unless" in one.why
    asked = GraphPipe(alone, (1, 2), schedules=("zero-bubble",)).plan()
    assert asked.schedule == "zero-bubble"


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (("FFIIWW", "FIWFI"), "F and I|W 2 times each"),
        (("FFIIWW", "IFWFIW"), "'I' in place 0"),
        (("FFIIWW", "FWIFIW"), "'W' in place 1"),
        (("FFIIWW", "FIWFIWF"), "'F' in place 6"),
        (("FFIIWW", "FBFB"), "'B' in place 1"),
        (("FFIIWW",), "1 orders"),
    ],
)
def test_orders_that_are_none_are_refused(orders: tuple[str, ...], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        zero_bubble(Shape(2, range(2)), orders)


def test_orders_that_wait_for_each_other_are_found() -> None:
    """The reader needs two micro-batches of its source, which waits for a gradient after the first."""
    shape = Shape(2, range(8), sizes=(4, 8))
    with pytest.raises(ScheduleError, match="waiting for ever"):
        simulate(zero_bubble(shape, ("FIWFIW", "FIW")), lambda action: 1.0)


def test_a_plan_of_an_unknown_field_is_refused() -> None:
    with pytest.raises(PlanError, match="oder"):
        StagePlan.from_json('{"batch": 2, "stages": [{"operators": ["a"], "oder": "FIW"}]}')


@pytest.mark.parametrize(
    "wrong", [{"order": 5}, {"order": ["F", "I", "W"]}, {"micro_batch": "2"}, {"k": None}]
)
def test_a_plan_with_a_field_of_another_type_is_refused(wrong: dict[str, object]) -> None:
    """An order that is a number ended in a TypeError of the program."""
    (name,) = wrong
    with pytest.raises(PlanError, match=f"{name} of a stage"):
        StagePlan.from_json(json.dumps({"batch": 2, "stages": [{"operators": ["a"], **wrong}]}))
