"""Letters: each peer's bytes are written once, only before they go, and read as soon as they have come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.comm.exchange import BytesRequest
from kagome.comm.in_process.thread_group import ThreadGroup
from kagome.comm.transport.process_group import Transport
from kagome.errors import ModelError

WORLDS = [1, 2, 3, 4]


def sheets(sender: int, receiver: int) -> list[int]:
    """Bytes of each sheet: of some letters none, of some one sheet alone has any."""
    some = (sender * 5 + receiver * 3 + 1) % 4
    return [40_000 * some, 10_000 * (some // 2), 7 * (some // 3)]


def size(sender: int, receiver: int) -> int:
    return sum(sheets(sender, receiver))


def letter(sender: int, receiver: int) -> Tensor:
    counts, value = sheets(sender, receiver), 10 * sender + receiver
    filled = [torch.full((count,), 60 * sheet + value) for sheet, count in enumerate(counts)]
    return torch.cat(filled).to(torch.uint8)


def crossed(channel: Any) -> None:
    me, world = channel.rank, range(channel.size)
    written: list[tuple[int, int]] = []

    def write(peer: int, sheet: int, place: Tensor) -> None:
        written.append((peer, sheet))
        place.copy_(letter(me, peer).split(sheets(me, peer))[sheet])

    sizes, expected = [sheets(me, peer) for peer in world], [sheets(peer, me) for peer in world]
    for _ in range(3):
        written.clear()
        begun = channel.start_bytes(BytesRequest(write, sizes, expected, "letters", header=(0, 1, 2, 3, 4)))
        assert sorted(written) == [(p, k) for p in world for k, count in enumerate(sizes[p]) if count]
        come: dict[int, list[Tensor]] = {}
        for peer, sheet, part in begun.parts(expected):
            assert sheet == len(come.setdefault(peer, []))
            come[peer].append(part.clone())
        assert sorted(come) == list(world)
        for peer, parts in come.items():
            assert torch.equal(torch.cat(parts), letter(peer, me))
        assert torch.equal(begun.wait(), torch.cat([letter(peer, me) for peer in world]))


def on_ranks(channel: Channel) -> None:
    channel.take_traffic()
    crossed(channel)
    spent = channel.take_traffic()
    assert spent.bytes["halo"] == 3 * sum(
        size(channel.rank, peer) for peer in range(channel.size) if peer != channel.rank
    )
    assert spent.under_way["halo"] >= spent.waited["halo"] >= 0


@pytest.mark.parametrize("world", WORLDS)
def test_letters_arrive_whole(ranks, world):
    ranks(world, on_ranks)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_threads_of_one_process_write_and_read_alike(world):
    ThreadGroup(world).run(crossed)


class Group:
    """Stands for a process group: notes what is begun."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self.events.append(f"send {peer}: {tensors[0].tolist()}")

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self.events.append(f"receive {peer}")


def test_what_comes_later_is_written_while_the_first_travels():
    events: list[str] = []
    transport = object.__new__(Transport)
    transport.group, transport.lane = Group(events), 0  # type: ignore[assignment]
    transport.shared_memory, transport.gloo = None, True
    transport.rank, transport.size, transport._count = 0, 4, 0
    sent = [[torch.zeros(n, dtype=torch.uint8) for n in each] for each in ((0, 0), (1, 1), (0, 0), (2, 0))]
    come = [[torch.zeros(n, dtype=torch.uint8) for n in (1, peer // 3)] for peer in range(4)]

    def fill(peer: int, sheet: int) -> None:
        events.append(f"write {peer}.{sheet}")
        sent[peer][sheet].fill_(10 * peer + sheet)

    for _, begin in transport.post(sent, come, fill):
        begin()
    assert events == [
        *("receive 3", "receive 2", "receive 1", "receive 3"),
        *("write 1.0", "send 1: [10]", "write 3.0", "send 3: [30, 30]", "write 1.1", "send 1: [11]"),
    ]


def broken_off(channel: Channel) -> None:
    def write(peer: int, sheet: int, place: Tensor) -> None:
        if peer != channel.rank and sheet == 1:
            raise ModelError("numbers that can be written", "others")

    with pytest.raises(ModelError, match="can be written"):
        channel.start_bytes(
            BytesRequest(write, [[3, 2, 0]] * channel.size, [[3, 2, 0]] * channel.size, "letters")
        )
    crossed(channel)  # nothing of it is left


@pytest.mark.parametrize("world", [2, 3])
def test_what_cannot_be_written_is_told_by_who_writes_and_leaves_nothing(ranks, world):
    ranks(world, broken_off)
