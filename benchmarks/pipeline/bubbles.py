"""Bubbles: the share of a pipeline's epochs without computing, as it was and as a simulation has it.

Where it sits: ``speed.py`` asks it for each rate of a run, and keeps both in the row.

The simulation knows the seconds of each action of the epoch, the order, and what a message takes on a link of
its rate; what is measured beyond it, none of these explains.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median

from kagome.records.pipeline import pipeline_summary
from kagome.records.spans import Span, action_of


def bubbles(
    spans_by_rank: Sequence[Sequence[Span]], epochs: Collection[int], rate: float, sent: float
) -> dict[str, float] | None:
    """Both bubbles in the middle of some epochs.

    Args:
        spans_by_rank: A run's trace.
        epochs: That ran on links of the rate.
        rate: Mbit/s of each host's link, each way.
        sent: Bytes between stages in an epoch, of all ranks.

    Returns:
        ``measured`` and ``simulated``, shares; None where stages sent nothing.
    """
    found = []
    for epoch in epochs:
        there = [[span for span in spans if span.epoch == epoch] for spans in spans_by_rank]
        actions = [action_of(span.name) for spans in there for span in spans]
        sends = sum(1 for action in actions if action is not None and action.kind.sends)
        if not sends:
            return None
        seconds = 8 * sent / sends / (rate * 1e6)  # METIS makes chunks of about one size
        one = pipeline_summary(there, epoch=epoch, transfer=lambda _, seconds=seconds: seconds)
        if one is None or one["bubble"] is None or one["predicted_bubble"] is None:
            return None
        found.append((one["bubble"], one["predicted_bubble"]))
    if not found:
        return None
    measured, simulated = zip(*found, strict=True)
    return {"measured": median(measured), "simulated": median(simulated)}
