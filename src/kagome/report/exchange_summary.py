"""Exchange summary: what coded and stale rows save and cost, for the summary and the page.

Where it sits: ``adaptive.report`` gives codecs, errors and probes; ``summary`` joins them with the epochs'
records; ``report.page.page`` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kagome.records.epoch import EpochRecord, by_kind, hidden_share
from kagome.records.units import bytes_text, epochs_text, share_text

PASSES = ("forward", "backward")


def crossing_summary(facts: Mapping[str, Any], records: Sequence[EpochRecord]) -> dict[str, Any]:
    """Return the entry ``crossing`` of ``summary.json``.

    Args:
        facts: ``codecs`` by kind, ``errors`` by site and pass, ``oldest_age``, ``probes``.
        records: The epochs over which means are taken.

    Returns:
        The facts with two more entries. ``bytes_uncoded_per_epoch`` is by kind, as ``bytes_per_epoch``.
        ``hidden_share`` is the share of the time of all exchanges that computation hid, or None if there was
        no exchange.
    """
    # `uncoded` has only kinds that may be coded; the others are as they were sent.
    counts = [by_kind({**record.bytes, **record.uncoded}) for record in records]
    under_way = sum(sum(record.under_way.values()) for record in records)
    waited = sum(sum(record.waited.values()) for record in records)
    plain = {kind: fmean(count[kind] for count in counts) if counts else 0.0 for kind in by_kind({})}
    hidden = hidden_share(under_way, waited)
    return {**facts, "bytes_uncoded_per_epoch": plain, "hidden_share": hidden}


def beside(found: Mapping[str, Any] | None) -> str:
    """Return the text behind the bytes that were sent: how many bytes they would be without codecs."""
    plain = ((found or {}).get("bytes_uncoded_per_epoch") or {}).get("total")
    return "" if plain is None else f" ({bytes_text(plain)} uncoded)"


def lead(found: Mapping[str, Any], total: float | None) -> str:
    """Describe codecs, bytes, ages and probes in a few sentences."""
    message = ", ".join(f"{kind} {codec}" for kind, codec in (found.get("codecs") or {}).items())
    plain = (found.get("bytes_uncoded_per_epoch") or {}).get("total")
    told = [f"Codecs: {message}." if message else ""]
    if total is not None and plain:
        told.append(
            f"{bytes_text(total)} an epoch, probes among them, instead of {bytes_text(plain)} without codecs "
            "and probes."
        )
    if found.get("oldest_age"):
        told.append(f"The oldest row of another part was {epochs_text(found['oldest_age'])} old.")
    if found.get("hidden_share") is not None:
        told.append(
            f"Of the time that exchanges were under way, computation hid {share_text(found['hidden_share'])}."
        )
    probes = found.get("probes") or {}
    if probes.get("count"):
        told.append(
            f"{epochs_text(probes['count'])} computed the exact gradient too: its cosine with the other was "
            f"{probes['last_cosine']:.2f} the last time, and {probes['lowest_cosine']:.2f}, the lowest, in "
            f"epoch {probes['lowest_epoch']}."
        )
    if found.get("errors"):
        told.append(
            "The table has what codecs lost of rows when last measured: the length of what was lost over the "
            "rows', on a sample, mean over the ranks."
        )
    return " ".join(sentence for sentence in told if sentence)


def climbed(found: Mapping[str, Any]) -> list[str]:
    """Return the probes after which the precision level rose, one line each."""
    steps = (found.get("probes") or {}).get("climbed") or []
    return [f"epoch {step['epoch']}, one rung up after {step['text']}" for step in steps]


def table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the error of the codecs as a table with one row per site."""
    errors: dict[str, dict[str, float]] = {}
    for name, error in (found.get("errors") or {}).items():
        # Names are "convs.1.x forward" and "convs.1.x backward"; a site may have spaces itself.
        site, _, way = name.rpartition(" ")
        errors.setdefault(site, {})[way] = error
    rows = [
        [site, *(share_text(ways[way]) if way in ways else "-" for way in PASSES)]
        for site, ways in errors.items()
    ]
    return ["site", *PASSES], rows
