"""Letters: each peer's bytes are written once, only before they go, and read as soon as they have come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.comm.local import LocalGroup
from kagome.comm.wire import Wire
from kagome.errors import ModelError

WORLDS = [1, 2, 3, 4]


def size(sender: int, receiver: int) -> int:
    return (sender * 5 + receiver * 3 + 1) % 4 * 50_000


def letter(sender: int, receiver: int) -> Tensor:
    return torch.full((size(sender, receiver),), 10 * sender + receiver, dtype=torch.uint8)


def crossed(channel: Any) -> None:
    me, world = channel.rank, range(channel.size)
    written: list[int] = []

    def write(peer: int, place: Tensor) -> None:
        written.append(peer)
        place.copy_(letter(me, peer))

    sizes, expected = [size(me, peer) for peer in world], [size(peer, me) for peer in world]
    for _ in range(3):
        written.clear()
        begun = channel.start_bytes(write, sizes, expected, action="letters", header=(0, 1, 2, 3, 4))
        assert sorted(written) == [peer for peer in world if sizes[peer]]
        come = {}
        for peer, part in begun.parts(expected):
            assert peer not in come
            come[peer] = part.clone()
        assert sorted(come) == list(world)
        for peer, part in come.items():
            assert torch.equal(part, letter(peer, me))
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
    LocalGroup(world).run(crossed)


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
    wire = object.__new__(Wire)
    wire.group, wire.lane, wire.shelf, wire.gloo = Group(events), 0, None, True  # type: ignore[assignment]
    wire.rank, wire.size, wire._count = 0, 4, 0
    sent = [torch.zeros(count, dtype=torch.uint8) for count in (0, 1, 0, 2)]
    come = [torch.zeros(1, dtype=torch.uint8) for _ in range(4)]

    def fill(peer: int) -> None:
        events.append(f"write {peer}")
        sent[peer].fill_(peer)

    for _, begin in wire.post(sent, come, fill):
        begin()
    assert events == [
        "receive 3", "receive 2", "receive 1", "write 1", "send 1: [1]", "write 3", "send 3: [3, 3]"
    ]  # fmt: skip


def broken_off(channel: Channel) -> None:
    def write(peer: int, place: Tensor) -> None:
        if peer != channel.rank:
            raise ModelError("numbers that can be written", "others")

    with pytest.raises(ModelError, match="can be written"):
        channel.start_bytes(write, [3] * channel.size, [3] * channel.size, action="letters")
    crossed(channel)  # nothing of it is left


@pytest.mark.parametrize("world", [2, 3])
def test_what_cannot_be_written_is_told_by_who_writes_and_leaves_nothing(ranks, world):
    ranks(world, broken_off)
