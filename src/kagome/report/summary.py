"""Summary of a run: ``summary.json`` and the table at the end of ``kagome train``.

Where it sits: rank 0 builds it from the epochs' records and what the ranks gathered; ``report.page.page``
reads it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kagome.records import memory as holdings
from kagome.records.epoch import EpochRecord, by_kind, hidden_shares
from kagome.records.spans import by_phase
from kagome.records.units import bytes_text, epochs_text, metric_text, seconds_text, share_text
from kagome.report import exchange_summary as crossings
from kagome.storage.atomic import write_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


SHOWN = ("halo", "stage", "transpose", "weights")
"""Kinds whose exchanges may be hidden; statistics are always waited for at once."""


def summary(
    *,
    records: Sequence[EpochRecord],
    test_metric: float | None,
    val_metric: float | None,
    metric_name: str,
    best_epoch: int | None,
    peak_memory_bytes: Sequence[int],
    world_size: int,
    parallel: Mapping[str, Any],
    seed: int,
    predicted: Mapping[str, Any] | None = None,
    max_age: int = 0,
    seconds_total: float | None = None,
    set_up_seconds: float | None = None,
    notes: Sequence[str] = (),
    phases: Sequence[Mapping[str, float]] = (),
    partition: Mapping[str, Any] | None = None,
    threads: Sequence[int] = (),
    memory: Sequence[Mapping[str, Any]] = (),
    pipeline: Mapping[str, float | None] | None = None,
    crossing: Mapping[str, Any] | None = None,
    working_memory_bytes: int | None = None,
    activations_moved_bytes: int | None = None,
    history: Mapping[str, Any] | None = None,
    weights_epoch: int | None = None,
    epochs: int | None = None,
) -> dict[str, Any]:
    """Build the content of ``summary.json``.

    Args:
        records: The epochs of the run, with those before a resume if they are known; bytes of all ranks.
        test_metric: The metric on the test vertices with the weights of ``weights_epoch``.
        val_metric: The metric on the validation vertices with the same weights.
        metric_name: The name of the metric, for example ``accuracy``.
        best_epoch: The epoch whose weights were kept; None if nothing was evaluated.
        peak_memory_bytes: Peak memory, one value per rank.
        world_size: The number of ranks.
        parallel: The settings of ``Parallel`` that the run used.
        seed: The seed of the run.
        predicted: The planner's epoch_seconds, bytes_per_epoch and peak_memory_bytes.
        max_age: The largest age, in epochs, of any row that was read.
        seconds_total: Wall-clock seconds of the run, set-up and evaluation included.
        set_up_seconds: Seconds before the first epoch.
        notes: Sentences that the reader of the page must know.
        phases: Seconds by phase, one entry per rank (:meth:`Spans.seconds`); actions count for their phase.
        partition: ``rows`` (one per part: part, vertices, edges, halo), ``advice`` (sentences), other facts.
        threads: The number of threads that each rank computed with.
        memory: Memory held by kind, one entry per rank, ``predicted`` and ``measured`` (``records.memory``).
        pipeline: The result of ``pipeline_summary``, whose predicted bubble leaves out the time of messages;
            None if there is no pipeline.
        crossing: Codecs by kind, errors by site, ``oldest_age`` and probes; None if every exchange is exact.
        working_memory_bytes: The most memory that a sum over feature slices took, if it is bounded.
        activations_moved_bytes: The most that a rank moved off its device in one forward.
        history: Costs of rows of other chunks: ``probes``, ``careful_from``, ``exact_epochs``,
            ``plateau_epochs``, and how often weights were rolled back (``undone``).
        weights_epoch: The epoch whose weights the model was left with; None before any.
        epochs: The number of epochs done, if records of some are missing.

    Returns:
        Plain values in the order of the file.
    """
    # The first epoch is not like the others: it compares headers, exchanges constant rows once and is exact.
    costly = records[1:] or records
    counts = [by_kind(record.bytes) for record in costly]
    sent = {kind: fmean(count[kind] for count in counts) if counts else 0.0 for kind in by_kind({})}
    result: dict[str, Any] = {
        "test_metric": test_metric,
        "val_metric": val_metric,
        "metric_name": metric_name,
        "best_epoch": best_epoch,
        "epochs": len(records) if epochs is None else epochs,
        # A median over all epochs, in which the first hardly counts.
        "epoch_seconds": median(record.seconds for record in records) if records else None,
        "bytes_per_epoch": sent,
        "peak_memory_bytes": [int(size) for size in peak_memory_bytes],
        "predicted": None if predicted is None else dict(predicted),
        "max_age": max_age,
        "world_size": world_size,
        "parallel": dict(parallel),
        "seed": seed,
    }
    kinds = dict.fromkeys(kind for record in costly for kind in record.waited)
    extra = {
        "weights_epoch": weights_epoch,
        "waited_per_epoch": {
            kind: fmean(record.waited.get(kind, 0.0) for record in costly) for kind in kinds
        },
        "hidden_share": hidden_shares(costly),
        "threads": list(threads),
        "memory": [dict(rank) for rank in memory],
        "seconds_total": seconds_total,
        "set_up_seconds": set_up_seconds,
        "notes": list(notes),
        "phases": [by_phase(phase) for phase in phases],
        "pipeline": None if pipeline is None else dict(pipeline),
        "crossing": None if crossing is None else crossings.crossing_summary(crossing, costly),
        "working_memory_bytes": working_memory_bytes,
        "activations_moved_bytes": activations_moved_bytes,
        "history": None if history is None else dict(history),
        "partition": None if partition is None else dict(partition),
    }
    # Entries of `result` are always in the file, null if unknown; the others only if they have content.
    return result | {key: value for key, value in extra.items() if value not in (None, [], {})}


def write_summary(path: str | Path, values: Mapping[str, Any]) -> Path:
    """Write ``summary.json`` in one atomic step.

    Args:
        path: The file.
        values: The result of :func:`summary`.

    Returns:
        The path.
    """
    return write_json(path, dict(values))


def final_table(values: Mapping[str, Any]) -> Table:
    """Return the summary as a small table.

    Args:
        values: The result of :func:`summary`.

    Returns:
        A table of two columns, one row per figure.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column("figure", style="bold")
    table.add_column("value", overflow="fold")
    for name, value in headline(values):
        table.add_row(name, value)
    return table


