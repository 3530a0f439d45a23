"""Shelf and box: what one rank lays, another takes, once, whole and in any order; nobody waits for room."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kagome.comm.channel import Channel, ChannelWork
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.groups import open_shared_memory
from kagome.comm.mesh import open_mesh
from kagome.comm.transport.mailbox import FORWARD, Mailbox, memory_file
from kagome.comm.transport.shared_memory import NOWHERE, MemoryAllowance, SharedMemory
from kagome.config import Parallel

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")

SHORT = timedelta(seconds=0.2)


@contextmanager
def shared_memories(size: int = 2, most: int = 2**24) -> Iterator[list[SharedMemory]]:
    """The shelves of several ranks, all in this process."""
    mailboxes = [Mailbox(rank, size) for rank in range(size)]
    for mine in mailboxes:
        for peer, theirs in enumerate(mailboxes):
            assert peer == mine.rank or mine.open(peer, theirs.offer)
    everyone = frozenset(range(size))
    found = [SharedMemory(mailbox, everyone - {mailbox.rank}, MemoryAllowance(most)) for mailbox in mailboxes]
    try:
        yield found
    finally:
        for shared_memory in found:
            shared_memory.close()


def take(shared_memory: SharedMemory, peer: int, token: tuple[int, ...], into: Tensor) -> bool:
    found = shared_memory.find(peer, token, into.numel())
    if found is not None:
        into.copy_(found)
    shared_memory.taken(peer, token)
    return found is not None


def some(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 70_000), min_size=2, max_size=2), min_size=1, max_size=6))
def test_what_is_laid_is_what_is_taken(turns):
    with shared_memories(3) as (giver, *takers):
        for turn, counts in enumerate(turns):
            parts = {peer: some(count, 10 * turn + peer) for peer, count in enumerate(counts, start=1)}
            tokens = giver.write(parts)
            for taker in takers:
                rank = taker.mailbox.rank
                into = torch.zeros(parts[rank].numel(), dtype=torch.uint8)
                assert take(taker, 0, tokens[rank], into)
                assert torch.equal(into, parts[rank])


def test_room_is_used_again_once_all_have_taken_and_not_before():
    with shared_memories(3) as (giver, one, two):
        into, part = torch.empty(5000, dtype=torch.uint8), some(5000)
        first = giver.write({1: part, 2: part})
        assert first[1][:4] == first[2][:4], "the same bytes are laid once for all their readers"
        assert take(one, 0, first[1], into)
        second = giver.write({1: part, 2: part})
        assert second[1][0] != first[1][0], "rank 2 has yet to take the first"
        assert take(two, 0, first[2], into)
        third = giver.write({1: part})
        assert third[1][0] == first[1][0]
        assert third[1][4] > first[1][4]


def test_a_message_packed_into_its_room_is_not_copied():
    with shared_memories() as (giver, taker):
        buffer = giver.buffer(4096)
        assert buffer is not None
        buffer.copy_(some(4096))
        token = giver.write({1: buffer})[1]
        into = torch.empty(4096, dtype=torch.uint8)
        assert take(taker, 0, token, into)
        assert torch.equal(into, some(4096))
        assert len(giver._own) == 1


def test_without_room_a_message_goes_by_the_wire():
    with shared_memories(most=20_000) as (giver, taker):
        part, into = some(10_000), torch.empty(10_000, dtype=torch.uint8)
        kept = giver.write({1: part})[1]
        assert giver.write({1: part})[1] == NOWHERE
        assert not take(taker, 0, NOWHERE, into)
        assert take(taker, 0, kept, into)
        assert giver.write({1: part})[1] != NOWHERE


def test_a_segment_of_a_rank_that_is_gone_cannot_be_opened_and_one_that_was_opened_stays():
    with shared_memories() as (giver, taker):
        part, into = some(10_000), torch.empty(10_000, dtype=torch.uint8)
        known = giver.write({1: part})[1]
        assert take(taker, 0, known, into)
        again = giver.write({1: part})[1]
        unknown = giver.write({1: some(10_000, 1)})[1]
        giver.close()
        assert take(taker, 0, again, into)
        with pytest.raises(RuntimeError, match="connection closed"):
            take(taker, 0, unknown, into)


def test_closing_waits_for_what_peers_have_yet_to_take():
    with shared_memories() as (giver, taker):
        part, into = some(10_000), torch.empty(10_000, dtype=torch.uint8)
        token = giver.write({1: part})[1]
        closing = threading.Thread(target=giver.close, args=(20.0,))
        closing.start()
        time.sleep(0.1)
        assert closing.is_alive()
        assert take(taker, 0, token, into)
        closing.join(10.0)
        assert not closing.is_alive()


def test_tokens_are_found_by_number_lane_and_size():
    with shared_memories() as (giver, taker):
        for count in (1, 2):
            assert giver.mailbox.put(1, 0, count, 100, (count,) * 5)
        assert taker.mailbox.find(0, 0, 2, 100) == (2,) * 5
        assert taker.mailbox.find(0, 0, 1, 100) == (1,) * 5
        assert taker.mailbox.find(0, 0, 1, 101) is None
        assert taker.mailbox.find(0, 1, 1, 100) is None
        assert taker.mailbox.find(0, 0, 3, 100) is None


@settings(max_examples=20, deadline=None)
@given(st.integers(129, 600), st.randoms(use_true_random=False))
def test_tokens_far_ahead_of_the_reader_are_put_off_and_come_in_order(count, random):
    with shared_memories() as (giver, taker):
        for number in range(1, count + 1):
            assert giver.mailbox.put(1, 0, number, 8, (number,) * 5) == (number <= 128)
        for number in range(1, count + 1):
            if random.random() < 0.3 or taker.mailbox.find(0, 0, number, 8) is None:
                giver.mailbox.lies(1, 0, count)
            assert taker.mailbox.find(0, 0, number, 8) == (number,) * 5
            taker.mailbox.read(0, 0, number)
        assert giver.mailbox.lies(1, 0, count)


def test_what_one_box_has_put_off_comes_while_its_rank_waits_at_another():
    with shared_memories() as (giver, taker):
        other, theirs = Mailbox(0, 2, giver.mailbox), Mailbox(1, 2, taker.mailbox)
        other.open(1, theirs.offer)
        for number in range(1, 131):
            giver.mailbox.put(1, FORWARD, number, 8, (number,) * 5)
        for number in range(1, 3):
            taker.mailbox.read(0, FORWARD, number)
        assert taker.mailbox.find(0, FORWARD, 129, 8) is None
        with pytest.raises(RuntimeError, match="timed out"):
            other.wait(1, 0, 1, 8, SHORT)
        assert taker.mailbox.find(0, FORWARD, 129, 8) == (129,) * 5
        assert taker.mailbox.find(0, FORWARD, 130, 8) == (130,) * 5
        other.close()
        theirs.close()


def test_shelves_of_one_rank_share_what_they_may_take():
    mailboxes = [Mailbox(0, 2), Mailbox(0, 2)]
    allowance = MemoryAllowance(60_000)
    one, two = (SharedMemory(mailbox, frozenset({1}), allowance) for mailbox in mailboxes)
    assert allowance.held == 0
    assert one.buffer(30_000) is not None
    assert two.buffer(30_000) is None
    assert two.buffer(10_000) is not None
    assert allowance.held <= allowance.most
    one.close()
    two.close()


def test_a_wait_ends_at_its_limit_and_when_the_peer_is_gone():
    with shared_memories() as (giver, taker):
        with pytest.raises(RuntimeError, match="timed out"):
            taker.mailbox.wait(0, 0, 1, 8, SHORT)
        giver.mailbox.put(1, 0, 1, 8, (7,) * 5)
        giver.close()
        assert taker.mailbox.wait(0, 0, 1, 8, SHORT) == (7,) * 5, "its last deed counts"
        with pytest.raises(RuntimeError, match="connection closed"):
            taker.mailbox.wait(0, 0, 2, 8, timedelta(seconds=20))


def test_a_box_opens_only_with_what_its_owner_wrote():
    mailbox, other = Mailbox(0, 2), Mailbox(1, 2)
    process, descriptor, cookie = mailbox.offer
    assert other.open(0, mailbox.offer)
    assert not other.open(0, (process, descriptor, bytes(16)))
    assert not other.open(0, (process, 10_000, cookie))
    mailbox.close()
    assert not other.open(0, (process, descriptor, cookie))
    assert not other.alive(0)
    other.close()


def test_memory_that_cannot_be_had_leaves_no_file_and_messages_go_by_the_wire(monkeypatch):
    with shared_memories() as (giver, _):
        before = len(os.listdir("/proc/self/fd"))

        def refuse(*_: int) -> None:
            raise OSError(28, "no space")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match="no space"):
            memory_file("kagome-test", 4096)
        assert giver.write({1: some(100)})[1] == NOWHERE
        assert len(os.listdir("/proc/self/fd")) == before


# On ranks ----------------------------------------------------------------------------------------


def swapped(channel: Channel, full: bool) -> list[Tensor]:
    if full and channel.rank == 0:
        assert channel._transport is not None
        assert channel._transport.shared_memory is not None
        channel._transport.shared_memory.allowance.most = 0
        channel._transport.shared_memory._own = []
    found = []
    for turn in range(4):
        width = 1000 * (turn + 1)
        rows = torch.full((channel.size, width), float(10 * turn + channel.rank))
        ones = [1] * channel.size
        found.append(channel.start(rows, ExchangeRequest(ones, ones, f"turn {turn}")).wait()[:, 0])
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("full", [False, True])
def test_rows_come_by_shelf_and_by_wire_alike(ranks, world, full):
    for found in ranks(world, swapped, full, spoils=True):
        for turn, column in enumerate(found):
            assert column.tolist() == [10.0 * turn + rank for rank in range(world)]


def picked(channel: Channel, lent: bool, turns: int = 5) -> int:
    """Rows are packed as they are picked, and read in the peer's memory or in one's own."""
    me, size = channel.rank, channel.size
    for turn in range(turns):
        rows = torch.arange(12.0).view(4, 3) + 100 * me + 1000 * turn
        counts = [0 if peer == me else 2 for peer in range(size)]
        index = torch.tensor([3, 1] * (size - 1))
        coming = channel.start(rows, ExchangeRequest(counts, counts, f"turn {turn}", index=index))
        expected = torch.cat(
            [
                (torch.arange(12.0).view(4, 3) + 100 * peer + 1000 * turn)[[3, 1]]
                for peer in range(size)
                if peer != me
            ]
        )
        if lent:
            with coming.borrow() as found:
                assert torch.equal(found, expected)
        else:
            assert torch.equal(coming.wait(), expected)
    assert channel._transport is not None
    assert channel._transport.shared_memory is not None
    return len(channel._transport.shared_memory._own)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("lent", [True, False])
def test_picked_rows_come_lent_or_copied(ranks, world, lent):
    assert all(segments >= 1 for segments in ranks(world, picked, lent, spoils=True))


def test_what_is_lent_is_given_back_and_its_memory_used_again(ranks):
    assert max(ranks(2, picked, True, 50, spoils=True)) <= 3


def opened(channel: Channel, unwilling: int | None) -> list[int] | None:
    shared_memory = open_shared_memory(channel, wanted=channel.rank != unwilling)
    if shared_memory is None:
        return None
    peers = sorted(shared_memory.peers)
    shared_memory.close()
    return peers


@pytest.mark.parametrize(
    ("world", "unwilling", "expected"),
    [
        (1, None, [None]),
        (2, None, [[1], [0]]),
        (2, 1, [None, None]),
        (3, 0, [None, [2], [1]]),
        (4, None, [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]),
    ],
)
def test_ranks_agree_who_reads_whose_memory(ranks, world, unwilling, expected):
    assert ranks(world, opened, unwilling) == expected


def mixed(channel: Channel, unwilling: int) -> list[list[float]]:
    """As on two hosts: some ranks share memory, one has only its socket."""
    beside = Channel(dist.group.WORLD, "cpu", timeout=10.0)
    for turn in range(3):  # numbered before there is shared memory
        beside.barrier(f"before, {turn}")
        beside.gather_objects(turn, f"before, {turn}")
    shared_memory = open_shared_memory(beside, wanted=channel.rank != unwilling)
    beside.attach_shared_memory(shared_memory)
    ones = [1] * channel.size
    found = [
        beside.start(
            torch.full((channel.size, 50), 10.0 * turn + channel.rank), ExchangeRequest(ones, ones, f"{turn}")
        ).wait()
        for turn in range(3)
    ]
    if shared_memory is not None:
        shared_memory.close(5.0)
    return [each[:, 0].tolist() for each in found]


@pytest.mark.parametrize("unwilling", [0, 1, 2])
def test_ranks_with_and_without_shared_memory_meet(ranks, unwilling):
    expected = [[10.0 * turn + rank for rank in range(3)] for turn in range(3)]
    assert ranks(3, mixed, unwilling, spoils=True) == [expected] * 3


def overlapped(channel: Channel) -> list[float]:
    """As on two hosts: rank 0 packs rows for rank 1 beside it and for rank 2, which reads them late."""
    beside = Channel(dist.group.WORLD, "cpu", timeout=10.0)
    shared_memory = open_shared_memory(beside, wanted=channel.rank != 2)
    beside.attach_shared_memory(shared_memory)
    sent, come = ([0, 1, 1], [0, 0, 0]) if channel.rank == 0 else ([0, 0, 0], [1, 0, 0])

    def begin(turn: int) -> ChannelWork:
        rows, index = torch.full((2, 5000), 1.0 + turn), torch.arange(sum(sent))
        return beside.start(rows, ExchangeRequest(sent, come, f"turn {turn}", index=index))

    def told(sender: int, receiver: int) -> None:
        word = torch.zeros(1)
        if channel.rank == sender:
            channel.start_send(word, receiver, action="word").wait()
        elif channel.rank == receiver:
            channel.start_receive((1,), word.dtype, sender, action="word").wait()

    works = [] if channel.rank == 2 else [begin(0)]
    if channel.rank == 1:
        works[0].wait()
    told(1, 0)  # rank 1 has read its rows of turn 0 ...
    works += [begin(1)] if channel.rank == 0 else []
    told(0, 2)  # ... and rank 0 has packed turn 1 before rank 2 asks for turn 0
    works += [begin(turn) for turn in range(len(works), 2)]
    found = [float(value) for work in works for value in work.wait().unique()]
    if shared_memory is not None:
        shared_memory.close(5.0)
    return found


def test_rows_that_also_go_to_another_host_do_not_change_until_they_are_sent(ranks):
    assert ranks(3, overlapped, spoils=True) == [[], [1.0, 2.0], [1.0, 2.0]]


def turned_off(channel: Channel, shared: bool) -> tuple[bool, Tensor]:
    with open_mesh(Parallel(shared_memory=shared)) as mesh:
        transport = mesh.graph._transport
        has = transport is not None and transport.shared_memory is not None
        ones, rows = [1] * mesh.size, torch.full((mesh.size, 9), float(mesh.rank))
        return has, mesh.graph.start(rows, ExchangeRequest(ones, ones, "a")).wait()[:, 0]


@pytest.mark.parametrize("shared", [True, False])
def test_shared_memory_can_be_turned_off(ranks, shared):
    for has, column in ranks(2, turned_off, shared):
        assert has == shared
        assert column.tolist() == [0.0, 1.0]
