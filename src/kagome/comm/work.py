"""Channel work: a communication operation that was started on a channel and will be waited for.

Where it sits: ``channel`` creates these; the caller computes something else between the start and the wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kagome.comm.exchange import SegmentSizes, Work
from kagome.comm.stats import Kind
from kagome.comm.transport.device import HOST
from kagome.comm.transport.process_group import IncomingMessage, TorchWork

if TYPE_CHECKING:
    from kagome.comm.channel import Channel


@dataclass
class ChannelWork(Work):
    """An exchange in progress; ``wait`` returns its rows.

    Args:
        rows: Buffer in which the rows arrive; it must not be read before ``wait``. On the meta device where
            all of them lie in other ranks' memory until then: a buffer is made if they are copied.
        channel: The channel on which the exchange was started.
        action: Name of the operation, for error messages.
        kind: Traffic kind that its time is counted under.
        works: Messages still to come, each with its peer, or None for a collective.
        kept: Tensors that must stay in memory until the exchange ends.
        begun: Time at which the exchange was started.
        streamed_peers: Peers whose segments arrive one by one; the messages of other peers arrive whole.
    """

    rows: Tensor
    channel: Channel
    action: str
    kind: Kind
    works: list[tuple[int | None, TorchWork]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    streamed_peers: frozenset[int] = frozenset()

    def wait(self) -> Tensor:
        """Wait until all rows have arrived and this rank's own have been sent. A second call returns at once.

        Returns:
            The received rows, peers in the order of their ranks.

        Raises:
            CommError: If a peer was late or its connection was lost.
        """
        if not self.works:
            return self.arrived()
        with self.channel.timed(self.kind):
            return self.arrived()

    @contextmanager
    def borrow(self) -> Iterator[Tensor]:
        """Lend the rows for a block of code, instead of :meth:`wait`.

        If they all come from one rank of this host, they are read in that rank's memory.

        Yields:
            The received rows, peers in the order of their ranks.

        Raises:
            CommError: If a peer was late or its connection was lost.
        """
        # Rows can be read in place only if one message holds all of them, this rank's own part being empty.
        # Empty messages are not posted, so at most one is as large as all rows.
        comings = [work for _, work in self.works if isinstance(work, IncomingMessage)]
        whole = [coming for coming in comings if coming.place.numel() == self.rows.nbytes]
        if not whole or self.channel.device.type != "cpu":
            yield self.wait()
            return
        (coming,) = whole
        coming.lends = True
        with self.channel.timed(self.kind):
            self.channel.finish(self)
        self.works, self.kept = [], []
        # A message without room in the peer's memory has come by a socket, into its own place.
        self.lent = coming.lying is not None
        found = coming.place if coming.lying is None else coming.lying
        like, self.rows = self.rows, self.rows[:0]
        try:
            yield found.view(like.dtype).view(like.shape)
        finally:
            coming.give_back()

    def parts(self, expected: SegmentSizes) -> Iterator[tuple[int, int, Tensor]]:
        """Yield each rank's segments as they arrive, while others are in transit; instead of :meth:`wait`.

        Args:
            expected: Bytes of each segment of each rank of the group, empty ones last.

        Yields:
            A rank of the group, the number of the segment, and its bytes, which must not be kept or written
            to. The first segment of each rank is always yielded, later ones only if they have bytes.

        Raises:
            CommError: If a peer was late or its connection was lost.
        """
        channel = self.channel
        self._allocate()
        slots = [
            slot.split(list(each))
            for slot, each in zip(self.rows.split([sum(each) for each in expected]), expected, strict=True)
        ]

        def segments(peer: int) -> range:
            # At least one: the reader expects the first segment of every peer, also of one that sends
            # nothing.
            return range(max(sum(1 for size in expected[peer] if size), 1))

        comes = sum(
            len(segments(peer)) if peer in self.streamed_peers else 1
            for peer in range(channel.size)
            if sum(expected[peer]) and peer != channel.rank
        )
        awaited = [peer for peer, _ in self.works[:comes]]  # receives were started first
        # nccl: one work for all peers, after which every slot is filled.
        if None in awaited:
            self.wait()
            awaited = []
        # First what needs no wait: this rank's own part, and the empty segments of peers that send nothing.
        for there in (rank for rank in range(channel.size) if rank not in awaited):
            for segment in segments(there):
                yield there, segment, slots[there][segment].to(channel.device)
        # Segments of a peer arrive in the order in which they were posted, so their number is a count.
        come = Counter[int]()
        for peer in (peer for peer in awaited if peer is not None):
            with channel.timed(self.kind):
                channel.finish(self, 1)
            for segment in (come[peer],) if peer in self.streamed_peers else segments(peer):
                yield peer, segment, slots[peer][segment].to(channel.device)
            come[peer] += 1
        # The sends, which come after the receives among the works.
        self.wait()

    def arrived(self) -> Tensor:
        """Wait for the rows like :meth:`wait`, without timing: for callers that already time the phase."""
        self._allocate()
        if self.works:
            self.channel.finish(self)
            self.works, self.kept = [], []
        return self.rows.to(self.channel.device)

    def _allocate(self) -> None:
        """Make the buffer of messages that lie in other ranks' memory, unless it is there."""
        if not self.rows.is_meta:
            return
        self.rows = torch.empty_like(self.rows, device=HOST)
        whole = self.rows.view(-1).view(torch.uint8)
        for _, work in self.works:
            if isinstance(work, IncomingMessage):
                # Its place was a view of a buffer without memory, at the same offset.
                first = work.place.storage_offset()
                work.place = whole[first : first + work.place.numel()]


@dataclass
class SendWork:
    """A message to one rank in progress. It keeps the sent tensor in memory until the message has gone.

    Args:
        pending: The operation to wait for.
    """

    pending: ChannelWork

    def wait(self) -> None:
        """Wait until the message has gone.

        After that its tensor may be changed. A second call returns at once.

        Raises:
            CommError: If the peer was late or its connection was lost.
        """
        self.pending.wait()
