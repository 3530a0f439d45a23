"""Bar charts: stacked horizontal bars to one scale.

Where it sits: ``report.page`` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kagome.report.rendering import chart


@dataclass(frozen=True)
class Bar:
    """A row of stacked segments."""

    label: str
    """The text left of the bar."""
    segments: Sequence[tuple[str, str, float]]
    """Colour class, name and value of each segment."""
    text: str
    """The text right of the bar."""


def bars(rows: Sequence[Bar], value_text: Callable[[float], str]) -> Markup:
    """Return one bar per row; each segment shows its name on hovering.

    Args:
        rows: The rows.
        value_text: Formats a segment's value.
    """
    # One scale for all rows: the longest bar fills the width. `or 1.0` avoids a division by 0.
    whole = max((sum(value for _, _, value in row.segments) for row in rows), default=0.0) or 1.0
    return chart("bars", rows=rows, whole=whole, value_text=value_text)
