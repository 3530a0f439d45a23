"""Plan table: the predicted cost of each plan, in a form that is understood at first sight.

Where it sits: ``kagome plan`` prints it, ``report.page.plan_page`` shows it, from what ``planner.candidates``
ranked.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from kagome.planner.candidates import Candidate, Plans
from kagome.records.units import bytes_text, seconds_text

HEAD = ("plan", "exact", "an epoch", "of it waiting", "crosses", "memory a rank")
"""Column heads of the table."""
WIDE = 140
"""Text width of the table in a file or a pipe."""
REASONS = 5
"""Number of best plans whose reasons are printed; the page has the reasons of all."""


def print_plans(plans: Plans) -> None:
    """Print the table, and a sentence about each of the best plans."""
    # Without a terminal rich assumes 80 columns, which would fold the table in files and pipes.
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    table = Table(title=title_of(plans), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in HEAD:
        left = name in ("plan", "exact")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "plan", overflow="fold")
    for one in plans.fitting:
        table.add_row(*cells(one))
    for one, _ in plans.refused:
        table.add_row(*cells(one), style="dim")
    console.print(table)
    for number, one in enumerate(plans.fitting[:REASONS], start=1):
        console.print(f"{number}. {one.name}: {one.reason}.", soft_wrap=True)
    for note in plans.facts.get("notes", ()):
        console.print(f"-  {note}", soft_wrap=True)
    for one, why in plans.refused:
        console.print(f"-  {one.name}: {why}.", soft_wrap=True)


def title_of(plans: Plans) -> str:
    """Return what the plans are for: ranks, cluster and graph."""
    facts = plans.facts
    graph = f"{facts['vertices']:,} vertices, {facts['edges']:,} edges"
    return f"{facts['ranks']} ranks of {facts['cluster']}; {graph}"


def cells(one: Candidate) -> tuple[str, ...]:
    """Return a plan's row of the table, one cell for each of :data:`HEAD`."""
    # Bytes are exact if the graph was cut, an estimate otherwise.
    about, off = (f" +-{each:.0%}" if each else "" for each in (one.uncertain, one.seconds_off))
    share = one.exposed_seconds / one.epoch_seconds if one.epoch_seconds else 0.0
    return (
        one.name,
        "yes" if one.exact else "no",
        seconds_text(one.epoch_seconds) + off,
        f"{share:.0%}",
        bytes_text(one.total_bytes) + about,
        bytes_text(round(one.memory_bytes)),
    )
