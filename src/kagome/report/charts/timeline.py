"""Timelines: rows of boxes over time, and one epoch of a run as its phases.

Where it sits: ``page.page`` shows an epoch's phases; ``lanes`` draws a pipeline's actions with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from kagome.records.spans import PHASES, Span, median_epoch, phase_of, training
from kagome.records.units import seconds_text
from kagome.report.charts.colours import ink
from kagome.report.charts.line_chart import nice_ticks, short
from kagome.report.rendering import chart

MOST_RECTS = 2000
MOST_RANKS = 64


class Box(NamedTuple):
    """One action of a rank, from one time to another."""

    css: str
    """The colour class."""
    begin: float
    seconds: float
    tip: str
    """The text that is shown on hovering."""
    text: str = ""
    """The text inside the box."""


class Row(NamedTuple):
    """One rank or stage over time; of its boxes, a later one is drawn over an earlier one."""

    label: str
    boxes: Sequence[Box]
    heading: str = ""
    """The title of the group of rows that begins here."""


def timeline(
    rows: Sequence[Row], seconds: float, inks: Sequence[tuple[str, str]], what: str, *, wide: bool = False
) -> Markup:
    """Draw rows to one scale, with a legend above and the times below.

    Args:
        rows: The rows.
        seconds: The length of the timeline.
        inks: Colour class and text of each entry of the legend.
        what: A description for readers who do not see the chart.
        wide: Whether the chart has a least width, and scrolls sideways in a narrower window.
    """
    # Pixels of a row, and from row to row. Many rows are drawn at half the height.
    height, step = (18, 22) if len(rows) <= 32 else (9, 11)
    tops: list[int] = []
    bottom = 0
    for row in rows:
        if row.heading:
            # A heading stands in the space above its first row, with more of it between two groups.
            bottom += 28 if tops else 20
        tops.append(bottom)
        bottom += step
    return chart(
        "timeline",
        rows=list(zip(tops, rows, strict=True)),
        seconds=seconds,
        ticks=[(t, short(seconds_text(t))) for t in nice_ticks(0.0, seconds) if t <= seconds],
        inks=inks,
        what=what,
        height=height,
        bottom=bottom + 8,
        wide=wide,
    )


def representative_epoch(spans_by_rank: Sequence[Sequence[Span]]) -> int | None:
    """Return the epoch of median length among those that every rank kept, without the first if possible."""
    return median_epoch([list(training(spans)) for spans in spans_by_rank])


def gantt_svg(spans_by_rank: Sequence[Sequence[Span]], epoch: int | None = None) -> Markup:
    """Draw one epoch's training as phases, one row per rank; without evaluation and checkpoints.

    If there are more than :data:`MOST_RANKS` ranks, the first are drawn.

    Args:
        spans_by_rank: One list per rank, with one common zero.
        epoch: The epoch to draw; by default :func:`representative_epoch`.

    Returns:
        A legend and an inline SVG that stretches to its column, or nothing if no epoch was kept.
    """
    epoch = representative_epoch(spans_by_rank) if epoch is None else epoch
    ranks = [
        [span for span in training(spans) if span.epoch == epoch] for spans in spans_by_rank[:MOST_RANKS]
    ]
    if epoch is None or not any(ranks):
        return Markup()
    zero = min(span.start for spans in ranks for span in spans)
    length = max(span.start + span.duration for spans in ranks for span in spans) - zero or 1e-9
    # A chart with a hundred thousand rectangles would not open; the longest spans are those one can see.
    most = max(MOST_RECTS // len(ranks), 8)
    rows = []
    for rank, spans in enumerate(ranks):
        longest = sorted(spans, key=lambda span: -span.duration)[:most]
        boxes = []
        # Inner phases are drawn later, and so on top of the phase around them.
        for span in sorted(longest, key=lambda span: (span.start, -span.duration)):
            tip = f"{span.name}: {seconds_text(span.duration)}"
            # An action of a pipeline has the colour of its phase.
            boxes.append(Box(ink(phase_of(span.name)), span.start - zero, span.duration, tip))
        rows.append(Row(f"rank {rank}", boxes))
    seen = {phase_of(span.name) for spans in ranks for span in spans}
    names = [name for name in PHASES if name in seen] + sorted(seen - set(PHASES))
    inks = [(ink(name), name) for name in names]
    return timeline(rows, length, inks, f"Epoch {epoch}, phases of each rank over time")
