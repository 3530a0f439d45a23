"""Lane chart: one epoch of a pipeline with one row per rank, and below it the predicted programs.

Where it sits: ``page.over_time`` and ``page.plan_page`` show it; it draws what ``records.pipeline`` found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from markupsafe import Markup

from kagome.records.pipeline import MeasuredPipeline
from kagome.records.units import seconds_text
from kagome.report.charts.colours import ink
from kagome.report.charts.timeline import Box, Row, timeline
from kagome.schedule.simulator import SimulatedSpan as Slice, Simulation

MOST_ROWS = 32
MOST_SLICES = 4000
PIXELS = 896
"""Width of the rows where the chart is narrowest (``.lanes`` in ``style.css``, without the labels)."""
DIGIT = 6.5
"""Width in pixels of a digit of a chunk's number."""
LEAST = 0.2
"""Slices narrower than this, in pixels, are not drawn unless they compute."""


def lanes_svg(measured: MeasuredPipeline, predicted: Simulation | None = None) -> Markup:
    """Draw a pipeline's epoch over time: measured above, predicted below, to one scale.

    If there are more than :data:`MOST_ROWS` ranks or stages, the first are drawn.

    Args:
        measured: The measured epoch.
        predicted: The simulation of the same programs.

    Returns:
        A legend and an inline SVG in a box that scrolls sideways in a narrow window.
    """
    groups = [("measured", "rank", measured.slices[:MOST_ROWS])]
    if predicted is not None:
        groups.append(("predicted", "stage", predicted.spans[:MOST_ROWS]))
    length = max(measured.seconds, 0.0 if predicted is None else predicted.seconds)
    what = f"Epoch {measured.epoch}, actions of each rank over time, measured and predicted"
    return _chart(groups, length, what)


def predicted_svg(predicted: Simulation) -> Markup:
    """Draw an epoch of a pipeline that has not been run yet.

    If there are more than :data:`MOST_ROWS` stages, the first are drawn.

    Args:
        predicted: The simulation of its programs.

    Returns:
        A legend and an inline SVG, as :func:`lanes_svg` returns.
    """
    groups = [("predicted", "stage", predicted.spans[:MOST_ROWS])]
    return _chart(groups, predicted.seconds, "Actions of each stage over time, as predicted")


def _chart(groups: Sequence[tuple[str, str, Sequence[Sequence[Slice]]]], seconds: float, what: str) -> Markup:
    """Draw groups of rows to one scale; each group has a title and a name for its rows."""
    # A chart of actions that took no measurable time must not divide by 0.
    length = seconds or 1e-9
    count = sum(len(rows) for _, _, rows in groups)
    # The page stays small: slices are shared by the rows, and rows of half the height have no numbers.
    most, numbered = max(MOST_SLICES // count, 50), count <= 32
    rows = [
        Row(
            f"{label} {number}",
            list(_boxes(_joined(slices, most), length, numbered=numbered)),
            "" if number else title,
        )
        for title, label, lanes in groups
        for number, slices in enumerate(lanes)
    ]
    inks = [(ink(name), name) for name in ("forward", "backward", "sending")]
    inks.append(("ink-dim", "waiting for a message"))
    return timeline(rows, length, inks, what, wide=True)


def _boxes(runs: Iterable[Sequence[Slice]], length: float, *, numbered: bool) -> Iterator[Box]:
    """Yield the boxes of one rank, with their chunks' numbers if there is space."""
    for run in runs:
        first, last = run[0], run[-1]
        kind, seconds = first.action.kind, last.end - first.begin
        pixels = seconds / length * PIXELS
        if pixels < LEAST and not kind.computes:
            continue
        phase = "sending" if kind.sends else "forward" if kind.forward else "backward"
        name = str(first.action) if len(run) == 1 else f"{first.action} to {last.action}"
        text = f"{first.action.chunk}"
        shown = numbered and kind.computes and len(run) == 1 and pixels > DIGIT * len(text) + 2
        yield Box(
            "wait" if kind.receives else ink(phase),
            first.begin,
            seconds,
            f"{name}: {seconds_text(seconds)}",
            text if shown else "",
        )


def _joined(slices: Sequence[Slice], most: int) -> list[list[Slice]]:
    """Group slices that are drawn as one: single slices, or if there are too many, neighbours of one kind."""
    runs = [[one] for one in slices]
    # Too many slices: neighbours of one kind become one box, as long as the box is narrower than `room`, the
    # width of a slice if all were alike, and gaps stay below a tenth of it. Then the longest are kept.
    if len(runs) <= most:
        return runs
    room = (slices[-1].end - slices[0].begin) / most
    kept: list[list[Slice]] = []
    for one in slices:
        last = kept[-1] if kept else None
        near = last is not None and one.end - last[0].begin <= room and one.begin - last[-1].end <= room / 10
        if last is not None and near and last[0].action.kind is one.action.kind:
            last.append(one)
        else:
            kept.append([one])
    # Begin minus end is the negative length, so the longest come first.
    longest = sorted(kept, key=lambda run: run[0].begin - run[-1].end)[:most]
    return sorted(longest, key=lambda run: run[0].begin)
