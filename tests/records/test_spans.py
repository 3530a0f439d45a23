"""Spans: nesting, sums that count each moment once, bounded memory."""

from __future__ import annotations

import pytest

from kagome.records.spans import Spans


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_phases_are_counted_once_and_inherit_the_epoch() -> None:
    clock = Clock()
    spans = Spans(clock=clock)
    with spans.phase("forward", epoch=3):
        clock.now += 2.0
        with spans.phase("exchange"):
            clock.now += 1.0
    assert spans.as_list() == [("forward", 0.0, 3.0, 3), ("exchange", 2.0, 1.0, 3)]
    assert spans.seconds() == {"exchange": 1.0, "forward": 2.0}


def test_an_evaluation_keeps_its_exchanges() -> None:
    clock = Clock()
    spans = Spans(clock=clock)
    with spans.phase("evaluate", epoch=1), spans.phase("forward"), spans.phase("exchange"):
        clock.now += 1.0
    assert spans.seconds() == {"evaluate": 1.0}
    assert [span.name for span in spans.as_list()] == ["evaluate", "forward", "exchange"]


def test_align_moves_the_zero() -> None:
    clock = Clock()
    spans = Spans(clock=clock)
    with spans.phase("load"):
        clock.now += 5.0
    spans.align()
    with spans.phase("forward", epoch=1):
        clock.now += 1.0
    assert [(span.start, span.epoch) for span in spans.as_list()] == [(-5.0, None), (0.0, 1)]


def test_memory_is_bounded_and_sums_hold_all() -> None:
    clock = Clock()
    spans = Spans(first=20, last=50, most=3, clock=clock)
    for epoch in range(1, 1001):
        for _ in range(5):
            with spans.phase("forward", epoch=epoch):
                clock.now += 1.0
    kept = spans.as_list()
    assert {span.epoch for span in kept} == {*range(1, 21), *range(951, 1001)}
    assert len(kept) == 3 * 70
    assert spans.seconds() == {"forward": 5000.0}


def test_an_exception_closes_its_phases() -> None:
    spans = Spans()
    with pytest.raises(RuntimeError), spans.phase("forward", epoch=1), spans.phase("exchange"):
        raise RuntimeError
    with spans.phase("backward", epoch=2):
        pass
    assert [span.name for span in spans.as_list()] == ["forward", "exchange", "backward"]
    assert spans.as_list()[-1].epoch == 2
