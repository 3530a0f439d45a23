"""Pending: exchanges and sums that are begun and waited for apart; what of their time was hidden."""

from __future__ import annotations

import time

import pytest
import torch

from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.stats import KINDS, Traffic
from kagome.errors import CommError

WORLDS = [1, 2, 3, 4]


def mixed(channel: Channel) -> list[float]:
    """Each rank in an order of its own: sums here, exchanges there."""
    beside, ones = channel.beside(), [1] * channel.size
    sums, come = [], []
    for step in range(6):
        if (step + channel.rank) % 2:
            sums += [beside.start_all_reduce(torch.full((3,), float(k)), action=f"sum {k}") for k in range(2)]
        got = channel.start(
            torch.full((channel.size, 3), float(step)), ExchangeRequest(ones, ones, f"rows {step}")
        ).wait()
        come.append(float(got.sum()))
        if not (step + channel.rank) % 2:
            sums += [beside.start_all_reduce(torch.full((3,), float(k)), action=f"sum {k}") for k in range(2)]
    assert channel.traffic is beside.traffic
    return come + [float(s.wait()[0]) for s in sums]


@pytest.mark.parametrize("world", WORLDS)
def test_a_lane_may_go_in_another_order_among_the_rest_on_each_rank(ranks, world):
    expected = [3.0 * world * step for step in range(6)] + [0.0, float(world)] * 6
    assert ranks(world, mixed) == [expected] * world


def very_many(channel: Channel) -> list[float]:
    begun = [channel.start_all_reduce(torch.full((2,), float(k)), action=f"{k}") for k in range(300)]
    return [float(one.wait()[0]) for one in begun]


def test_more_sums_under_way_than_there_are_tags(ranks):
    assert ranks(3, very_many) == [[3.0 * k for k in range(300)]] * 3


def hides(channel: Channel) -> dict[str, tuple[float, float]]:
    ones, rows = [1] * channel.size, torch.zeros(channel.size, 1000)
    for _ in range(3):
        later = channel.start(rows, ExchangeRequest(ones, ones, "apart"))
        total = channel.start_all_reduce(torch.zeros(1000), action="sum apart")
        time.sleep(0.1)
        later.wait()
        total.wait()
        later.wait()  # counts once
        time.sleep(0.03 * channel.rank)  # rank 0 waits for it
        channel.start(rows, ExchangeRequest(ones, ones, "at once", kind="transpose")).wait()
        time.sleep(0.03 * channel.rank)  # and again: a sum that nobody is late for takes no time to wait
        channel.all_reduce(rows, action="at once")
    taken = channel.take_traffic()
    assert channel.take_traffic() == Traffic()
    return {kind: (taken.waited[kind], taken.under_way[kind]) for kind in KINDS}


def test_what_is_computed_between_begin_and_wait_is_hidden(ranks):
    for rank, found in enumerate(ranks(2, hides)):
        for kind in ("halo", "weights"):
            waited, under_way = found[kind]
            assert under_way >= 0.3
            assert 1 - waited / under_way > 0.8
        for kind in ("transpose", "statistics"):
            waited, under_way = found[kind]
            assert 0 < waited <= under_way
            assert rank or 1 - waited / under_way < 0.5
        assert found["stage"] == found["other"] == (0.0, 0.0)


def phases(channel: Channel) -> list[str]:
    noted: list[str] = []

    class Phase:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            noted.append(f"+{self.name}")

        def __exit__(self, *_: object) -> None:
            noted.append(f"-{self.name}")

    channel.timer = Phase
    ones, rows = [1] * channel.size, torch.zeros(channel.size, 1)
    channel.start(rows, ExchangeRequest(ones, ones, "at once")).wait()
    later = channel.start(rows, ExchangeRequest(ones, ones, "apart"))
    noted.append("computes")
    later.wait()
    later.wait()
    channel.start_all_reduce(rows.view(-1), action="weights").wait()
    return noted


def test_begin_and_wait_are_noted_each_and_weights_are_not(ranks):
    once = ["+exchange", "-exchange"]
    assert ranks(2, phases) == [[*once, *once, *once, "computes", *once]] * 2


def too_late(channel: Channel) -> str:
    channel.timeout = 1.0
    if channel.rank == 1:
        time.sleep(2.0)
        return ""
    with pytest.raises(CommError) as caught:
        channel.start_all_reduce(torch.zeros(5), action="sum of gradients, epoch 3").wait()
    return str(caught.value)


def test_a_peer_that_begins_too_late_is_named(ranks):
    text, _ = ranks(2, too_late, spoils=True)
    assert text.startswith("expected rank 0 to be answered in 'sum of gradients, epoch 3' by rank 1")
    assert "nothing within 1 s" in text


def gives_up(channel: Channel) -> float:
    """Rank 0 begins and fails before it waits, as after an error in backward: nobody may hang on it."""
    begun = time.monotonic()
    try:
        under_way = [channel.beside().start_all_reduce(torch.zeros(100_000), action=f"{k}") for k in range(3)]
        if channel.rank == 0:
            raise ZeroDivisionError
        with pytest.raises(CommError):
            channel.start(torch.zeros(2, 1), ExchangeRequest([1, 1], [1, 1], "halo")).wait()
        under_way.clear()
    except ZeroDivisionError:
        under_way = []
    channel.close()
    torch.distributed.destroy_process_group()
    return time.monotonic() - begun


def test_sums_that_nobody_waits_for_hold_nobody_up(ranks):
    assert all(seconds < 10 for seconds in ranks(2, gives_up, spoils=True))
