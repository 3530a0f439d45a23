"""Simulate: times by hand, links that are busy, memory by size, and deadlock shown with an arrow."""

from __future__ import annotations

import pytest

from kagome.errors import ScheduleError
from kagome.schedule.actions import ActionKind, from_text
from kagome.schedule.schedules import Shape, fill_drain
from kagome.schedule.simulator import simulate


def test_times_by_hand():
    programs = fill_drain(Shape(2, (0, 1)))
    cost = {(0, ActionKind.F): 2.0, (0, ActionKind.B): 3.0, (1, ActionKind.F): 1.0, (1, ActionKind.B): 4.0}
    run = simulate(programs, lambda a: cost[a.stage, a.kind], transfer=lambda a: 0.5)
    found = [(str(s.action), s.begin, s.end) for s in run.spans[1] if s.action.kind.computes]
    assert found == [("1F0", 2.5, 3.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 9.5), ("1B0", 9.5, 13.5)]
    found = [(str(s.action), s.begin, s.end) for s in run.spans[0] if s.action.kind.computes]
    assert found == [("0F0", 0, 2), ("0F1", 2, 4), ("0B1", 10, 13), ("0B0", 14, 17)]
    assert run.seconds == 17
    assert run.bubble == pytest.approx(1 - 20 / 34)
    assert run.imbalance == 0


def test_a_link_carries_one_message_after_the_other():
    programs = from_text("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0\n")
    run = simulate(programs, lambda a: 1.0, transfer=lambda a: 5.0)
    assert [(s.begin, s.end) for s in run.transfers] == [(1, 6), (6, 11)]
    assert run.spans[1][-1].begin == 11


def test_memory_is_counted_from_the_first_forward_to_the_last_backward():
    programs = from_text("0F0 0F1 0B1 0B0 0F2 0B2\n")
    sizes = {0: 3.0, 1: 5.0, 2: 7.0}
    assert simulate(programs, lambda a: 1.0, size=lambda a: sizes[a.chunk]).held == (8,)


def test_deadlock_is_shown_with_an_arrow_at_each_waiting_action():
    programs = from_text("0F0 0RECV_B0 0SEND_F0\n1RECV_F0 1SEND_B0\n2F0\n")
    with pytest.raises(ScheduleError) as caught:
        simulate(programs, lambda a: 1.0)
    text = str(caught.value)
    assert "2 waiting for ever" in text
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "stage 0 waits at 0RECV_B0" in line)
    assert lines[at + 1][lines[at + 2].index("^") :].startswith("0RECV_B0")


def test_nothing_takes_no_time():
    run = simulate([(), ()], lambda a: 1.0)
    assert (run.seconds, run.bubble, run.imbalance) == (0, 0, 0)
