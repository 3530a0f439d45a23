"""Block exchange: encoded blocks of a different width for each peer, between vertex and feature slices.

Where it sits: ``compressed_exchange`` puts it in front of ``comm``'s channel for exchanges that consist of
blocks. A rank's block for itself is not encoded.

::

    to peer 0  [rows 0, width 0]   to peer 1  [rows 1, width 1]   ...      each a message of its codec
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kagome.comm.codec import Codec
from kagome.comm.exchange import (
    BytesExchange,
    BytesRequest,
    BytesWork,
    DeferredWork,
    ExchangeRequest,
    SiteExchange,
    Work,
)
from kagome.halo.encoded_exchange import ErrorMeter
from kagome.halo.encoded_message import padded, plain
from kagome.halo.epoch_rows import CompressionState

Shape = tuple[int, int]
"""Number of rows and columns of a block."""


class BlockExchange:
    """An exchange of blocks in place of rows; its wait returns the numbers, block after block.

    Args:
        channel: The channel to the peers.
        state: Mode and counts of this rank.
        meter: Measures the codecs' error.
    """

    def __init__(self, channel: BytesExchange, state: CompressionState, meter: ErrorMeter) -> None:
        self.channel, self.state, self.meter = channel, state, meter

    def start(self, numbers: Tensor, request: ExchangeRequest) -> Work:
        """Begin an exchange of blocks, in which each peer gets as many columns as it holds."""
        site, rank, dtype = request.site, self.channel.rank, numbers.dtype
        assert site is not None
        assert site.blocks is not None
        # Blocks are sent flat, so the request's counts are counts of numbers, not of rows.
        self.state.counts.sliced += (numbers.numel() - request.send_counts[rank]) * numbers.itemsize
        codec = self.state.mode.codec_for(site)
        out, received = (BlockLayout.of(codec, shapes, rank, dtype) for shapes in site.blocks)
        # Narrow blocks are not encoded, and widths differ between ranks. Each rank sees the widths of all
        # ranks of its group in one direction or the other, so all of them come to the same answer here.
        if all(each.exact for each in (*out.codecs, *received.codecs)):
            return self.channel.start(numbers, request)
        # Each pair of ranks has its own draws, since every peer gets other columns of a row.
        size = self.channel.size
        keys = [self.state.draws_of(site, rank * size + peer) for peer in range(size)]
        self._measure(codec, out, numbers, site, keys, request.action)
        blocks = out.split(numbers)
        row_ids = site.row_ids.split([rows for rows, _ in out.shapes])

        def write(peer: int, segment: int, message: Tensor) -> None:
            mine = out.rows(peer, segment, dtype)
            codec, where = out.codecs[peer], request.action
            ids, later = row_ids[peer][mine], self.state.refusals
            codec.encode(blocks[peer][mine], None, ids, keys[peer], message, where=where, later=later)

        written = BytesRequest(
            write, out.segments(dtype), received.segments(dtype), request.action, request.kind, request.header
        )
        work = self.channel.start_bytes(written)
        return DeferredWork(lambda: received.decoded(work, numbers))

    def _measure(
        self,
        codec: Codec,
        out: BlockLayout,
        numbers: Tensor,
        site: SiteExchange,
        keys: Sequence[int],
        action: str,
    ) -> None:
        """Measure the codec's error on the first block that is encoded."""
        first = 0
        for peer, (block, (rows, _)) in enumerate(zip(out.split(numbers), out.shapes, strict=True)):
            # The blocks are columns of the same rows, so one of them stands for all.
            if rows and not out.codecs[peer].exact:
                part = replace(site, row_ids=site.row_ids[first : first + rows])
                self.meter.measure(plain(codec, [rows]), block, None, part, keys[peer], action)
                return
            first += rows


@dataclass(frozen=True)
class BlockLayout:
    """The blocks that go to all peers, or come from them.

    Args:
        codecs: Codec of each block.
        shapes: Shape of each block.
    """

    codecs: Sequence[Codec]
    shapes: Sequence[Shape]

    @classmethod
    def of(cls, codec: Codec, shapes: Sequence[Shape], rank: int, dtype: torch.dtype) -> BlockLayout:
        """Return blocks of which those are encoded that go to a peer and become shorter."""
        none = Codec("none")
        codecs = [
            codec if peer != rank and codec.shortens(width, dtype) else none
            for peer, (_, width) in enumerate(shapes)
        ]
        return cls(codecs, shapes)

    def split(self, numbers: Tensor) -> list[Tensor]:
        """Return the view of each block."""
        parts = numbers.split([rows * width for rows, width in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def segments(self, dtype: torch.dtype) -> list[list[int]]:
        """Return the bytes of each segment of each block."""
        return [
            padded([codec.size(rows, shape[1], dtype) for rows in codec.segments(*shape, dtype)])
            for codec, shape in zip(self.codecs, self.shapes, strict=True)
        ]

    def rows(self, peer: int, segment: int, dtype: torch.dtype) -> slice:
        """Return the rows of a block that one of its segments holds."""
        rows = self.codecs[peer].segments(*self.shapes[peer], dtype)
        return slice(sum(rows[:segment]), sum(rows[: segment + 1]))

    def decoded(self, work: BytesWork, like: Tensor) -> Tensor:
        """Wait for the blocks and return their numbers, of the type and device of ``like``."""
        # Every number is written below: blocks without a codec arrive as segments too, this rank's own among
        # them.
        out = like.new_empty(sum(rows * width for rows, width in self.shapes))
        blocks = self.split(out)
        for peer, segment, part in work.parts(self.segments(out.dtype)):
            self.codecs[peer].decode(part, blocks[peer][self.rows(peer, segment, out.dtype)])
        return out
