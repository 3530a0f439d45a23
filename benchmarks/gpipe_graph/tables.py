"""Tables: results of all seeds and turns put together, as Markdown.

Where it sits: ``main`` writes what it gives; ``figures`` draws the same numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from settings import Kind, Setting, for_accuracy, for_time, key

Kept = Mapping[str, Any]
MOST = 1000
"""Seeds or turns that are looked for."""


@dataclass(frozen=True)
class Figure:
    """A mean (of times: the median) over so many runs, with its spread."""

    value: float
    low: float
    high: float
    deviation: float
    runs: int


def graphs(kept: Kept) -> list[str]:
    """Those that there are results of; Cora first."""
    return sorted({name.split("/")[1] for name in kept}, key=lambda name: (name != "Cora", name))


def rows(kept: Kept, kind: Kind, graph: str, name: str) -> list[dict[str, Any]]:
    """All runs of a setting."""
    found = (kept.get(key(kind, graph, name, number)) for number in range(MOST))
    return [row for row in found if row is not None]


def accuracy(kept: Kept, graph: str, setting: Setting, column: str = "test") -> Figure | None:
    """Over seeds, in per cent."""
    found = rows(kept, "accuracy", graph, setting.name)
    values = [100 * row[column] for row in found if column in row]
    return _figure(values, statistics.fmean(values)) if values else None


def seconds(kept: Kept, graph: str, setting: Setting) -> Figure | None:
    """Of an epoch, over turns."""
    values = [row["seconds"] for row in rows(kept, "time", graph, setting.name)]
    return _figure(values, statistics.median(values)) if values else None


def provisional(kept: Kept, kind: Kind) -> bool:
    """Whether some results of a kind are to be taken again."""
    return any(row.get("provisional") for name, row in kept.items() if name.startswith(kind))


def told(setting: Setting) -> tuple[str, str]:
    """A setting in words: who trains on how many stages; what micro-batches read."""
    name = {"pyg": "PyG", "dgl": "DGL", "rebuild": "PyG, subgraphs made anew", "kagome": "Kagome"}
    who = name[setting.side]
    if setting.side == "kagome":
        who += f", {setting.pipe} stage{'s' * (setting.pipe > 1)}"
    reads = {"drop": "edges dropped", "history": "history", "exact": "exact"}[setting.cross]
    order = "METIS" if setting.partitioner == "metis" else "consecutive"
    return who, "-" if setting.chunks == 1 else f"{reads}, {order}"


def text(kept: Kept) -> str:
    """Both tables."""
    parts = []
    for graph in graphs(kept):
        parts.append(f"## {graph}\n")
        parts += [part for part in (_accuracies(kept, graph), _times(kept, graph)) if part]
    if provisional(kept, "time"):
        parts.append("Times are provisional: other programs ran beside some of them.\n")
    if provisional(kept, "accuracy"):
        parts.append("Seeds with a * are provisional: they are to be run again.\n")
    machines = sorted({row["machine"] for row in kept.values()})
    parts.append(f"Machine: {'; '.join(machines)}.\n")
    return "\n".join(parts)


def _accuracies(kept: Kept, graph: str) -> str:
    lines = [
        "| trained by | micro-batches | between them | test % | validation % | training % "
        "| test %, evaluated without these edges | edges lost % (by chance) | seeds |",
        "|---" * 9 + "|",
    ]
    for setting in for_accuracy():
        test = accuracy(kept, graph, setting)
        if test is None:
            continue
        columns = [accuracy(kept, graph, setting, name) for name in ("val", "train_plain", "test_dropped")]
        val, train, dropped = (spread(value) for value in columns)
        lost, chance = (accuracy(kept, graph, setting, name) for name in ("lost", "by_chance"))
        edges = f"{lost.value:.1f} ({chance.value:.1f})" if lost and chance else "-"
        who, reads = told(setting)
        again = any(row.get("provisional") for row in rows(kept, "accuracy", graph, setting.name))
        mark = " *" if again else ""
        cells = [
            who,
            str(setting.chunks),
            reads,
            spread(test),
            val,
            train,
            dropped,
            edges,
            f"{test.runs}{mark}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""]) if len(lines) > 2 else ""


def _times(kept: Kept, graph: str) -> str:
    lines = ["| trained by | micro-batches | between them | ms an epoch (least to most) | turns |"]
    lines.append("|---" * 5 + "|")
    for setting in for_time():
        taken = seconds(kept, graph, setting)
        if taken is None:
            continue
        ms = f"{1e3 * taken.value:.0f} ({1e3 * taken.low:.0f} to {1e3 * taken.high:.0f})"
        who, reads = told(setting)
        lines.append(f"| {who} | {setting.chunks} | {reads} | {ms} | {taken.runs} |")
    return "\n".join([*lines, ""]) if len(lines) > 2 else ""


def spread(value: Figure | None) -> str:
    """A mean and its deviation."""
    if value is None:
        return "-"
    return f"{value.value:.1f} ± {value.deviation:.1f}" if value.runs > 1 else f"{value.value:.1f}"


def _figure(values: list[float], middle: float) -> Figure:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Figure(middle, min(values), max(values), deviation, len(values))
