"""Report page of a run: one HTML file that opens offline, without scripts.

Where it sits: the end of the flow; ``kagome train`` and ``kagome report`` call :func:`write_page` on a run
directory. Each section of the template ``run.html`` has a function here, which says what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from kagome.errors import shortened
from kagome.records import memory as holdings
from kagome.records.epoch import KINDS
from kagome.records.peak_tensors import fullest_peak, peak_line, peak_table
from kagome.records.spans import PHASES, SET_UP
from kagome.records.units import bytes_text, count_text, epochs_text, metric_text, seconds_text, share_text
from kagome.report import exchange_summary as crossings
from kagome.report.charts.bars import Bar, bars
from kagome.report.charts.colours import ink
from kagome.report.charts.line_chart import Series, curves
from kagome.report.charts.timeline import MOST_RANKS, gantt_svg, representative_epoch
from kagome.report.diagnosis import diagnose
from kagome.report.page.over_time import over_time
from kagome.report.rendering import page
from kagome.report.run_data import RunFolder, read_folder
from kagome.report.summary import threads_text
from kagome.storage.atomic import write_text

Found = TypeVar("Found")
Shown = Mapping[str, Any] | None
"""The values that a section of the template shows, by name; None if the section is left out."""
BROKEN: Final = (
    *(TypeError, ValueError, KeyError, IndexError, AttributeError),
    *(ArithmeticError, AssertionError, RecursionError, StopIteration),
)
"""Exceptions that a section raises if a run's files hold values that no run writes."""


def write_page(folder: str | Path) -> Path:
    """Write ``report.html`` into a run directory and return its path; see :func:`report`."""
    return report(folder)[1]


def report(folder: str | Path) -> tuple[RunFolder, Path]:
    """Write ``report.html`` into a run directory.

    Args:
        folder: The run directory, with ``metrics.jsonl`` or ``summary.json``, and optionally ``config.toml``
            and ``trace.json``.

    Returns:
        The run as it was read, with a sentence for each fault of its files; the page's path.

    Raises:
        ConfigError: If there is no such folder, or it holds no files of a run.
    """
    run = read_folder(folder)
    text = page_html(run)
    return run, write_text(run.path / "report.html", text)


def page_html(run: RunFolder) -> str:
    """Return the page of a run as HTML; empty sections are left out.

    A section is also left out if its values are not those of a run; ``run.faults`` then says so.
    """
    title, facts = _found(run, title_of) or ("A run", "")
    sections: list[Callable[[RunFolder], object]] = [
        *(figures, bottleneck, learning, time, timeline, pipeline, traffic, memory, crossing, partition),
        *(notes, settings),
    ]
    # The template finds a section under its function's name.
    shown = {find.__name__: _found(run, find) for find in sections}
    footer = f"Kagome, run directory {run.path.resolve()}"
    # Last, because it names the sections that were left out.
    shown["warnings"] = _found(run, warnings)
    return page("run.html", title=title, facts=facts, footer=footer, **shown)


def _found(run: RunFolder, find: Callable[[RunFolder], Found]) -> Found | None:
    """Return what a section shows, or None if the run's files hold values that it cannot show."""
    try:
        return find(run)
    # A damaged file costs one section and not the page. Other errors, of the system or of memory, go up.
    except BROKEN as error:
        found = shortened(f"{type(error).__name__}: {error}", 200)
        run.faults.append(f"the page leaves {find.__name__} out: the run's files hold other values ({found})")
        return None


def title_of(run: RunFolder) -> tuple[str, str]:
    """Return the title and the line below it, which say what was trained and on what; not yet escaped."""
    model, data = run.setting("model", "name"), run.setting("data", "name")
    layers = run.setting("model", "layers")
    depth = f" with {layers} layer{'s' if layers != 1 else ''}" if layers and model else ""
    title = f"{model or 'A model'}{depth} on {data}" if data else f"{model or 'Run'}{depth}"
    values = run.summary
    facts: list[str] = []
    if ranks := values.get("world_size"):
        facts.append(f"{ranks} rank{'s' if ranks != 1 else ''}")
    cut = values.get("partition")
    # The setting may be "auto"; the summary's partition has the partitioner that was used.
    chosen = {"partitioner": cut["partitioner"]} if isinstance(cut, dict) and "partitioner" in cut else {}
    facts += _mesh({**(values.get("parallel") or {}), **chosen})
    if epochs := values.get("epochs"):
        facts.append(f"{epochs} epoch{'s' if epochs != 1 else ''}")
    if values.get("seed") is not None:
        facts.append(f"seed {values['seed']}")
    return title, " · ".join(facts)


