"""Encoded message: the bytes sent to one peer, made of pieces of rows, each with its codec, and notes.

A message of a single piece is written as several segments, which are sent one after the other.

Where it sits: ``encoded_exchange`` writes and reads messages by the plan of a ``row_selection``. The channel
sees only bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kagome.comm.codec import SEGMENTS, Codec, UnreadRefusals
from kagome.comm.exchange import BytesWork, DeferredWork, Work
from kagome.comm.transport.device import to_device


@dataclass(frozen=True)
class Piece:
    """Rows to or from one peer that are encoded alike.

    Args:
        codec: Codec of the rows.
        rows: Indices among the peer's rows; all rows if None.
        factor: Factor that the receiver multiplies the rows by.
    """

    codec: Codec
    rows: Tensor | None = None
    factor: float = 1.0

    def size(self, of: int, width: int, dtype: torch.dtype) -> int:
        """Return the number of bytes, if the peer has ``of`` rows."""
        return self.codec.size(of if self.rows is None else self.rows.numel(), width, dtype)


@dataclass(frozen=True)
class MessageLayout:
    """The layout of the messages to all peers, or from all peers.

    Args:
        pieces: The pieces of each peer's message.
        counts: Number of rows of each peer, sent or not.
        notes: Bytes that follow the pieces in each peer's message.
    """

    pieces: Sequence[Sequence[Piece]]
    counts: Sequence[int]
    notes: Sequence[int]

    def coded(self) -> dict[Codec, Tensor]:
        """Return for each codec the indices of the rows that it encodes, among the rows of all peers."""
        found: dict[Codec, list[Tensor]] = {}
        first = 0
        for pieces, count in zip(self.pieces, self.counts, strict=True):
            for piece in pieces:
                rows = torch.arange(count) if piece.rows is None else piece.rows.cpu()
                found.setdefault(piece.codec, []).append(first + rows)
            first += count
        return {codec: torch.cat(rows) for codec, rows in found.items()}

    def segments(self, width: int, dtype: torch.dtype) -> list[list[int]]:
        """Return the bytes of each segment of each peer's message.

        All have the same number of segments, empty ones last.
        """
        return [self._segments(peer, width, dtype) for peer in range(len(self.counts))]

    def rows(self, peer: int, width: int, dtype: torch.dtype) -> list[slice] | None:
        """Return the rows of each segment of a message; None if it has a single segment."""
        # Only a message of rows that are all encoded alike is cut: its segments follow from counts alone. A
        # selection's pieces and notes go as one.
        pieces = self.pieces[peer]
        if len(pieces) != 1 or pieces[0].rows is not None or self.notes[peer]:
            return None
        ends = [0, *accumulate(pieces[0].codec.segments(self.counts[peer], width, dtype))]
        return [slice(first, last) for first, last in pairwise(ends)]

    def _segments(self, peer: int, width: int, dtype: torch.dtype) -> list[int]:
        pieces, rows = self.pieces[peer], self.rows(peer, width, dtype)
        if rows is None:
            size = sum(piece.size(self.counts[peer], width, dtype) for piece in pieces)
            return padded([size + self.notes[peer]])
        return padded([pieces[0].codec.size(each.stop - each.start, width, dtype) for each in rows])


def padded(sizes: list[int]) -> list[int]:
    """Append empty segments up to the number that all messages have."""
    return [*sizes, *[0] * (SEGMENTS - len(sizes))]


def plain(codec: Codec, counts: Sequence[int]) -> MessageLayout:
    """Return the layout in which all rows are encoded alike."""
    return MessageLayout([[Piece(codec)] for _ in counts], counts, [0] * len(counts))


@dataclass(frozen=True)
class Writer:
    """Writes the messages of one exchange, each when it is asked for.

    Args:
        layout: Layout of the messages.
        rows: The rows to select from.
        index: Indices of the rows to send, by peer; all rows if None.
        row_ids: The numbers that seed the draws of the rows to send.
        key: A further seed of the draws.
        notes: The notes that follow each message.
        where: Location for error messages.
        refusals: Collects what a device refuses.

    Shapes:
        ``rows [*, W]``, ``index [R]``, ``row_ids [R]`` with R the sum of counts.
    """

    layout: MessageLayout
    rows: Tensor
    index: Tensor | None
    row_ids: Tensor
    key: int
    notes: Sequence[Tensor] = ()
    where: str = ""
    refusals: UnreadRefusals | None = None

    def write(self, peer: int, segment: int, message: Tensor) -> None:
        """Write one segment of the message to one peer.

        Shapes:
            ``message [its size]`` uint8.
        """
        index, rows, at = self.index, self.rows, 0
        mine = _rows(self.layout, peer, segment, rows.size(1), rows.dtype)
        first, count = mine.start, mine.stop - mine.start
        # [ piece 0: low, span, codes ][ piece 1 ] ... [ notes ]      each piece as its codec writes a message
        for piece in self.layout.pieces[peer]:
            row_id, chosen = self.row_ids[mine], None if index is None else index[mine]
            # ``rows`` is the table of the site or only the rows to send, and a piece has all of them or some:
            #
            #     index    piece.rows    encoded rows
            #     None     None          rows[mine]
            #     None     which         rows[first + which]
            #     given    None          rows[index[mine]]
            #     given    which         rows[index[mine][which]]
            if piece.rows is not None:
                which = to_device(piece.rows, rows.device)
                row_id, chosen = row_id[which], (first + which if index is None else index[mine][which])
            size = piece.size(count, rows.size(1), rows.dtype)
            source = rows[mine] if chosen is None else rows
            place = message[at : at + size]
            piece.codec.encode(source, chosen, row_id, self.key, place, where=self.where, later=self.refusals)
            at += size
        if self.notes:
            message[at : at + self.notes[peer].numel()].copy_(self.notes[peer])


def _rows(layout: MessageLayout, peer: int, segment: int, width: int, dtype: torch.dtype) -> slice:
    """Return the range of a segment's rows among the rows of all peers."""
    first, own = sum(layout.counts[:peer]), layout.rows(peer, width, dtype)
    if own is None:
        return slice(first, first + layout.counts[peer])
    return slice(first + own[segment].start, first + own[segment].stop)


