"""Spans: the phases of one rank over time.

Where it sits: ``train`` and ``pipelining`` open a phase around each piece of their work;
``report.chrome_trace`` and ``report.summary`` read the spans.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from kagome.errors import ScheduleError
from kagome.records.device_clock import DeviceClock
from kagome.schedule.actions import Action, parse

if TYPE_CHECKING:
    import torch

SET_UP = ("partition", "load", "check")
COMPUTE = ("forward", "backward", "optimizer")
MOVE = ("exchange", "weights")
BESIDE = ("evaluate", "checkpoint")
PHASES = (*SET_UP, "forward", "backward", "exchange", "weights", "optimizer", *BESIDE)

# Anything inside these is not training: an exchange within an evaluation is part of the evaluation.
OPAQUE = frozenset((*SET_UP, *BESIDE))

UNREAD = 4096
"""Most phases whose marks on a device are not read yet; to read them the host waits for the device."""


class Span(NamedTuple):
    """One occurrence of a phase."""

    name: str
    """The phase, usually one of :data:`PHASES`."""
    start: float
    """Begin, in seconds after the common zero."""
    duration: float
    """Length in seconds, inner phases included."""
    epoch: int | None
    """The epoch it belongs to; None before and after training."""


@lru_cache(maxsize=1 << 16)
def action_of(name: str) -> Action | None:
    """Return the action that a span is named after, or None."""
    # Actions begin with their stage ("0F2"), phases do not. Parsing only these, and caching, keeps it cheap:
    # a trace has many spans of few names.
    if not name[:1].isdigit():
        return None
    try:
        return parse(name)
    except ScheduleError:
        return None


def phase_of(name: str) -> str:
    """Return a span's phase: forward, backward or exchange if it is an action, else its own name."""
    action = action_of(name)
    if action is None:
        return name
    if not action.kind.computes:
        return "exchange"
    return "forward" if action.kind.forward else "backward"