def _mesh(parallel: dict[str, Any]) -> list[str]:
    """Describe the mesh axes above one, and the partitioner and the codec if they matter."""
    axes = [f"{axis} {parallel[axis]}" for axis in ("pipe", "graph", "tensor") if _above_one(parallel, axis)]
    if axes and parallel.get("partitioner") and _above_one(parallel, "graph"):
        axes.append(f"{parallel['partitioner']} partition")
    if parallel.get("codec", "none") != "none":
        axes.append(f"{parallel['codec']} codec")
    return axes


def _above_one(parallel: dict[str, Any], axis: str) -> bool:
    size = parallel.get(axis)
    return isinstance(size, int) and size > 1


def warnings(run: RunFolder) -> list[str]:
    """Return what must be known before any number: an unfinished run, a lost loss, unreadable files."""
    lines = list(run.faults)
    if not run.finished:
        wanted = run.setting("train", "epochs")
        of = f" of {wanted}" if wanted else ""
        lines.insert(
            0,
            f"This run left no summary: it did not end. What follows is from {len(run.records)}{of} epochs.",
        )
    # JSON has no NaN, so a loss that was not finite is stored as null and read as None.
    lost = next((record.epoch for record in run.records if record.loss is None), None)
    if lost is not None:
        lines.append(f"The loss was not finite from epoch {lost}.")
    return lines


def figures(run: RunFolder) -> list[tuple[str, str, str]]:
    """Return the headline figures of the run, each with its name and a hint."""
    values = run.summary
    metric = values.get("metric_name") or "metric"
    tiles: list[tuple[str, str, str]] = []
    # Any of these may be missing: an unfinished run has only what follows from its records.
    if values.get("test_metric") is not None:
        tiles.append((f"test {metric}", metric_text(values["test_metric"]), ""))
    if values.get("val_metric") is not None:
        best = values.get("best_epoch")
        tiles.append(
            (
                f"validation {metric}",
                metric_text(values["val_metric"]),
                "" if best is None else f"epoch {best}",
            )
        )
    predicted = values.get("predicted") or {}
    if values.get("epoch_seconds") is not None:
        hint = "median, evaluation excluded"
        if predicted.get("epoch_seconds") is not None:
            hint = f"predicted {seconds_text(predicted['epoch_seconds'])}"
        tiles.append(("time an epoch", seconds_text(values["epoch_seconds"]), hint))
    total = (values.get("bytes_per_epoch") or {}).get("total")
    if total is not None:
        # Without codecs there is nothing to compare with.
        plain = crossings.beside(values.get("crossing")).strip(" ()")
        tiles.append(("sent an epoch", bytes_text(total), plain or "all ranks, training only"))
    sizes = values.get("peak_memory_bytes") or []
    if sizes:
        hint = f"least {bytes_text(min(sizes))}" if len(sizes) > 1 else ""
        tiles.append(("peak memory a rank", bytes_text(max(sizes)), hint))
    if values.get("seconds_total") is not None:
        hint = (
            f"{seconds_text(values['set_up_seconds'])} of it set-up" if values.get("set_up_seconds") else ""
        )
        tiles.append(("whole run", seconds_text(values["seconds_total"]), hint))
    if values.get("threads"):
        tiles.append(("threads a rank", threads_text(values["threads"]), ""))
    if values.get("max_age"):
        tiles.append(("oldest row read", epochs_text(values["max_age"]), "halo and history"))
    return tiles


