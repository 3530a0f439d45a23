"""Spans: nesting, sums that count each moment once, bounded memory."""

from __future__ import annotations

import pytest
import torch

from kagome.records.spans import UNREAD, Spans


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


class Device:
    """A GPU that comes to its work later than the host gives it: the host gives all within a moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.now, self.waits = 7.0, 0
        device = self

        class Event:
            def __init__(self, kind: str, *, enable_timing: bool) -> None:
                assert (kind, enable_timing) == ("cuda", True)

            def record(self) -> None:
                self.at = device.now

            def synchronize(self) -> None:
                device.waits += 1

            def elapsed_time(self, other: Event) -> float:
                return float(torch.tensor((other.at - self.at) * 1e3, dtype=torch.float32))

        monkeypatch.setattr(torch, "Event", Event)


def test_phases_of_a_gpu_are_measured_where_it_comes_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    device, spans = Device(monkeypatch, clock), Spans(clock=clock)
    with spans.phase("load"):
        clock.now += 1.0  # by the host's clock, before there is a device
    spans.measure(torch.device("cuda", 0))
    waits = device.waits
    with spans.phase("forward", epoch=1):
        device.now += 2.0
        with spans.phase("exchange"):
            device.now += 0.5
    with spans.phase("evaluate", epoch=1), spans.phase("forward"):
        device.now += 1.0
    assert device.waits == waits  # nothing waits for the device within an epoch
    assert spans.seconds() == {"load": 1.0, "forward": 2.0, "exchange": 0.5, "evaluate": 1.0}
    assert [(span.name, span.start, span.duration) for span in spans.as_list()] == [
        ("load", 0.0, 1.0),
        ("forward", 1.0, 2.5),
        ("exchange", 3.0, 0.5),
        ("evaluate", 3.5, 1.0),
        ("forward", 3.5, 1.0),
    ]


def test_marks_are_read_in_time_and_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a day a float32 of milliseconds is coarser than a phase; and a phase may be open meanwhile."""
    clock = Clock()
    device, spans = Device(monkeypatch, clock), Spans(clock=clock, most=10)
    spans.measure(torch.device("cuda", 0))
    with spans.phase("check"):
        for epoch in range(UNREAD // 2 + 10):  # 17 hours
            with spans.phase("forward", epoch=epoch), spans.phase("exchange"):
                device.now += 30.0
            device.now += 0.0625
    assert device.waits > UNREAD
    for span in spans.as_list():
        whole = 30.0625 * (UNREAD // 2 + 10)
        assert span.duration == pytest.approx(whole if span.name == "check" else 30.0, abs=3e-3)
    assert spans.seconds() == {"check": pytest.approx(whole, abs=3e-3)}
