"""Pending: what was begun on a channel and will be waited for - rows that come or go.

Where it sits: ``channel`` makes them; who began one computes something else before it waits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from kagome.comm.stats import Kind
from kagome.comm.transport.process_group import IncomingMessage, TorchWork

if TYPE_CHECKING:
    from kagome.comm.channel import Channel

Sheets = Sequence[Sequence[int]]
"""Bytes of each sheet of each peer's letter."""


@dataclass
class Work:
    """An exchange under way; ``wait`` gives its rows.

    Args:
        rows: Where the rows arrive; not to be read before ``wait``.
        channel: On which it was begun.
        action: What it is, for errors.
        kind: What its time counts as.
        works: What is still to come, with the peer if there is a single one.
        kept: What must stay in memory until then.
        begun: When it was begun.
        apart: Peers whose sheets come one by one; others' come whole.
    """

    rows: Tensor
    channel: Channel
    action: str
    kind: Kind
    works: list[tuple[int | None, TorchWork]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    apart: frozenset[int] = frozenset()

    def wait(self) -> Tensor:
        """Wait until all rows have come and the own ones are taken; a second call returns at once.

        Returns:
            The received rows, peers in the order of their ranks.

        Raises:
            CommError: If a peer was late or lost.
        """
        if not self.works:
            return self.arrived()
        with self.channel.timed(self.kind):
            return self.arrived()

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """The rows for a block, instead of :meth:`wait`: neither to be kept nor written to.

        Where they all come from one rank of this host they are read in that rank's memory.

        Yields:
            The received rows.

        Raises:
            CommError: If a peer was late or lost.
        """
        comings = [work for _, work in self.works if isinstance(work, IncomingMessage)]
        whole = [coming for coming in comings if coming.place.numel() == self.rows.nbytes]
        if not whole or self.channel.device.type != "cpu":
            yield self.wait()
            return
        (coming,) = whole
        coming.lends = True
        rows = self.wait()
        self.rows = rows[:0]  # never filled, if what was lent was
        try:
            yield rows if coming.lying is None else coming.lying.view(rows.dtype).view(rows.shape)
        finally:
            coming.give_back()

    def parts(self, expected: Sheets) -> Iterator[tuple[int, int, Tensor]]:
        """Each rank's sheets as soon as they have come, while others travel; instead of :meth:`wait`.

        Args:
            expected: Bytes of each sheet of each rank of the group, empty ones last.

        Yields:
            A rank of the group, the number of its sheet, and its bytes, neither to be kept nor written to:
            the first sheet of each rank, and others where they have bytes.

        Raises:
            CommError: If a peer was late or lost.
        """
        channel = self.channel
        slots = [
            slot.split(list(each))
            for slot, each in zip(self.rows.split([sum(each) for each in expected]), expected, strict=True)
        ]

        def sheets(peer: int) -> range:
            return range(max(sum(1 for size in expected[peer] if size), 1))

        comes = sum(
            len(sheets(peer)) if peer in self.apart else 1
            for peer in range(channel.size)
            if sum(expected[peer]) and peer != channel.rank
        )
        awaited = [peer for peer, _ in self.works[:comes]]  # receives were begun first
        if None in awaited:
            self.wait()
            awaited = []
        for there in (rank for rank in range(channel.size) if rank not in awaited):
            for sheet in sheets(there):
                yield there, sheet, slots[there][sheet].to(channel.device)
        come = Counter[int]()
        for peer in (peer for peer in awaited if peer is not None):
            with channel.timed(self.kind):
                channel.finish(self, 1)
            for sheet in (come[peer],) if peer in self.apart else sheets(peer):
                yield peer, sheet, slots[peer][sheet].to(channel.device)
            come[peer] += 1
        self.wait()

    def arrived(self) -> Tensor:
        """The same inside a phase that is timed already."""
        if self.works:
            self.channel.finish(self)
            self.works, self.kept = [], []
        return self.rows.to(self.channel.device)


@dataclass
class SendWork:
    """A message to one rank under way; it holds what is sent until it has gone.

    Args:
        pending: What is still to be done.
    """

    pending: Work

    def wait(self) -> None:
        """Return when the message has gone: what was sent may be changed; a second call returns at once.

        Raises:
            CommError: If the peer was late or lost.
        """
        self.pending.wait()