def headline(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the most important figures of the summary as name and text; missing ones are left out."""
    rows: list[tuple[str, str]] = []
    metric = values.get("metric_name") or "metric"
    if values.get("test_metric") is not None:
        rows.append((f"test {metric}", metric_text(values["test_metric"])))
    if values.get("val_metric") is not None:
        rows.append((f"validation {metric}", metric_text(values["val_metric"])))
    epochs, best = values.get("epochs"), values.get("best_epoch")
    if best is not None:
        rows.append(("best epoch", f"{best} of {epochs}" if epochs else str(best)))
    elif epochs is not None:
        rows.append(("epochs", str(epochs)))
    if values.get("epoch_seconds") is not None:
        rows.append(("time an epoch", seconds_text(values["epoch_seconds"])))
    total = (values.get("bytes_per_epoch") or {}).get("total")
    if total is not None:
        rows.append(("sent an epoch", bytes_text(total) + crossings.beside(values.get("crossing"))))
    waited = values.get("waited_per_epoch") or {}
    if waited:
        rows.append(("waited an epoch", seconds_text(sum(waited.values()))))
        hidden = {kind: share_text(share) for kind, share in (values.get("hidden_share") or {}).items()}
        told = [f"{kind} {hidden[kind]}" for kind in SHOWN if kind in hidden]
        if told:
            rows.append(("hidden by computation", ", ".join(told)))
    sizes = values.get("peak_memory_bytes") or []
    if sizes:
        low, high = bytes_text(min(sizes)), bytes_text(max(sizes))
        rows.append(("peak memory a rank", high if low == high else f"{low} to {high}"))
    if (held := holdings.line(values.get("memory") or [])) is not None:
        rows.append(held)
    if values.get("seconds_total") is not None:
        rows.append(("whole run", seconds_text(values["seconds_total"])))
    pipeline = values.get("pipeline") or {}
    if pipeline.get("bubble") is not None:
        expected = pipeline.get("predicted_bubble")
        beside = "" if expected is None else f" (predicted {share_text(expected)})"
        rows.append(("bubble", share_text(pipeline["bubble"]) + beside))
    counts = values.get("threads") or []
    if counts:
        rows.append(("threads a rank", threads_text(counts)))
    if values.get("working_memory_bytes"):
        rows.append(("working memory of sums", bytes_text(values["working_memory_bytes"])))
    if values.get("activations_moved_bytes"):
        rows.append(("activations moved a rank", bytes_text(values["activations_moved_bytes"])))
    if values.get("max_age"):
        rows.append(("oldest row read", epochs_text(values["max_age"])))
    return rows


def threads_text(counts: Sequence[int]) -> str:
    """Return the threads per rank as one number, or as the least and the most."""
    return str(max(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def print_summary(
    values: Mapping[str, Any], page: str | Path | None = None, *, console: Console | None = None
) -> None:
    """Print the table at the end of ``kagome train`` and the path of the page.

    Args:
        values: The result of :func:`summary`.
        page: The report page, if one was written.
        console: Where to print; by default standard output.
    """
    from rich.console import Console

    # Highlighting would colour numbers within names and paths.
    console = console or Console(highlight=False)
    console.print(final_table(values))
    if page is not None:
        # A path that is broken over two lines cannot be clicked or copied.
        console.print(f"Report: {page}", soft_wrap=True, markup=False, highlight=False)
