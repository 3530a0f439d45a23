"""Actions: text and object are one; what is no action is refused; an error points at its action."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kagome.errors import ScheduleError
from kagome.schedule.actions import Action, ActionKind, from_text, pairs, parse, pointed, to_text

NUMBERS = st.integers(0, 30)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(ActionKind))
    stage, chunk = draw(NUMBERS), draw(NUMBERS)
    if kind.computes:
        return Action(stage, kind, chunk)
    later = (kind in (ActionKind.SEND_F, ActionKind.RECV_B)) or stage == 0
    if stage == 0 and kind in (ActionKind.RECV_F, ActionKind.SEND_B):
        stage = 1
        later = False
    peer = draw(st.integers(stage + 1, stage + 9) if later else st.integers(0, stage - 1))
    return Action(stage, kind, chunk, peer)


@given(actions())
def test_text_and_action_are_one(action):
    assert parse(str(action)) == action
    if not action.kind.computes:
        assert action.counterpart.counterpart == action
        assert action.counterpart.kind.sends != action.kind.sends


@given(st.lists(actions(), max_size=6))
def test_programs_are_written_a_line_a_stage(found):
    programs = tuple(tuple(a for a in found if a.stage == stage) for stage in range(31))
    assert from_text(to_text(programs)) == programs


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, ActionKind.F, 0)),
        ("1B3", Action(1, ActionKind.B, 3)),
        ("0SEND_F2", Action(0, ActionKind.SEND_F, 2)),
        ("0SEND_F2>1", Action(0, ActionKind.SEND_F, 2)),
        ("0SEND_F2>3", Action(0, ActionKind.SEND_F, 2, 3)),
        ("3RECV_F2<0", Action(3, ActionKind.RECV_F, 2, 0)),
        ("0RECV_B2<3", Action(0, ActionKind.RECV_B, 2, 3)),
    ],
)
def test_texts(text, action):
    assert parse(text) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2X0", "2F", "0SEND_F2<3", "3RECV_F2>0", "2F0.1", "1F0>2", "2F0 "]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="got '"):
        parse(text)


def test_a_line_of_another_stage_is_refused():
    with pytest.raises(ScheduleError, match="got 0F0"):
        from_text("0F0\n0F0\n")


def test_an_arrow_points_at_the_action():
    program = from_text("0F0 0F1 0F2 0F3 0F4 0F5\n")[0]
    line, arrow = pointed(program, 3, around=2).splitlines()
    assert line == "... 0F1 0F2 0F3 0F4 0F5"
    assert line[arrow.index("^") :].startswith("0F3")
    assert pointed(program, 0, around=9).splitlines()[1] == "^"


def test_a_send_without_its_receive_is_refused():
    with pytest.raises(ScheduleError, match="1RECV_F0"):
        pairs(from_text("0F0 0SEND_F0\n1F0\n"))
    with pytest.raises(ScheduleError, match="twice"):
        pairs(from_text("0F0 0F0\n"))
