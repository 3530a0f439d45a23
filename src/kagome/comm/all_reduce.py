"""Summing: a sum over all ranks under way - in one round or two, in the values' own type or a shorter one.

Where it sits: ``channel`` begins one, ``components.gradients`` one a bucket.

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
from kagome.comm.work import Work

if TYPE_CHECKING:
    from kagome.comm.channel import Channel

ONE_ROUND_BYTES: Final = 2**18
"""A sum goes in one round up to so many bytes of all ranks together: below it a second round would cost its
latency."""


@dataclass(frozen=True)
class Values:
    """How values look on the wire.

    Args:
        dtype: Their own type, in which they are added.
        cast: The shorter type of those that are cast; else their own.
        exact: So many, the first of all, are not cast.
    """

    dtype: torch.dtype
    cast: torch.dtype
    exact: int

    @staticmethod
    def of(flat: Tensor, cast: torch.dtype | None, exact: int) -> Values:
        """Values whose others are cast, where that makes them shorter."""
        shorter = cast is not None and flat.is_floating_point() and cast.itemsize < flat.dtype.itemsize
        return Values(flat.dtype, cast if cast is not None and shorter else flat.dtype, exact)

    def size(self, begin: int, end: int) -> int:
        """Bytes of a piece."""
        exact = self._exact(begin, end)
        return exact * self.dtype.itemsize + (end - begin - exact) * self.cast.itemsize

    def pack(self, piece: Tensor, begin: int) -> Tensor:
        """A piece as bytes; where nothing is cast, the same memory.

        Args:
            piece: Some of the values.
            begin: Which is its first.
        """
        if self.cast == self.dtype:
            return piece.view(torch.uint8)
        exact = self._exact(begin, begin + piece.numel())
        return torch.cat([piece[:exact].view(torch.uint8), piece[exact:].to(self.cast).view(torch.uint8)])

    def unpack(self, message: Tensor, begin: int, end: int) -> Tensor:
        """A piece of its bytes; where nothing is cast, the same memory."""
        if self.cast == self.dtype:
            return aligned(message, self.dtype)
        split = self._exact(begin, end) * self.dtype.itemsize
        exact, others = aligned(message[:split], self.dtype), aligned(message[split:], self.cast)
        return torch.cat([exact, others.to(self.dtype)])

    def _exact(self, begin: int, end: int) -> int:
        return min(max(self.exact - begin, 0), end - begin)


@dataclass
class AllReduceWork:
    """A sum over all ranks under way; ``wait`` gives it.

    Each rank adds the ranks' values one after the other in the order of ranks, so the bits depend neither on
    timing nor on what else is summed in the same message. In one round every rank gets every other's values
    and adds them; in two rounds each adds a piece and sends it to the others: fewer bytes, but the second
    round begins only in ``advance`` or ``wait``. Values that are cast are cast once on their way in and, in
    two rounds, once on their way out; a rank reads its own as the others do.

    Args:
        first: The values of all ranks, or of this rank's piece; with one rank, or nccl's own sum, the sum.
        values: How they look on the wire; None where the sum itself comes.
        bounds: Where the pieces of two rounds begin and end, a rank each; for one round, the only one's.
    """

    first: Work
    values: Values | None = None
    bounds: Sequence[tuple[int, int]] = ()
    second: Work | None = None

    @property
    def rounds(self) -> int:
        """How often values cross."""
        return min(len(self.bounds), 2) or 1

    @property
    def uncast(self) -> int:
        """Bytes that this rank sends, were nothing cast."""
        channel = self.first.channel
        if self.values is None:
            return 2 * (channel.size - 1) * self.first.rows.nbytes // channel.size
        count = self.bounds[-1][1]
        if self.rounds == 1:
            return count * (channel.size - 1) * self.values.dtype.itemsize
        begin, end = self.bounds[channel.rank]
        return (count + (end - begin) * (channel.size - 2)) * self.values.dtype.itemsize

    def advance(self) -> None:
        """Begin the second round, if any, once the first has ended: of several sums, before any wait."""
        if self.rounds == 2 and self.second is None and self.values is not None:
            first, values = self.first, self.values
            begin, end = self.bounds[first.channel.rank]
            piece = values.pack(self._added(first.wait(), begin, end), begin).to(first.channel.wire)
            sizes = [values.size(*bounds) for bounds in self.bounds]
            same = [piece] * first.channel.size
            self.second = first.channel.start_parts(same, sizes, first.action, first.kind)

    def wait(self) -> Tensor:
        """Wait for the sum.

        Returns:
            A tensor of the same shape, the same bits on every rank; with one rank what was given.

        Raises:
            CommError: If a peer was late or lost.
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
        """All ranks' values of a piece, added."""
        assert self.values is not None
        rows = come.view(self.first.channel.size, self.values.size(begin, end))
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
    """Begin a sum over the ranks; see :class:`AllReduceWork` for its bits.

    Nobody is waited for here, and no peer's limit begins before this rank waits.

    Args:
        channel: Of the ranks.
        tensor: This rank's values; not to be changed before the wait ends.
        action: What this is, for errors.
        kind: What its bytes and its time count as.
        cast: A type that values have on the wire, where it is shorter than their own.
        exact: So many of them, the first, keep their own.

    Shapes: [n] -> [n].

    Cost: size - 1 times the bytes on the wire in one round, 2 (size - 1) / size times in two.
    """
    flat, size, count = tensor.detach().contiguous(), channel.size, tensor.numel()
    if size == 1:
        return AllReduceWork(Work(flat, channel, action, kind))
    values = Values.of(flat, cast, exact)
    if not channel.lanes and values.cast == values.dtype:
        return AllReduceWork(channel.begin_all_reduce(flat.clone(), "sum", action, kind))
    whole = values.size(0, count)
    if size == 2 or size * whole <= ONE_ROUND_BYTES:
        message = values.pack(flat, 0).to(channel.wire)
        first = channel.start_parts([message] * size, [whole] * size, action, kind)
        return AllReduceWork(first, values, [(0, count)])
    parts, bounds, begin = torch.tensor_split(flat, size), [], 0
    for part in parts:
        bounds.append((begin, begin + part.numel()))
        begin += part.numel()
    messages = [
        values.pack(part, first).to(channel.wire) for part, (first, _) in zip(parts, bounds, strict=True)
    ]
    mine = values.size(*bounds[channel.rank])
    return AllReduceWork(channel.start_parts(messages, [mine] * size, action, kind), values, bounds)
