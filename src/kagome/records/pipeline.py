"""Pipeline record: how much of an epoch the ranks compute, wait and send, measured and predicted.

Where it sits: reads the spans that ``pipelining`` names after its programs' actions; ``report.summary`` keeps
the figures, ``report.charts.lanes`` draws them.

All shares are of one window: from the first action's begin to the last action's end, on all ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

from kagome.errors import ScheduleError
from kagome.records.spans import MOVE, Span, action_of, common_epochs, median_epoch, training
from kagome.schedule.actions import Action, ActionKind, Program, Programs
from kagome.schedule.simulator import Seconds, SimulatedSpan as Slice, Simulation, simulate

Interval = tuple[float, float]
_Key = tuple[int, ActionKind] | tuple[int, ActionKind, int]


@dataclass(frozen=True, slots=True)
class Shares:
    """How one rank, or the mean of all, spends the window; each value is a share of it."""

    computing: float
    """Share spent in F and B, including exchanges within them."""
    waiting: float
    """Share spent in RECV."""
    sending: float
    """Share spent in SEND."""
    other: float
    """Share spent in recorded work outside actions: weights, optimizer, history."""
    exposed: float
    """Share spent in communication that no computing hides: exchanges, SEND, and a RECV's time after its SEND
    began. It overlaps the shares above. Waiting for a message that has not been sent yet does not count.
    """

    @property
    def bubble(self) -> float:
        """Share of the window without computing."""
        return 1 - self.computing

    @property
    def idle(self) -> float:
        """Share of the window in which nothing is recorded."""
        return max(0.0, 1 - self.computing - self.waiting - self.sending - self.other)


@dataclass(frozen=True, slots=True)
class MeasuredPipeline:
    """One epoch of a pipeline as it was measured."""

    epoch: int
    """The number of the epoch."""
    seconds: float
    """Seconds from the first action's begin to the last action's end."""
    slices: tuple[tuple[Slice, ...], ...]
    """Each rank's actions in order, in seconds after the window's begin."""
    ranks: tuple[Shares, ...]
    """The shares of each rank."""

    @property
    def stages(self) -> tuple[int | None, ...]:
        """Each rank's stage, or None for a rank without actions."""
        return tuple(slices[0].action.stage if slices else None for slices in self.slices)

    @property
    def whole(self) -> Shares:
        """The mean of all ranks' shares."""
        return Shares(*(fmean(column) for column in zip(*map(astuple, self.ranks), strict=True)))

    @property
    def bubble(self) -> float:
        """The share of all ranks' time without computing."""
        return self.whole.bubble

    @property
    def imbalance(self) -> float:
        """The busiest rank's computing time over the mean, minus 1."""
        mean = self.whole.computing
        return max(rank.computing for rank in self.ranks) / mean - 1 if mean else 0.0


def measure(spans_by_rank: Sequence[Sequence[Span]], epoch: int | None = None) -> MeasuredPipeline | None:
    """Measure what the ranks did in one epoch of a pipeline.

    Args:
        spans_by_rank: One list per rank (:meth:`Spans.as_list`), with one common zero.
        epoch: The epoch to measure. By default the one of median length among the epochs after the first that
            passed the stages once; a probe epoch computes its gradient twice.

    Returns:
        The epoch's actions and shares, or None if no action of it was recorded.
    """
    # The window of one epoch; times of the slices count from its begin:
    #    begin                                         end
    #      rank 0   |F0|F1|F2|....RECV....|B2|B1|B0|
    #      rank 1      |F0|F1|F2|B2|B1|B0|..........|      idle counts as bubble
    kept = [list(training(spans)) for spans in spans_by_rank]
    actions = [[span for span in spans if action_of(span.name) is not None] for spans in kept]
    epoch = _usual_epoch(actions) if epoch is None else epoch
    wanted = [[span for span in spans if span.epoch == epoch] for spans in actions]
    if epoch is None or not any(wanted):
        return None
    begin = min(span.start for spans in wanted for span in spans)
    end = max(span.start + span.duration for spans in wanted for span in spans)
    slices = tuple(_slices(spans, begin) for spans in wanted)
    # A span of the epoch that extends beyond the window counts as far as it lies inside.
    others = [
        [
            (span.name, (max(span.start - begin, 0.0), min(span.start + span.duration - begin, end - begin)))
            for span in spans
            if span.epoch == epoch and action_of(span.name) is None
        ]
        for spans in kept
    ]
    transits = _transits(slices)
    ranks = tuple(
        _shares(mine, [(name, part) for name, part in rest if part[1] > part[0]], transit, end - begin)
        for mine, rest, transit in zip(slices, others, transits, strict=True)
    )
    return MeasuredPipeline(epoch, end - begin, slices, ranks)


