"""Plans: what each cut is predicted to cost, as a table that a person understands at first sight.

Where it sits: ``kagome plan`` prints it, ``report.page.plan_page`` shows it; they see plain records.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from kagome.records.units import bytes_text, seconds_text
from kagome.schedule.simulator import Simulation

HEAD = ("plan", "exact", "an epoch", "of it waiting", "crosses", "memory a rank")
"""Columns of the table."""
WIDE = 140
"""Columns of what goes into a file or a pipe."""
REASONS = 5
"""Of so many plans, the best ones, why they stand there is printed; of all it is on the page."""


class PlanRow(Protocol):
    """One plan."""

    @property
    def name(self) -> str:
        """Its settings."""

    @property
    def exact(self) -> bool:
        """Whether it gives what one rank gives."""

    @property
    def epoch_seconds(self) -> float:
        """Predicted."""

    @property
    def exposed_seconds(self) -> float:
        """Waited for messages."""

    @property
    def total_bytes(self) -> int:
        """That cross, of all ranks."""

    @property
    def memory_bytes(self) -> float:
        """Of the fullest rank."""

    @property
    def uncertain(self) -> float:
        """By which share bytes may be off."""

    @property
    def seconds_off(self) -> float:
        """By which share seconds may be off."""

    @property
    def reason(self) -> str:
        """Why it stands where it stands."""

    @property
    def compute_seconds(self) -> float:
        """Of the slowest rank."""

    @property
    def busy(self) -> Sequence[float]:
        """Seconds that each rank computes."""

    @property
    def run(self) -> Simulation | None:
        """What a pipeline's stages do over time."""


class Ranked(Protocol):
    """Plans, the best first, and those that do not fit."""

    @property
    def fitting(self) -> Sequence[PlanRow]:
        """Those that fit."""

    @property
    def refused(self) -> Sequence[tuple[PlanRow, str]]:
        """The others, with why."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What they were predicted from."""


def print_plans(plans: Ranked, console: Console | None = None) -> None:
    """Print the table, and a sentence about each of the best."""
    console = console or Console(width=None if sys.stdout.isatty() else WIDE)
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


def title_of(plans: Ranked) -> str:
    """For what they are."""
    facts = plans.facts
    graph = f"{facts['vertices']:,} vertices, {facts['edges']:,} edges"
    return f"{facts['ranks']} ranks of {facts['cluster']}; {graph}"


def cells(one: PlanRow) -> tuple[str, ...]:
    """A plan's row in the table, a cell for each of :data:`HEAD`."""
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
