"""Sections of the report page, one function each, which returns HTML or an empty text.

Where it sits: ``page`` puts them in order; they read a :class:`RunFolder` and draw with
``report.charts.svg``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kagome.records import memory as holdings
from kagome.records.epoch import KINDS
from kagome.records.spans import PHASES, SET_UP
from kagome.records.units import bytes_text, count_text, epochs_text, metric_text, seconds_text, share_text
from kagome.report import exchange_summary as crossings
from kagome.report.charts.style import ink
from kagome.report.charts.svg import Bar, Series, bars, curves, legend
from kagome.report.chrome_trace import MOST_RANKS, gantt_svg, representative_epoch
from kagome.report.diagnosis import diagnose
from kagome.report.page.html import section, table
from kagome.report.page.over_time import over_time
from kagome.report.run_data import RunFolder
from kagome.report.summary import threads_text

_HELD = (
    "What each rank holds, as measured, and in brackets as predicted before the first epoch. Activations are "
    "what one forward keeps for its backward; other is what the peak has beyond all this."
)


def warnings(run: RunFolder) -> str:
    """Return what must be known before any number: an unfinished run, a lost loss, unreadable files."""
    lines = list(run.faults)
    if not run.finished:
        wanted = run.setting("train", "epochs")
        of = f" of {wanted}" if wanted else ""
        lines.insert(
            0,
            f"This run left no summary: it did not end. What follows is from {len(run.records)}{of} epochs.",
        )
    lost = next((record.epoch for record in run.records if record.loss is None), None)
    if lost is not None:
        lines.append(f"The loss was not finite from epoch {lost}.")
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<section class="warn"><h2>Attention</h2><ul>{items}</ul></section>'


def figures(run: RunFolder) -> str:
    """Return the headline figures of the run."""
    values = run.summary
    metric = values.get("metric_name") or "metric"
    tiles: list[tuple[str, str, str]] = []
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
    if not tiles:
        return ""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd{' class=long' if len(text) > 9 else ''}>{escape(text)}"
        f"<small>{escape(hint)}</small></dd></div>"
        for name, text, hint in tiles
    )
    return f'<section class="tiles"><dl>{items}</dl></section>'


def bottleneck(run: RunFolder) -> str:
    """Return what bounds the speed, as a sentence with its shares."""
    finding = diagnose(run.summary)
    if finding.kind == "unknown" and not run.finished:
        return ""
    body = f'<p class="finding">{escape(finding.sentence)}</p>'
    if finding.advice:
        body += f"<p>{escape(finding.advice)}</p>"
    if len(run.summary.get("phases") or []) > 1:
        text = [(ink(name), f"{name} {share_text(share)}") for name, share in finding.shares]
        row = Bar("", [(ink(name), name, share) for name, share in finding.shares], "")
        body += f'<div class="shares">{bars([row], share_text)}{legend(text)}</div>'
    return section("Bottleneck", body, css="verdict")


def learning(run: RunFolder) -> str:
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
    return section("Learning", f'<div class="pair">{loss}{metrics}</div>') if loss or metrics else ""


def time(run: RunFolder) -> str:
    """Return seconds by phase and rank, and the lengths of the epochs."""
    phases: Sequence[Mapping[str, float]] = run.summary.get("phases") or []
    names = _names(phases, PHASES)
    training = [name for name in names if name not in SET_UP]
    body = ""
    if training and phases:
        rows = []
        for rank, seconds in list(enumerate(phases))[:MOST_RANKS]:
            parts = [(ink(name), name, seconds.get(name, 0.0)) for name in training]
            rows.append(Bar(f"rank {rank}", parts, seconds_text(sum(value for _, _, value in parts))))
        drawn = legend([(ink(name), name) for name in training]) + bars(rows, seconds_text)
        body += (
            f'<figure class="{_density(rows)}"><figcaption>By phase, whole run</figcaption>{drawn}</figure>'
        )
        body += _details(
            ["rank", *names],
            [[str(r), *(seconds_text(s.get(name, 0.0)) for name in names)] for r, s in enumerate(phases)],
        )
    length = curves("Time an epoch", [_series(run, "seconds", "epoch", "teal")], seconds_text, from_zero=True)
    lead = (
        "An exchange includes waiting for the other ranks; each moment counts once, for its innermost phase."
    )
    set_up = [(name, max(rank.get(name, 0.0) for rank in phases)) for name in SET_UP if name in names]
    if set_up:
        pieces = ", ".join(f"{name} {seconds_text(value)}" for name, value in set_up)
        lead += f" Set-up, on the slowest rank: {pieces}."
    content = f'<div class="pair">{body and f"<div>{body}</div>"}{length}</div>'
    return section("Time", content, lead if body else "") if body or length else ""


def timeline(run: RunFolder) -> str:
    """Return one epoch as a Gantt chart."""
    epoch = representative_epoch(run.spans)
    chart = gantt_svg(run.spans, epoch)
    lead = (
        f"Epoch {epoch}, of median length, evaluation left out. Every recorded epoch is in trace.json, which "
        "opens in Perfetto (ui.perfetto.dev)."
    )
    if len(run.spans) > MOST_RANKS:
        lead += f" The first {MOST_RANKS} of {len(run.spans)} ranks are drawn."
    return section("One epoch", chart, lead) if chart else ""


def pipeline(run: RunFolder) -> str:
    """Return one epoch of a pipeline: its actions, how the ranks spent the time, and the prediction."""
    return over_time(run.spans)


def traffic(run: RunFolder) -> str:
    """Return bytes by kind, and how long they were waited for."""
    counts = run.summary.get("bytes_per_epoch") or {}
    total = counts.get("total", 0)
    kinds = [kind for kind in KINDS if counts.get(kind)]
    if not kinds or not total:
        return ""
    rows = [
        Bar(
            kind,
            [(ink(kind), kind, counts[kind])],
            f"{bytes_text(counts[kind])} · {share_text(counts[kind] / total)}",
        )
        for kind in kinds
    ]
    lead = (
        f"{bytes_text(total)} an epoch on the wire, after the codec: all ranks, training only, mean over the "
    )
    lead += "epochs after the first."
    waited, hidden = (run.summary.get(name) or {} for name in ("waited_per_epoch", "hidden_share"))
    numbers = table(
        ["kind", "waited an epoch", "hidden"],
        [[k, seconds_text(waited[k]), share_text(hidden.get(k, 0.0))] for k in KINDS if k in waited],
    )
    if numbers:
        numbers = (
            "<p>What a rank waited for others, and the share of the time between an exchange's begin and its "
            f"end in which it computed instead.</p>{numbers}"
        )
    return section("Data sent", bars(rows, bytes_text) + numbers, lead)


def crossing(run: RunFolder) -> str:
    """Return the savings and errors of codecs and stale rows, and the results of probes."""
    found = run.summary.get("crossing")
    if not found:
        return ""
    total = (run.summary.get("bytes_per_epoch") or {}).get("total")
    climbed = "".join(f"<li>{escape(line)}</li>" for line in crossings.climbed(found))
    body = table(*crossings.table(found)) + (climbed and f"<ul>{climbed}</ul>")
    return section("What crossed", body, crossings.lead(found, total))


def memory(run: RunFolder) -> str:
    """Return peak memory by rank, and memory held by kind."""
    sizes = run.summary.get("peak_memory_bytes") or []
    held = table(*holdings.table((run.summary.get("memory") or [])[:MOST_RANKS]))
    if not sizes or not max(sizes):
        return section("Memory", held, _HELD) if held else ""
    rows = [Bar(f"rank {r}", [(ink("memory"), "peak", n)], bytes_text(n)) for r, n in enumerate(sizes)][
        :MOST_RANKS
    ]
    lead = "Peak of each rank. On a GPU the allocator's; on a CPU resident memory less what the imports took."
    body = f'<div class="{_density(rows)}">{bars(rows, bytes_text)}</div>'
    return section("Memory", body + (held and f"<p>{escape(_HELD)}</p>{held}"), lead)


def partition(run: RunFolder) -> str:
    """Return the parts, their balance, and the advice about the cut."""
    found = run.summary.get("partition") or {}
    found = {"rows": found} if isinstance(found, list) else found
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
    owned, halo = (sum(row.get(name) or 0 for row in rows) for name in ("vertices", "halo"))
    if owned and halo:
        facts.append(f"halo rows are {halo / owned:.2f} times the vertices")
    columns = _names(rows, ("part", "vertices", "edges", "halo"))
    numbers = table(
        [column.replace("_", " ") for column in columns],
        [[_cell(r.get(c), c) for c in columns] for r in rows],
    )
    advice = found.get("advice") or []
    for sentence in [advice] if isinstance(advice, str) else advice:
        numbers += f"<p>{escape(str(sentence))}</p>"
    lead = "; ".join(facts)
    lead = f"{lead[:1].upper()}{lead[1:]}." if lead else ""
    return section("Partition", numbers, lead) if rows or facts else ""


def notes(run: RunFolder) -> str:
    """Return the notes of the run itself."""
    items = "".join(f"<li>{escape(str(note))}</li>" for note in run.summary.get("notes") or [])
    return section("Notes", f"<ul>{items}</ul>") if items else ""


def settings(run: RunFolder) -> str:
    """Return a table of all settings."""
    groups = []
    for name, values in run.config.items():
        values = values if isinstance(values, dict) else {"value": values}
        items = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(_setting(v))}</dd>" for k, v in values.items())
        groups.append(f"<div><h3>{escape(name)}</h3><dl>{items}</dl></div>")
    return section("Settings", f'<div class="settings">{"".join(groups)}</div>') if groups else ""


def beside(*parts: str) -> str:
    """Return sections side by side where the window is wide enough; empty ones take no space."""
    there = [part for part in parts if part]
    return f'<div class="beside">{"".join(there)}</div>' if there else ""


def _series(run: RunFolder, field: str, name: str, colour: str) -> Series:
    pairs = [(float(record.epoch), getattr(record, field)) for record in run.records]
    return Series(name, f"ink-{colour}", [(x, float(y)) for x, y in pairs if y is not None])


def _names(rows: Sequence[Mapping[str, Any]], known: Sequence[str]) -> list[str]:
    """Return the keys that occur: the known ones in their order, then the others in theirs."""
    seen = dict.fromkeys(key for row in rows for key in row)
    return [name for name in known if name in seen] + [name for name in seen if name not in known]


def _density(rows: Sequence[Bar]) -> str:
    return "many" if len(rows) > 12 else "few"


def _details(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<details><summary>Numbers</summary>{table(head, rows)}</details>"


def _cell(value: Any, name: str) -> str:
    if isinstance(value, float) and (name == "cut" or "share" in name):
        return share_text(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return count_text(value)
    return "-" if value is None else str(value)


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
