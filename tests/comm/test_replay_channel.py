"""A rank of a group of threads goes on alone, hearing again what it heard."""

from __future__ import annotations

import pytest
import torch

from kagome.comm.exchange import ExchangeRequest
from kagome.comm.in_process.replay_channel import ReplayChannel
from kagome.comm.in_process.thread_group import ThreadGroup
from kagome.errors import CommError


def test_each_rank_in_its_turn_hears_again_what_it_heard() -> None:
    group, order = ThreadGroup(3), []

    def work(rank: int) -> list[list[float]]:
        channel = ReplayChannel(group, rank)

        def epoch(number: int) -> list[float]:
            rows = torch.full((3, 1), 10.0 * number + rank)
            came = channel.start(
                rows, ExchangeRequest([1, 1, 1], [1, 1, 1], f"epoch {number}", header=(number,))
            ).wait()
            total = channel.all_reduce(torch.tensor(float(number)), action=f"sums of epoch {number}")
            return [*came.flatten().tolist(), float(total)]

        found = [epoch(1)]
        with channel.recording():
            found.append(epoch(2))
        for mine in channel.turn():
            if mine:
                order.append(rank)
                for number in (3, 4):
                    with channel.replaying():
                        found.append(epoch(number))
        found.append(epoch(5))  # together again
        return found

    for found in group.run(lambda channel: work(channel.rank)):
        assert found[0] == [10.0, 11.0, 12.0, 3.0]
        assert found[1] == found[2] == found[3] == [20.0, 21.0, 22.0, 6.0]
        assert found[4] == [50.0, 51.0, 52.0, 15.0]
    assert order == [0, 1, 2]


def test_a_rank_that_fails_in_its_turn_ends_the_others() -> None:
    group = ThreadGroup(2)

    def work(rank: int) -> None:
        channel = ReplayChannel(group, rank)
        for mine in channel.turn():
            if mine and rank == 1:
                raise CommError("rank 1 goes on", "it has failed")

    with pytest.raises(CommError, match="it has failed"):
        group.run(lambda channel: work(channel.rank))


def test_a_block_that_fails_ends_recording_and_replaying() -> None:
    channel = ReplayChannel(ThreadGroup(1), 0)

    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError), channel.recording():
        fails()
    assert float(channel.all_reduce(torch.ones(1), action="not recorded")) == 1.0
    assert channel._heard == []
    with pytest.raises(KeyError), channel.replaying():
        fails()
    assert float(channel.all_reduce(torch.ones(1), action="not replayed")) == 1.0
