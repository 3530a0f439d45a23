"""Shelf: memory of one rank that other ranks of its host read, so that rows need not go through a socket.

Where it sits: ``comm.mesh`` opens one for each group of ranks; ``process_group`` lays on it what goes to a
rank of the same host, and leaves a token in ``mailbox`` that says where it lies.

::

    rank 0                                     rank 1
    room ── rows are packed into it            token ── says segment, place, turn
      └─ token in the box ───────────────────>   └─ copies the rows out, marks the turn as taken
    the room is free again once all its readers have marked it

A segment is a ``memfd``: it has no name, needs no ``/dev/shm``, and is gone with its last process. Who can
open whose is tried, not concluded from names of hosts. When there is no free room and none may be made,
rows go by the wire as they would without a shelf: nobody ever waits for room.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kagome.comm.transport.mailbox import FIELDS, Mailbox, mapped, memory_file

SHARE: Final = 1 / 8
"""All shelves of a host together take at most this share of the memory that is free at the start."""
NOWHERE: Final = (-1,) * FIELDS
"""The token of what comes by the wire; else segment, descriptor, bytes of the segment, first byte, turn."""
_PAGE, _ALIGNED = 4096, 64
_ROOMY: Final = 4
"""A segment serves a message down to this share of its size."""


class Segment:
    """A piece of a shelf: marks of its readers, then room for rows.

    Args:
        number: Its number on the shelf.
        descriptor: Its file.
        size: Bytes of it all.
        ranks: Ranks of the group, one mark each.
    """

    def __init__(self, number: int, descriptor: int, size: int, ranks: int) -> None:
        memory = mapped(descriptor, size)
        self.number, self.descriptor, self.size = number, descriptor, size
        self.taken = memoryview(memory)[: 8 * ranks].cast("q")
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=marks(ranks))
        self.turn = 0
        self.given: dict[int, int] = {}
        """The last turn given to each reader."""
        self.lent = False
        """Whether somebody writes into it now."""

    @property
    def free(self) -> bool:
        """Whether all readers have taken what was given to them."""
        return not self.lent and all(self.taken[rank] >= turn for rank, turn in self.given.items())

    def place_of(self, part: Tensor) -> int | None:
        """The first byte of a tensor that lies in this segment's room."""
        place = part.data_ptr() - self.bytes.data_ptr()
        return place if 0 <= place <= self.bytes.numel() - part.numel() else None


@dataclass
class MemoryAllowance:
    """What all shelves of a rank together may take, and have taken.

    Args:
        most: Bytes of all segments.
        held: Bytes of those there are.
    """

    most: int
    held: int = 0


