"""Line charts: curves over the epochs, and round numbers for the axes of every chart.

Where it sits: ``report.page`` shows them; ``timeline`` takes its times from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from kagome.report.rendering import chart

MOST_POINTS = 400


@dataclass(frozen=True)
class Series:
    """One curve of a line chart."""

    name: str
    """The name in the legend."""
    ink: str
    """The colour class (``colours``)."""
    points: Sequence[tuple[float, float]]
    """Pairs of x and y, sorted by x, all finite."""


def curves(
    title: str,
    series: Sequence[Series],
    value_text: Callable[[float], str],
    *,
    mark: tuple[float, str] | None = None,
    from_zero: bool = False,
) -> Markup:
    """Return a line chart that stretches to its column, with text of fixed size.

    If all values are above 0 and span more than a factor of 50, the axis is logarithmic and labelled so.

    Args:
        title: The title of the chart.
        series: The curves; those without points are left out.
        value_text: Formats a value on the axis.
        mark: An x to mark, and its text.
        from_zero: Whether the axis starts at 0.

    Returns:
        HTML; nothing if there is no point.
    """
    series = [line for line in series if line.points]
    if not series:
        return Markup()
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    # A loss that falls by orders of magnitude is a flat line on a linear axis.
    log = not from_zero and min(ys) > 0 and max(ys) > 50 * min(ys)
    scale = math.log10 if log else float
    ticks = log_ticks(min(ys), max(ys)) if log else nice_ticks(0.0 if from_zero else min(ys), max(ys))
    # Ticks are round numbers at or beyond the values, so the axis ends at ticks.
    low, high = scale(min(ticks[0], *ys)), scale(max(ticks[-1], *ys))
    left, right = min(xs), max(xs)

    # Coordinates in per cent of the drawing, which the page stretches to its width; SVG's y grows downwards.
    def x_at(x: float) -> float:
        return 100 * (x - left) / (right - left) if right > left else 50.0

    def y_at(y: float) -> float:
        return 100 * (high - scale(y)) / (high - low) if high > low else 50.0

    lines = []
    for line in series:
        points = [(x_at(x), y_at(y)) for x, y in thinned(line.points)]
        if len(points) == 1:
            # A single point draws no line: a dash in its place is visible.
            points = [(points[0][0] - 1, points[0][1]), (points[0][0] + 1, points[0][1])]
        lines.append((line.ink, points))
    # Epochs are whole numbers.
    x_ticks = [t for t in nice_ticks(left, right, most=6) if left <= t <= right and t == int(t)]
    return chart(
        "curves",
        title=title,
        log=log,
        inks=[(line.ink, f"{line.name}, last {value_text(line.points[-1][1])}") for line in series],
        lines=lines,
        x_ticks=[(x_at(t), int(t)) for t in x_ticks],
        y_ticks=[(y_at(t), short(value_text(t))) for t in ticks],
        mark=None if mark is None or not left <= mark[0] <= right else (x_at(mark[0]), mark[1]),
    )


def short(text: str) -> str:
    """Return a tick's text without superfluous zeros: ``50.0 ms`` becomes ``50 ms``."""
    number, _, unit = text.partition(" ")
    if "." in number and number[-1].isdigit() and "e" not in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number} {unit}".rstrip()


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most :data:`MOST_POINTS` points that keep every peak: lowest and highest of each stretch."""
    if len(points) <= MOST_POINTS:
        return list(points)
    # Two points of each of 200 stretches. Taking every n-th point would
    # lose peaks, which are what one looks for.
    edges = [round(i * len(points) / (MOST_POINTS // 2)) for i in range(MOST_POINTS // 2 + 1)]
    kept: list[tuple[float, float]] = []
    for start, end in pairwise(edges):
        stretch = points[start:end]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from at or below ``low`` to at or above ``high``.

    Args:
        low: The least value.
        high: The largest value.
        most: The approximate number of steps.

    Returns:
        At least two numbers.
    """
    if not high > low:
        # All values are equal: a range around them.
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    # The smallest round step that needs no more than `most` steps; 0.999 forgives rounding of the power.
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Multiples of the step, rounded: 3 * 0.1 is 0.30000000000000004.
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten around the values, at most about six."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, math.ceil((last - first) / 6))
    return [10.0**power for power in range(first, last + step, step)]
