"""Shared memory: memory of one rank that other ranks of its host read, so that rows need no socket.

Where it sits: ``comm.groups`` opens one for each group of ranks. ``process_group`` puts messages to a rank of
the same host into it, and leaves a token in ``mailbox`` that says where the bytes are.

::

    rank 0                                     rank 1
    room ── rows are packed into it            token ── says segment, place, turn
      └─ token in the mailbox ───────────────>   └─ copies the rows out, marks the turn as taken
    the room is free again once all its readers have marked it

A segment is a ``memfd``: it has no name, needs no ``/dev/shm``, and disappears with the last process that
holds it. Which ranks can open each other's segments is tried out, not inferred from host names. If no free
room is left and no more may be allocated, rows go through the socket as they would without shared memory:
no rank ever waits for room.
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
"""Upper bound for the shared memory of all ranks of a host together, as a share of the memory free at the
start."""
NOWHERE: Final = (-1,) * FIELDS
"""The token of a message sent through a socket; other tokens hold segment, descriptor, bytes of the segment,
first byte and turn."""
_PAGE, _ALIGNED = 4096, 64
_NEVER: Final = 2**63 - 1
"""A turn after all others."""
_ROOMY: Final = 4
"""A segment may be up to this many times as large as a message needs."""


class Segment:
    """A block of shared memory: one counter for each reader, then room for rows.

    Args:
        number: Its number among this rank's segments.
        descriptor: Descriptor of its file.
        size: Bytes of the whole segment.
        ranks: Number of ranks of the group, which have one counter each.
    """

    def __init__(self, number: int, descriptor: int, size: int, ranks: int) -> None:
        # [ counter of rank 0 | counter of rank 1 | ... | rest of the page ][ room for rows ]
        #   ``taken``, written by the readers                                 ``bytes``, written by the owner
        memory = mapped(descriptor, size)
        self.number, self.descriptor, self.size = number, descriptor, size
        self.taken = memoryview(memory)[: 8 * ranks].cast("q")
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=counter_bytes(ranks))
        self.turn = 0
        self.given: dict[int, int] = {}
        """The last turn that was announced to each reader."""
        self.lent = False
        """Whether this rank is writing a message into it now."""

    @property
    def free(self) -> bool:
        """Whether all readers have read what was announced to them, and no message is being written."""
        return not self.lent and all(self.taken[rank] >= turn for rank, turn in self.given.items())

    def place_of(self, part: Tensor) -> int | None:
        """Return the offset of a tensor's first byte in this segment; None if the tensor is elsewhere."""
        # By address: a part is a view of a buffer that the caller packed, and does not refer to its segment.
        place = part.data_ptr() - self.bytes.data_ptr()
        return place if 0 <= place <= self.bytes.numel() - part.numel() else None


@dataclass
class MemoryAllowance:
    """Limit on the shared memory of one rank over all its groups, and the amount in use.

    Args:
        most: Bytes that all segments together may take.
        held: Bytes of the existing segments.
    """

    most: int
    held: int = 0


