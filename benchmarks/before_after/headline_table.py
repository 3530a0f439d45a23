"""The table of ``headline.py``: medians with their spread, ratios of the same turn, goals.

Where it sits: ``headline_rows`` says which lines there are, ``headline`` gives what was run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""What each run found: by job, by turn. A rival that cannot run has ``error`` and no figure."""
UNITS: Mapping[str, float] = {"s": 1.0, "ms": 1e3, "MB": 1e-6}
"""What seconds or bytes are multiplied with."""


@dataclass(frozen=True)
class Goal:
    """At most so much.

    Args:
        most: Of the figure, in its unit, or of the ratio to another job's figure.
        of: The job that the figure is divided by, turn by turn; None if the figure itself is bounded.
    """

    most: float
    of: str | None = None


@dataclass(frozen=True)
class Line:
    """A figure of several jobs, side by side.

    Args:
        what: What is measured.
        figure: Its name in what a job finds.
        unit: A name of ``UNITS``.
        before: The job of the other commit.
        now: The job of this one.
        rivals: Jobs set beside them: heads by job.
        goal: What ``now`` should be.
    """

    what: str
    figure: str
    unit: str
    before: str
    now: str
    rivals: Mapping[str, str]
    goal: Goal | None = None


def missing(jobs: Sequence[str], found: Runs, turns: int) -> list[tuple[int, str]]:
    """The runs that are not there yet, turn after turn, each with all jobs.

    Who goes first alternates: a slow minute of the machine is not always one side's.
    """
    order = [(turn, job) for turn in range(turns) for job in jobs[:: -1 if turn % 2 else 1]]
    return [(turn, job) for turn, job in order if turn not in found.get(job, {})]


def figures(line: Line, job: str, runs: Runs) -> dict[int, float]:
    """A job's figure by turn, in the line's unit; turns that failed are left out."""
    found = {turn: one for turn, one in runs.get(job, {}).items() if line.figure in one}
    return {turn: float(one[line.figure]) * UNITS[line.unit] for turn, one in found.items()}


def ratios(above: Mapping[int, float], below: Mapping[int, float]) -> list[float]:
    """Ratios of the turns that both have."""
    return [above[turn] / below[turn] for turn in sorted(above.keys() & below.keys())]


def spread(values: Sequence[float], digits: int) -> str:
    """The median, the least and the most; a dash where there is nothing."""
    if not values:
        return "-"
    middle, low, high = (
        f"{each:,.{digits}f}" for each in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def told(line: Line, job: str, runs: Runs) -> str:
    """A job's figure with its spread, and the edges that it drops; or why there is none."""
    values = list(figures(line, job, runs).values())
    if not values:
        faults = [str(one["error"]) for one in runs.get(job, {}).values() if "error" in one]
        return faults[0] if faults else "-"
    text = f"{spread(values, 2 if line.unit == 's' else 0)} {line.unit}"
    kept = [one["edges kept"] for one in runs[job].values() if "edges kept" in one]
    return f"{text}, {1 - kept[0]:.0%} of the edges dropped" if kept else text


def verdict(line: Line, runs: Runs) -> str:
    """Whether the goal is reached: by the median, and whether each turn agrees."""
    if line.goal is None:
        return "-"
    values = figures(line, line.now, runs)
    compared = list(values.values())
    if line.goal.of is not None:
        compared = ratios(values, figures(line, line.goal.of, runs))
    if not compared:
        return "not measured"
    holds = [each <= line.goal.most for each in compared]
    reached = statistics.median(compared) <= line.goal.most
    text = "yes" if reached else "**no**"
    return (
        text if all(each == reached for each in holds) else f"{text}; in {sum(holds)} of {len(holds)} turns"
    )


def goal_words(line: Line) -> str:
    """The goal as a cell."""
    if line.goal is None:
        return "-"
    if line.goal.of is None:
        return f"at most {line.goal.most:g} {line.unit}"
    beside = {line.before: "before", **line.rivals}
    return f"at most {line.goal.most:g} of {beside[line.goal.of]}"


def cells(line: Line, runs: Runs) -> list[str]:
    """The cells of a line."""
    now, before = figures(line, line.now, runs), figures(line, line.before, runs)
    beside, over = [], []
    for job, head in line.rivals.items():
        beside.append(f"{head}: {told(line, job, runs)}")
        if each := ratios(now, figures(line, job, runs)):
            over.append(f"{head}: {spread(each, 2)}")
    return [
        line.what,
        str(len(now.keys() & before.keys())),
        told(line, line.before, runs),
        told(line, line.now, runs),
        spread(ratios(now, before), 2),
        "; ".join(beside) or "-",
        "; ".join(over) or "-",
        goal_words(line),
        verdict(line, runs),
    ]


HEAD = ("what", "turns", "before", "now", "now over before", "beside", "now over that", "goal", "reached")


def table(lines: Sequence[Line], runs: Runs) -> str:
    """The lines that have a figure of either side, as Markdown."""
    rows = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for line in lines:
        if figures(line, line.now, runs) or figures(line, line.before, runs):
            rows.append(f"| {' | '.join(cells(line, runs))} |")
    return "\n".join(rows) + "\n"


def same_training(lines: Sequence[Line], runs: Runs) -> str:
    """How far the last losses of both sides are apart: a ratio of times tells nothing of other training."""
    apart = []
    for before, now in dict.fromkeys((line.before, line.now) for line in lines):
        for turn in runs.get(before, {}).keys() & runs.get(now, {}).keys():
            old, new = (runs[job][turn].get("loss") for job in (before, now))
            if old is not None and new is not None:
                apart.append((abs(new - old) / max(abs(old), 1e-12), now))
    if not apart:
        return ""
    most, job = max(apart)
    return f"Last losses of before and now are at most {most:.1e} of the loss apart ({job}).\n"
