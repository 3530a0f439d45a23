"""Letter: what goes to a peer, coded - pieces of its rows, each by its codec, and what is noted behind them.

A letter of one piece is written on several sheets, which are sent one after the other.

Where it sits: ``compressed_exchange`` writes and reads them by a ``row_selection``'s plan; the channel sees
bytes.
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
    """Rows to or from one peer that are coded alike.

    Args:
        codec: Theirs.
        rows: Which of the peer's rows; all if None.
        factor: What they are multiplied by on arrival.
    """

    codec: Codec
    rows: Tensor | None = None
    factor: float = 1.0

    def size(self, of: int, width: int, dtype: torch.dtype) -> int:
        """Bytes, where the peer has so many rows."""
        return self.codec.size(of if self.rows is None else self.rows.numel(), width, dtype)


@dataclass(frozen=True)
class Letters:
    """What goes to all peers, or comes from them.

    Args:
        pieces: Of each peer.
        counts: Rows of each peer, written or not.
        notes: Bytes behind the pieces of each peer.
    """

    pieces: Sequence[Sequence[Piece]]
    counts: Sequence[int]
    notes: Sequence[int]

    def coded(self) -> dict[Codec, Tensor]:
        """Which rows each codec writes, of all that go."""
        found: dict[Codec, list[Tensor]] = {}
        first = 0
        for pieces, count in zip(self.pieces, self.counts, strict=True):
            for piece in pieces:
                rows = torch.arange(count) if piece.rows is None else piece.rows.cpu()
                found.setdefault(piece.codec, []).append(first + rows)
            first += count
        return {codec: torch.cat(rows) for codec, rows in found.items()}

    def sheets(self, width: int, dtype: torch.dtype) -> list[list[int]]:
        """Bytes of each sheet of each peer's letter; all have as many, empty ones last."""
        return [self._sheets(peer, width, dtype) for peer in range(len(self.counts))]

    def rows(self, peer: int, width: int, dtype: torch.dtype) -> list[slice] | None:
        """The rows of each sheet of a letter; None if it is on one sheet."""
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
    """As many sheets as all letters have."""
    return [*sizes, *[0] * (SHEETS - len(sizes))]


def plain(codec: Codec, counts: Sequence[int]) -> Letters:
    """All rows, all alike."""
    return Letters([[Piece(codec)] for _ in counts], counts, [0] * len(counts))


@dataclass(frozen=True)
class Writer:
    """Writes the letters of one exchange, each when it is asked for.

    Args:
        letters: What is in them.
        rows: Rows.
        pick: Which of them go, by peer; all if None.
        stamps: Of those that go.
        key: What draws depend on besides.
        notes: What is noted behind each.
        where: For errors.

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
        """A sheet of the letter to one peer.

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
    """The rows of a sheet, of all peers' rows."""
    first, own = sum(letters.counts[:peer]), letters.rows(peer, width, dtype)
    if own is None:
        return slice(first, first + letters.counts[peer])
    return slice(first + own[sheet].start, first + own[sheet].stop)


def read(letters: Letters, peer: int, sheet: int, message: Tensor, out: Tensor) -> Tensor:
    """Restore the rows of one sheet of a peer's letter; those that are in no piece stay as they are.

    Returns:
        Its notes.

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
    """Bytes under way."""

    def parts(self, expected: Sheets) -> Iterator[tuple[int, int, Tensor]]:
        """Each rank's sheets as soon as they have come."""


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
        """Begin to send bytes to each peer that are written only before they go, and to receive theirs."""


@dataclass
class IncomingRows:
    """Coded letters under way.

    Args:
        bytes: They.
        letters: What is in them.
        rows: Where their rows go.
        told: Called with the rows and the notes when they have come.
    """

    bytes: Parts
    letters: Letters
    rows: Tensor
    told: Callable[[Tensor, Sequence[Tensor]], None] | None
    done: bool = False

    def wait(self) -> Tensor:
        """The restored rows."""
        if not self.done:
            sheets = self.letters.sheets(self.rows.size(1), self.rows.dtype)
            notes: dict[int, Tensor] = {}
            for peer, sheet, part in self.bytes.parts(sheets):
                noted = read(self.letters, peer, sheet, part, self.rows)
                notes.setdefault(peer, noted)  # they are on the first sheet, which is then the only one
            self.done = True
            if self.told is not None:
                self.told(self.rows, [notes[peer] for peer in range(len(sheets))])
        return self.rows

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """The restored rows."""
        yield self.wait()
