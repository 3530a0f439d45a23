"""Box: tokens that one rank leaves for the others of its host, in memory that all of them see.

Where it sits: ``process_group`` leaves a token for each message that lies on ``shared_memory`` and looks for
its peers'. A token costs a rank no system call and needs no thread of anybody's: where every core computes, a
message through a socket waits for the scheduler once at each end.

::

    own box:   [lane][reader][count mod SLOTS] -> number, read, size, then five fields
               the writer writes all but `read`, `number` last; the reader writes `read`

A rank looks for a token by the message's count, so messages may be waited for in any order. Messages to all
ranks are counted a lane; those between two ranks have lanes of their own, each counted a peer and direction.
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
"""Lanes of messages from all ranks to all."""
FORWARD, BACKWARD = ALL_LANES, ALL_LANES + 1
"""Lanes of messages from one rank to one."""
LANES: Final = ALL_LANES + 2
FIELDS: Final = 5
_SLOTS, _WIDTH, _HEAD = 128, 8, 4096
_COOKIE: Final = 16
_LOOKS: Final = 50
"""So often a token is looked for before this rank sleeps between looks."""
_NAP, _LONGEST = 2e-5, 5e-4
_ALIVE_EVERY: Final = 0.05
"""Seconds between two looks whether an awaited peer is alive."""


class Mailbox:
    """The tokens of one rank, and those of the peers that it has opened.

    Args:
        rank: This rank in the group that the box serves.
        size: Ranks in that group.
        beside: Another box of this process: what it has put off is tried again wherever this rank waits.

    Raises:
        OSError: If the system gives no such memory.

    Cost:
        32 KiB for each rank of the group.
    """

    def __init__(self, rank: int, size: int, beside: Mailbox | None = None) -> None:
        self.rank, self.size = rank, size
        self.cookie = secrets.token_bytes(_COOKIE)
        self.descriptor = memory_file("kagome-box", self._bytes)
        self._own = _numbers(mapped(self.descriptor, self._bytes))
        os.pwrite(self.descriptor, self.cookie, 0)
        self._theirs: dict[int, memoryview] = {}
        self._offers: dict[int, tuple[int, int, bytes]] = {}
        self._counts = [0] * ALL_LANES
        self._points: dict[tuple[int, int, bool], int] = {}
        self._put_off: dict[int, list[tuple[int, int, Sequence[int]]]] = {}
        self._early: dict[tuple[int, int, int], tuple[int, ...]] = {}
        """Peers' tokens that lay in the place of later ones: size, then fields."""
        self._lock = threading.Lock()
        self._all: list[Mailbox] = [] if beside is None else beside._all
        self._all.append(self)

    @property
    def offer(self) -> tuple[int, int, bytes]:
        """What a peer needs to open this box: process, descriptor, and what it must find there."""
        return os.getpid(), self.descriptor, self.cookie

    def open(self, peer: int, offer: tuple[int, int, bytes]) -> bool:
        """Open a peer's box; False where this process cannot, or finds something else there."""
        if [type(each) for each in offer] != [int, int, bytes]:  # a path is made of it
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
        """Forget all peers but these."""
        self._theirs = {peer: box for peer, box in self._theirs.items() if peer in peers}
        self._offers = {peer: offer for peer, offer in self._offers.items() if peer in peers}

    def count(self, lane: int) -> int:
        """Number the next message of a lane: the same number at both its ends."""
        self._counts[lane] += 1
        return self._counts[lane]

    def count_point(self, peer: int, lane: int, *, sent: bool) -> int:
        """Number the next message that goes to a peer, or comes from it."""
        key = (peer, lane, sent)
        self._points[key] = self._points.get(key, 0) + 1
        return self._points[key]

    def put(self, peer: int, lane: int, count: int, size: int, fields: Sequence[int]) -> bool:
        """Leave a token; False if that is put off until the peer has read one from far before."""
        at = self._at(lane, peer, count)
        if self._put_off:
            self.press()
        if at in self._put_off or not self._write(at, count, size, fields):
            self._put_off.setdefault(at, []).append((count, size, fields))
            return False
        return True

    def lies(self, peer: int, lane: int, count: int) -> bool:
        """Whether a token was left by now; those put off are tried again."""
        self.press_all()
        return all(number != count for number, *_ in self._put_off.get(self._at(lane, peer, count), ()))

    def press_all(self) -> None:
        """Try again what any box of this rank has put off: the peer that it waits for may wait for that."""
        for box in self._all:
            box.press()

    def press(self) -> None:
        """Try again what was put off, each place's in its order."""
        for at, tokens in list(self._put_off.items()):
            while tokens and self._write(at, *tokens[0]):
                tokens.pop(0)
            if not tokens:
                del self._put_off[at]

    def _write(self, at: int, count: int, size: int, fields: Sequence[int]) -> bool:
        """Write a token into its place, if the one before was read."""
        if self._own[at] != self._own[at + 1]:
            return False
        for step, value in enumerate((size, *fields), start=2):
            self._own[at + step] = value
        self._fence()
        self._own[at] = count
        return True

    def find(self, peer: int, lane: int, count: int, size: int) -> tuple[int, ...] | None:
        """The fields of a peer's token for a message of so many bytes, if it is there."""
        early = self._early.get((peer, lane, count))
        if early is not None:
            return early[1:] if early[0] == size else None
        box, at = self._theirs[peer], self._at(lane, self.rank, count)
        there = box[at]
        if there < count and box[at + 1] < there:
            # Nobody has waited for it yet, and the peer can leave no later one before it is read.
            self._fence()
            self._early[peer, lane, there] = tuple(box[at + 2 : at + 3 + FIELDS])
            box[at + 1] = there
        if there != count or box[at + 2] != size:
            return None
        self._fence()
        return tuple(box[at + 3 : at + 3 + FIELDS])

    def read(self, peer: int, lane: int, count: int) -> None:
        """Say that a token was read."""
        if self._early.pop((peer, lane, count), None) is not None:
            return  # it was said when it was taken away
        self._theirs[peer][self._at(lane, self.rank, count) + 1] = count

    def wait(self, peer: int, lane: int, count: int, size: int, timeout: timedelta) -> tuple[int, ...]:
        """The fields of a peer's token, as soon as it is there.

        Raises:
            RuntimeError: If that takes longer than the limit, or the peer is gone.
        """
        begun = asked = time.monotonic()
        limit, looks, nap = begun + timeout.total_seconds(), 0, _NAP
        while (found := self.find(peer, lane, count, size)) is None:
            looks += 1
            if looks < _LOOKS:
                continue
            self.press_all()
            time.sleep(nap)
            nap, now = min(1.2 * nap, _LONGEST), time.monotonic()
            if now > asked + _ALIVE_EVERY:
                asked = now
                # It may have left the token as its last deed.
                if not self.alive(peer) and self.find(peer, lane, count, size) is None:
                    raise RuntimeError(f"connection closed: rank {peer} of the group is gone")
            if now > limit:
                raise RuntimeError(f"timed out: no token of rank {peer} of the group")
        return found

    def alive(self, peer: int) -> bool:
        """Whether a peer's process is there and has not closed its box."""
        try:
            os.close(self._reach(self._offers[peer]))
        except OSError:
            return False
        return True

    def open_file(self, peer: int, descriptor: int) -> int:
        """A descriptor of this process for one of a peer's.

        Raises:
            OSError: If the peer or its file is gone.
        """
        return os.open(f"/proc/{self._offers[peer][0]}/fd/{descriptor}", os.O_RDWR)

    def close(self) -> None:
        """Let the peers find that this rank is gone."""
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
        """Order what was written before it ahead of what is written after it, on any processor."""
        for _ in range(2):
            with self._lock:
                pass

    @staticmethod
    def _reach(offer: tuple[int, int, bytes]) -> int:
        return os.open(f"/proc/{offer[0]}/fd/{offer[1]}", os.O_RDWR)


def memory_file(name: str, size: int) -> int:
    """A descriptor of so many bytes of memory that other processes can open.

    Raises:
        OSError: If there is no such memory. All pages are taken now: to find out later that there are none
            would end the process.
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
    """A file's memory, pages at hand."""
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _numbers(memory: mmap.mmap) -> memoryview:
    return memoryview(memory).cast("q")
