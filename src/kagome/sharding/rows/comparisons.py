"""Comparisons: what ranks compare of the arguments of a call, and how a rank finds that it compares alone.

Where it sits: :class:`kagome.sharding.rows.placing.Placer` compares arguments through it.

::

    call 1   rank 0   compares with all   ─┐ the layout of the arguments, and whose rows they have
             rank 1   compares with all   ─┘
    call 2   known arguments: nothing is compared, and nothing is sent
    call 3   rank 0   known arguments, so it goes on and waits for rows of rank 1
             rank 1   new ones: it sees that rank 0 has passed call 3, and raises an error on all ranks

How far a rank is stands in what its watchdog publishes every 2 s anyway, so no call sends a message for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kagome.comm.channel import Channel
from kagome.comm.watchdog import CallProgress
from kagome.errors import ModelError

PAUSE: Final = 0.02
"""Seconds between two looks at what the other ranks have published."""


class Comparisons:
    """The comparisons of one model's arguments.

    Args:
        channel: The channel of all ranks of the graph.
    """

    def __init__(self, channel: Channel) -> None:
        # A rank that has the whole graph compares with nobody, and may call alone.
        self._channel, self._watch = channel, None if channel.size == 1 else channel.watch
        self.layout = 1
        """The number of the layout of the present call's arguments, in the order in which ranks met them."""

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wrap the placing of the arguments of one call. All ranks call it alike."""
        if (watch := self._watch) is None:
            yield
            return
        before = watch.progress
        watch.progress = CallProgress(before.call + 1, before.compared)
        yield
        watch.progress = watch.progress._replace(layout=self.layout)

    def gather(self, mine: object, action: str, *, here: str, alone: bool) -> list[Any]:
        """Return what each rank has to say, on every rank. It runs within :meth:`call`.

        Args:
            mine: What this rank says: plain data.
            action: The comparison, for errors.
            here: This rank's arguments in words.
            alone: Whether another rank may go on without comparing.

        Raises:
            ModelError: If another rank goes on without comparing.
        """
        if self._watch is not None:
            self._watch.progress = self._watch.progress._replace(compared=self._watch.progress.compared + 1)
            if alone:
                self._refuse_alone(here)
        return self._channel.gather_objects(mine, action)

    def _refuse_alone(self, here: str) -> None:
        """Return when all ranks compare, or when only a message to them can tell whether they do.

        Raises:
            ModelError: If a rank goes on without comparing.
        """
        watch, channel, names = self._watch, self._channel, self._channel.names
        assert watch is not None
        watch.tell()
        mine, end = watch.progress, time.monotonic() + channel.timeout
        waiting = [name for rank, name in enumerate(names) if rank != channel.rank]
        while waiting and time.monotonic() < end:
            for name in [*waiting]:
                seen = watch.seen(name)
                # A message to a rank that is gone, or of which nothing is known, ends in an error of its own.
                if seen is None or watch.stale(seen) is not None or seen.progress.compared >= mine.compared:
                    waiting.remove(name)
                elif seen.progress.call > mine.call or (
                    seen.progress.call == mine.call and seen.progress.layout
                ):
                    raise ModelError(
                        "arguments of one kind on all ranks, in each call",
                        f"here {here}, unlike earlier calls; rank {name} has gone on with arguments of an "
                        "earlier call",
                        where=f"net(...), rank {names[channel.rank]}",
                        hint="the same arguments on all ranks; a rank without rows gives a tensor of none",
                    )
            time.sleep(PAUSE)
