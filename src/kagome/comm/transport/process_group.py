"""Transport: how a message travels to each peer or to one peer: over gloo, shared memory or nccl.

Where it sits: ``comm.channel`` decides what is sent to whom, counts the bytes and waits. This module handles
tags and the order of messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kagome.comm.transport import failures
from kagome.comm.transport.device import HOST, backend_of
from kagome.comm.transport.mailbox import BACKWARD, FORWARD, Mailbox
from kagome.comm.transport.routes import Route
from kagome.comm.transport.shared_memory import NOWHERE, SharedMemory

Begin = Callable[[], "TorchWork | None"]
NO_LIMIT = timedelta(days=1)


class TorchWork(Protocol):
    """A communication operation in progress; a part of the interface of torch's ``Work``."""

    def wait(self, timeout: timedelta = NO_LIMIT) -> object:
        """Return when the operation is done; raise RuntimeError if it was late or its peer is gone."""


class MessageTag(NamedTuple):
    """The numbers that identify a message, the same for its sender and its receiver.

    Args:
        lane: Messages with different lanes never match.
        message: Number of messages begun on this lane, counted for each peer and direction if the message is
            point-to-point. Both sides count alike, with or without shared memory.
        token: Number of the message in the mailbox, which outlives a transport; 0 without shared memory.
        segment: Number of the segment, for a message sent in several.
    """

    lane: int
    message: int
    token: int
    segment: int = 0


