"""All-reduce: a non-blocking sum over all ranks, in one round or two, exact or cast to a shorter type.

Where it sits: ``channel`` starts one; ``components.gradients`` starts one for each bucket of gradients.

::

    one round     each rank -> all: [ all values ]                                     (n - 1) x their bytes
    two rounds    each rank -> rank i: [ piece i ], then i -> all: [ its sum ]   2 (n - 1) / n x their bytes

    values        [ exact, in their own type ][ others, cast to a shorter type ]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kagome.comm.codec import aligned
from kagome.comm.stats import Kind
from kagome.comm.work import ChannelWork

if TYPE_CHECKING:
    from kagome.comm.channel import Channel

ONE_ROUND_BYTES: Final = 2**18
"""A sum takes one round while the messages of all ranks together have at most this many bytes. For such short
messages a second round would cost more latency than it saves in bytes."""


@dataclass(frozen=True)
class Values:
    """The format in which the values of a sum are sent.

    Args:
        dtype: The type of the tensor, in which the values are added.
        cast: The shorter type in which values are sent; equal to ``dtype`` if none is cast.
        exact: Number of leading values that are sent in ``dtype``.
    """

    dtype: torch.dtype
    cast: torch.dtype
    exact: int

    @staticmethod
    def of(flat: Tensor, cast: torch.dtype | None, exact: int) -> Values:
        """Return the format for a tensor, with a cast only if ``cast`` is shorter than the tensor's type."""
        shorter = cast is not None and flat.is_floating_point() and cast.itemsize < flat.dtype.itemsize
        return Values(flat.dtype, cast if cast is not None and shorter else flat.dtype, exact)

    def size(self, begin: int, end: int) -> int:
        """Return the number of bytes that the values from ``begin`` to ``end`` take in a message."""
        # The exact values are the first of all values, so a piece has exact values only if it begins before
        # ``self.exact``.
        exact = self._exact(begin, end)
        return exact * self.dtype.itemsize + (end - begin - exact) * self.cast.itemsize

    def pack(self, piece: Tensor, begin: int) -> Tensor:
        """Return a piece of the values as bytes. If nothing is cast, the bytes share the piece's memory.

        Args:
            piece: A run of consecutive values.
            begin: Index of the first of them among all values.
        """
        if self.cast == self.dtype:
            return piece.view(torch.uint8)
        exact = self._exact(begin, begin + piece.numel())
        return torch.cat([piece[:exact].view(torch.uint8), piece[exact:].to(self.cast).view(torch.uint8)])

    def unpack(self, message: Tensor, begin: int, end: int) -> Tensor:
        """Return the values of a message. If nothing is cast, they share its memory."""
        if self.cast == self.dtype:
            return aligned(message, self.dtype)
        split = self._exact(begin, end) * self.dtype.itemsize
        # The message holds the exact values and then the cast ones, both as bytes. It may begin at any byte
        # of the received buffer, so each half is aligned by itself.
        exact, others = aligned(message[:split], self.dtype), aligned(message[split:], self.cast)
        return torch.cat([exact, others.to(self.dtype)])

    def _exact(self, begin: int, end: int) -> int:
        return min(max(self.exact - begin, 0), end - begin)


