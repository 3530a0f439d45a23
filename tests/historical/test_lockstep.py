"""Lockstep: one piece at a time, none past a meeting before all have come, and no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

from devices import CurrentDevice
from kagome.errors import ModelError
from kagome.historical.lockstep import Lockstep

HERE = ("here", 0)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class Log:
    """Works that write down what they do and meet a number of times."""

    def __init__(self, meetings: list[int]) -> None:
        self.seen: list[str] = []
        self.lockstep = Lockstep([self._work(chunk, many) for chunk, many in enumerate(meetings)])

    def _work(self, chunk: int, meetings: int) -> Callable[[], None]:
        def work() -> None:
            for meeting in range(meetings):
                self.seen.append(f"{chunk}.{meeting}")
                self.lockstep.meet(("place", meeting), partial(self.seen.append, f"meet {meeting}"))
            self.seen.append(f"{chunk}.{meetings}")

        return work


def run(lockstep: Lockstep, order: Sequence[int]) -> None:
    """Advance all chunks in an order, round after round, until all have ended."""
    ended = [False]
    while not all(ended):
        ended = [lockstep.advance(chunk) for chunk in order]


@given(order=st.integers(1, 6).flatmap(lambda n: st.permutations(range(n))), meetings=st.integers(0, 5))
@settings(deadline=None)
def test_all_pass_a_piece_in_order_before_one_meeting_settles_it(order, meetings):
    log = Log([meetings] * len(order))
    run(log.lockstep, order)
    expected = []
    for piece in range(meetings + 1):
        expected += [f"meet {piece - 1}"] if piece else []
        expected += [f"{chunk}.{piece}" for chunk in order]
    assert log.seen == expected


def test_nothing_runs_before_it_is_advanced_and_only_one_at_a_time():
    log = Log([1, 1])
    assert log.seen == []
    assert not log.lockstep.advance(1)
    assert log.seen == ["1.0"]
    assert not log.lockstep.advance(0)
    assert log.seen == ["1.0", "0.0"]
    log.lockstep.close()


def test_each_round_may_take_another_order():
    log = Log([2, 2, 2])
    ended = [[log.lockstep.advance(chunk) for chunk in order] for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0])]
    assert ended == [[False] * 3, [False] * 3, [True] * 3]
    assert log.seen == ["0.0", "1.0", "2.0", "meet 0", "2.1", "0.1", "1.1", "meet 1", "1.2", "2.2", "0.2"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_a_work_raises_reaches_the_caller_and_ends_the_others(place):
    ended: list[int] = []

    def work(chunk: int) -> Callable[[], None]:
        def run() -> None:
            try:
                for meeting in range(3):
                    if chunk == 1 and meeting == place:
                        raise ValueError("mine")
                    lockstep.meet(HERE, lambda: None)
            finally:
                ended.append(chunk)

        return run

    lockstep = Lockstep([work(chunk) for chunk in range(3)])
    with pytest.raises(ValueError, match="mine"):
        run(lockstep, range(3))
    begun = {0, 1, 2} if place else {0, 1}
    assert set(ended) == begun


def test_what_a_settlement_raises_reaches_the_caller():
    def settle() -> None:
        raise RuntimeError("no way across")

    lockstep = Lockstep([lambda: lockstep.meet(HERE, settle)] * 2)
    with pytest.raises(RuntimeError, match="no way across"):
        run(lockstep, [0, 1])
    lockstep.close()


@pytest.mark.parametrize("meetings", [[2, 1], [1, 2], [0, 1], [3, 3, 1], [0, 0, 2]])
def test_chunks_that_meet_another_number_of_times_are_refused(meetings):
    log = Log(meetings)
    with pytest.raises(ModelError, match=r"a place of chunk \d that chunk \d does not come to \(place\)"):
        run(log.lockstep, range(len(meetings)))
    log.lockstep.close()


@pytest.mark.parametrize("place", [("there", 0), ("here", 1)])
def test_chunks_that_meet_at_unlike_places_are_refused(place):
    settled: list[str] = []
    lockstep = Lockstep(
        [lambda at=at: lockstep.meet(at, partial(settled.append, "")) for at in (HERE, place)]
    )
    words = r"a place of chunk 0 that chunk 1 does not come to \(here(; there)?\)"
    with pytest.raises(ModelError, match=words):
        run(lockstep, [0, 1])
    lockstep.close()
    assert not settled


def test_closing_ends_what_waits_and_twice_does_no_harm():
    log = Log([3, 3])
    log.lockstep.close()  # nothing has begun
    log = Log([3, 3])
    log.lockstep.advance(0)
    log.lockstep.advance(1)
    log.lockstep.close()
    log.lockstep.close()
    assert log.seen == ["0.0", "1.0"]


def test_closing_after_the_end_does_no_harm():
    log = Log([1, 1])
    run(log.lockstep, [0, 1])
    log.lockstep.close()


@pytest.mark.parametrize("grad", [True, False])
def test_gradients_are_on_where_they_are_in_the_caller(grad):
    found = []

    def work() -> None:
        found.append(torch.is_grad_enabled())
        lockstep.meet(HERE, lambda: None)
        found.append(torch.is_grad_enabled())

    lockstep = Lockstep([work, work])
    with torch.set_grad_enabled(grad):
        run(lockstep, [0, 1])
    assert found == [grad] * 4
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("threads", [True, False])
def test_backward_stays_in_its_thread_where_the_caller_wants_that(threads):
    """On a GPU it ran in a thread of autograd's, which is no chunk's: nothing could meet there."""
    found: list[bool] = []
    lockstep = Lockstep([lambda: found.append(torch._C._is_multithreading_enabled())])
    with torch.autograd.set_multithreading_enabled(threads):
        assert lockstep.advance(0)
    assert found == [threads]


def test_mixed_precision_is_handed_on():
    kinds = []
    lockstep = Lockstep([lambda: kinds.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        lockstep.advance(0)
    lockstep.advance(1)
    assert kinds == [torch.bfloat16, torch.float32]


def test_backward_meets_inside_autograd_too():
    """Each chunk's backward stops in the middle of autograd and goes on after the meeting."""
    seen: list[str] = []

    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, chunk):
            ctx.chunk = chunk
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append(f"{ctx.chunk} comes")
            lockstep.meet(HERE, lambda: seen.append("all"))
            seen.append(f"{ctx.chunk} goes")
            return g * 2, None

    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    outs = [Meeting.apply(leaf * 3, chunk).sum() for chunk, leaf in enumerate(leaves)]
    lockstep = Lockstep([out.backward for out in outs])
    with torch.autograd.set_multithreading_enabled(False):
        run(lockstep, [1, 0])
    assert seen == ["1 comes", "0 comes", "all", "1 goes", "0 goes"]
    assert all(torch.equal(leaf.grad, torch.full((3,), 6.0)) for leaf in leaves)


def test_each_chunk_runs_on_the_device_of_the_rank(monkeypatch):
    """Triton launches on the thread's current device, and a new thread has device 0."""
    current, seen = CurrentDevice(monkeypatch), list[int]()
    lockstep = Lockstep([lambda: seen.append(current.get()) for _ in range(2)])
    with current.set(3):
        run(lockstep, range(2))
    assert seen == [3, 3]
