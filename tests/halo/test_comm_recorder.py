"""A channel that notes what comes and gives it again: in order, to the same questions, sending nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kagome.comm.exchange import ExchangeRequest, Work
from kagome.errors import ModelError
from kagome.halo.comm_recorder import Record, RecordedRows


class Come(Work):
    """Rows that have come; it counts the waits."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.waits = rows, 0

    def wait(self) -> Tensor:
        self.waits += 1
        return self.rows


class Peers:
    """A channel of two ranks that gives a new number at each call."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.begun: list[Come] = []

    def _next(self, action: str) -> Tensor:
        self.asked.append(action)
        return torch.full((2, 1), float(len(self.asked)))

    def start(self, rows: Tensor, request: ExchangeRequest) -> Work:
        self.begun.append(Come(self._next(request.action)))
        return self.begun[-1]

    def all_reduce(self, tensor, op="sum", *, action, kind="statistics", key=None) -> Tensor:
        return self._next(action)


def rows(taped: RecordedRows, action: str) -> float:
    return float(taped.start(torch.zeros(1, 1), ExchangeRequest([0, 1], [0, 2], action)).wait()[0])


def begun(taped: RecordedRows, action: str) -> Work:
    return taped.start(torch.zeros(1, 1), ExchangeRequest([0, 1], [0, 2], action))


def test_what_came_comes_again_in_order() -> None:
    peers, record = Peers(), Record()
    taped = RecordedRows(peers)
    assert (taped.rank, taped.size, taped.runs) == (1, 2, False)
    assert rows(taped, "before") == 1
    with taped.recording(record):
        assert taped.runs
        first = [rows(taped, "a"), float(begun(taped, "b").wait()[0]), rows(taped, "a")]
        total = taped.all_reduce(torch.zeros(2, 1), action="c")
        total.zero_()  # who asked may write to a sum
        assert not taped.same("d", False)
    assert first == [2, 3, 4]
    asked = list(peers.asked)
    for _ in range(2):
        with taped.replaying(record):
            restored = [rows(taped, "a"), float(begun(taped, "b").wait()[0]), rows(taped, "a")]
            assert restored == first
            assert float(taped.all_reduce(torch.zeros(2, 1), action="c")[0]) == 5
            assert not taped.same("d", True)
    assert peers.asked == asked
    assert [each.waits for each in peers.begun] == [1] * 4
    assert rows(taped, "after") == 6


def test_rows_may_come_late() -> None:
    taped, record = RecordedRows(Peers()), Record()
    with taped.recording(record):
        coming = begun(taped, "a")
        assert rows(taped, "b") == 2
        assert float(coming.wait()[0]) == 1
    with taped.replaying(record):
        assert float(begun(taped, "a").wait()[0]) == 1


def test_another_question_is_refused() -> None:
    taped, record = RecordedRows(Peers()), Record()
    with taped.recording(record):
        rows(taped, "a")
        assert taped.same("kept", True)
    with taped.replaying(record), pytest.raises(ModelError, match="got b, and a the first time"):
        rows(taped, "b")
    with taped.replaying(record):
        rows(taped, "a")
        with pytest.raises(ModelError, match="of which nothing is left"):
            taped.same("kept", False)
        with pytest.raises(ModelError, match="got a, and nothing the first time"):
            rows(taped, "a")
    assert not taped.runs


def test_what_is_kept_for_ever_is_asked_for_unrecorded() -> None:
    peers, record = Peers(), Record()
    taped = RecordedRows(peers)
    with taped.recording(record):
        rows(taped, "a")
        with taped.unrecorded():
            assert rows(taped, "degrees") == 2
        assert rows(taped, "b") == 3
    assert [what for what, _ in record] == ["a", "b"]
    with taped.replaying(record):
        assert rows(taped, "a") == 1
        with taped.unrecorded(), pytest.raises(ModelError, match="degrees"):
            rows(taped, "degrees")  # it was to be found, and nobody answers now
        assert rows(taped, "b") == 3
    with taped.unrecorded():
        assert rows(taped, "c") == 4
    assert peers.asked == ["a", "degrees", "b", "c"]