def bottleneck(run: RunFolder) -> Shown:
    """Return what bounds the speed, as a sentence with its shares."""
    finding = diagnose(run.summary)
    # Phases are written with the summary, so an unfinished run has none to speak about.
    if finding.kind == "unknown" and not run.finished:
        return None
    row = Bar("", [(ink(name), name, share) for name, share in finding.shares], "")
    return {
        "sentence": finding.sentence,
        "advice": finding.advice,
        # On a single rank everything is computing.
        "chart": bars([row], share_text) if len(run.summary.get("phases") or []) > 1 else "",
        "inks": [(ink(name), f"{name} {share_text(share)}") for name, share in finding.shares],
    }


def learning(run: RunFolder) -> Shown:
    """Return charts of loss and metrics over the epochs."""
    metric = run.summary.get("metric_name") or "metric"
    best = run.summary.get("best_epoch")
    mark = (float(best), f"best, epoch {best}") if best is not None else None
    loss = curves("Loss", [_series(run, "loss", "training", "blue")], metric_text)
    rated = [
        _series(run, "train_metric", "training", "blue"),
        _series(run, "val_metric", "validation", "orange"),
    ]
    metrics = curves(metric.capitalize().replace("_", " "), rated, metric_text, mark=mark)
    return {"loss": loss, "metrics": metrics} if loss or metrics else None


def time(run: RunFolder) -> Shown:
    """Return seconds by phase and rank, and the lengths of the epochs."""
    phases: Sequence[Mapping[str, float]] = run.summary.get("phases") or []
    names = _names(phases, PHASES)
    # Set-up would dwarf an epoch's phases in the chart, so it is told in a line of text.
    training = [name for name in names if name not in SET_UP]
    set_up = [(name, max(rank.get(name, 0.0) for rank in phases)) for name in SET_UP if name in names]
    rows = [
        Bar(
            f"rank {rank}",
            [(ink(name), name, seconds.get(name, 0.0)) for name in training],
            seconds_text(sum(seconds.get(name, 0.0) for name in training)),
        )
        for rank, seconds in enumerate(phases[:MOST_RANKS])
    ]
    chart = bars(rows, seconds_text) if training else ""
    length = curves("Time an epoch", [_series(run, "seconds", "epoch", "teal")], seconds_text, from_zero=True)
    if not chart and not length:
        return None
    return {
        "chart": chart,
        "inks": [(ink(name), name) for name in training],
        "set_up": ", ".join(f"{name} {seconds_text(value)}" for name, value in set_up),
        "head": ["rank", *names],
        "rows": [[r, *(seconds_text(s.get(name, 0.0)) for name in names)] for r, s in enumerate(phases)],
        "length": length,
    }


def timeline(run: RunFolder) -> Shown:
    """Return one epoch as a Gantt chart."""
    epoch = representative_epoch(run.spans)
    chart = gantt_svg(run.spans, epoch)
    return {"epoch": epoch, "chart": chart, "count": len(run.spans), "drawn": MOST_RANKS} if chart else None


def pipeline(run: RunFolder) -> Shown:
    """Return one epoch of a pipeline: its actions, how the ranks spent the time, and the prediction."""
    return over_time(run.spans)


def traffic(run: RunFolder) -> Shown:
    """Return bytes by kind, and how long they were waited for."""
    counts = run.summary.get("bytes_per_epoch") or {}
    total = counts.get("total", 0)
    kinds = [kind for kind in KINDS if counts.get(kind)]
    if not kinds or not total:
        return None
    rows = [
        Bar(
            kind,
            [(ink(kind), kind, counts[kind])],
            f"{bytes_text(counts[kind])} · {share_text(counts[kind] / total)}",
        )
        for kind in kinds
    ]
    waited, hidden = (run.summary.get(name) or {} for name in ("waited_per_epoch", "hidden_share"))
    return {
        "total": bytes_text(total),
        "chart": bars(rows, bytes_text),
        "rows": [[k, seconds_text(waited[k]), share_text(hidden.get(k, 0.0))] for k in KINDS if k in waited],
    }


