"""Programs of stages that form a DAG: nobody waits for ever, and no stage holds more than its window."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from kagome.errors import ScheduleError
from kagome.schedule.actions import ActionKind, from_text, to_text
from kagome.schedule.dag_schedules import DagShape, Turns, dag, windows
from kagome.schedule.schedules import Shape, k_forward_k_backward
from kagome.schedule.simulator import simulate

UNO = ((0, 4), (1, 4), (2, 4), (3, 4), (4, 5))
"""Four towers, what joins them, the loss: six stages."""


@st.composite
def shapes(draw: st.DrawFn) -> DagShape:
    count = draw(st.integers(1, 6))
    stages = [Turns(2 ** draw(st.integers(0, 3)), draw(st.integers(1, 3))) for _ in range(count)]
    pairs = [(one, other) for other in range(count) for one in range(other)]
    links = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return DagShape(8 * draw(st.integers(1, 4)), tuple(stages), tuple(sorted(links)))


@settings(deadline=None, max_examples=150)
@given(shape=shapes(), slow=st.integers(0, 5))
def test_every_program_ends_and_holds_no_more_than_its_window(shape: DagShape, slow: int) -> None:
    programs = dag(shape)
    run = simulate(
        programs,
        lambda action: 9.0 if action.stage == slow else 1.0,
        transfer=lambda action: 0.5,
        size=lambda action: shape.stages[action.stage].micro_batch,
    )
    for stage, (program, held, most) in enumerate(zip(programs, run.held, windows(shape), strict=True)):
        chunks = list(range(shape.batch // shape.stages[stage].micro_batch))
        for kind in (ActionKind.F, ActionKind.B):
            assert [action.chunk for action in program if action.kind is kind] == chunks
        assert held <= most <= shape.batch
    assert from_text(to_text(programs)) == programs


def test_in_flight_of_six_stages_in_a_chain_and_as_a_dag() -> None:
    """Candle-Uno: 6, 5, 4, 3, 2, 1 micro-batches of 64 in a chain; at most 3 as a DAG."""
    chain = DagShape(640, (Turns(64),) * 6, tuple((stage, stage + 1) for stage in range(5)))
    assert [held // 64 for held in windows(chain)] == [6, 5, 4, 3, 2, 1]
    assert simulate(dag(chain), lambda action: 1.0).held == (6, 5, 4, 3, 2, 1)
    branches = DagShape(640, (Turns(64),) * 6, UNO)
    assert simulate(dag(branches), lambda action: 1.0).held == (3, 3, 3, 3, 2, 1)
    assert simulate(dag(branches), lambda action: 1.0).seconds < simulate(dag(chain), lambda a: 1.0).seconds


@pytest.mark.parametrize("k", [1, 2])
def test_a_chain_of_one_size_is_kfkb(k: int) -> None:
    links = ((0, 1), (1, 2))
    assert dag(DagShape(8, (Turns(1, k),) * 3, links)) == k_forward_k_backward(Shape(3, tuple(range(8))), k)


@pytest.mark.parametrize(
    ("batch", "sizes", "links", "words"),
    [
        (10, (4, 2), ((0, 1),), "a batch of 10"),
        (12, (4, 6), ((0, 1),), "4 and 6 samples"),
        (8, (2, 2), ((1, 0),), "1 -> 0"),
    ],
)
def test_what_cannot_be_is_refused(
    batch: int, sizes: tuple[int, ...], links: tuple[tuple[int, int], ...], words: str
) -> None:
    with pytest.raises(ScheduleError, match=words):
        DagShape(batch, tuple(map(Turns, sizes)), links)
