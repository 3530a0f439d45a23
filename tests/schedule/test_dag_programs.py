"""Programs of stages that form a DAG: nobody waits for ever, and no stage holds more than its window."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from kagome.errors import ScheduleError
from kagome.schedule.actions import ActionKind, from_text, to_text
from kagome.schedule.schedules import Shape, k_forward_k_backward, windows
from kagome.schedule.simulator import simulate

UNO = ((0, 4), (1, 4), (2, 4), (3, 4), (4, 5))
"""Four towers, what joins them, the loss: six stages."""


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, list[int]]:
    """Stages of micro-batches of several sizes, and the k of each."""
    count = draw(st.integers(1, 6))
    sizes = [2 ** draw(st.integers(0, 3)) for _ in range(count)]
    k = [draw(st.integers(1, 3)) for _ in range(count)]
    pairs = [(one, other) for other in range(count) for one in range(other)]
    links = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    batch = range(8 * draw(st.integers(1, 4)))
    return Shape(count, batch, tuple(sorted(links)), sizes=tuple(sizes)), k


@settings(deadline=None, max_examples=150)
@given(drawn=shapes(), slow=st.integers(0, 5))
def test_every_program_ends_and_holds_no_more_than_its_window(
    drawn: tuple[Shape, list[int]], slow: int
) -> None:
    shape, k = drawn
    programs = k_forward_k_backward(shape, k)
    run = simulate(
        programs,
        lambda action: 9.0 if action.stage == slow else 1.0,
        transfer=lambda action: 0.5,
        size=lambda action: shape.size(action.stage),
    )
    for stage, (program, held, most) in enumerate(zip(programs, run.held, windows(shape, k), strict=True)):
        chunks = list(range(len(shape.order) // shape.size(stage)))
        for kind in (ActionKind.F, ActionKind.B):
            assert [action.chunk for action in program if action.kind is kind] == chunks
        assert held <= most <= len(shape.order)
    assert from_text(to_text(programs)) == programs


def test_in_flight_of_six_stages_in_a_chain_and_as_a_dag() -> None:
    """Candle-Uno: 6, 5, 4, 3, 2, 1 micro-batches of 64 in a chain; at most 3 as a DAG."""
    chain = Shape(6, range(640), sizes=(64,) * 6)
    assert [held // 64 for held in windows(chain)] == [6, 5, 4, 3, 2, 1]
    alone = simulate(k_forward_k_backward(chain), lambda action: 1.0)
    assert alone.held == (6, 5, 4, 3, 2, 1)
    branches = simulate(k_forward_k_backward(Shape(6, range(640), UNO, sizes=(64,) * 6)), lambda action: 1.0)
    assert branches.held == (3, 3, 3, 3, 2, 1)
    assert branches.seconds < alone.seconds


@pytest.mark.parametrize("k", [1, 2])
def test_micro_batches_of_one_size_are_chunks(k: int) -> None:
    samples = Shape(3, range(16), sizes=(2, 2, 2))
    assert k_forward_k_backward(samples, [k] * 3) == k_forward_k_backward(Shape(3, tuple(range(8))), k)


def test_golden_program_of_two_sizes() -> None:
    """The drawing at the head of ``schedules``: two micro-batches of 2 fill one of 4."""
    assert to_text(k_forward_k_backward(Shape(2, range(8), sizes=(2, 4)), (2, 1))) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 "
        "0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3\n"
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1SEND_B1 1RECV_F2 1RECV_F3 1F1 1B1 1SEND_B2 1SEND_B3\n"
    )


@pytest.mark.parametrize(
    ("batch", "sizes", "links", "words"),
    [
        (10, (4, 2), ((0, 1),), "a batch of 10"),
        (12, (4, 6), ((0, 1),), "4 and 6 samples"),
        (8, (2, 2), ((1, 0),), "1 -> 0"),
        (8, (2,), ((0, 1),), "1 sizes"),
    ],
)
def test_what_cannot_be_is_refused(
    batch: int, sizes: tuple[int, ...], links: tuple[tuple[int, int], ...], words: str
) -> None:
    with pytest.raises(ScheduleError, match=words):
        Shape(2, range(batch), links, sizes=sizes)


def test_samples_are_taken_in_order_and_each_stage_has_a_k() -> None:
    with pytest.raises(ScheduleError, match="samples in order"):
        Shape(2, (1, 0), sizes=(1, 1))
    for k in (0, (1, 0), (1,)):
        with pytest.raises(ScheduleError, match="a k of 1 or more"):
            k_forward_k_backward(Shape(2, range(2)), k)
