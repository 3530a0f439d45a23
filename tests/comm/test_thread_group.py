"""Ranks that are threads: what one of them does with torch's generator stops none of the others."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch

from devices import CurrentDevice
from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup


def drawn_by_threads(channel: Channel) -> list[int]:
    """Four threads read the generator's state while every collection lets another thread run."""
    together = threading.Barrier(4)

    def work(channel: ThreadChannel) -> int:
        together.wait(10)
        # The states are all that the collector has to count: collections begin where one is made.
        read = torch.default_generator.get_state
        return len([read() for _ in range(200)])

    def lets_others_run(phase: str, facts: dict[str, int]) -> None:
        time.sleep(1e-3)

    before = gc.get_threshold()
    gc.callbacks.append(lets_others_run)
    gc.set_threshold(20)
    try:
        return ThreadGroup(4).run(work)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(lets_others_run)


def test_a_collection_while_threads_read_the_generator_stops_nothing(ranks):
    """The thread in which it began held the generator's lock, and another one the interpreter."""
    assert ranks(1, drawn_by_threads, timeout=15) == [[200] * 4]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled):
    def fails(channel: ThreadChannel) -> None:
        raise KeyError("its own fault")

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert ThreadGroup(2).run(lambda channel: gc.isenabled()) == [False, False]
        assert gc.isenabled() is enabled
        with pytest.raises(KeyError, match="its own fault"):
            ThreadGroup(2).run(fails)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_each_rank_runs_on_the_device_of_the_caller(monkeypatch):
    current = CurrentDevice(monkeypatch)
    with current.set(2):
        assert ThreadGroup(2).run(lambda channel: current.get()) == [2, 2]


class Slow(ThreadChannel):
    """Rank 1 reads what the ranks shared after rank 0 has gone on."""

    def _share(self, value: Any) -> list[Any]:
        values = super()._share(value)
        time.sleep(0.3 * self.rank)
        return values


def test_what_a_rank_writes_in_place_after_a_collective_does_not_reach_its_peers():
    def work(channel: ThreadChannel) -> list[float]:
        mine, rows = Slow(channel.group, channel.rank), torch.ones(2, 1)
        total = mine.all_reduce(rows, action="sum")
        rows.fill_(5.0)
        came = mine.start(rows, ExchangeRequest([1, 1], [1, 1], "rows")).wait()
        rows.fill_(9.0)
        return [*total.flatten().tolist(), *came.flatten().tolist()]

    assert ThreadGroup(2).run(work) == [[2.0, 2.0, 5.0, 5.0]] * 2
