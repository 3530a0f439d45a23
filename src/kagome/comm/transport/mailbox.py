"""Mailbox: tokens that one rank leaves for the other ranks of its host, in memory that all of them map.

Where it sits: ``process_group`` leaves a token for each message whose bytes are in ``shared_memory``, and
looks for the tokens of its peers. A token needs no system call and no extra thread. When every core is
computing, a message through a socket would wait for the scheduler once on each side.

::

    own mailbox:   [lane][reader][count mod SLOTS] -> number, read, size, then five fields
                   the writer writes all but `read`, `number` last; the reader writes `read`

A rank looks for a token by the message's count, so messages may be waited for in any order. Messages to all
ranks are counted for each lane. Point-to-point messages have lanes of their own, in which each peer and
direction is counted separately.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

ALL_LANES: Final = 2
"""Number of lanes for messages from all ranks to all ranks."""
FORWARD, BACKWARD = ALL_LANES, ALL_LANES + 1
"""Lanes for point-to-point messages of the forward and of the backward pass."""
LANES: Final = ALL_LANES + 2
FIELDS: Final = 5
_SLOTS, _WIDTH, _HEAD = 128, 8, 4096
_COOKIE: Final = 16
_LOOKS: Final = 50
"""Number of polls for a token before this rank sleeps between polls."""
_NAP, _LONGEST = 2e-5, 5e-4
_ALIVE_EVERY: Final = 0.05
"""Seconds between two checks whether an awaited peer is alive."""


class Mailbox:
    """The tokens of one rank, and those of the peers whose mailboxes it has opened.

    Args:
        rank: This rank in the group that the mailbox serves.
        size: Number of ranks in that group.
        beside: Another mailbox of this process. A wait on either retries the delayed tokens of both.

    Raises:
        OSError: If the system cannot provide such memory.

    Cost:
        32 KiB for each rank of the group.
    """

    def __init__(self, rank: int, size: int, beside: Mailbox | None = None) -> None:
        self.rank, self.size = rank, size
        self.cookie = secrets.token_bytes(_COOKIE)
        self.descriptor = memory_file("kagome-box", self._bytes)
        # One page with the cookie, then a slot of 8 int64 (64 bytes, a cache line) by lane, reader, count mod
        # SLOTS:
        #
        #     [ number | read | size | segment | descriptor | bytes | place | turn ]
        self._own = _numbers(mapped(self.descriptor, self._bytes))
        os.pwrite(self.descriptor, self.cookie, 0)
        self._theirs: dict[int, memoryview] = {}
        self._offers: dict[int, tuple[int, int, bytes]] = {}
        self._counts = [0] * ALL_LANES
        self._points: dict[tuple[int, int, bool], int] = {}
        self._put_off: dict[int, list[tuple[int, int, Sequence[int]]]] = {}
        self._early: dict[tuple[int, int, int], tuple[int, ...]] = {}
        """Tokens of peers that occupied the slot of a later token: size, then fields."""
        self._lock = threading.Lock()
        self._all: list[Mailbox] = [] if beside is None else beside._all
        self._all.append(self)

    @property
    def offer(self) -> tuple[int, int, bytes]:
        """The process id, descriptor and cookie with which a peer opens this mailbox."""
        return os.getpid(), self.descriptor, self.cookie

    def open(self, peer: int, offer: tuple[int, int, bytes]) -> bool:
        """Open a peer's mailbox; return False if this process cannot, or if the cookie differs."""
        if [type(each) for each in offer] != [int, int, bytes]:  # it becomes part of a path
            return False
        try:
            file = self._reach(offer)
        except OSError:
            return False
        try:
            if os.pread(file, _COOKIE, 0) != offer[2]:
                return False
            self._theirs[peer], self._offers[peer] = _numbers(mapped(file, self._bytes)), offer
        except OSError:
            return False
        finally:
            os.close(file)
        return True

    def keep(self, peers: Mapping[int, object] | Sequence[int]) -> None:
        """Forget all peers except these."""
        self._theirs = {peer: mailbox for peer, mailbox in self._theirs.items() if peer in peers}
        self._offers = {peer: offer for peer, offer in self._offers.items() if peer in peers}

    def count(self, lane: int) -> int:
        """Number the next message of a lane; sender and receiver count alike."""
        self._counts[lane] += 1
        return self._counts[lane]

    def count_point(self, peer: int, lane: int, *, sent: bool) -> int:
        """Number the next point-to-point message to a peer, or from it."""
        key = (peer, lane, sent)
        self._points[key] = self._points.get(key, 0) + 1
        return self._points[key]

    def put(self, peer: int, lane: int, count: int, size: int, fields: Sequence[int]) -> bool:
        """Leave a token; return False if it is delayed until the peer has read the older one in its slot."""
        at = self._at(lane, peer, count)
        if self._put_off:
            self.wake_all()
        # Behind an older delayed token of the same slot, even if the slot is free by now: tokens keep their
        # order.
        if at in self._put_off or not self._write(at, count, size, fields):
            self._put_off.setdefault(at, []).append((count, size, fields))
            return False
        return True

    def lies(self, peer: int, lane: int, count: int) -> bool:
        """Return whether a token has been written by now. Delayed tokens are retried first."""
        self.press_all()
        return all(number != count for number, *_ in self._put_off.get(self._at(lane, peer, count), ()))

    def press_all(self) -> None:
        """Retry the delayed tokens of all mailboxes of this rank.

        The awaited peer may itself wait for one.
        """
        for mailbox in self._all:
            mailbox.wake_all()

    def wake_all(self) -> None:
        """Retry delayed tokens, those of each slot in order."""
        for at, tokens in list(self._put_off.items()):
            while tokens and self._write(at, *tokens[0]):
                tokens.pop(0)
            if not tokens:
                del self._put_off[at]

    # [Note: memory order] Writer and reader are processes, so no lock of Python's orders their accesses. The
    # order of the writes is the whole protocol:
    #
    #     writer                              reader
    #     size, fields      plain writes      number == count?      polls
    #     ---- fence ----                     ---- fence ----
    #     number = count    one 8-byte write  size, fields          are complete now
    #                                         read = count          the slot is free again
    #
    # The number is written last and in one piece, so a reader that sees it sees the fields too. The fence
    # keeps a processor with weak ordering (ARM) from moving a write across it. It takes a lock twice in a
    # row. A write may move into the block that holds a lock, but not out of it, so with one block an earlier
    # and a later write could meet inside and change places. Of two blocks the first holds back the earlier
    # writes, the second the later ones.
    #
    # A slot is used again after SLOTS messages. The writer may overwrite a token only if the reader has
    # marked it as read (number == read); otherwise the token waits in ``_put_off``, and the sender does not
    # block.

    def _write(self, at: int, count: int, size: int, fields: Sequence[int]) -> bool:
        """Write a token into its slot, if the token before it has been read."""
        if self._own[at] != self._own[at + 1]:
            return False
        for step, value in enumerate((size, *fields), start=2):
            self._own[at + step] = value
        self._fence()
        self._own[at] = count
        return True

    def find(self, peer: int, lane: int, count: int, size: int) -> tuple[int, ...] | None:
        """Return the fields of a peer's token for a message of this size, or None if it is not there yet."""
        early = self._early.get((peer, lane, count))
        if early is not None:
            return early[1:] if early[0] == size else None
        mailbox, at = self._theirs[peer], self._at(lane, self.rank, count)
        there = mailbox[at]
        if there < count and mailbox[at + 1] < there:
            # Nobody has waited for this token yet, and the peer cannot write a later one before it is read.
            self._fence()
            self._early[peer, lane, there] = tuple(mailbox[at + 2 : at + 3 + FIELDS])
            mailbox[at + 1] = there
        if there != count or mailbox[at + 2] != size:
            return None
        self._fence()
        return tuple(mailbox[at + 3 : at + 3 + FIELDS])

    def read(self, peer: int, lane: int, count: int) -> None:
        """Mark a peer's token as read."""
        if self._early.pop((peer, lane, count), None) is not None:
            return  # it was marked as read when ``find`` set it aside
        self._theirs[peer][self._at(lane, self.rank, count) + 1] = count

    def wait(self, peer: int, lane: int, count: int, size: int, timeout: timedelta) -> tuple[int, ...]:
        """Wait for a peer's token and return its fields.

        Raises:
            RuntimeError: If the wait exceeds the time limit, or the peer has ended.
        """
        begun = asked = time.monotonic()
        limit, looks, nap = begun + timeout.total_seconds(), 0, _NAP
        while (found := self.find(peer, lane, count, size)) is None:
            # Poll 50 times, then sleep for 20 us, longer each time up to 0.5 ms: the peer may need this core
            # to compute.
            looks += 1
            if looks < _LOOKS:
                continue
            self.press_all()
            time.sleep(nap)
            nap, now = min(1.2 * nap, _LONGEST), time.monotonic()
            if now > asked + _ALIVE_EVERY:
                asked = now
                # The peer may have written the token just before it ended.
                if not self.alive(peer) and self.find(peer, lane, count, size) is None:
                    raise RuntimeError(f"connection closed: rank {peer} of the group is gone")
            if now > limit:
                raise RuntimeError(f"timed out: no token of rank {peer} of the group")
        return found

    def alive(self, peer: int) -> bool:
        """Return whether a peer's process exists and has not closed its mailbox."""
        try:
            os.close(self._reach(self._offers[peer]))
        except OSError:
            return False
        return True

    def open_file(self, peer: int, descriptor: int) -> int:
        """Open a peer's file in this process and return the descriptor.

        Raises:
            OSError: If the peer has ended or its file is closed.
        """
        return os.open(f"/proc/{self._offers[peer][0]}/fd/{descriptor}", os.O_RDWR)

    def close(self) -> None:
        """Close the mailbox, by which peers see that this rank has ended."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self._all.remove(self)
        self.descriptor = -1

    @property
    def _bytes(self) -> int:
        return _HEAD + 8 * _WIDTH * _SLOTS * LANES * self.size

    def _at(self, lane: int, reader: int, count: int) -> int:
        return _HEAD // 8 + _WIDTH * (_SLOTS * (lane * self.size + reader) + count % _SLOTS)

    def _fence(self) -> None:
        """Make writes before this call visible ahead of writes after it, on any processor."""
        for _ in range(2):
            with self._lock:
                pass

    @staticmethod
    def _reach(offer: tuple[int, int, bytes]) -> int:
        # Fails once the process has ended or has closed the descriptor, so opening it also shows that a peer
        # is alive.
        return os.open(f"/proc/{offer[0]}/fd/{offer[1]}", os.O_RDWR)


def memory_file(name: str, size: int) -> int:
    """Return a descriptor of this many bytes of memory that other processes can open.

    Raises:
        OSError: If there is no such memory. All pages are allocated now: running out of them later would end
            the process.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    descriptor = os.memfd_create(name)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int, size: int) -> mmap.mmap:
    """Map a file's memory, with all pages present."""
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _numbers(memory: mmap.mmap) -> memoryview:
    return memoryview(memory).cast("q")
