"""Block exchange: encoded blocks of a different width for each peer, between vertex and feature slices.

Where it sits: ``compressed_exchange`` sends and receives blocks where a ``Trip`` says that it consists of
them. A rank's block for itself is not encoded.

::

    to peer 0  [rows 0, width 0]   to peer 1  [rows 1, width 1]   ...      each a message of its codec
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kagome.comm.channel import Kind
from kagome.comm.codec import Codec
from kagome.comm.exchange import Trip
from kagome.halo.encoded_message import EncodingChoice, Parts, padded
from kagome.halo.exchange import UnderWay

Shape = tuple[int, int]
"""Number of rows and columns of a block."""


def start(
    way: EncodingChoice,
    codec: Codec,
    numbers: Tensor,
    sends: Sequence[int],
    comes: Sequence[int],
    trip: Trip,
    keys: Sequence[int],
    *,
    action: str,
    kind: Kind,
    header: tuple[int, ...] | None,
) -> UnderWay:
    """Begin an exchange of blocks; its wait returns the numbers, block after block.

    Args:
        way: The channel to the peers.
        codec: Codec for the blocks that it shortens.
        numbers: The numbers to send, block after block.
        sends: Number of numbers for each peer.
        comes: Number of numbers from each peer.
        trip: Description of the exchange, with the shapes of its blocks.
        keys: Seed of the random draws for each peer's block.
        action: Name of the operation, for error messages.
        kind: Traffic kind that its bytes are counted under.
        header: Numbers that ranks compare before the exchange.
    """
    assert trip.blocks is not None
    (out, come), dtype = trip.blocks, numbers.dtype
    to, of = (codecs_of(codec, shapes, way.rank, dtype) for shapes in (out, come))
    if all(each.exact for each in (*to, *of)):
        return way.start_exchange(numbers, sends, comes, action=action, kind=kind, header=header)
    block = numbers.split([rows * width for rows, width in out])
    stamps = trip.stamps.split([rows for rows, _ in out])

    def write(peer: int, sheet: int, message: Tensor) -> None:
        rows = to[peer].sheets(*out[peer], dtype)
        mine = slice(sum(rows[:sheet]), sum(rows[: sheet + 1]))
        numbers, stamp = block[peer].view(out[peer])[mine], stamps[peer][mine]
        to[peer].encode(numbers, None, stamp, keys[peer], message, where=action)

    sizes, expected = sheets_of(to, out, dtype), sheets_of(of, come, dtype)
    begun = way.start_bytes(write, sizes, expected, action=action, kind=kind, header=header)
    return ComingBlocks(begun, of, come, numbers)


def sample_of(codec: Codec, numbers: Tensor, trip: Trip, rank: int) -> tuple[Tensor, Tensor, int] | None:
    """Return the first encoded block, the stamps of its rows, and its peer; None if no block is encoded."""
    assert trip.blocks is not None
    shapes = trip.blocks[0]
    codecs = codecs_of(codec, shapes, rank, numbers.dtype)
    for peer, (rows, width) in enumerate(shapes):
        if rows and not codecs[peer].exact:
            before = sum(many * columns for many, columns in shapes[:peer])
            first = sum(many for many, _ in shapes[:peer])
            block = numbers[before : before + rows * width].view(rows, width)
            return block, trip.stamps[first : first + rows], peer
    return None


def codecs_of(codec: Codec, shapes: Sequence[Shape], rank: int, dtype: torch.dtype) -> tuple[Codec, ...]:
    """Return the codec of each peer's block.

    This rank's own block is not encoded, nor one whose header would cost more than encoding saves.
    """
    none = Codec("none")
    return tuple(
        codec if peer != rank and codec.shortens(width, dtype) else none
        for peer, (_, width) in enumerate(shapes)
    )


def sheets_of(codecs: Sequence[Codec], shapes: Sequence[Shape], dtype: torch.dtype) -> list[list[int]]:
    """Return the bytes of each segment of each block."""
    return [
        padded([codec.size(rows, shape[1], dtype) for rows in codec.sheets(*shape, dtype)])
        for codec, shape in zip(codecs, shapes, strict=True)
    ]


@dataclass
class ComingBlocks:
    """An exchange of encoded blocks in progress.

    Args:
        bytes: The encoded bytes in progress.
        codecs: Codec of each block.
        shapes: Shape of each block.
        like: A tensor with the numbers' type and device.
        numbers: The decoded numbers, once they have arrived.
    """

    bytes: Parts
    codecs: Sequence[Codec]
    shapes: Sequence[Shape]
    like: Tensor
    numbers: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the blocks and return the decoded numbers, block after block."""
        if self.numbers is None:
            counts = [rows * width for rows, width in self.shapes]
            out = self.like.new_empty(sum(counts))
            blocks = out.split(counts)
            for peer, sheet, part in self.bytes.parts(sheets_of(self.codecs, self.shapes, out.dtype)):
                rows = self.codecs[peer].sheets(*self.shapes[peer], out.dtype)
                mine = slice(sum(rows[:sheet]), sum(rows[: sheet + 1]))
                self.codecs[peer].decode(part, blocks[peer].view(self.shapes[peer])[mine])
            self.numbers = out
        return self.numbers

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """Lend the decoded numbers for a block of code."""
        yield self.wait()