class Transport:
    """The messages of one lane of one group in their order, and those between two of its ranks.

    Args:
        group: The process group.
        lane: Messages with different lanes never match.
        shared_memory: Memory that peers on this host read; None if there is none.
        device: Device of what is sent: the host for gloo.

    Attributes:
        routes: With nccl, the group of the two ranks of each route of this rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        lane: Literal[0, 1],
        shared_memory: SharedMemory | None,
        device: torch.device = HOST,
    ) -> None:
        self.group, self.lane, self.shared_memory = group, lane, shared_memory
        self.routes: dict[Route, dist.ProcessGroup] = {}
        self.rank, self.size = group.rank(), group.size()
        self.gloo = backend_of(group, device) == "gloo"
        # [Note: counts] Both ends number the messages alike, empty ones included, and so agree without
        # asking:
        #
        #     to all ranks      one count a lane, since all ranks make the same exchanges in one order
        #     to one rank       one count for each peer, pass and direction: a stage may be chunks ahead
        #     in the mailbox    the same again, because a patient channel shares the mailbox and has its
        #                       own transport, whose counts begin at 0
        self._count = 0
        self._points: dict[tuple[int, int, bool], int] = {}

    def post(
        self,
        sent: Sequence[Sequence[Tensor]],
        come: Sequence[Sequence[Tensor]],
        fill: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[int | None, Begin]]:
        """Yield the peer of each message and the function that begins the message, receives first.

        The peer is None for a collective. The message of this rank to itself is left out.

        Args:
            sent: Bytes for each peer, as segments: the same number of them on all ranks. With nccl, and for a
                peer that is ``shares_memory_with``, all bytes are in the first segment.
            come: Buffers for each peer's bytes, in the same form.
            fill: Writes a segment for a peer if its bytes are not there yet. It is called as late as
                possible.
        """
        write = fill or _nothing
        if not self.gloo:
            mine = self.rank
            for peer in self._ring(1):
                write(peer, 0)
            give, take = [each[0] for each in sent], [each[0] for each in come]
            # The caller copies this rank's own part.
            give[mine], take[mine] = give[mine][:0], take[mine][:0]
            yield None, lambda: self.group.alltoall(take, give)
            return
        segments = range(len(sent[0]))
        # Counted for every exchange, also one without bytes for a peer of this host.
        token = 0 if self.shared_memory is None else self.shared_memory.mailbox.count(self.lane)
        self._count += 1
        tags = [MessageTag(self.lane, self._count, token, segment) for segment in segments]
        # Receives first, so that arriving bytes have a buffer; each rank begins with another peer.
        for segment in segments:
            for peer in self._ring(-1):
                if come[peer][segment].numel():
                    yield peer, partial(self._receive, peer, come[peer][segment], tags[segment])
        # The parts for peers of this host are all written first: ``_laid`` then copies those that are not in
        # shared memory yet into one block, equal ones once.
        near = [peer for peer in self._ring(1) if self.shares_memory_with(peer)]
        for peer in near:
            write(peer, 0)
        laid = self._laid({peer: each[0] for peer, each in enumerate(sent)})
        for segment in segments:
            for peer in self._ring(1):
                if sent[peer][segment].numel():
                    if peer not in near:
                        write(peer, segment)  # while the segments before it are in transit
                    yield peer, partial(self._send, peer, sent[peer][segment], tags[segment], laid.get(peer))

    def send(self, peer: int, message: Tensor, *, backward: bool) -> TorchWork | None:
        """Begin to send a message to one peer; messages of one pass arrive there in the order of calls.

        Returns:
            The operation in progress; None if it has ended already.
        """
        tag = self._tag(peer, backward, sent=True)
        if not message.numel():
            return None
        # nccl matches by order on its stream alone: it has no tags, and no shared memory is open.
        if not self.gloo:
            group = self._group_of(Route(self.rank, peer, backward))
            work: TorchWork = group.send([message], 1 - group.rank(), 0)
            return work
        return self._send(peer, message, tag, self._laid({peer: message}).get(peer))

    def receive(self, peer: int, place: Tensor, *, backward: bool) -> TorchWork | None:
        """Begin to receive what the peer's :meth:`send` of the same pass and number sends."""
        tag = self._tag(peer, backward, sent=False)
        if not place.numel():
            return None
        if not self.gloo:
            group = self._group_of(Route(peer, self.rank, backward))
            work: TorchWork = group.recv([place], 1 - group.rank(), 0)
            return work
        return self._receive(peer, place, tag)

    def shares_memory_with(self, peer: int) -> bool:
        """Return whether this rank and a peer read each other's shared memory."""
        return self.shared_memory is not None and peer in self.shared_memory.peers

    def buffer(self, count: int, counts: Sequence[int]) -> Tensor | None:
        """Return this many bytes of shared memory for a message to all ranks.

        It is None if some peer that gets rows does not read them there, or if there is no room.
        """
        # The memory is reused when its readers have read it. They do not know whether a socket still sends
        # from it to another host.
        near = [
            self.shares_memory_with(peer) for peer, rows in enumerate(counts) if rows and peer != self.rank
        ]
        fits = self.shared_memory is not None and near and all(near)
        return self.shared_memory.buffer(count) if self.shared_memory is not None and fits else None

    def dead_peers(self, peers: Sequence[int]) -> list[int]:
        """Return the peers whose connection is closed. A collective's own error does not identify them."""
        if not self.gloo:
            return []
        closed: list[int] = []
        for peer in peers:
            try:
                # gloo fails at once on a closed connection and waits on an open one. Nobody sends with this
                # tag.
                probe = self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, 2**31 - 1)
                probe.wait(timedelta(seconds=0.05))
            except RuntimeError as error:
                if not failures.is_late(error):
                    closed.append(peer)
        return closed

    def by_gloo(self, peer: int, message: Tensor, tag: MessageTag, *, send: bool) -> TorchWork:
        """Begin to send or receive a message through a socket."""
        # Order (7 bits), lane (2), size and segment (22, hashed): messages that do not belong together never
        # match, and the wait for the right one ends in an error that can be caught, not in gloo's abort.
        # tag     bits 30 .. 24: number mod 128      23, 22: lane      21 .. 0: hash of size and segment
        #
        # Knuth's multiplicative hash, 2^32 over the golden ratio. Its upper bits spread best: 22 are kept.
        size = (8 * message.numel() + tag.segment) * 2654435761 % 2**32
        number = (tag.message % 128) << 24 | tag.lane << 22 | size >> 10
        begin = self.group.send if send else self.group.recv
        work: TorchWork = begin([message], peer, number)
        return work

    def _group_of(self, route: Route) -> dist.ProcessGroup:
        # Not the group of all ranks in its place: see [Note: routes].
        if route not in self.routes:
            raise ValueError(f"{route} has no group: Channel.open_routes makes it")
        return self.routes[route]

    def _tag(self, peer: int, backward: bool, *, sent: bool) -> MessageTag:
        """Number a message between two ranks; empty messages are counted too."""
        key = (peer, BACKWARD if backward else FORWARD, sent)
        self._points[key] = self._points.get(key, 0) + 1
        token = 0
        if self.shared_memory is not None and self.shares_memory_with(peer):
            token = self.shared_memory.mailbox.count_point(*key[:2], sent=sent)
        return MessageTag(key[1], self._points[key], token)

    def _receive(self, peer: int, place: Tensor, tag: MessageTag) -> TorchWork:
        if self.shares_memory_with(peer):
            return IncomingMessage(self, peer, place, tag)
        return self.by_gloo(peer, place, tag, send=False)

    def _send(
        self, peer: int, message: Tensor, tag: MessageTag, token: tuple[int, ...] | None
    ) -> TorchWork | None:
        if token is None or self.shared_memory is None:
            return self.by_gloo(peer, message, tag, send=True)
        # Without room in shared memory the bytes go by a socket. The receiver waits for a token in any case,
        # so one is left that says so.
        sent = self.by_gloo(peer, message, tag, send=True) if token == NOWHERE else None
        lies = self.shared_memory.mailbox.put(peer, tag.lane, tag.token, message.numel(), token)
        return sent if lies else _Leaving(self.shared_memory.mailbox, peer, tag, sent)

    def _laid(self, sent: Mapping[int, Tensor]) -> dict[int, tuple[int, ...]]:
        """Put the messages of all near peers into shared memory, and return the token for each."""
        near = {
            peer: part
            for peer, part in sent.items()
            if peer != self.rank and part.numel() and self.shares_memory_with(peer)
        }
        return self.shared_memory.write(near) if near and self.shared_memory is not None else {}

    def _ring(self, step: int) -> list[int]:
        # Every rank begins with another peer, so that no rank is sent to by all at once. Of 4 ranks:
        #
        #     sends (step 1)       rank 0: 1 2 3     rank 1: 2 3 0     rank 2: 3 0 1     rank 3: 0 1 2
        #     receives (step -1)   rank 0: 3 2 1     rank 1: 0 3 2     rank 2: 1 0 3     rank 3: 2 1 0
        return [(self.rank + step * hop) % self.size for hop in range(1, self.size)]


