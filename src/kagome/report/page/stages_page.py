"""Stages page: a pipeline of any module, with its stages side by side and one update over time.

Where it sits: ``pipelining.dag`` writes it at the end; it shows what ``records.pipeline`` measures from the
ranks' spans with the template ``stages.html``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kagome.records.pipeline import pipeline_summary
from kagome.records.spans import Span, common_epochs
from kagome.records.units import bytes_text, count_text, seconds_text
from kagome.report.chrome_trace import write_trace
from kagome.report.page.over_time import over_time
from kagome.report.rendering import page
from kagome.schedule.actions import Program
from kagome.storage.atomic import write_json, write_text

NAMED = 6
"""Most operators of a stage that its row names; of more, it names the first and the last."""


@dataclass(frozen=True)
class StageRow:
    """One stage of the pipeline.

    Args:
        operators: The names of its operators.
        devices: The number of replicas.
        micro_batch: Samples of a micro-batch, over all replicas.
        k: Micro-batches that go forward in one turn.
        reads: The stages whose output it reads.
        weights: Bytes of its weights.
    """

    operators: Sequence[str]
    devices: int
    micro_batch: int
    k: int
    reads: Sequence[int]
    weights: int


def write_stages(
    folder: str | Path,
    stages: Sequence[StageRow],
    programs: Sequence[Program],
    spans: Sequence[Sequence[Span]],
    facts: Mapping[str, Any],
) -> Path:
    """Write ``report.html``, ``summary.json`` and ``trace.json``.

    Args:
        folder: The folder to write into; it is created if missing.
        stages: The stages, in order.
        programs: One program per stage.
        spans: One list per rank, with one common zero.
        facts: ``title``, ``batch`` (samples), ``updates``, ``last_loss`` (or None), ``schedule`` and ``why``
            it was taken, and ``bytes`` of all ranks by kind.

    Returns:
        The page's path.
    """
    folder = Path(folder)
    summary = {
        **facts,
        "update_seconds": update_seconds(spans),
        "pipeline": pipeline_summary(spans, programs),
        "stages": [asdict(one) for one in stages],
    }
    # The page is written last: a reader that sees it finds the files that it names.
    write_trace(folder / "trace.json", spans)
    write_json(folder / "summary.json", summary)
    ranks = sum(one.devices for one in stages)
    text = page(
        "stages.html",
        title=facts["title"],
        facts=f"{len(stages)} stages on {ranks} ranks; {count_text(facts['batch'])} samples an update",
        updates=_figures(facts, summary["update_seconds"]),
        pipeline=over_time(spans, programs),
        stages=[_cells(number, one) for number, one in enumerate(stages)],
        traffic=[(kind, bytes_text(value)) for kind, value in facts["bytes"].items() if value],
        footer="Kagome",
    )
    return write_text(folder / "report.html", text)


def update_seconds(spans: Sequence[Sequence[Span]]) -> float | None:
    """Return the median seconds of the recorded updates without the first, from first begin to last end."""
    found = []
    for update in common_epochs(spans):
        mine = [span for each in spans for span in each if span.epoch == update]
        # Of all ranks together: an update lasts from the first rank's first action to the last rank's last.
        found.append(max(span.start + span.duration for span in mine) - min(span.start for span in mine))
    return median(found) if found else None


def _figures(facts: Mapping[str, Any], seconds: float | None) -> list[tuple[str, str]]:
    rows = [("updates", count_text(facts["updates"])), ("schedule", facts["schedule"])]
    if seconds:
        rows.append(("an update", seconds_text(seconds)))
        rows.append(("samples a second", f"{facts['batch'] / seconds:,.1f}"))
    if facts["last_loss"] is not None:
        rows.append(("loss of the last", f"{facts['last_loss']:.4f}"))
    return rows


def _cells(number: int, one: StageRow) -> tuple[str, ...]:
    """Return a stage's row of the table."""
    names = list(one.operators)
    if len(names) > NAMED:
        names = [*names[: NAMED - 1], "...", names[-1]]
    return (
        str(number),
        ", ".join(map(str, one.reads)) or "inputs alone",
        str(one.devices),
        str(one.micro_batch),
        str(one.k),
        bytes_text(one.weights),
        f"{len(one.operators)}: {' '.join(names)}",
    )