def read(layout: MessageLayout, peer: int, segment: int, message: Tensor, out: Tensor) -> Tensor:
    """Decode the rows of one segment of a peer's message. Rows that are in no piece keep their values.

    Returns:
        The segment's notes.

    Shapes:
        ``message [its size]`` uint8, ``out [R, W]`` of all peers' rows, contiguous.
    """
    mine, at = out[_rows(layout, peer, segment, out.size(1), out.dtype)], 0
    count = mine.size(0)
    for piece in layout.pieces[peer]:
        size = piece.size(count, out.size(1), out.dtype)
        part = message[at : at + size]
        # A factor belongs to a sample of the rows; a piece of all rows has the factor 1.
        if piece.rows is None:
            piece.codec.decode(part, mine)
        else:
            which = to_device(piece.rows, out.device)
            restored = piece.codec.decode(part, out.new_empty(which.numel(), out.size(1)))
            mine.index_copy_(0, which, restored if piece.factor == 1.0 else restored * piece.factor)
        at += size
    return message[at : at + layout.notes[peer]].clone()


def incoming_rows(
    work: BytesWork,
    layout: MessageLayout,
    width: int,
    dtype: torch.dtype,
    buffer: Callable[[], Tensor],
    arrived: Callable[[Tensor, Sequence[Tensor]], None] | None = None,
) -> Work:
    """Return the rows of encoded messages in transit, which the first wait decodes as they arrive.

    Args:
        work: The bytes in transit.
        layout: Layout of the messages.
        width: Columns of the rows.
        dtype: Number type of the rows.
        buffer: Makes the buffer for the decoded rows; rows that are not sent keep its values.
        arrived: Called with the rows and each peer's notes once they have arrived.
    """

    def decoded() -> Tensor:
        sizes, rows = layout.segments(width, dtype), buffer()
        notes: dict[int, Tensor] = {}
        for peer, segment, part in work.parts(sizes):
            noted = read(layout, peer, segment, part, rows)
            notes.setdefault(peer, noted)  # a message with notes has only one segment
        if arrived is not None:
            arrived(rows, [notes[peer] for peer in range(len(sizes))])
        return rows

    return EncodedWork(decoded, work)


class EncodedWork(DeferredWork):
    """Rows that are decoded at the first wait.

    Args:
        decoded: The function that decodes them.
        work: The bytes in transit.
    """

    def __init__(self, decoded: Callable[[], Tensor], work: BytesWork) -> None:
        super().__init__(decoded)
        self._work: BytesWork | None = work

    def receive(self) -> bool:
        """Receive the bytes, and decode nothing: late rows stay short until they are read."""
        if self._work is not None:
            self._work.wait()
        return True

    def wait(self) -> Tensor:
        """Return the rows; the first call decodes them and drops their bytes."""
        rows, self._work = super().wait(), None
        return rows