def predict(
    programs: Sequence[Program] | None,
    spans_by_rank: Sequence[Sequence[Span]],
    *,
    epoch: int | None = None,
    transfer: Seconds | None = None,
) -> Simulation | None:
    """Predict how long the programs take on imaginary devices, from the measured seconds of the actions.

    An F or a B takes the mean of its stage's ranks over the recorded epochs after the first. An action that
    was never recorded takes the mean of its stage's others.

    Args:
        programs: One program per stage; if None, what the ranks did in the epoch.
        spans_by_rank: One list per rank, with one common zero.
        epoch: The epoch from which the programs are taken; by default as in :func:`measure`.
        transfer: Returns the seconds of a SEND on its link; 0 if None.

    Returns:
        The simulation, with its ``bubble``, ``imbalance`` and ``seconds``; None if no action was recorded.

    Raises:
        ScheduleError: If the programs cannot end, for example because the spans lack a part of the epoch.
    """
    measured = measure(spans_by_rank, epoch)
    if measured is None:
        return None
    programs = _programs(measured) if programs is None else programs
    actions = [
        [(action, span) for span in training(spans) if (action := action_of(span.name)) is not None]
        for spans in spans_by_rank
    ]
    # Means over all recorded epochs, since a single one has the noise of the machine. Ranks without actions
    # are left out: they have no common epoch with the others.
    epochs = {measured.epoch, *common_epochs([[span for _, span in pairs] for pairs in actions if pairs])}
    seen: defaultdict[_Key, list[float]] = defaultdict(list)
    for action, span in (pair for pairs in actions for pair in pairs):
        if action.kind.computes and span.epoch in epochs:
            # Stored under stage, kind, chunk and piece, and under
            # stage and kind alone, for actions never seen.
            for key in _keys(action):
                seen[key].append(span.duration)
    means = {key: fmean(durations) for key, durations in seen.items()}

    def compute(action: Action) -> float:
        return next((means[key] for key in _keys(action) if key in means), 0.0)

    return simulate(programs, compute, transfer=transfer)


def pipeline_summary(
    spans_by_rank: Sequence[Sequence[Span]],
    programs: Sequence[Program] | None = None,
    *,
    epoch: int | None = None,
    transfer: Seconds | None = None,
) -> dict[str, float | None] | None:
    """Return the entry of a pipeline in ``summary.json``.

    Args:
        spans_by_rank: One list per rank, with one common zero.
        programs: One program per stage; by default what the ranks did in the epoch.
        epoch: The epoch to measure; by default as in :func:`measure`.
        transfer: Returns the seconds of a SEND on its link; 0 if None.

    Returns:
        ``bubble``, ``predicted_bubble``, ``imbalance``, ``waiting`` and ``computing``; None if there is no
        pipeline. ``predicted_bubble`` is of the same order, with each action at its mean time and each
        message at ``transfer``; it is None if the spans lack a part of the epoch.
    """
    measured = measure(spans_by_rank, epoch)
    if measured is None:
        return None
    try:
        run = predict(programs, spans_by_rank, epoch=measured.epoch, transfer=transfer)
    except ScheduleError:
        run = None
    whole = measured.whole
    return {
        "bubble": measured.bubble,
        "predicted_bubble": None if run is None else run.bubble,
        "imbalance": measured.imbalance,
        "waiting": whole.waiting,
        "computing": whole.computing,
    }


def _usual_epoch(actions: Sequence[Sequence[Span]]) -> int | None:
    counts = Counter((rank, span.epoch, span.name) for rank, spans in enumerate(actions) for span in spans)
    # A probe runs the stages twice in its epoch, so it lasts twice as long and is not usual.
    twice = {epoch for (_, epoch, _), count in counts.items() if count > 1}
    once = [[span for span in spans if span.epoch not in twice] for spans in actions if spans]
    # If every epoch is a probe, the usual one is a probe.
    found = median_epoch(once) if all(once) else None
    return median_epoch([spans for spans in actions if spans]) if found is None else found