class SharedMemory:
    """One rank's segments for one group, and the segments of its peers that it has opened.

    Args:
        mailbox: The mailbox for its tokens, which knows the mailboxes of peers that read its memory.
        peers: Those peers, by rank of the group.
        allowance: Limit in bytes, shared with this rank's other groups.

    Cost:
        Segments remain until the end. There are as many as messages in progress at once, each up to 4 times
        too large.
    """

    def __init__(self, mailbox: Mailbox, peers: frozenset[int], allowance: MemoryAllowance) -> None:
        self.mailbox, self.peers, self.allowance = mailbox, peers, allowance
        self._own: list[Segment] = []
        self._theirs: dict[tuple[int, int], Segment] = {}

    def buffer(self, count: int) -> Tensor | None:
        """Return this many bytes to write the next message into, or None if there is no room.

        The memory must not be used after the wait for that message.
        """
        needed = self._size(count)
        # A far larger segment is left for the large messages that it was made for.
        fitting = [s for s in self._own if needed <= s.size <= _ROOMY * needed and s.free]
        segment = min(fitting, key=lambda s: s.size, default=None) or self._new_segment(needed)
        if segment is None:
            return None
        segment.lent = True
        return segment.bytes[:count]

    def write(self, parts: Mapping[int, Tensor]) -> dict[int, tuple[int, ...]]:
        """Copy messages into shared memory, except those that are there already.

        Args:
            parts: Bytes for each peer.

        Returns:
            The fields of each peer's token.
        """
        # A part is in shared memory already if the channel packed its rows there. Of the others, parts of the
        # same bytes (an all-reduce sends one tensor to all) are copied once:
        #
        #     parts    peer 1: A             peer 2: A             peer 3: B, packed in segment 0
        #     loose    A -> segment 1
        #     tokens   1: segment 1, byte 0  2: segment 1, byte 0  3: segment 0, where B begins
        loose = {_key(part): part for part in parts.values() if self._holder(part) is None}
        buffer = self.buffer(sum(_round_up(count, _ALIGNED) for _, count in loose)) if loose else None
        copies: dict[tuple[int, int], Tensor] = {}
        if buffer is not None:
            begin = 0
            for key, part in loose.items():
                copies[key] = buffer[begin : begin + part.numel()].copy_(part)
                begin += _round_up(part.numel(), _ALIGNED)
        found = {peer: copies.get(_key(part), part) for peer, part in parts.items()}
        held = {peer: self._holder(part) for peer, part in found.items()}
        # One turn for all parts of the message in a segment. The segment is free again when every reader has
        # written this turn, or a later one, into its counter.
        for segment in {id(holder): holder for holder in held.values() if holder is not None}.values():
            segment.turn += 1
            segment.lent = False
        return {peer: self._token(peer, found[peer], holder) for peer, holder in held.items()}

    def find(self, peer: int, token: tuple[int, ...], count: int) -> Tensor | None:
        """Return the bytes that a peer's token points to; None if they come through the socket.

        They do not change until :meth:`taken` marks them as read.

        Raises:
            RuntimeError: If the peer has ended.
        """
        number, descriptor, size, place, _ = token
        if number < 0:
            return None
        if (peer, number) not in self._theirs:
            try:
                file = self.mailbox.open_file(peer, descriptor)
            except OSError as error:
                text = f"connection closed: memory of rank {peer} of the group is gone ({error})"
                raise RuntimeError(text) from None
            self._theirs[peer, number] = Segment(number, file, size, self.mailbox.size)
            # The mapping keeps the memory; the descriptor is not needed any more.
            os.close(file)
        return self._theirs[peer, number].bytes[place : place + count]

    def taken(self, peer: int, token: tuple[int, ...]) -> None:
        """Allow the peer to reuse the memory of a token."""
        segment = self._theirs.get((peer, token[0]))
        if segment is not None:
            segment.taken[self.mailbox.rank] = token[-1]

    def close(self, patience: float = 0.0) -> None:
        """Release the memory, after waiting up to some seconds until the peers have read theirs."""
        # What this rank still borrows it will not read: peers that wait here for it would wait in vain.
        for segment in self._theirs.values():
            segment.taken[self.mailbox.rank] = _NEVER
        limit = time.monotonic() + patience
        while time.monotonic() < limit and not all(segment.free for segment in self._own):
            # A peer reads a message only after its token, which may still be delayed.
            self.mailbox.wake_all()
            time.sleep(1e-3)
        for segment in self._own:
            os.close(segment.descriptor)
        self._own, self._theirs = [], {}
        self.mailbox.close()

    def _holder(self, part: Tensor) -> Segment | None:
        return next((segment for segment in self._own if segment.place_of(part) is not None), None)

    def _token(self, peer: int, part: Tensor, holder: Segment | None) -> tuple[int, ...]:
        place = None if holder is None else holder.place_of(part)
        if holder is None or place is None:
            return NOWHERE
        holder.given[peer] = holder.turn
        return holder.number, holder.descriptor, holder.size, place, holder.turn

    def _size(self, count: int) -> int:
        """Return the segment size for this many bytes.

        Sizes go in steps of an eighth, so that few are enough.
        """
        # bit_length - 4 gives steps of 1/8 of the power of two below: of 2^20 + 1 bytes, steps of 2^17 bytes.
        whole = counter_bytes(self.mailbox.size) + max(count, 1)
        return _round_up(whole, max(_PAGE, 1 << (whole.bit_length() - 4)))

    def _new_segment(self, size: int) -> Segment | None:
        if self.allowance.held + size > self.allowance.most:
            return None
        try:
            descriptor = memory_file("kagome-shelf", size)
            try:
                segment = Segment(len(self._own), descriptor, size, self.mailbox.size)
            except OSError:
                os.close(descriptor)
                raise
        except OSError:
            # The system has no more memory, so later messages do not try again and go by sockets.
            self.allowance.most = self.allowance.held
            return None
        self._own.append(segment)
        self.allowance.held += size
        return segment


def counter_bytes(ranks: int) -> int:
    """Return the bytes of the counters of this many ranks, in whole pages."""
    return _round_up(8 * ranks, _PAGE)


def _key(part: Tensor) -> tuple[int, int]:
    """Return a key that is equal for parts of the same bytes: they are copied once for all their readers."""
    return part.data_ptr(), part.numel()


def _round_up(count: int, block: int) -> int:
    return -(-count // block) * block
