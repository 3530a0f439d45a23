"""Plan page: plans side by side, and what the ranks would do in an epoch under the best ones.

Where it sits: ``kagome plan`` and ``plan="auto"`` write it; it draws what ``planner.candidates`` ranked.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from kagome.records.plan import HEAD, PlanRow, Ranked, cells, title_of
from kagome.records.units import seconds_text
from kagome.report.charts.style import ink
from kagome.report.charts.svg import Bar, bars, legend
from kagome.report.page.html import document, section, table
from kagome.report.page.lanes import MOST_ROWS, predicted_svg
from kagome.storage.atomic import write_text

DRAWN = 3
"""Number of plans of which an epoch is drawn."""
MOST_BARS = 16
"""Number of plans that are shown side by side as bars."""


def write_plans(path: str | Path, plans: Ranked) -> Path:
    """Write the page of ranked plans.

    Args:
        path: The path of the file; missing folders are created.
        plans: The ranked plans, the best first.

    Returns:
        The path.
    """
    return write_text(path, plans_html(plans))


def plans_html(plans: Ranked) -> str:
    """Return the page of ranked plans as HTML."""
    numbered = list(enumerate(plans.fitting, start=1))
    return document(
        f"Plans for {plans.facts['ranks']} ranks",
        title_of(plans),
        [_beside(plans), *(_epoch(number, one) for number, one in numbered[:DRAWN]), _reasons(plans)],
        "Kagome, predicted: nothing of this was run",
    )


def _beside(plans: Ranked) -> str:
    best = plans.fitting[0]
    rows = [
        Bar(
            one.name,
            [
                (ink("compute"), "computing", one.compute_seconds),
                (ink("waiting"), "waiting", one.exposed_seconds),
            ],
            seconds_text(one.epoch_seconds),
        )
        for one in plans.fitting[:MOST_BARS]
    ]
    keys = legend([(ink("compute"), "the slowest rank computes"), (ink("waiting"), "it waits")])
    numbers = table(HEAD, [cells(one) for one in (*plans.fitting, *(one for one, _ in plans.refused))])
    lead = f"An epoch of each plan that fits, the best first. {best.name}: {best.reason}."
    return section("Plans", keys + bars(rows, seconds_text) + numbers, lead)


def _epoch(number: int, one: PlanRow) -> str:
    title = f"{number}. {one.name}"
    if one.run is not None:
        rest = one.epoch_seconds - one.run.seconds
        more = (
            f" {seconds_text(rest)} for neighbours of other parts and sums come on top." if rest > 0 else ""
        )
        return section(
            title,
            predicted_svg(one.run),
            f"What each stage does in an epoch; {one.run.bubble:.0%} of it goes by without computing.{more}",
        )
    rows = [
        Bar(
            f"rank {rank}",
            [
                (ink("compute"), "computing", busy),
                (ink("exchange"), "messages", one.exposed_seconds),
                (ink("waiting"), "waiting for the slowest", one.compute_seconds - busy),
            ],
            seconds_text(busy),
        )
        for rank, busy in enumerate(one.busy[:MOST_ROWS])
    ]
    keys = legend(
        [
            (ink("compute"), "computing"),
            (ink("exchange"), "messages"),
            (ink("waiting"), "waiting for the slowest"),
        ]
    )
    alike = "Each rank's epoch." if len(one.busy) > 1 else "All ranks' epochs are alike."
    return section(title, keys + bars(rows, seconds_text), alike)


def _reasons(plans: Ranked) -> str:
    told = [f"{one.name}: {one.reason}." for one in plans.fitting]
    told += [str(note) for note in plans.facts.get("notes", ())]
    told += [f"{one.name}: {why}." for one, why in plans.refused]
    items = "".join(f"<li>{escape(text)}</li>" for text in told)
    return section("Why", f"<ul>{items}</ul>")
