"""Wire: how one message a peer goes over and comes in, by gloo, by a shelf, or by one grouped nccl call.

Where it sits: ``channel`` says what is sent to whom, counts it and waits; this file knows tags and order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kagome.comm import faults
from kagome.comm.shelf import NOWHERE, Shelf

Begin = Callable[[], "Work | None"]
NO_LIMIT = timedelta(days=1)


class Work(Protocol):
    """Something under way."""

    def wait(self, timeout: timedelta = NO_LIMIT) -> object:
        """Return when it is done; a RuntimeError if it was late or its peer is gone."""


class Mark(NamedTuple):
    """The numbers of a message, the same at both its ends.

    Args:
        message: How many were begun on this wire; all ranks of its group count alike, shelf or not.
        token: How many on its lane of the box, which outlives a wire; ranks without a shelf have none.
    """

    message: int
    token: int


class Wire:
    """The messages of one lane of one group, in their order.

    Args:
        group: The process group.
        lane: Messages of one lane never meet those of another.
        shelf: Memory that peers on this host read; None if there is none.
    """

    def __init__(self, group: dist.ProcessGroup, lane: Literal[0, 1], shelf: Shelf | None) -> None:
        self.group, self.lane, self.shelf = group, lane, shelf
        self.rank, self.size, self.names = group.rank(), group.size(), dist.get_process_group_ranks(group)
        self.gloo = dist.get_backend(group) == "gloo"
        self._count = 0

    def post(self, sent: Sequence[Tensor], come: Sequence[Tensor]) -> Iterator[tuple[int | None, Begin]]:
        """What begins each message, with its peer (None: all at once); the own message is left out.

        Args:
            sent: Bytes for each peer.
            come: Room for each peer's bytes.
        """
        if not self.gloo:
            mine = self.rank
            give, take = list(sent), list(come)
            give[mine], take[mine] = give[mine][:0], take[mine][:0]
            yield None, lambda: self.group.alltoall(take, give)
            return
        self._count += 1
        mark = Mark(self._count, 0 if self.shelf is None else self.shelf.box.count(self.lane))
        # Receives first, so that what arrives finds its place; each rank begins at another peer.
        for peer in self._ring(-1):
            if come[peer].numel():
                yield peer, partial(self._receive, peer, come[peer], mark)
        laid = self._laid(sent)
        for peer in self._ring(1):
            if sent[peer].numel():
                yield peer, partial(self._send, peer, sent[peer], mark, laid.get(peer))

    def near(self, peer: int) -> bool:
        """Whether a peer reads this rank's shelf, and this rank its."""
        return self.shelf is not None and self.names[peer] in self.shelf.peers

    def room(self, count: int, counts: Sequence[int]) -> Tensor | None:
        """So many bytes on the shelf for a message to all, if a peer that gets rows reads them there."""
        reads = any(rows and peer != self.rank and self.near(peer) for peer, rows in enumerate(counts))
        return self.shelf.room(count) if self.shelf is not None and reads else None

    def dead(self, peers: Sequence[int]) -> list[int]:
        """Those whose connection is closed: a collective's error does not say whose."""
        if not self.gloo:
            return []
        closed: list[int] = []
        for peer in peers:
            try:
                probe = self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, 2**31 - 1)
                probe.wait(timedelta(seconds=0.05))
            except RuntimeError as error:
                if not faults.is_late(error):
                    closed.append(peer)
        return closed

    def by_gloo(self, peer: int, message: Tensor, mark: Mark, *, send: bool) -> Work:
        """Begin a message through a socket."""
        # Order (7 bits), lane (1) and size (23, hashed): messages that do not belong together never meet, and
        # the wait for the right one ends in an error that can be caught, not in gloo's abort.
        tag = (mark.message % 128) << 24 | self.lane << 23 | (message.numel() * 2654435761 % 2**32) >> 9
        begin = self.group.send if send else self.group.recv
        work: Work = begin([message], peer, tag)
        return work

    def _receive(self, peer: int, place: Tensor, mark: Mark) -> Work:
        if self.near(peer):
            return Coming(self, peer, place, mark)
        return self.by_gloo(peer, place, mark, send=False)

    def _send(self, peer: int, message: Tensor, mark: Mark, token: tuple[int, ...] | None) -> Work | None:
        if token is None or self.shelf is None:
            return self.by_gloo(peer, message, mark, send=True)
        sent = self.by_gloo(peer, message, mark, send=True) if token == NOWHERE else None
        lies = self.shelf.box.put(self.names[peer], self.lane, mark.token, message.numel(), token)
        return sent if lies else _Leaving(self, peer, mark.token, sent)

    def _laid(self, sent: Sequence[Tensor]) -> dict[int, tuple[int, ...]]:
        """The token for each peer that reads this rank's shelf."""
        near = {
            peer: part
            for peer, part in enumerate(sent)
            if peer != self.rank and part.numel() and self.near(peer)
        }
        if not near or self.shelf is None:
            return {}
        tokens = self.shelf.lay({self.names[peer]: part for peer, part in near.items()})
        return {peer: tokens[self.names[peer]] for peer in near}

    def _ring(self, step: int) -> list[int]:
        return [(self.rank + step * hop) % self.size for hop in range(1, self.size)]


