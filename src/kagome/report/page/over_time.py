"""Pipeline section: what the ranks of a pipeline did in one epoch over time, and what was predicted.

Where it sits: shown on the page of a run (``page``) and on that of a DAG's stages (``stages_page``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kagome.errors import ScheduleError
from kagome.records.pipeline import Shares, measure, predict
from kagome.records.spans import Span
from kagome.records.units import seconds_text, share_text
from kagome.report.charts.lanes import MOST_ROWS, lanes_svg
from kagome.schedule.actions import Program


def over_time(
    spans: Sequence[Sequence[Span]], programs: Sequence[Program] | None = None
) -> Mapping[str, Any] | None:
    """Return a chart of actions, how the ranks spent the time, and the prediction.

    Args:
        spans: One list per rank, with one common zero.
        programs: One program per stage; by default what the ranks did in the epoch.

    Returns:
        The values that the macro ``over_time`` in ``parts.html`` shows, or None if no action was recorded.
    """
    found = measure(spans)
    if found is None:
        return None
    try:
        # Both are of one epoch, so that the charts show the same actions.
        expected = predict(programs, spans, epoch=found.epoch)
    except ScheduleError:
        expected = None  # the trace keeps a limited number of spans per epoch
    columns = [
        (seconds_text(one.seconds), share_text(one.bubble), share_text(one.imbalance))
        for one in (found, expected)
        if one is not None
    ]
    # The mean of all ranks comes first, then one row a rank.
    ranks = [("all", "-", *_shares(found.whole))]
    for rank, (stage, shares) in enumerate(zip(found.stages, found.ranks, strict=True)):
        ranks.append((f"rank {rank}", "-" if stage is None else str(stage), *_shares(shares)))
    return {
        "epoch": found.epoch,
        "predicted": expected is not None,
        "count": len(spans),
        "drawn": MOST_ROWS,
        "chart": lanes_svg(found, expected),
        "figures": list(zip(("time", "bubble", "imbalance"), *columns, strict=True)),
        "ranks": ranks,
    }


def _shares(shares: Shares) -> list[str]:
    names = ("computing", "waiting", "sending", "other", "idle", "exposed")
    return [share_text(getattr(shares, name)) for name in names]