def by_phase(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by phase, with those of actions added to their phases."""
    found: dict[str, float] = {}
    for name, value in seconds.items():
        found[phase_of(name)] = found.get(phase_of(name), 0.0) + value
    return found


def training(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans of a rank's epochs, without evaluation, checkpoints and whatever is inside them."""
    # Outer spans come before inner ones, so one number says until when everything is part of an evaluation:
    #    evaluate   |---------------|           closed_until is its end
    #    exchange       |----|                  left out
    #    forward                      |----|    kept
    closed_until = float("-inf")
    for span in sorted(spans, key=lambda span: (span.start, -span.duration)):
        if span.name in OPAQUE:
            closed_until = max(closed_until, span.start + span.duration)
        elif span.epoch is not None and span.start >= closed_until:
            yield span


def common_epochs(spans_by_rank: Sequence[Sequence[Span]]) -> list[int]:
    """Return the epochs of which every rank has spans, in order, without the first if there are several."""
    # A rank may have forgotten epochs in the middle of the run; charts need all ranks.
    by_rank = [{span.epoch for span in spans} for spans in spans_by_rank]
    common = sorted(epoch for epoch in set.intersection(*by_rank) if epoch is not None) if by_rank else []
    # The first epoch warms caches up and is not representative.
    return common[1:] or common


def median_epoch(spans_by_rank: Sequence[Sequence[Span]]) -> int | None:
    """Return the epoch of median length among :func:`common_epochs`, or None if there is none."""
    common = common_epochs(spans_by_rank)
    if not common:
        return None
    ends: dict[int, tuple[float, float]] = {}
    for spans in spans_by_rank:
        for span in spans:
            if span.epoch is not None:
                low, high = ends.get(span.epoch, (span.start, span.start))
                ends[span.epoch] = min(low, span.start), max(high, span.start + span.duration)
    lengths = {epoch: ends[epoch][1] - ends[epoch][0] for epoch in common}
    # median_low is one of the values, so an epoch has exactly that length.
    middle = median_low(lengths.values())
    return next(epoch for epoch in common if lengths[epoch] == middle)


class Spans:
    """Recorder of one rank's phases, in bounded memory.

    Phases nest, such as an exchange inside a forward. :meth:`as_list` gives each span whole. :meth:`seconds`
    counts each moment once, for the innermost phase. The exception are set-up, evaluation and checkpoints,
    which count everything inside them as their own.

    Args:
        first: How many of the first epochs are kept.
        last: How many of the last epochs are kept.
        most: Most spans to keep of one epoch, and of everything outside epochs.
        clock: Returns seconds; on one Linux machine ``time.perf_counter`` has the same zero in all processes.
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
        self._device: DeviceClock | None = None
        self._unread: list[Phase] = []

    def measure(self, device: torch.device) -> None:
        """Measure phases on a device from now on: on a GPU, when it comes to them and not when the host does.

        No phase may be open.
        """
        self._read()
        self._device = None if device.type == "cpu" else DeviceClock(device, self.clock)

    def phase(self, name: str, epoch: int | None = None) -> Phase:
        """Return a context manager that records what runs inside it.

        Args:
            name: The phase.
            epoch: The epoch; by default that of the enclosing phase.

        Returns:
            The context manager.
        """
        return Phase(self, name, epoch)

    def align(self, zero: float | None = None) -> None:
        """Set the common zero; call it on every rank right after a barrier.

        Args:
            zero: The clock's value that counts as 0; by default the current one. Earlier spans start below 0.
        """
        self._zero = self.clock() if zero is None else zero

    def as_list(self) -> list[Span]:
        """Return the kept spans in the order of their starts, in seconds after the common zero."""
        self._read()
        spans = (span for kept in self._kept.values() for span in kept)
        # An outer phase is recorded after its inner ones: reversed, it comes first where both start at once.
        shifted = [span._replace(start=span.start - self._zero) for span in spans][::-1]
        return sorted(shifted, key=lambda span: (span.start, -span.duration))

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase over the whole run, with forgotten epochs; each moment counts once."""
        self._read()
        return dict(self._sums)

    def _enter(self, phase: Phase) -> None:
        if self._open:
            outer = self._open[-1]
            phase.inside = outer.inside or outer.name in OPAQUE
            if phase.epoch is None:
                phase.epoch = outer.epoch
        self._open.append(phase)
        phase.start = self._now()

    def _now(self) -> float | torch.Event:
        return self.clock() if self._device is None else self._device.mark()

    def _leave(self, phase: Phase) -> None:
        phase.end = self._now()
        # Phases close in any order if threads overlap, so this one may not be the last.
        if phase in self._open:
            # A phase opened later and never closed (an exception in another thread) is dropped with it.
            del self._open[self._open.index(phase) :]
        phase.outer = self._open[-1] if self._open else None
        self._unread.append(phase)
        if self._device is None or len(self._unread) >= UNREAD:
            self._read()

    def _read(self) -> None:
        """Count the phases that have ended. Inner ones have ended before their outer one."""
        phases, self._unread = self._unread, []
        if self._device is not None and phases:
            # Also the starts of open phases: later marks are measured from a mark after them.
            marked = [phase for phase in self._open if not isinstance(phase.start, float)]
            marks = [mark for phase in phases for mark in (phase.start, phase.end)]
            marks += [phase.start for phase in marked]
            events = [mark for mark in marks if not isinstance(mark, float)]
            known = dict(zip(map(id, events), self._device.seconds(events), strict=True))
            for phase in (*phases, *marked):
                phase.start = known.get(id(phase.start), phase.start)
                phase.end = known.get(id(phase.end), phase.end)
        for phase in phases:
            self._count(phase)

    def _count(self, phase: Phase) -> None:
        assert isinstance(phase.start, float)
        assert isinstance(phase.end, float)
        duration = phase.end - phase.start
        # Seconds of an inner phase are subtracted from the outer one, so each moment counts once. In an
        # evaluation everything counts for the evaluation, so inner phases count nothing.
        if not phase.inside:
            if phase.outer is not None:
                phase.outer.inner += duration
            self._sums[phase.name] = self._sums.get(phase.name, 0.0) + max(duration - phase.inner, 0.0)
        kept = self._list_of(phase.epoch)
        # Sums go on for epochs whose spans are no longer kept.
        if len(kept) < self._most:
            kept.append(Span(phase.name, phase.start, duration, phase.epoch))

    def _list_of(self, epoch: int | None) -> list[Span]:
        kept = self._kept.get(epoch)
        if kept is not None:
            return kept
        if epoch is not None:
            # The first and the last epochs are kept; the oldest of the last ones is dropped for each new one.
            # What lies outside of epochs (None) is always kept.
            if len(self._early) < self._first:
                self._early.add(epoch)
            else:
                self._late.append(epoch)
                if len(self._late) > self._last:
                    self._kept.pop(self._late.popleft(), None)
        return self._kept.setdefault(epoch, [])


class Phase:
    """An open phase of a :class:`Spans`; use it with ``with``."""

    __slots__ = ("_spans", "end", "epoch", "inner", "inside", "name", "outer", "start")

    def __init__(self, spans: Spans, name: str, epoch: int | None) -> None:
        self._spans = spans
        self.name = name
        self.epoch = epoch
        self.start: float | torch.Event = 0.0
        self.end: float | torch.Event = 0.0
        self.inner = 0.0
        self.inside = False
        self.outer: Phase | None = None

    def __enter__(self) -> Phase:
        self._spans._enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._spans._leave(self)
