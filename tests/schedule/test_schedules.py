"""Schedules: golden programs; every generated one runs to its end, holds what it may, and takes its time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from kagome.errors import ScheduleError
from kagome.schedule.actions import ActionKind, Programs, from_text, to_text
from kagome.schedule.schedules import Shape, arrivals, fill_drain, k_forward_k_backward
from kagome.schedule.simulator import simulate

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "fill_drain_3x4_order_2031": fill_drain(Shape(3, (2, 0, 3, 1))),
    "fill_drain_4x2_skip": fill_drain(Shape(4, (0, 1), ((0, 1), (1, 2), (2, 3), (0, 3)))),
    "1f1b_3x5": k_forward_k_backward(Shape(3, (0, 1, 2, 3, 4))),
    "2f2b_3x5": k_forward_k_backward(Shape(3, (0, 1, 2, 3, 4)), 2),
    "1f1b_dag": k_forward_k_backward(Shape(4, (0, 1, 2), ((0, 2), (1, 2), (2, 3)))),
    "fill_drain_4x4_on_2": fill_drain(Shape(4, (0, 1, 2, 3), None, 2)),
    "fill_drain_4x3_on_2_skip": fill_drain(Shape(4, (1, 0, 2), ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3)), 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_golden_programs(name):
    assert to_text(CASES[name]) == (GOLDEN / f"{name}.txt").read_text()
    assert from_text((GOLDEN / f"{name}.txt").read_text()) == CASES[name]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    stages, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    order = tuple(draw(st.permutations(range(chunks))))
    every = list(itertools.combinations(range(stages), 2))
    links = tuple(draw(st.lists(st.sampled_from(every), max_size=6))) if every else ()
    return Shape(stages, order, draw(st.sampled_from([None, links])))


@st.composite
def dealt_shapes(draw: st.DrawFn) -> Shape:
    shape = draw(shapes())
    return replace(shape, ranks=draw(st.integers(1, shape.stages)))


def computed(programs: Programs) -> dict[str, int]:
    return {kind.value: sum(a.kind is kind for p in programs for a in p) for kind in ActionKind}


@given(shapes(), st.integers(1, 4))
def test_every_program_ends_and_does_all_once(shape, k):
    for programs in (fill_drain(shape), k_forward_k_backward(shape, k)):
        run = simulate(programs, lambda action: 1.0, transfer=lambda action: 0.5)
        counts, moved = computed(programs), len(shape.order) * len(shape.all_links)
        assert counts["F"] == counts["B"] == len(shape.order) * shape.stages
        assert counts["SEND_F"] == counts["RECV_F"] == counts["SEND_B"] == counts["RECV_B"] == moved
        assert run.seconds >= 2 * len(shape.order)
        assert 0 <= run.bubble < 1


@given(shapes())
def test_backward_is_the_reverse_of_forward(shape):
    for program in fill_drain(shape):
        forward = [a.chunk for a in program if a.kind is ActionKind.F]
        assert [a.chunk for a in program if a.kind is ActionKind.B] == forward[::-1]


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_what_a_chain_holds_and_how_long_it_takes(stages, chunks, k):
    shape = Shape(stages, tuple(range(chunks)))
    filled = simulate(fill_drain(shape), lambda action: 1.0)
    assert filled.held == (chunks,) * stages
    assert filled.seconds == 2 * (chunks + stages - 1)
    assert filled.bubble == pytest.approx((stages - 1) / (chunks + stages - 1))
    turned = simulate(k_forward_k_backward(shape, k), lambda action: 1.0)
    assert turned.held == tuple(min(chunks, k * (stages - stage)) for stage in range(stages))
    assert turned.seconds >= filled.seconds or k > 1
    if k == 1:
        assert turned.seconds == filled.seconds


@given(dealt_shapes())
def test_stages_dealt_to_fewer_ranks_end_and_do_all_once(shape):
    programs = fill_drain(shape)
    run = simulate(programs, lambda action: 1.0, transfer=lambda action: 0.5)
    assert len(programs) == len(run.spans) == shape.homes
    assert run.seconds >= 2 * len(shape.order) * max(len(shape.held(r)) for r in range(shape.homes))
    for rank, program in enumerate(programs):
        assert {action.stage for action in program} == set(shape.held(rank))
        chunks = {a.chunk for a in program if a.kind is ActionKind.B}
        assert chunks == set(shape.order)
        forward = [(a.stage, a.chunk) for a in program if a.kind is ActionKind.F]
        back = [(a.stage, a.chunk) for a in program if a.kind is ActionKind.B]
        assert back == forward[::-1]
    for stage in range(shape.stages):  # rows of chunks that came before are fresh in each stage
        done = [
            a.chunk
            for a in fill_drain(shape)[stage % shape.homes]
            if (a.stage, a.kind) == (stage, ActionKind.F)
        ]
        assert done == list(shape.order)


@given(dealt_shapes())
def test_what_comes_from_a_rank_is_waited_for_in_the_order_in_which_it_is_sent(shape):
    programs = fill_drain(shape)
    for rank, program in enumerate(programs):
        found = arrivals(programs, rank)
        assert sorted(map(str, found)) == sorted(str(a) for a in program if a.kind.receives)
        for other, sender in enumerate(programs):
            come = [a for a in found if a.other % shape.homes == other]
            assert come == [a.counterpart for a in sender if a.kind.sends and a.other % shape.homes == rank]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_several_stages_a_rank_fill_in_the_time_of_one_of_them(ranks, each, more):
    """The bubble is (ranks - 1) / (chunks x stages of a rank + ranks - 1), with a chunk a rank at least."""
    chunks = ranks + more
    shape = Shape(ranks * each, tuple(range(chunks)), None, ranks)
    run = simulate(fill_drain(shape), lambda action: 1.0)
    assert run.bubble == pytest.approx((ranks - 1) / (chunks * each + ranks - 1))
    assert run.held == (chunks * each,) * ranks


def test_what_stages_of_one_rank_give_each_other_takes_no_time():
    shape = Shape(4, (0,), ((0, 2), (2, 3)), 2)
    run = simulate(fill_drain(shape), lambda action: 1.0, transfer=lambda action: 10.0)
    takes = {str(span.action): span.end - span.begin for span in run.transfers}
    assert takes == {"0SEND_F0>2": 0.0, "2SEND_F0": 10.0, "3SEND_B0": 10.0, "2SEND_B0>0": 0.0}


def test_six_stages_hold_six_to_one_in_a_chain_and_at_most_three_as_a_dag():
    order = tuple(range(12))
    chain = simulate(k_forward_k_backward(Shape(6, order)), lambda action: 1.0)
    assert chain.held == (6, 5, 4, 3, 2, 1)
    links = ((0, 4), (1, 4), (2, 4), (3, 4), (4, 5))
    dag = simulate(k_forward_k_backward(Shape(6, order, links)), lambda action: 1.0)
    assert dag.held == (3, 3, 3, 3, 2, 1)
    assert dag.seconds < chain.seconds


@pytest.mark.parametrize(
    ("stages", "order", "links"),
    [
        (0, (0,), None),
        (2, (), None),
        (2, (0, 0), None),
        (2, (-1,), None),
        (2, (0,), ((1, 0),)),
        (2, (0,), ((0, 2),)),
    ],
)
def test_impossible_shapes_are_refused(stages, order, links):
    with pytest.raises(ScheduleError, match=r"; got (.* -> |.* stages|the order)"):
        Shape(stages, order, links)


def test_impossible_settings_are_refused():
    with pytest.raises(ScheduleError, match="got 0"):
        k_forward_k_backward(Shape(2, (0,)), 0)
    with pytest.raises(ScheduleError, match="one stage a rank"):
        k_forward_k_backward(Shape(4, (0,), None, 2))
    for ranks in (0, 3):
        with pytest.raises(ScheduleError, match="a stage for each rank"):
            Shape(2, (0,), None, ranks)
