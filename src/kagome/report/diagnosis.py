"""Diagnosis: which part of the run took the time, in one sentence.

Where it sits: reads the summary's seconds by phase and rank; ``report.page.page`` shows the sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kagome.records.spans import COMPUTE, MOVE
from kagome.records.units import bytes_text, seconds_text, share_text


@dataclass(frozen=True)
class Diagnosis:
    """The part of a run that bounds its speed."""

    kind: str
    """``compute``, ``exchange``, ``waiting``, ``set-up`` or ``unknown``."""
    sentence: str
    """The finding as a sentence."""
    advice: str
    """The advice on what to try, or ``""``."""
    shares: tuple[tuple[str, float], ...] = ()
    """Name and share of the training time, summing to one: compute, exchange, waiting."""


def diagnose(values: Mapping[str, Any]) -> Diagnosis:
    """Find the bottleneck of a run.

    All ranks start and end an epoch together, so a rank that computes less than the busiest one stays longer
    in its exchanges. The shortest stay of any rank is therefore taken as the cost of the exchange itself. The
    time that the ranks stay longer than that, on average, is taken as waiting.

    Args:
        values: The summary.

    Returns:
        The finding; its kind is ``unknown`` if the summary has no phases.
    """
    phases: Sequence[Mapping[str, float]] = values.get("phases") or []
    compute = [sum(rank.get(name, 0.0) for name in COMPUTE) for rank in phases]
    move = [sum(rank.get(name, 0.0) for name in MOVE) for rank in phases]
    if not phases or sum(compute) + sum(move) <= 0:
        return Diagnosis("unknown", "The run left no times by phase, so its bottleneck is not known.", "")
    # Example, two ranks, seconds of an epoch:
    #    rank 0   compute 6   move 4       exchange = min(move) = 2    the time that messages take
    #    rank 1   compute 8   move 2       waiting = 3 - 2 = 1         mean stay beyond that
    total = fmean(compute) + fmean(move)
    exchange = min(move)
    waiting = fmean(move) - exchange
    shares = (
        ("compute", fmean(compute) / total),
        ("exchange", exchange / total),
        ("waiting", waiting / total),
    )
    set_up = values.get("set_up_seconds") or 0.0
    # Shorter epochs would not help a run that spends most of its time before the first.
    if set_up > total:
        return Diagnosis(
            "set-up",
            f"Set-up: {seconds_text(set_up)} before the first epoch, then {seconds_text(total)} of training.",
            "Save the partition once (kagome partition) and train on it with --data.partition.",
            shares,
        )
    kind, share = max(shares, key=lambda item: item[1])
    if len(phases) == 1:
        sentence, advice = f"Computation: {share_text(shares[0][1])} of the training time, on one rank.", ""
    elif kind == "compute":
        sentence = (
            f"Computation: {share_text(share)} of the training time; {share_text(1 - share)} goes into "
        )
        sentence += "exchange and waiting."
        advice = "More ranks would shorten an epoch further."
        # With more ranks computing is divided and exchange is not. From 0.7 on, twice the ranks still compute
        # for longer than they exchange (0.35 to 0.3).
        if share < 0.7:
            advice = "More ranks would shorten it, but the exchange would soon lead."
    elif kind == "exchange":
        sentence = f"Exchange: {share_text(share)} of the training time goes into moving {_moved(values)}."
        advice = "Try fewer parts, a partitioner that cuts fewer edges, or a faster link."
    else:
        # The rank that the others wait for computes longest.
        slowest = max(range(len(compute)), key=compute.__getitem__)
        times = compute[slowest] / fmean(compute) if fmean(compute) else 1.0
        sentence = (
            f"Imbalance: {share_text(share)} of the training time the ranks wait for the slowest; rank "
        )
        sentence += f"{slowest} computes {times:.2f} times the mean."
        advice = (
            "Balance the parts' edges (see Partition below), or look for a slower machine or a busy core."
        )
    return Diagnosis(kind, sentence, advice, shares)


def _moved(values: Mapping[str, Any]) -> str:
    counts = {kind: n for kind, n in (values.get("bytes_per_epoch") or {}).items() if kind != "total" and n}
    if not counts:
        return "data between ranks"
    kind = max(counts, key=counts.__getitem__)
    total = sum(counts.values())
    return f"{bytes_text(total)} an epoch, {share_text(counts[kind] / total)} of them {kind}"
