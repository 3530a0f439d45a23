"""Letter: one coded message a peer - pieces of its rows, each by its codec, and what is noted behind them.

Where it sits: ``crossing`` writes and reads them by a ``selection``'s plan; the channel sees bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kagome.comm.codec import Codec
from kagome.neighbors.rows import UnderWay


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

    def sizes(self, width: int, dtype: torch.dtype) -> list[int]:
        """Bytes of each peer's letter."""
        return [
            sum(piece.size(count, width, dtype) for piece in pieces) + noted
            for pieces, count, noted in zip(self.pieces, self.counts, self.notes, strict=True)
        ]


def plain(codec: Codec, counts: Sequence[int]) -> Letters:
    """All rows, all alike."""
    return Letters([[Piece(codec)] for _ in counts], counts, [0] * len(counts))


def write(
    letters: Letters,
    rows: Tensor,
    pick: Tensor | None,
    stamps: Tensor,
    key: int,
    notes: Sequence[Tensor] = (),
    *,
    where: str,
) -> Tensor:
    """The letters, one after the other.

    Args:
        letters: What is in them.
        rows: Rows.
        pick: Which of them go, by peer; all if None.
        stamps: Of those that go.
        key: What draws depend on besides.
        notes: What is noted behind each.
        where: For errors.

    Shapes:
        ``rows [*, W]``, ``pick [R]``, ``stamps [R]`` with R the sum of counts -> ``[sum of sizes]`` uint8.
    """
    sizes = letters.sizes(rows.size(1), rows.dtype)
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=rows.device)
    first = at = 0
    for peer, (pieces, count) in enumerate(zip(letters.pieces, letters.counts, strict=True)):
        mine = slice(first, first + count)
        for piece in pieces:
            stamp, chosen = stamps[mine], None if pick is None else pick[mine]
            if piece.rows is not None:
                which = piece.rows.to(rows.device)
                stamp, chosen = stamp[which], (first + which if pick is None else pick[mine][which])
            size = piece.size(count, rows.size(1), rows.dtype)
            source = rows[mine] if chosen is None else rows
            piece.codec.encode(source, chosen, stamp, key, message[at : at + size], where=where)
            at += size
        if notes:
            message[at : at + notes[peer].numel()].copy_(notes[peer])
        at += letters.notes[peer]
        first += count
    return message


def read(letters: Letters, message: Tensor, out: Tensor) -> list[Tensor]:
    """Restore rows; those that are in no piece stay as they are.

    Returns:
        The notes of each peer.

    Shapes:
        ``message [sum of sizes]`` uint8, ``out [R, W]`` contiguous.
    """
    first = at = 0
    notes = []
    for pieces, count, noted in zip(letters.pieces, letters.counts, letters.notes, strict=True):
        mine = out[first : first + count]
        for piece in pieces:
            size = piece.size(count, out.size(1), out.dtype)
            part = message[at : at + size]
            if piece.rows is None:
                piece.codec.decode(part, mine)
            else:
                which = piece.rows.to(out.device)
                restored = piece.codec.decode(part, out.new_empty(which.numel(), out.size(1)))
                mine.index_copy_(0, which, restored if piece.factor == 1.0 else restored * piece.factor)
            at += size
        notes.append(message[at : at + noted].clone())
        at += noted
        first += count
    return notes


@dataclass
class Coming:
    """Coded letters under way.

    Args:
        bytes: They.
        letters: What is in them.
        rows: Where their rows go.
        told: Called with the rows and the notes when they have come.
    """

    bytes: UnderWay
    letters: Letters
    rows: Tensor
    told: Callable[[Tensor, Sequence[Tensor]], None] | None
    done: bool = False

    def wait(self) -> Tensor:
        """The restored rows."""
        if not self.done:
            with self.bytes.lent() as message:
                notes = read(self.letters, message, self.rows)
            self.done = True
            if self.told is not None:
                self.told(self.rows, notes)
        return self.rows

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """The restored rows."""
        yield self.wait()