@dataclass
class AllReduceWork:
    """A sum over all ranks in progress; ``wait`` returns it.

    Each rank adds the ranks' values one after the other in rank order, so the bits of the sum depend neither
    on timing nor on what else shares the message. In one round every rank receives all values of all ranks
    and adds them. In two rounds each rank adds one piece and sends its sum to the others. This takes fewer
    bytes, but the second round begins only in ``advance`` or ``wait``. Values that are cast are cast once
    before the first round and, in two rounds, once more before the second. A rank reads its own values from
    the same cast message as its peers do.

    Args:
        first: The values of all ranks, or of this rank's piece. With one rank, or with nccl's own all-reduce,
            it is the sum itself.
        values: The format in which values are sent; None if ``first`` is the sum itself.
        bounds: In two rounds, where each rank's piece begins and ends. In one round, one pair for all values.
        second: The second round, once it has begun.
    """

    first: ChannelWork
    values: Values | None = None
    bounds: Sequence[tuple[int, int]] = ()
    second: ChannelWork | None = None

    @property
    def rounds(self) -> int:
        """Number of rounds in which values are sent."""
        return min(len(self.bounds), 2) or 1

    @property
    def uncast(self) -> int:
        """Bytes that this rank would send if nothing were cast."""
        channel = self.first.channel
        # The process group's own all-reduce: a ring sends 2 (n - 1) / n of the values.
        if self.values is None:
            return 2 * (channel.size - 1) * self.first.rows.nbytes // channel.size
        count = self.bounds[-1][1]
        if self.rounds == 1:
            return count * (channel.size - 1) * self.values.dtype.itemsize
        # First round: every value but this rank's own piece. Second round: the sum of that piece to n - 1
        # peers.
        #     count - piece + piece (n - 1) = count + piece (n - 2)
        begin, end = self.bounds[channel.rank]
        return (count + (end - begin) * (channel.size - 2)) * self.values.dtype.itemsize

    def advance(self) -> None:
        """Begin the second round, if there is one, once the first has ended.

        With several sums in progress, call it on each before waiting for any.
        """
        if self.rounds == 2 and self.second is None and self.values is not None:
            first, values = self.first, self.values
            begin, end = self.bounds[first.channel.rank]
            # Every rank, this one included, reads the sum from the packed message. Otherwise this rank would
            # keep the bits that a cast removes, and the sums would differ between ranks.
            piece = values.pack(self._added(first.wait(), begin, end), begin).to(first.channel.send_device)
            sizes = [values.size(*bounds) for bounds in self.bounds]
            same = [piece] * first.channel.size
            self.second = first.channel.start_parts(same, sizes, first.action, first.kind)

    def wait(self) -> Tensor:
        """Wait for the sum and return it.

        Returns:
            A tensor of the same shape, with the same bits on every rank; with one rank the input itself.

        Raises:
            CommError: If a peer was late or its connection was lost.
        """
        if self.values is None:
            return self.first.wait()
        self.advance()
        if self.second is None:
            return self._added(self.first.wait(), *self.bounds[0])
        come = self.second.wait()
        if self.values.cast == self.values.dtype:
            return come.view(self.values.dtype)
        return torch.cat(list(self._pieces(come)))

    def _pieces(self, come: Tensor) -> Iterator[Tensor]:
        assert self.values is not None
        sizes = [self.values.size(*bounds) for bounds in self.bounds]
        for message, bounds in zip(torch.split(come, sizes), self.bounds, strict=True):
            yield self.values.unpack(message, *bounds)

    def _added(self, come: Tensor, begin: int, end: int) -> Tensor:
        """Return the sum of all ranks' values of one piece."""
        assert self.values is not None
        rows = come.view(self.first.channel.size, self.values.size(begin, end))
        # Out of place at first, because without a cast ``unpack`` returns a view of the received buffer.
        total = self.values.unpack(rows[0], begin, end) + self.values.unpack(rows[1], begin, end)
        for row in rows[2:]:
            total += self.values.unpack(row, begin, end)
        return total


def start_all_reduce(
    channel: Channel,
    tensor: Tensor,
    *,
    action: str,
    kind: Kind = "weights",
    cast: torch.dtype | None = None,
    exact: int = 0,
) -> AllReduceWork:
    """Begin a sum over the ranks; :class:`AllReduceWork` says how its bits come about.

    This call waits for no peer, and the time limit for peers begins only when this rank waits.

    Args:
        channel: The channel of the ranks.
        tensor: This rank's values, which must not change before the wait ends.
        action: Name of the operation, for error messages.
        kind: Traffic kind that its bytes and time are counted under.
        cast: Type in which values are sent, if it is shorter than their own.
        exact: Number of leading values that are sent in their own type.

    Shapes: [n] -> [n].

    Cost: size - 1 times the message's bytes in one round, 2 (size - 1) / size times in two.
    """
    flat, size, count = tensor.detach().contiguous(), channel.size, tensor.numel()
    if size == 1:
        return AllReduceWork(ChannelWork(flat, channel, action, kind))
    values = Values.of(flat, cast, exact)
    # nccl's own all-reduce works in place, so it gets a copy. With a cast it would also add in the short
    # type; then the rounds below run on nccl too, by its all-to-all.
    if not channel.lanes and values.cast == values.dtype:
        return AllReduceWork(channel.begin_all_reduce(flat.clone(), "sum", action, kind))
    whole = values.size(0, count)
    # Two ranks send the same bytes in one round as in two, and one round has half the latency.
    if size == 2 or size * whole <= ONE_ROUND_BYTES:
        message = values.pack(flat, 0).to(channel.send_device)
        first = channel.start_parts([message] * size, [whole] * size, action, kind)
        return AllReduceWork(first, values, [(0, count)])
    parts, bounds, begin = torch.tensor_split(flat, size), [], 0
    for part in parts:
        bounds.append((begin, begin + part.numel()))
        begin += part.numel()
    messages = [
        values.pack(part, first).to(channel.send_device)
        for part, (first, _) in zip(parts, bounds, strict=True)
    ]
    # In the first round this rank receives its own piece from every rank, so all messages to it have one
    # size.
    mine = values.size(*bounds[channel.rank])
    return AllReduceWork(channel.start_parts(messages, [mine] * size, action, kind), values, bounds)
