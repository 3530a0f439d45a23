"""Letter: one coded message a peer - pieces of its rows, each by its codec, and what is noted behind them.

Where it sits: ``crossing`` writes and reads them by a ``selection``'s plan; the channel sees bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kagome.comm.channel import Kind
from kagome.comm.codec import Codec
from kagome.neighbors.rows import Carrier


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

    def write(self, peer: int, message: Tensor) -> None:
        """The letter to one peer.

        Shapes:
            ``message [its size]`` uint8.
        """
        count, pick, rows, at = self.letters.counts[peer], self.pick, self.rows, 0
        first = sum(self.letters.counts[:peer])
        mine = slice(first, first + count)
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


def read(letters: Letters, peer: int, message: Tensor, out: Tensor) -> Tensor:
    """Restore the rows of one peer; those that are in no piece stay as they are.

    Returns:
        Its notes.

    Shapes:
        ``message [its size]`` uint8, ``out [R, W]`` of all peers' rows, contiguous.
    """
    first, count, at = sum(letters.counts[:peer]), letters.counts[peer], 0
    mine = out[first : first + count]
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

    def parts(self, counts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Each rank's bytes as soon as they have come."""


class Way(Carrier, Protocol):
    """A channel that sends each peer's bytes as soon as they are written."""

    def start_bytes(
        self,
        write: Callable[[int, Tensor], None],
        sizes: Sequence[int],
        expected: Sequence[int],
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
    ) -> Parts:
        """Begin to send bytes to each peer that are written only before they go, and to receive theirs."""


@dataclass
class Coming:
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
            sizes = self.letters.sizes(self.rows.size(1), self.rows.dtype)
            notes = {
                peer: read(self.letters, peer, part, self.rows) for peer, part in self.bytes.parts(sizes)
            }
            self.done = True
            if self.told is not None:
                self.told(self.rows, [notes[peer] for peer in range(len(sizes))])
        return self.rows

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """The restored rows."""
        yield self.wait()
