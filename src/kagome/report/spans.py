"""Spans: what one rank did when, phase by phase.

Where it sits: ``run`` opens a phase around each piece of its work; ``timeline`` and ``summary`` read them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

SET_UP = ("partition", "load", "check")
COMPUTE = ("forward", "backward", "optimizer")
MOVE = ("exchange", "weights")
BESIDE = ("evaluate", "checkpoint")
PHASES = (*SET_UP, "forward", "backward", "exchange", "weights", "optimizer", *BESIDE)

# What happens inside these is not training: an exchange within an evaluation is part of the evaluation.
OPAQUE = frozenset((*SET_UP, *BESIDE))


class Span(NamedTuple):
    """One phase, once."""

    name: str
    """The phase, usually one of :data:`PHASES`."""
    start: float
    """Seconds after the common zero."""
    duration: float
    """Seconds, those of inner phases included."""
    epoch: int | None
    """The epoch it belongs to; None before and after training."""


class Spans:
    """Records the phases of one rank in bounded memory.

    Phases nest (an exchange inside a forward). :meth:`as_list` gives each span whole; :meth:`seconds` counts
    each moment once, for the innermost phase, except within set-up, evaluation and checkpoints, which keep
    what happens inside them.

    Args:
        first: How many of the first epochs are kept.
        last: How many of the last epochs are kept.
        most: Most spans kept of one epoch, and of all that is outside epochs.
        clock: Seconds; on one Linux machine ``time.perf_counter`` has the same zero in all processes.
    """

    def __init__(
        self,
        *,
        first: int = 20,
        last: int = 50,
        most: int = 1000,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._zero = clock()
        self._first, self._last, self._most = first, last, most
        self._kept: dict[int | None, list[Span]] = {}
        self._early: set[int] = set()
        self._late: deque[int] = deque()
        self._sums: dict[str, float] = {}
        # One stack for all threads: autograd may run a backward's exchange in a device thread, while the
        # thread that called backward waits inside its own phase.
        self._open: list[Phase] = []

    def phase(self, name: str, epoch: int | None = None) -> Phase:
        """A context manager that records what runs inside it.

        Args:
            name: The phase.
            epoch: Its epoch; by default that of the phase it is opened in.

        Returns:
            The context manager.
        """
        return Phase(self, name, epoch)

    def align(self, zero: float | None = None) -> None:
        """Set the common zero: call it on every rank right after a barrier.

        Args:
            zero: The clock's value that counts as 0; by default now. Earlier spans start below 0.
        """
        self._zero = self.clock() if zero is None else zero

    def as_list(self) -> list[Span]:
        """The kept spans in the order of their starts, in seconds after the common zero."""
        spans = (span for kept in self._kept.values() for span in kept)
        # An outer phase is recorded after its inner ones: reversed, it comes first where both start at once.
        shifted = [span._replace(start=span.start - self._zero) for span in spans][::-1]
        return sorted(shifted, key=lambda span: (span.start, -span.duration))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase over the whole run, of forgotten epochs too, each moment counted once."""
        return dict(self._sums)

    def _enter(self, phase: Phase) -> None:
        if self._open:
            outer = self._open[-1]
            phase.inside = outer.inside or outer.name in OPAQUE
            if phase.epoch is None:
                phase.epoch = outer.epoch
        self._open.append(phase)

    def _leave(self, phase: Phase, duration: float) -> None:
        if phase in self._open:
            # What was opened later and never closed (an exception in another thread) goes with it.
            del self._open[self._open.index(phase) :]
        if not phase.inside:
            if self._open:
                self._open[-1].inner += duration
            self._sums[phase.name] = self._sums.get(phase.name, 0.0) + max(duration - phase.inner, 0.0)
        kept = self._list_of(phase.epoch)
        if len(kept) < self._most:
            kept.append(Span(phase.name, phase.start, duration, phase.epoch))

    def _list_of(self, epoch: int | None) -> list[Span]:
        kept = self._kept.get(epoch)
        if kept is not None:
            return kept
        if epoch is not None:
            if len(self._early) < self._first:
                self._early.add(epoch)
            else:
                self._late.append(epoch)
                if len(self._late) > self._last:
                    self._kept.pop(self._late.popleft(), None)
        return self._kept.setdefault(epoch, [])


class Phase:
    """An open phase of a :class:`Spans`; use it with ``with``."""

    __slots__ = ("_spans", "epoch", "inner", "inside", "name", "start")

    def __init__(self, spans: Spans, name: str, epoch: int | None) -> None:
        self._spans = spans
        self.name = name
        self.epoch = epoch
        self.start = 0.0
        self.inner = 0.0
        self.inside = False

    def __enter__(self) -> Phase:
        self._spans._enter(self)
        self.start = self._spans.clock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spans._leave(self, self._spans.clock() - self.start)
