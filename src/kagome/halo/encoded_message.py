"""Encoded message: the bytes sent to one peer, made of pieces of rows, each with its codec, and notes.

A message of a single piece is written as several segments, which are sent one after the other.

Where it sits: ``compressed_exchange`` writes and reads messages by the plan of a ``row_selection``. The
channel sees only bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from kagome.comm.channel import Kind
from kagome.comm.codec import SHEETS, Codec
from kagome.comm.work import Sheets
from kagome.halo.exchange import Carrier


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
class Letters:
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

    def sheets(self, width: int, dtype: torch.dtype) -> list[list[int]]:
        """Return the bytes of each segment of each peer's message.

        All have the same number of segments, empty ones last.
        """
        return [self._sheets(peer, width, dtype) for peer in range(len(self.counts))]

    def rows(self, peer: int, width: int, dtype: torch.dtype) -> list[slice] | None:
        """Return the rows of each segment of a message; None if it has a single segment."""
        pieces = self.pieces[peer]
        if len(pieces) != 1 or pieces[0].rows is not None or self.notes[peer]:
            return None
        ends = [0, *accumulate(pieces[0].codec.sheets(self.counts[peer], width, dtype))]
        return [slice(first, last) for first, last in pairwise(ends)]

    def _sheets(self, peer: int, width: int, dtype: torch.dtype) -> list[int]:
        pieces, rows = self.pieces[peer], self.rows(peer, width, dtype)
        if rows is None:
            size = sum(piece.size(self.counts[peer], width, dtype) for piece in pieces)
            return padded([size + self.notes[peer]])
        return padded([pieces[0].codec.size(each.stop - each.start, width, dtype) for each in rows])


def padded(sizes: list[int]) -> list[int]:
    """Append empty segments up to the number that all messages have."""
    return [*sizes, *[0] * (SHEETS - len(sizes))]


def plain(codec: Codec, counts: Sequence[int]) -> Letters:
    """Return the layout in which all rows are encoded alike."""
    return Letters([[Piece(codec)] for _ in counts], counts, [0] * len(counts))


@dataclass(frozen=True)
class Writer:
    """Writes the messages of one exchange, each when it is asked for.

    Args:
        letters: Layout of the messages.
        rows: The rows to select from.
        pick: Indices of the rows to send, by peer; all rows if None.
        stamps: The numbers that seed the draws of the rows to send.
        key: A further seed of the draws.
        notes: The notes that follow each message.
        where: Location for error messages.

    Shapes:
        ``rows [*, W]``, ``pick [R]``, ``stamps [R]`` with R the sum of counts.
    """

    letters: Letters
    rows: Tensor
    pick: Tensor | None
    stamps: Tensor
    key: int
    notes: Sequence[Tensor] = ()
    where: str = ""

    def write(self, peer: int, sheet: int, message: Tensor) -> None:
        """Write one segment of the message to one peer.

        Shapes:
            ``message [its size]`` uint8.
        """
        pick, rows, at = self.pick, self.rows, 0
        mine = _rows(self.letters, peer, sheet, rows.size(1), rows.dtype)
        first, count = mine.start, mine.stop - mine.start
        for piece in self.letters.pieces[peer]:
            stamp, chosen = self.stamps[mine], None if pick is None else pick[mine]
            if piece.rows is not None:
                which = piece.rows.to(rows.device)
                stamp, chosen = stamp[which], (first + which if pick is None else pick[mine][which])
            size = piece.size(count, rows.size(1), rows.dtype)
            source = rows[mine] if chosen is None else rows
            piece.codec.encode(source, chosen, stamp, self.key, message[at : at + size], where=self.where)
            at += size
        if self.notes:
            message[at : at + self.notes[peer].numel()].copy_(self.notes[peer])


def _rows(letters: Letters, peer: int, sheet: int, width: int, dtype: torch.dtype) -> slice:
    """Return the range of a segment's rows among the rows of all peers."""
    first, own = sum(letters.counts[:peer]), letters.rows(peer, width, dtype)
    if own is None:
        return slice(first, first + letters.counts[peer])
    return slice(first + own[sheet].start, first + own[sheet].stop)


def read(letters: Letters, peer: int, sheet: int, message: Tensor, out: Tensor) -> Tensor:
    """Decode the rows of one segment of a peer's message. Rows that are in no piece keep their values.

    Returns:
        The segment's notes.

    Shapes:
        ``message [its size]`` uint8, ``out [R, W]`` of all peers' rows, contiguous.
    """
    mine, at = out[_rows(letters, peer, sheet, out.size(1), out.dtype)], 0
    count = mine.size(0)
    for piece in letters.pieces[peer]:
        size = piece.size(count, out.size(1), out.dtype)
        part = message[at : at + size]
        if piece.rows is None:
            piece.codec.decode(part, mine)
        else:
            which = piece.rows.to(out.device)
            restored = piece.codec.decode(part, out.new_empty(which.numel(), out.size(1)))
            mine.index_copy_(0, which, restored if piece.factor == 1.0 else restored * piece.factor)
        at += size
    return message[at : at + letters.notes[peer]].clone()


class Parts(Protocol):
    """An exchange of bytes in progress that arrive segment by segment."""

    def parts(self, expected: Sheets) -> Iterator[tuple[int, int, Tensor]]:
        """Yield each rank's segments as soon as they have arrived."""


class EncodingChoice(Carrier, Protocol):
    """A channel that sends each peer's bytes as soon as they are written."""

    def start_bytes(
        self,
        write: Callable[[int, int, Tensor], None],
        sizes: Sheets,
        expected: Sheets,
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
    ) -> Parts:
        """Begin to send each peer bytes that are written just before that, and receive the peers' bytes."""


@dataclass
class IncomingRows:
    """An exchange of encoded messages in progress.

    Args:
        bytes: The bytes in progress.
        letters: Layout of the messages.
        rows: Buffer for the decoded rows.
        told: Called with the rows and the notes once they have arrived.
    """

    bytes: Parts
    letters: Letters
    rows: Tensor
    told: Callable[[Tensor, Sequence[Tensor]], None] | None
    done: bool = False

    def wait(self) -> Tensor:
        """Wait for the messages and return the decoded rows."""
        if not self.done:
            sheets = self.letters.sheets(self.rows.size(1), self.rows.dtype)
            notes: dict[int, Tensor] = {}
            for peer, sheet, part in self.bytes.parts(sheets):
                noted = read(self.letters, peer, sheet, part, self.rows)
                notes.setdefault(peer, noted)  # a message with notes has only one segment
            self.done = True
            if self.told is not None:
                self.told(self.rows, [notes[peer] for peer in range(len(sheets))])
        return self.rows

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """Lend the decoded rows for a block of code."""
        yield self.wait()
