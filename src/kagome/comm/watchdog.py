"""Watchdog: publishes what every rank is doing, so that a long wait can name the late rank and its action.

Where it sits: ``Channel`` reports its waits here and asks which rank to blame; ``open_mesh`` creates it.

With nccl the host does not wait for its peers. Its stream does, and the host where it next reads a result.
``Channel`` therefore hands over an event before and one behind each wait of the stream, and the thread asks
which have occurred.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kagome.comm import serialization
from kagome.comm.transport.timeout import Answer, SilentError, within
from kagome.errors import CommError, KagomeError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

NAMED_PEERS = 4
"""Number of late peers that are described in full; the rest are only counted."""
ANSWERS_WITHIN = 5.0
"""Seconds that the store has to answer. After one answer that took longer it is not asked again."""


@dataclass(frozen=True)
class _Doing:
    """The present action of this rank, replaced as a whole: the thread must not read a partial update."""

    number: int
    action: str
    since: float
    peers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _StreamWait:
    """A wait of the device's stream: it is in it between two events."""

    action: str
    peers: tuple[int, ...]
    before: torch.Event
    behind: torch.Event


class CallProgress(NamedTuple):
    """How far a rank is in the calls of a training loop of the user's own, whose arguments ranks compare.

    Args:
        call: The number of calls begun.
        compared: The number of comparisons of arguments begun.
        layout: The number of the arguments' layout, in the order in which ranks met them; 0 while a call
            places its arguments, and may compare them.
    """

    call: int = 0
    compared: int = 0
    layout: int = 0


@dataclass(frozen=True)
class Seen:
    """The last state that a rank published.

    Args:
        number: Number of actions that the rank had begun.
        action: Text of the current action.
        begun: Wall-clock time in seconds at which the rank began the action.
        alive: Wall-clock time in seconds at which the rank published this state.
        waits: Whether the rank was itself waiting for others.
        progress: How far it was in the calls of a training loop.
    """

    number: int
    action: str
    begun: float
    alive: float
    waits: bool
    progress: CallProgress


