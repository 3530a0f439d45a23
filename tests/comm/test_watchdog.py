"""Watch: a wait that grows long is told once, with the peer that is late and what it was last seen in."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from kagome.comm.watchdog import CallProgress, Watchdog
from kagome.errors import CommError, ModelError

WARN = 0.5
"""Seconds from which on a wait is told."""


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


@pytest.fixture
def two():
    store, lines = dist.HashStore(), []
    watches = [
        Watchdog(
            store,
            rank,
            2,
            log=lambda line, rank=rank: lines.append((rank, line)),
            every=0.05,
            warn_after=WARN,
        )
        for rank in (0, 1)
    ]
    yield *watches, lines
    for watch in watches:
        watch.close()


def test_a_long_wait_is_told_once_with_what_the_peer_does(two):
    first, second, lines = two
    second.doing("epoch 2: optimizer")
    with first.waiting("halo forward of conv1.x, epoch 3", [1]):
        until(lambda: lines)
        time.sleep(WARN)
    ((rank, line),) = lines
    assert rank == 0
    assert re.fullmatch(
        r"rank 0 has waited \d+ s in 'halo forward of conv1.x, epoch 3' for rank 1, "
        r"which was last seen in 'epoch 2: optimizer' \d+ s ago",
        line,
    )
    with first.waiting("the next", [1]):
        until(lambda: len(lines) == 2)


def test_short_waits_are_not_told(two):
    first, _, lines = two
    for _ in range(40):
        with first.waiting("halo", [1]):
            time.sleep(WARN / 20)
    assert not lines


def test_the_rank_that_does_not_wait_is_the_late_one(two):
    first, second, _ = two
    with first.waiting("halo", [1]):
        assert first.late("halo", [1]) == [1]
        with second.waiting("halo", [0]):
            until(lambda: first.late("halo", [1]) == [])
        until(lambda: first.late("halo", [1]) == [1])


def test_after_a_wait_the_rank_is_back_in_what_it_did(two):
    first, second, _ = two
    second.doing("epoch 4: forward")
    with second.waiting("halo", [0]):
        until(lambda: "'halo'" in first.describe(1))
    until(lambda: "'epoch 4: forward'" in first.describe(1))


def test_a_rank_that_stopped_publishing_gives_no_sign_of_life(two):
    first, second, _ = two
    second.close()
    time.sleep(1.1)
    assert re.search(r"no sign of life for [1-9]\d* s", first.describe(1))


def test_a_rank_with_arguments_of_another_layout_in_the_same_call(two):
    first, second, _ = two
    words = "in a call of net(...) with arguments of another layout than those of rank 0"
    for mine, theirs, other in (
        ((3, 1, 1), (3, 1, 2), True),
        ((3, 1, 1), (3, 1, 1), False),
        ((3, 1, 1), (2, 1, 2), False),  # it is behind
        ((3, 1, 1), (3, 1, 0), False),  # it has not placed its arguments
    ):
        first.progress, second.progress = CallProgress(*mine), CallProgress(*theirs)
        second.tell()  # at once, without the thread
        assert first.seen(1).progress == theirs
        assert (words in first.describe(1)) is other


def test_a_rank_never_seen(two):
    first, _, _ = two
    assert first.seen(7) is None
    assert first.describe(7) == "rank 7, of which nothing was seen"


def test_what_ends_a_rank_is_told_to_those_who_wait_for_it(two):
    first, second, _ = two
    assert second.reported() is None
    first.report_error(CommError("an answer", "a closed connection"))  # an echo of another's fault
    first.report_error(ValueError("a fault of the user's own"))
    assert second.reported() is None
    first.report_error(ModelError("a row a vertex", "there is none", where="conv1", hint="return one"))
    word = second.reported()
    assert isinstance(word, ModelError)
    assert str(word) == str(ModelError("a row a vertex", "there is none", where="conv1", hint="return one"))
    assert first.reported() is None


def test_one_rank_has_no_thread():
    before = threading.active_count()
    watch = Watchdog(dist.HashStore(), 0, 1, log=print)
    assert threading.active_count() == before
    with watch.waiting("nothing", []):
        assert watch.seen(0) is None
    watch.close()


class Event:
    """An event of a stream; it occurs when a test says so."""

    def __init__(self, occurred: bool) -> None:
        self.occurred = occurred

    def query(self) -> bool:
        return self.occurred


def test_a_wait_of_the_stream_is_told_while_the_host_reads_a_result(two):
    first, second, lines = two
    first.doing("epoch 3: weights")
    second.report_error(ModelError("a row a vertex", "there is none", hint="return one"))
    second.close()
    behind = [Event(True), Event(False), Event(False)]
    came = Event(False)
    for number, (before, after) in enumerate(zip([Event(True), came, Event(False)], behind, strict=True)):
        first.streamed(f"halo forward of conv{number}", [1], before, after)
    time.sleep(2 * WARN)
    assert not lines  # the stream computes
    came.occurred = True
    until(lambda: lines)
    assert "'halo forward of conv1'" in lines[0][1]
    assert "for rank 1, which was last seen in 'its start'" in lines[0][1]
    assert "rank 1 ended with: " in lines[0][1]
    assert "a row a vertex" in lines[0][1]
    # Peers see that it waits, so that it is not the one to blame.
    assert first.late("halo forward of conv1", [0]) == []
    for event in behind:
        event.occurred = True
    until(lambda: "epoch 3: weights" in first.describe(0))
    assert len(lines) == 1


def test_the_thread_ends_at_close(two):
    first, _, _ = two
    first.close()
    first.close()
    assert first._thread is None or not first._thread.is_alive()


def test_a_blocking_call_on_the_run_s_store_does_not_hold_the_news_back():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    first = Watchdog(store, 0, 2, log=print, every=0.05)
    second = Watchdog(other, 1, 2, log=print, every=0.05)
    blocked = threading.Thread(target=lambda: store.wait(["late"], timedelta(seconds=120)), daemon=True)
    blocked.start()
    first.doing("epoch 9")
    until(lambda: "'epoch 9'" in second.describe(0))
    assert blocked.is_alive()
    other.set("late", "here")
    blocked.join()
    first.close()
    second.close()


def test_a_store_that_is_gone_ends_the_thread_quietly(two):
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("connection reset")

        check = set

    first, _, _ = two
    first._store = Gone()
    until(lambda: not first._thread.is_alive())
    first.doing("still fine")


def test_many_late_peers_are_counted():
    lines: list[str] = []
    watch = Watchdog(dist.HashStore(), 0, 9, log=lines.append, every=0.02, warn_after=0.05)
    with watch.waiting("halo", list(range(1, 9))):
        until(lambda: lines)
    watch.close()
    assert "rank 4, of which nothing was seen and for 4 others" in lines[0]