class SharedMemory:
    """One rank's segments for one group, and those of its peers that it has opened.

    Args:
        box: Where its tokens lie, with the boxes of the peers that can read this rank's memory.
        peers: Those peers, by rank of the group.
        allowance: Bytes that all segments together may take, with those of the rank's other shelves.

    Cost:
        Segments stay until the end: as many as messages are under way at once, each up to 4 times too large.
    """

    def __init__(self, box: Mailbox, peers: frozenset[int], allowance: MemoryAllowance) -> None:
        self.box, self.peers, self.allowance = box, peers, allowance
        self._own: list[Segment] = []
        self._theirs: dict[tuple[int, int], Segment] = {}

    def room(self, count: int) -> Tensor | None:
        """So many bytes to write into, to be sent next and not to be used after the wait for it; or None."""
        needed = self._size(count)
        fitting = [s for s in self._own if needed <= s.size <= _ROOMY * needed and s.free]
        segment = min(fitting, key=lambda s: s.size, default=None) or self._made(needed)
        if segment is None:
            return None
        segment.lent = True
        return segment.bytes[:count]

    def lay(self, parts: Mapping[int, Tensor]) -> dict[int, tuple[int, ...]]:
        """Lay on the shelf what does not lie there yet.

        Args:
            parts: Bytes for each peer.

        Returns:
            The token's fields for each.
        """
        loose = {_key(part): part for part in parts.values() if self._holder(part) is None}
        room = self.room(sum(_round_up(count, _ALIGNED) for _, count in loose)) if loose else None
        copies: dict[tuple[int, int], Tensor] = {}
        if room is not None:
            begin = 0
            for key, part in loose.items():
                copies[key] = room[begin : begin + part.numel()].copy_(part)
                begin += _round_up(part.numel(), _ALIGNED)
        found = {peer: copies.get(_key(part), part) for peer, part in parts.items()}
        held = {peer: self._holder(part) for peer, part in found.items()}
        for segment in {id(holder): holder for holder in held.values() if holder is not None}.values():
            segment.turn += 1
            segment.lent = False
        return {peer: self._token(peer, found[peer], holder) for peer, holder in held.items()}

    def find(self, peer: int, token: tuple[int, ...], count: int) -> Tensor | None:
        """The bytes that a peer's token tells of, where the peer laid them; None if they come by the wire.

        They stay as they are until :meth:`taken` says that they were read.

        Raises:
            RuntimeError: If the peer is gone.
        """
        number, descriptor, size, place, _ = token
        if number < 0:
            return None
        if (peer, number) not in self._theirs:
            try:
                file = self.box.open_file(peer, descriptor)
            except OSError as error:
                text = f"connection closed: memory of rank {peer} of the group is gone ({error})"
                raise RuntimeError(text) from None
            self._theirs[peer, number] = Segment(number, file, size, self.box.size)
            os.close(file)
        return self._theirs[peer, number].bytes[place : place + count]

    def taken(self, peer: int, token: tuple[int, ...]) -> None:
        """Let the peer use the memory of a token again."""
        if token[0] >= 0:
            self._theirs[peer, token[0]].taken[self.box.rank] = token[-1]

    def close(self, patience: float = 0.0) -> None:
        """Give the memory back; before, wait up to some seconds until the peers have taken what is theirs."""
        limit = time.monotonic() + patience
        while time.monotonic() < limit and not all(segment.free for segment in self._own):
            self.box.press()
            time.sleep(1e-3)
        for segment in self._own:
            os.close(segment.descriptor)
        self._own, self._theirs = [], {}
        self.box.close()

    def _holder(self, part: Tensor) -> Segment | None:
        return next((segment for segment in self._own if segment.place_of(part) is not None), None)

    def _token(self, peer: int, part: Tensor, holder: Segment | None) -> tuple[int, ...]:
        place = None if holder is None else holder.place_of(part)
        if holder is None or place is None:
            return NOWHERE
        holder.given[peer] = holder.turn
        return holder.number, holder.descriptor, holder.size, place, holder.turn

    def _size(self, count: int) -> int:
        """A segment's size for so many bytes: in steps of an eighth, so that few sizes serve all."""
        whole = marks(self.box.size) + max(count, 1)
        return _round_up(whole, max(_PAGE, 1 << (whole.bit_length() - 4)))

    def _made(self, size: int) -> Segment | None:
        if self.allowance.held + size > self.allowance.most:
            return None
        try:
            descriptor = memory_file("kagome-shelf", size)
            try:
                segment = Segment(len(self._own), descriptor, size, self.box.size)
            except OSError:
                os.close(descriptor)
                raise
        except OSError:
            self.allowance.most = self.allowance.held
            return None
        self._own.append(segment)
        self.allowance.held += size
        return segment


def marks(ranks: int) -> int:
    """Bytes of the marks of so many ranks, whole pages."""
    return _round_up(8 * ranks, _PAGE)


def _key(part: Tensor) -> tuple[int, int]:
    """The same for parts that are the same bytes: they are laid once for all their readers."""
    return part.data_ptr(), part.numel()


def _round_up(count: int, block: int) -> int:
    return -(-count // block) * block
