"""Lane chart: one epoch of a pipeline with one row per rank, and below it the predicted programs.

Where it sits: ``over_time`` and ``plan_page`` show it; it draws what ``records.pipeline`` found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from kagome.records.pipeline import MeasuredPipeline
from kagome.records.units import seconds_text
from kagome.report.charts.style import ink
from kagome.report.charts.svg import legend
from kagome.report.chrome_trace import axis
from kagome.schedule.simulator import SimulatedSpan as Slice, Simulation

MOST_ROWS = 32
MOST_SLICES = 4000
PIXELS = 896
"""Width of the rows where the chart is narrowest (``.lanes`` in ``style``, without the labels)."""
DIGIT = 6.5
"""Width in pixels of a digit of a chunk's number."""
LEAST = 0.2
"""Slices narrower than this, in pixels, are not drawn unless they compute."""


def lanes_svg(measured: MeasuredPipeline, predicted: Simulation | None = None) -> str:
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


def predicted_svg(predicted: Simulation) -> str:
    """Draw an epoch of a pipeline that has not been run yet.

    If there are more than :data:`MOST_ROWS` stages, the first are drawn.

    Args:
        predicted: The simulation of its programs.

    Returns:
        A legend and an inline SVG, as :func:`lanes_svg` returns.
    """
    groups = [("predicted", "stage", predicted.spans[:MOST_ROWS])]
    return _chart(groups, predicted.seconds, "Actions of each stage over time, as predicted")


def _chart(groups: Sequence[tuple[str, str, Sequence[Sequence[Slice]]]], seconds: float, what: str) -> str:
    """Draw groups of rows to one scale; each group has a title and a name for its rows."""
    length = seconds or 1e-9
    count = sum(len(rows) for _, _, rows in groups)
    height, step = (18, 22) if count <= 32 else (9, 11)
    drawn: list[str] = []
    top = 0
    for title, label, rows in groups:
        drawn.append(f'<text class="part" y="{top + 12}">{title}</text>')
        top += 20
        for number, slices in enumerate(rows):
            drawn.append(
                f'<text x="-8" y="{top + height / 2 + 4:g}" text-anchor="end">{label} {number}</text>'
            )
            drawn.append(f'<rect class="track" y="{top}" width="100%" height="{height}"/>')
            runs = _joined(slices, max(MOST_SLICES // count, 50))
            drawn += _row(runs, f"{label} {number}", top, height, length)
            top += step
        top += 8
    names = ("forward", "backward", "sending")
    keys = legend([*((ink(name), name) for name in names), ("ink-dim", "waiting for a message")])
    return (
        f'{keys}<div class="scroll"><svg class="gantt lanes" height="{top + 20}" role="img" '
        f'aria-label="{what}">{"".join(axis(length, top) + drawn)}</svg></div>'
    )


def _row(
    runs: Iterable[Sequence[Slice]], who: str, top: float, height: float, length: float
) -> Iterator[str]:
    """Yield the rectangles of one rank, with their chunks' numbers if there is space."""
    for run in runs:
        first, last = run[0], run[-1]
        kind = first.action.kind
        x, width = 100 * first.begin / length, 100 * (last.end - first.begin) / length
        pixels = width * PIXELS / 100
        if pixels < LEAST and not kind.computes:
            continue
        name = str(first.action) if len(run) == 1 else f"{first.action} to {last.action}"
        tip = escape(f"{who}, {name}: {seconds_text(last.end - first.begin)}")
        colour = "wait" if kind.receives else ink("sending" if kind.sends else _phase(first))
        yield (
            f'<rect class="{colour}" x="{x:.2f}%" y="{top}" width="{width:.2f}%" height="{height}">'
            f"<title>{tip}</title></rect>"
        )
        piece = first.action.piece
        text = f"{first.action.chunk}" + ("" if piece is None else f".{piece}")
        if kind.computes and len(run) == 1 and height > 10 and pixels > DIGIT * len(text) + 2:
            yield (
                f'<text class="chunk" x="{x + width / 2:.2f}%" y="{top + height / 2 + 4:g}" '
                f'text-anchor="middle">{text}</text>'
            )


def _phase(one: Slice) -> str:
    return "forward" if one.action.kind.forward else "backward"


def _joined(slices: Sequence[Slice], most: int) -> list[list[Slice]]:
    """Group slices that are drawn as one: single slices, or if there are too many, neighbours of one kind."""
    runs = [[one] for one in slices]
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
    longest = sorted(kept, key=lambda run: run[0].begin - run[-1].end)[:most]
    return sorted(longest, key=lambda run: run[0].begin)
