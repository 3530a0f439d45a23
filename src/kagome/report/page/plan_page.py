"""Plan page: plans side by side, and what the ranks would do in an epoch under the best ones.

Where it sits: ``kagome plan`` and ``plan="auto"`` write it; it shows what ``planner.candidates`` ranked with
the template ``plans.html``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from kagome.planner.candidates import Candidate, Plans
from kagome.records.units import seconds_text
from kagome.report.charts.bars import Bar, bars
from kagome.report.charts.colours import ink
from kagome.report.charts.lanes import MOST_ROWS, predicted_svg
from kagome.report.plan_table import HEAD, cells, title_of
from kagome.report.rendering import page
from kagome.storage.atomic import write_text

DRAWN = 3
"""Number of plans of which an epoch is drawn."""
MOST_BARS = 16
"""Number of plans that are shown side by side as bars."""
_BUSY, _MESSAGES, _WAITING = (
    (ink("compute"), "computing"),
    (ink("exchange"), "messages"),
    (ink("waiting"), "waiting for the slowest"),
)
"""Colour class and name of the parts of a rank's epoch."""


def write_plans(path: str | Path, plans: Plans) -> Path:
    """Write the page of ranked plans.

    Args:
        path: The path of the file; missing folders are created.
        plans: The ranked plans, the best first.

    Returns:
        The path.
    """
    return write_text(path, plans_html(plans))


def plans_html(plans: Plans) -> str:
    """Return the page of ranked plans as HTML."""
    fitting, refused = plans.fitting, plans.refused
    return page(
        "plans.html",
        title=f"Plans for {plans.facts['ranks']} ranks",
        facts=title_of(plans),
        best=fitting[0],
        plans=_beside(fitting[:MOST_BARS]),
        head=HEAD,
        rows=[cells(one) for one in (*fitting, *(one for one, _ in refused))],
        epochs=[(one, _epoch(one)) for one in fitting[:DRAWN]],
        parts=(_BUSY, _MESSAGES, _WAITING),
        reasons=[
            *(f"{one.name}: {one.reason}." for one in fitting),
            *plans.facts.get("notes", ()),
            *(f"{one.name}: {why}." for one, why in refused),
        ],
        footer="Kagome, predicted: nothing of this was run",
    )


def _beside(plans: Sequence[Candidate]) -> Markup:
    """Draw an epoch of each plan, of its slowest rank."""
    rows = [
        Bar(
            one.name,
            [(*_BUSY, one.compute_seconds), (ink("waiting"), "waiting", one.exposed_seconds)],
            seconds_text(one.epoch_seconds),
        )
        for one in plans
    ]
    return bars(rows, seconds_text)


def _epoch(one: Candidate) -> Markup:
    """Draw an epoch of a plan: its stages over time, or how long each rank computes."""
    # A pipeline of the best few plans has a simulation; other plans have seconds a rank.
    if one.run is not None:
        return predicted_svg(one.run)
    rows = [
        Bar(
            f"rank {rank}",
            # A rank that computes less waits for the slowest, so all rows have the epoch's length.
            [(*_BUSY, busy), (*_MESSAGES, one.exposed_seconds), (*_WAITING, one.compute_seconds - busy)],
            seconds_text(busy),
        )
        for rank, busy in enumerate(one.busy[:MOST_ROWS])
    ]
    return bars(rows, seconds_text)
