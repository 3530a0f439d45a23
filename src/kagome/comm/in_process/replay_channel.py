"""ReplayChannel: a rank's end of a group of threads that can go on alone, hearing again what it heard.

Where it sits: ``profile.epoch_costs`` times what one rank computes with it, on a core that no other thread
wants.

::

    all ranks      epoch 1   epoch 2, recorded
    then rank 0                                epoch 3, 4, 5 on what it heard in 2
    then rank 1                                                                    epoch 3, 4, 5 ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from kagome.comm.in_process.thread_group import Come, ThreadChannel, ThreadGroup


class _Timed(Come):
    """An exchange that notes how long its rank did something else before it asked for the rows."""

    def __init__(self, rows: Tensor, channel: ReplayChannel) -> None:
        super().__init__(rows)
        self._channel, self._begun = channel, channel.clock()

    def wait(self) -> Tensor:
        """The rows."""
        if self._begun:
            self._channel.meanwhile += self._channel.clock() - self._begun
            self._begun = 0.0
        return super().wait()

    def lent(self) -> AbstractContextManager[Tensor]:
        """The rows."""
        self.wait()
        return super().lent()


class ReplayChannel(ThreadChannel):
    """A :class:`~kagome.comm.in_process.thread_group.ThreadChannel`; no point-to-point message is replayed.

    Args:
        group: Of this rank.
        rank: Its number.
        clock: Seconds.

    Attributes:
        meanwhile: Seconds from the start of exchanges until their rows were waited for: what they take, up to
            that, keeps nobody.
        met: When this rank met all others, since it was cleared.
    """

    def __init__(self, group: ThreadGroup, rank: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(group, rank)
        self.clock = clock
        self.meanwhile, self.met = 0.0, list[float]()
        self._heard: list[list[Any]] = []
        self._recording, self._place = False, -1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what is heard inside."""
        self._heard, self._recording = [], True
        yield
        self._recording = False

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Hear inside what was heard while it was recorded, in the same order; nobody else takes part."""
        self._place = 0
        yield
        self._place = -1

    def turn(self) -> Iterator[bool]:
        """The ranks' turns, one after the other: whether it is this one's."""
        for rank in range(self.size):
            yield rank == self.rank
            super()._share(None)

    def _started(self, rows: Tensor) -> Come:
        return _Timed(rows, self)

    def _share(self, value: Any) -> list[Any]:
        self.met.append(self.clock())
        if self._place >= 0:
            self._place += 1
            return self._heard[self._place - 1]
        values = super()._share(value)
        if self._recording:
            self._heard.append(values)
        return values

    def _agree(self, offers: Sequence[str], mine: str) -> None:
        if self._place < 0:  # what is replayed is of another epoch
            super()._agree(offers, mine)