def _nothing(peer: int, segment: int) -> None:
    """Write nothing: the bytes are in place already."""


class IncomingMessage:
    """A message announced by a token: its bytes are in the peer's shared memory, or follow through a socket.

    Args:
        transport: The transport that receives it.
        peer: The sending rank of the group.
        place: Buffer for its bytes; on the meta device if they are to be read where they lie.
        tag: The numbers that identify it.
    """

    def __init__(self, transport: Transport, peer: int, place: Tensor, tag: MessageTag) -> None:
        self.transport, self.peer, self.place, self.tag = transport, peer, place, tag
        self.lends = False
        """Whether bytes in shared memory are left there to be read in place."""
        self.lying: Tensor | None = None
        self._token: tuple[int, ...] = NOWHERE

    def wait(self, timeout: timedelta = NO_LIMIT) -> None:
        """Wait for the token, then copy or receive the bytes."""
        begun = time.monotonic()
        shared_memory, peer, lane, number = (
            self.transport.shared_memory,
            self.peer,
            self.tag.lane,
            self.tag.token,
        )
        assert shared_memory is not None
        self._token = shared_memory.mailbox.wait(peer, lane, number, self.place.numel(), timeout)
        self.lying = shared_memory.find(peer, self._token, self.place.numel())
        if self.lying is None:
            # The receive is posted only now, because only the token says which way the bytes take.
            self.place = torch.empty_like(self.place, device=HOST) if self.place.is_meta else self.place
            left = timeout - timedelta(seconds=time.monotonic() - begun)
            work = self.transport.by_gloo(self.peer, self.place, self.tag, send=False)
            work.wait(max(left, timedelta(seconds=0.01)))
        elif not self.lends:
            self.place.copy_(self.lying)
        # This frees the token's slot. The bytes that it points to are free only after ``give_back``.
        shared_memory.mailbox.read(peer, lane, number)
        if not self.lends:
            self.give_back()

    def give_back(self) -> None:
        """Allow the peer to reuse its memory."""
        if self.lying is not None and self.transport.shared_memory is not None:
            self.transport.shared_memory.taken(self.peer, self._token)
        self.lying = None


class _Leaving:
    """A message whose token is delayed because the peer has not read enough of the earlier ones."""

    def __init__(self, mailbox: Mailbox, peer: int, tag: MessageTag, sent: TorchWork | None) -> None:
        self.mailbox, self.peer, self.tag, self.sent = mailbox, peer, tag, sent

    def wait(self, timeout: timedelta = NO_LIMIT) -> None:
        """Return when the token has been written and the bytes have been sent."""
        limit = time.monotonic() + timeout.total_seconds()
        while not self.mailbox.lies(self.peer, self.tag.lane, self.tag.token):
            if time.monotonic() > limit:
                raise RuntimeError(f"timed out: rank {self.peer} of the group reads no token")
            if not self.mailbox.alive(self.peer):
                raise RuntimeError(f"connection closed: rank {self.peer} of the group is gone")
            time.sleep(1e-3)
        if self.sent is not None:
            self.sent.wait(max(timedelta(seconds=limit - time.monotonic()), timedelta(seconds=0.01)))