class Watchdog:
    """Publishes this rank's action to a store, and reads the other ranks' actions when a wait takes long.

    One daemon thread publishes every ``every`` seconds and at no other time, so an action costs its rank only
    one small object. The store is cloned: a client of torch's TCPStore serves one call at a time, and a
    blocking call of the process group on the same client would delay publishing for as long as it blocks.

    Args:
        store: A store that all ranks share.
        rank: This rank in the world.
        size: Number of ranks in the world. With one rank there is no thread and nothing is published.
        log: Called with one line for each wait that takes longer than ``warn_after``.
        every: Seconds between two publications.
        warn_after: Seconds of one wait after which it is reported.

    Cost: about 100 bytes to the store's host every ``every`` seconds; in a long wait, 100 bytes back for each
    peer.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        log: Callable[[str], None],
        every: float = 2.0,
        warn_after: float = 10.0,
    ) -> None:
        self.rank, self.size = rank, size
        self._log, self._every, self._warn_after = log, every, warn_after
        self._frame = "its start"
        self._now = _Doing(0, self._frame, time.monotonic(), ())
        self._warned: float | None = None
        # Waits of the stream in their order. Of very many the oldest go.
        self._streamed: deque[_StreamWait] = deque(maxlen=4096)
        self._stuck: tuple[_StreamWait, _Doing] | None = None
        self.progress = CallProgress()
        self._closed, self._silent = threading.Event(), False
        self._thread: threading.Thread | None = None
        if size > 1:
            self._store = _own_client(store)
            self._publish()
            self._thread = threading.Thread(target=self._run, name="kagome-watch", daemon=True)
            self._thread.start()

    def doing(self, action: str) -> None:
        """Set what this rank computes from now on, such as ``epoch 2: optimizer``."""
        self._frame = action
        self._now = _Doing(self._now.number + 1, action, time.monotonic(), ())

    @contextmanager
    def waiting(self, action: str, peers: Sequence[int]) -> Iterator[None]:
        """Mark this rank as waiting in ``action`` for ``peers`` (ranks of the world) inside the block."""
        before = self._now
        # A new object in one assignment: the thread that publishes takes no lock.
        self._now = _Doing(before.number + 1, action, time.monotonic(), tuple(peers))
        try:
            yield
        finally:
            # Restore the earlier action with its own start time: the wait was a part of it.
            self._now = _Doing(self._now.number + 1, self._frame, before.since, ())

    def streamed(self, action: str, peers: Sequence[int], before: torch.Event, behind: torch.Event) -> None:
        """Mark the device's stream as waiting in ``action`` for ``peers`` between two events."""
        # Events and not the operation itself, which would keep the tensors of the exchange.
        self._streamed.append(_StreamWait(action, tuple(peers), before, behind))

    def seen(self, rank: int) -> Seen | None:
        """Return the last state that a rank published; None if there is none or the store is silent."""
        if self._thread is None:
            return None
        key = f"watch/{rank}"
        try:
            found = self._asked(lambda: self._word(key))
            if found is None:
                return None
            number, action, begun, alive, waits, progress = json.loads(found)
        except (RuntimeError, ValueError):
            return None
        return Seen(number, action, begun, alive, waits, CallProgress(*progress))

    def tell(self) -> None:
        """Publish this rank's state now, for ranks that look at it more often than the thread publishes."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the store's host has ended
                self._asked(self._publish)

    def report_error(self, error: BaseException) -> None:
        """Publish the error that ends this rank, so that ranks waiting for it raise the same error."""
        # A CommError is usually the consequence of another rank's end, and would hide the cause. Errors that
        # are not Kagome's may hold data that cannot be packed.
        if self._thread is None or not isinstance(error, KagomeError) or isinstance(error, CommError):
            return
        # This rank only repeats what another one has published.
        if error.told_by is not None:
            return
        word = json.dumps(serialization.pack(error)[0])
        with suppress(RuntimeError):  # the store's host has ended
            self._asked(lambda: self._store.set(f"told/{self.rank}", word))

    def reported(self) -> KagomeError | None:
        """Return the error that ended another rank, if that rank published one."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        with suppress(RuntimeError, ValueError):
            for rank in others if self._thread is not None else ():
                if (found := self._asked(partial(self._word, f"told/{rank}"))) is not None:
                    error = serialization.unpack(json.loads(found), [])
                    if isinstance(error, KagomeError):
                        error.told_by = rank
                        return error
        return None

    def _word(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    def describe(self, rank: int) -> str:
        """Describe a rank: ``rank 1, which was last seen in 'epoch 2: optimizer' 12 s ago``."""
        seen = self.seen(rank)
        if seen is None:
            gone = "; the host where ranks meet is silent" if self._silent else ""
            return f"rank {rank}, of which nothing was seen{gone}"
        now = time.time()
        text = f"rank {rank}, which was last seen in '{seen.action}' {max(0.0, now - seen.begun):.0f} s ago"
        # Two publications may be late on a busy host; after three the process is stopped or gone.
        if now - seen.alive > 3 * self._every:
            text += f" and has given no sign of life for {now - seen.alive:.0f} s"
        # Ranks that know their arguments from different calls wait for rows of other sizes.
        mine, theirs = self.progress, seen.progress
        if mine.call == theirs.call and 0 < mine.layout != theirs.layout > 0:
            text += f", in a call of net(...) with arguments of another layout than those of rank {self.rank}"
        return text

    def late(self, action: str, peers: Sequence[int]) -> list[int]:
        """Return those of ``peers`` that were not seen waiting in ``action`` themselves."""
        return [peer for peer in peers if not self._waits_in(action, peer)]

    def close(self) -> None:
        """End the thread, publish where this rank stopped, and release the store.

        A second call does nothing.
        """
        self._closed.set()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if thread is not threading.current_thread():  # garbage collection may call this in the thread itself
            thread.join(timeout=5.0)
        if not thread.is_alive():
            with suppress(RuntimeError):  # the store's host has ended
                self._asked(self._publish)
            del self._store

    def _asked(self, call: Callable[[], Answer]) -> Answer:
        """Return the result of a call to the store.

        Raises:
            RuntimeError: If the store does not answer, or once failed to answer in time: nobody waits for it
                twice.
        """
        # A wait that failed asks about several ranks. With a dead host each question would cost
        # ``ANSWERS_WITHIN``.
        if self._silent:
            raise SilentError("the store is silent")
        try:
            return within(ANSWERS_WITHIN, call, "store")
        except SilentError:
            self._silent = True
            raise

    def _waits_in(self, action: str, peer: int) -> bool:
        seen = self.seen(peer)
        return seen is not None and seen.waits and seen.action == action

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            try:
                self._publish()
            except RuntimeError:
                return  # the store's host has ended, so the run ends; this thread need not report it
            self._warn()

    def _publish(self) -> None:
        doing = self._present()
        age, wall = time.monotonic() - doing.since, time.time()
        # Wall-clock times, since the monotonic clocks of two hosts are unrelated.
        record = [doing.number, doing.action, wall - age, wall, bool(doing.peers), self.progress]
        self._store.set(f"watch/{self.rank}", json.dumps(record))

    def _present(self) -> _Doing:
        """Return what this rank is doing: the wait of its stream, if that is what the host waits for."""
        doing = self._now  # read once: another thread replaces it
        while self._streamed and self._streamed[0].behind.query():
            self._streamed.popleft()
        if doing.peers or not self._streamed or not self._streamed[0].before.query():
            return doing
        first = self._streamed[0]
        if self._stuck is None or self._stuck[0] is not first:
            # The stream came here since the last look. When, no event says without a wait for it.
            self._stuck = first, _Doing(doing.number, first.action, time.monotonic(), first.peers)
        return self._stuck[1]

    def _warn(self) -> None:
        doing = self._present()
        waited = time.monotonic() - doing.since
        # Its begin tells one wait from the next, so each long wait is reported once.
        if not doing.peers or waited < self._warn_after or self._warned == doing.since:
            return
        self._warned = doing.since
        # If all peers wait in the same action, no single one is to blame, so all are described.
        late = self.late(doing.action, doing.peers) or list(doing.peers)
        names = " and for ".join(self.describe(peer) for peer in late[:NAMED_PEERS])
        more = f" and for {len(late) - NAMED_PEERS} others" if len(late) > NAMED_PEERS else ""
        # With nccl nobody raises the error that ended a peer: the host waits for its stream.
        error = self.reported()
        why = "" if error is None else f"; rank {error.told_by} ended with: {' '.join(str(error).split())}"
        self._log(f"rank {self.rank} has waited {waited:.0f} s in '{doing.action}' for {names}{more}{why}")


def _own_client(store: Store) -> Store:
    try:
        client: Store = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return store  # a HashStore or FileStore has no connection that could block
    client.set_timeout(timedelta(seconds=10))
    return client
