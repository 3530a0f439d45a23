"""Replay channel: a rank of a group of threads that can run on alone, on recorded answers of its peers.

Where it sits: ``profile.epoch_costs`` uses it to time the computation of one rank on a core that no other
thread uses.

::

    all ranks      epoch 1   epoch 2, recorded
    then rank 0                                epochs 3, 4, 5 on what was recorded in 2
    then rank 1                                                                    epochs 3, 4, 5 ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kagome.comm.in_process.thread_group import EndedWork, ThreadChannel, ThreadGroup


class _Timed(EndedWork):
    """An exchange that records how long its rank did other work before it waited for the rows."""

    def __init__(self, rows: Tensor, channel: ReplayChannel) -> None:
        super().__init__(rows)
        self._channel, self._begun = channel, channel.clock()

    def wait(self) -> Tensor:
        """Return the rows, and count the time since the start of the exchange."""
        # The second wait of one exchange does not count again.
        if self._begun:
            self._channel.meanwhile += self._channel.clock() - self._begun
            self._begun = 0.0
        return super().wait()


class ReplayChannel(ThreadChannel):
    """A thread's channel that can replay collectives; point-to-point messages are not replayed.

    Args:
        group: The group of this rank.
        rank: This rank's number.
        clock: Returns the time in seconds.

    Attributes:
        meanwhile: Seconds between the start of exchanges and the wait for their rows: communication of up to
            this length is hidden.
        met: Times at which this rank met all others, since the list was cleared.
    """

    def __init__(self, group: ThreadGroup, rank: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(group, rank)
        self.clock = clock
        self.meanwhile, self.met = 0.0, list[float]()
        self._heard: list[list[Any]] = []
        self._recording, self._place = False, -1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the values that the peers share inside the block."""
        self._heard, self._recording = [], True
        try:
            yield
        finally:
            self._recording = False

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Return the recorded values inside the block, in the same order; no other rank takes part."""
        self._place = 0
        try:
            yield
        finally:
            self._place = -1

    def turn(self) -> Iterator[bool]:
        """Let the ranks take turns, one after the other: yield for each turn whether it is this rank's."""
        for rank in range(self.size):
            yield rank == self.rank
            # Past this class: the meeting between turns is neither recorded nor replayed, nor counted in
            # ``met``.
            super()._share(None)

    def _ended(self, rows: Tensor) -> EndedWork:
        return _Timed(rows, self)

    def _share(self, value: Any) -> list[Any]:
        self.met.append(self.clock())
        # The n-th meeting of the block gets the n-th recorded answer, so both must make the same calls.
        if self._place >= 0:
            self._place += 1
            return self._heard[self._place - 1]
        values = super()._share(value)
        if self._recording:
            self._heard.append(values)
        return values

    def _agree(self, offers: Sequence[str], mine: str) -> None:
        if self._place < 0:  # replayed values carry the header of another epoch
            super()._agree(offers, mine)