def crossing(run: RunFolder) -> Shown:
    """Return the savings and errors of codecs and stale rows, and the results of probes."""
    found = run.summary.get("crossing")
    if not found:
        return None
    head, rows = crossings.table(found)
    lead = crossings.lead(found, (run.summary.get("bytes_per_epoch") or {}).get("total"))
    return {"lead": lead, "head": head, "rows": rows, "climbed": crossings.climbed(found)}


def memory(run: RunFolder) -> Shown:
    """Return peak memory by rank, and memory held by kind."""
    sizes = run.summary.get("peak_memory_bytes") or []
    head, held = holdings.table((run.summary.get("memory") or [])[:MOST_RANKS])
    rows = [
        Bar(f"rank {rank}", [(ink("memory"), "peak", size)], bytes_text(size))
        for rank, size in enumerate(sizes[:MOST_RANKS])
    ]
    chart = bars(rows, bytes_text) if any(sizes) else ""
    shown = {"chart": chart, "ranks": len(rows), "head": head, "rows": held, **_peak_tensors(run)}
    return shown if chart or held else None


def _peak_tensors(run: RunFolder) -> Mapping[str, Any]:
    """Return the largest tensors of the rank whose tensors took most; nothing where no rank recorded them."""
    found = fullest_peak(run.summary.get("memory") or [])
    if found is None:
        return {"peak": ""}
    rank, peak = found
    head, rows = peak_table(peak)
    return {"peak": f"Rank {rank}: {peak_line(peak)}.", "peak_head": head, "peak_rows": rows}


def partition(run: RunFolder) -> Shown:
    """Return the parts, their balance, and the advice about the cut."""
    found = run.summary.get("partition") or {}
    rows: list[Mapping[str, Any]] = found.get("rows") or []
    facts = [
        f"{key.replace('_', ' ')} {_cell(value, key)}"
        for key, value in found.items()
        if key not in ("rows", "advice")
    ]
    for name in ("vertices", "edges"):
        sizes = [row[name] for row in rows if row.get(name) is not None]
        if len(sizes) > 1 and sum(sizes):
            facts.append(
                f"{name} of the fullest part over the mean {max(sizes) * len(sizes) / sum(sizes):.2f}"
            )
    # Each vertex is an own row of one part, so their sum is the number of vertices.
    owned, halo = (sum(row.get(name) or 0 for row in rows) for name in ("vertices", "halo"))
    if owned and halo:
        facts.append(f"halo rows are {halo / owned:.2f} times the vertices")
    columns = _names(rows, ("part", "vertices", "edges", "sent", "halo"))
    if not rows and not facts:
        return None
    told = "; ".join(facts)
    advice = found.get("advice") or []
    return {
        "facts": f"{told[:1].upper()}{told[1:]}." if told else "",
        "head": [column.replace("_", " ") for column in columns],
        "rows": [[_cell(row.get(column), column) for column in columns] for row in rows],
        "advice": [advice] if isinstance(advice, str) else [str(sentence) for sentence in advice],
    }


def notes(run: RunFolder) -> list[str]:
    """Return the notes of the run itself."""
    return [str(note) for note in run.summary.get("notes") or []]


def settings(run: RunFolder) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return all settings by group."""
    # TOML allows a value outside of any section.
    groups = {
        name: values if isinstance(values, dict) else {"value": values} for name, values in run.config.items()
    }
    return [(name, [(k, _setting(v)) for k, v in values.items()]) for name, values in groups.items()]


def _series(run: RunFolder, field: str, name: str, colour: str) -> Series:
    pairs = [(float(record.epoch), getattr(record, field)) for record in run.records]
    return Series(name, f"ink-{colour}", [(x, float(y)) for x, y in pairs if y is not None])


def _names(rows: Sequence[Mapping[str, Any]], known: Sequence[str]) -> list[str]:
    """Return the keys that occur: the known ones in their order, then the others in theirs."""
    seen = dict.fromkeys(key for row in rows for key in row)
    return [name for name in known if name in seen] + [name for name in seen if name not in known]


def _cell(value: Any, name: str) -> str:
    # `cut` is the share of the edges that cross parts.
    if isinstance(value, float) and (name == "cut" or "share" in name):
        return share_text(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return count_text(value)
    return "-" if value is None else str(value)


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