def _slices(spans: Iterable[Span], zero: float) -> tuple[Slice, ...]:
    """Return a rank's actions in order; one of zero length comes before the one that begins at its end."""
    found = [
        Slice(action, span.start - zero, span.start + span.duration - zero)
        for span in spans
        if (action := action_of(span.name)) is not None
    ]
    return tuple(sorted(found, key=lambda one: (one.begin, one.end)))


def _shares(
    slices: Sequence[Slice], rest: Sequence[tuple[str, Interval]], transit: float, seconds: float
) -> Shares:
    begins = [one.begin for one in slices]

    def around(part: Interval) -> bool:
        """Return whether an action lies inside: a phase around actions does not run beside them."""
        # The first action that does not begin before the part; the part itself stands for no such action.
        at = bisect_left(begins, part[0])
        inner = (slices[at].begin, slices[at].end) if at < len(slices) else part
        return inner != part and inner[0] < part[1] and inner[1] <= part[1]

    def within(found: Iterable[Slice]) -> list[Interval]:
        return [(one.begin, one.end) for one in found]

    computing = within(one for one in slices if one.action.kind.computes)
    waiting = within(one for one in slices if one.action.kind.receives)
    sending = within(one for one in slices if one.action.kind.sends)
    actions = within(slices)
    beside = [part for _, part in rest if not around(part)]
    moving = [part for name, part in rest if name in MOVE and not around(part)]
    # |A and B| = |A| + |B| - |A or B|: exchanges within F and B.
    # Outside of actions nothing hides them either.
    exchange = _length(moving) + _length(computing) - _length(computing + moving)
    exposed = exchange + _beyond(moving, actions) + _length(sending) + transit
    parts = (_length(computing), _length(waiting), _length(sending), _beyond(beside, actions), exposed)
    return Shares(*(part / seconds if seconds else 0.0 for part in parts))


def _transits(slices: Sequence[Sequence[Slice]]) -> list[float]:
    """Return the seconds of each rank's RECVs after their SENDs began; a stage's ranks are parts in order."""
    # Ranks are in the order of stages and parts, so the n-th rank of a stage has part n, and its messages go
    # to the n-th rank of other stages.
    parts, counts = [], defaultdict[int, int](int)
    for mine in slices:
        stage = mine[0].action.stage if mine else -1
        parts.append(counts[stage])
        counts[stage] += 1
    sent = {
        (one.action, part): one.begin
        for mine, part in zip(slices, parts, strict=True)
        for one in mine
        if one.action.kind.sends
    }
    return [
        sum(
            # A RECV before its SEND has begun waits for the sender's computing, not for the link:
            #    sender     |---- F ----|SEND|
            #    receiver   |------- RECV -----|
            #                           |------|    counted
            # Without a recorded SEND the end stands for its begin, so nothing counts.
            max(0.0, one.end - max(one.begin, sent.get((one.action.counterpart, part), one.end)))
            for one in mine
            if one.action.kind.receives
        )
        for mine, part in zip(slices, parts, strict=True)
    ]


def _programs(measured: MeasuredPipeline) -> Programs:
    """Return what each stage did: the actions of its rank with the most of them."""
    longest: dict[int, Program] = {}
    for stage, slices in zip(measured.stages, measured.slices, strict=True):
        # Spans of an epoch are limited in number, so a rank may lack some of its actions.
        if stage is not None and len(slices) > len(longest.get(stage, ())):
            longest[stage] = tuple(one.action for one in slices)
    return tuple(longest.get(stage, ()) for stage in range(max(longest) + 1))


def _keys(action: Action) -> tuple[_Key, _Key]:
    """Return the keys under which an action's seconds are stored, the most specific first."""
    stage, kind = action.stage, action.kind
    return (stage, kind, action.chunk), (stage, kind)


def _length(parts: Sequence[Interval]) -> float:
    """Return the seconds that intervals cover, each moment counted once."""
    # Sweep in order of begins; `until` is the end of all that was counted.
    total, until = 0.0, float("-inf")
    for begin, end in sorted(parts):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _beyond(parts: Sequence[Interval], known: Sequence[Interval]) -> float:
    """Return the seconds that intervals cover and the known ones do not."""
    return _length([*parts, *known]) - _length(known)