class Coming:
    """A message whose token comes first: its bytes lie on the peer's shelf, or come by the wire.

    Args:
        wire: The wire.
        peer: Who sends it.
        place: Where its bytes are to go.
        mark: Its numbers.
    """

    def __init__(self, wire: Wire, peer: int, place: Tensor, mark: Mark) -> None:
        self.wire, self.peer, self.place, self.mark = wire, peer, place, mark
        self.lends = False
        """Whether bytes on the shelf are to be left there, to be read in place."""
        self.lying: Tensor | None = None
        self._token: tuple[int, ...] = NOWHERE

    def wait(self, timeout: timedelta = NO_LIMIT) -> None:
        """Wait for the token, then take the bytes."""
        begun = time.monotonic()
        shelf, name, lane = self.wire.shelf, self.wire.names[self.peer], self.wire.lane
        assert shelf is not None
        self._token = shelf.box.wait(name, lane, self.mark.token, self.place.numel(), timeout)
        self.lying = shelf.find(name, self._token, self.place.numel())
        if self.lying is None:
            left = timeout - timedelta(seconds=time.monotonic() - begun)
            work = self.wire.by_gloo(self.peer, self.place, self.mark, send=False)
            work.wait(max(left, timedelta(seconds=0.01)))
        elif not self.lends:
            self.place.copy_(self.lying)
        shelf.box.read(name, lane, self.mark.token)
        if not self.lends:
            self.give_back()

    def give_back(self) -> None:
        """Let the peer use its memory again."""
        if self.lying is not None and self.wire.shelf is not None:
            self.wire.shelf.taken(self.wire.names[self.peer], self._token)
        self.lying = None


class _Leaving:
    """A message whose token was put off: it is far ahead of what its peer has read."""

    def __init__(self, wire: Wire, peer: int, count: int, sent: Work | None) -> None:
        self.wire, self.peer, self.count, self.sent = wire, peer, count, sent

    def wait(self, timeout: timedelta = NO_LIMIT) -> None:
        """Return when the token lies there, and its bytes have gone."""
        limit, name = time.monotonic() + timeout.total_seconds(), self.wire.names[self.peer]
        assert self.wire.shelf is not None
        box = self.wire.shelf.box
        while not box.lies(name, self.wire.lane, self.count):
            if time.monotonic() > limit:
                raise RuntimeError(f"timed out: rank {name} reads no token")
            if not box.alive(name):
                raise RuntimeError(f"connection closed: rank {name} is gone")
            time.sleep(1e-3)
        if self.sent is not None:
            self.sent.wait(max(timedelta(seconds=limit - time.monotonic()), timedelta(seconds=0.01)))
