"""Pipeline section: what the ranks of a pipeline did in one epoch over time, and what was predicted.

Where it sits: shown on the page of a run (``sections``) and on that of a DAG's stages (``stages_page``).
"""

from __future__ import annotations

from collections.abc import Sequence

from kagome.errors import ScheduleError
from kagome.records.pipeline import Shares, measure, predict
from kagome.records.spans import Span
from kagome.records.units import seconds_text, share_text
from kagome.report.page.html import section, table
from kagome.report.page.lanes import MOST_ROWS, lanes_svg
from kagome.schedule.actions import Program


def over_time(
    spans: Sequence[Sequence[Span]],
    programs: Sequence[Program] | None = None,
    *,
    epoch: str = "epoch",
    chunks: str = "chunks",
) -> str:
    """Return a section with a chart of actions, how the ranks spent the time, and the prediction.

    Args:
        spans: One list per rank, with one common zero.
        programs: One program per stage; by default what the ranks did in the epoch.
        epoch: The word for what is shown.
        chunks: The word for what the numbers in the chart count.

    Returns:
        A section, or ``""`` if no action was recorded.
    """
    found = measure(spans)
    if found is None:
        return ""
    try:
        expected = predict(programs, spans, epoch=found.epoch)
    except ScheduleError:
        expected = None  # the trace keeps a limited number of spans per epoch
    lead = (
        f"{epoch.capitalize()} {found.epoch}, of median length, from the first action's begin to the last "
        f"one's end; the numbers are {chunks}. "
    )
    if expected is None:
        lead += f"The trace lacks a part of the {epoch}, so nothing can be predicted from it."
    else:
        lead += (
            "Predicted is the same order on imaginary devices, where each action takes its mean time and a "
            "message none: what is measured beyond it, neither order nor balance explains."
        )
    if len(spans) > MOST_ROWS:
        lead += f" The first {MOST_ROWS} of {len(spans)} ranks are drawn."
    rows = [["time", seconds_text(found.seconds)], ["bubble", share_text(found.bubble)]]
    rows.append(["imbalance", share_text(found.imbalance)])
    if expected is not None:
        values = seconds_text(expected.seconds), share_text(expected.bubble), share_text(expected.imbalance)
        rows = [[*row, value] for row, value in zip(rows, values, strict=True)]
    figures = table(["", "measured", "predicted"][: len(rows[0])], rows)
    ranks = [("all", "-", found.whole)]
    for rank, (stage, shares) in enumerate(zip(found.stages, found.ranks, strict=True)):
        ranks.append((f"rank {rank}", "-" if stage is None else str(stage), shares))
    numbers = table(
        ["", "stage", "computing", "waiting", "sending", "other", "idle", "exposed communication"],
        [[name, stage, *_shares(shares)] for name, stage, shares in ranks],
    )
    return section("Pipeline", lanes_svg(found, expected) + figures + numbers, lead)


def _shares(shares: Shares) -> list[str]:
    names = ("computing", "waiting", "sending", "other", "idle", "exposed")
    return [share_text(getattr(shares, name)) for name in names]
