"""Pending: what was begun on a channel and will be waited for - rows that come or go, a sum over all ranks.

Where it sits: ``channel`` makes them; who began one computes something else before it waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kagome.comm.traffic import Kind
from kagome.comm.wire import Coming, Work

if TYPE_CHECKING:
    from kagome.comm.channel import Channel

ONE_ROUND_BYTES: Final = 2**20
"""A sum of more than two ranks goes in one round up to so many bytes of all ranks together."""


@dataclass
class Pending:
    """An exchange under way; ``wait`` gives its rows.

    Args:
        rows: Where the rows arrive; not to be read before ``wait``.
        channel: On which it was begun.
        action: What it is, for errors.
        kind: What its time counts as.
        works: What is still to come, with the peer if there is a single one.
        kept: What must stay in memory until then.
        begun: When it was begun.
    """

    rows: Tensor
    channel: Channel
    action: str
    kind: Kind
    works: list[tuple[int | None, Work]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

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
        comings = [work for _, work in self.works if isinstance(work, Coming)]
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

    def parts(self, counts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Each rank's rows as soon as they have come, while others travel; instead of :meth:`wait`.

        Args:
            counts: Rows of each rank of the group.

        Yields:
            Its rank in the group and its rows, neither to be kept nor written to.

        Raises:
            CommError: If a peer was late or lost.
        """
        channel, slots = self.channel, torch.split(self.rows, list(counts))
        comes = sum(1 for peer, count in enumerate(counts) if count and peer != channel.rank)
        awaited = [peer for peer, _ in self.works[:comes]]  # receives were begun first
        if None in awaited:
            self.wait()
            awaited = []
        for peer in (*(peer for peer in range(channel.size) if peer not in awaited), *awaited):
            if peer in awaited:
                with channel.timed(self.kind):
                    channel.finish(self, 1)
            assert peer is not None
            yield peer, slots[peer].to(channel.device)
        self.wait()

    def arrived(self) -> Tensor:
        """The same inside a phase that is timed already."""
        if self.works:
            self.channel.finish(self)
            self.works, self.kept = [], []
        return self.rows.to(self.channel.device)


@dataclass
class Sending:
    """A message to one rank under way; it holds what is sent until it has gone.

    Args:
        pending: What is still to be done.
    """

    pending: Pending

    def wait(self) -> None:
        """Return when the message has gone: what was sent may be changed; a second call returns at once.

        Raises:
            CommError: If the peer was late or lost.
        """
        self.pending.wait()


@dataclass
class PendingSum:
    """A sum over all ranks under way; ``wait`` gives it.

    Each rank adds the ranks' values one after the other in the order of ranks, so the bits depend neither on
    timing nor on what else is summed in the same message. In one round every rank gets every other's values
    and adds them; in two rounds each adds a piece and sends it to the others: fewer bytes, but the second
    round begins only in ``advance`` or ``wait``.

    Args:
        first: The values of all ranks, or of this rank's piece; with ``summed``, their sum already.
        pieces: How the values are cut for two rounds; none for one round.
        summed: Whether what comes is the sum itself (one rank, nccl).
    """

    first: Pending
    pieces: tuple[int, ...] = ()
    summed: bool = False
    second: Pending | None = None

    def advance(self) -> None:
        """Begin the second round, if any, once the first has ended: of several sums, before any wait."""
        if self.pieces and self.second is None:
            first, piece = self.first, self._added(self.first.wait())
            same = [piece] * first.channel.size
            self.second = first.channel.start_parts(same, self.pieces, first.action, first.kind)

    def wait(self) -> Tensor:
        """Wait for the sum.

        Returns:
            A tensor of the same shape, the same bits on every rank; with one rank what was given.

        Raises:
            CommError: If a peer was late or lost.
        """
        self.advance()
        if self.second is not None:
            return self.second.wait()
        values = self.first.wait()
        return values if self.summed else self._added(values)

    def _added(self, values: Tensor) -> Tensor:
        size = self.first.channel.size
        rows = values.view(size, values.numel() // size)
        total = rows[0] + rows[1]
        for row in rows[2:]:
            total += row
        return total


def start_sum(channel: Channel, flat: Tensor, action: str, kind: Kind) -> PendingSum:
    """Begin what :meth:`Channel.start_all_reduce` describes."""
    size = channel.size
    if size == 1:
        return PendingSum(Pending(flat, channel, action, kind), summed=True)
    if not channel.lanes:
        return PendingSum(channel.begin_all_reduce(flat.clone(), "sum", action, kind), summed=True)
    flat = flat.to(channel.wire)
    if size == 2 or size * flat.nbytes <= ONE_ROUND_BYTES:
        return PendingSum(channel.start_parts([flat] * size, [flat.size(0)] * size, action, kind))
    parts = list(torch.tensor_split(flat, size))
    first = channel.start_parts(parts, [parts[channel.rank].size(0)] * size, action, kind)
    return PendingSum(first, pieces=tuple(part.size(0) for part in parts))
