"""Figures: the four of Dearing and Wang, drawn from our runs; a panel a graph.

Where it sits: ``main`` draws them from all kept results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from settings import COUNTS, LINES, WHOLE, Setting, kagome
from tables import Figure, Kept, accuracy, graphs, provisional, seconds, told

TIMED: dict[str, Callable[[int], Setting]] = {
    "PyG, subgraphs made anew": lambda chunks: (
        Setting("rebuild", chunks=chunks) if chunks > 1 else Setting("pyg")
    ),
    "Kagome, 1 stage, dropped": partial(kagome, 1),
    "Kagome, 2 stages, dropped": partial(kagome, 2),
    "Kagome, 4 stages, dropped": partial(kagome, 4),
    "Kagome, 2 stages, history": lambda chunks: kagome(2, chunks, "history"),
    "Kagome, 2 stages, exact": lambda chunks: kagome(2, chunks, "exact"),
}


def draw(kept: Kept, out: Path) -> list[Path]:
    """Draw what there are results for."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same figures give the same file.
    mpl.rcParams.update({"svg.hashsalt": "kagome", "svg.fonttype": "none", "font.size": 8})
    mark = " (provisional)" if provisional(kept, "time") else ""
    figures: list[tuple[str, str, Callable[[Any, Kept, str], None]]] = [
        ("figure1_time_by_setting", f"ms an epoch, no micro-batches{mark}", _time_bars),
        ("figure2_accuracy_whole", "test accuracy %, no micro-batches", _accuracy_bars),
        ("figure3_time_by_micro_batches", f"ms an epoch{mark}", _time_lines),
        ("figure4_accuracy_by_micro_batches", "test accuracy %", _accuracy_lines),
    ]
    return [_figure(kept, out / f"{name}.svg", title, panel) for name, title, panel in figures]


def _figure(kept: Kept, path: Path, title: str, panel: Callable[[Any, Kept, str], None]) -> Path:
    from matplotlib import pyplot as plt

    names = graphs(kept) or [""]
    drawing, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.4), squeeze=False)
    for number, (place, graph) in enumerate(zip(axes[0], names, strict=True)):
        panel(place, kept, graph)
        place.set_title(graph)
        place.set_ylabel(title if number == 0 else "")
    drawing.tight_layout()
    drawing.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(drawing)
    return path


def _time_bars(place: Any, kept: Kept, graph: str) -> None:
    found = {told(setting)[0]: seconds(kept, graph, setting) for setting in WHOLE}
    bars = {name: taken for name, taken in found.items() if taken}
    values = [1e3 * taken.value for taken in bars.values()]
    ends = [
        [1e3 * (taken.value - taken.low) for taken in bars.values()],
        [1e3 * (taken.high - taken.value) for taken in bars.values()],
    ]
    _bars(place, list(bars), values, ends)


def _accuracy_bars(place: Any, kept: Kept, graph: str) -> None:
    found = {told(setting)[0]: accuracy(kept, graph, setting) for setting in WHOLE}
    bars = {name: value for name, value in found.items() if value}
    deviations = [value.deviation for value in bars.values()]
    _bars(place, list(bars), [value.value for value in bars.values()], [deviations, deviations])


def _bars(place: Any, names: list[str], values: list[float], ends: list[list[float]]) -> None:
    drawn = place.bar([name.replace(", ", ",\n") for name in names], values, yerr=ends, capsize=2, color="C0")
    place.bar_label(drawn, [f"{value:.1f}" for value in values], label_type="center", color="white")


def _time_lines(place: Any, kept: Kept, graph: str) -> None:
    for name, setting in TIMED.items():
        points = {chunks: seconds(kept, graph, setting(chunks)) for chunks in COUNTS}
        _line(place, name, {at: taken for at, taken in points.items() if taken}, 1e3)
    place.set_ylim(bottom=0)
    _counts(place)


def _accuracy_lines(place: Any, kept: Kept, graph: str) -> None:
    for cross, partitioner in LINES:
        label = ", ".join(("dropped" if cross == "drop" else cross, *(["METIS"] * (partitioner == "metis"))))
        for column in ("test", "test_dropped") if cross == "drop" else ("test",):
            points = {
                chunks: accuracy(kept, graph, kagome(1, chunks, cross, partitioner), column)
                for chunks in COUNTS[1:]
            }
            whole = accuracy(kept, graph, kagome(1))
            name = label if column == "test" else f"{label}, evaluated so too"
            _line(place, name, {at: v for at, v in {1: whole, **points}.items() if v}, 1.0)
    other = place.twinx()
    for partitioner, style in (("contiguous", ":"), ("metis", "-.")):
        shares = {
            chunks: accuracy(kept, graph, kagome(1, chunks, "drop", partitioner), "lost")
            for chunks in COUNTS[1:]
        }
        known = [(1, 0.0), *((at, share.value) for at, share in shares.items() if share)]
        order = "METIS" if partitioner == "metis" else "consecutive"
        other.plot(*zip(*known, strict=True), style, color="grey", lw=0.8, label=f"edges lost, {order}")
    other.set_ylim(0, 100)
    other.set_ylabel("edges lost %")
    other.legend(frameon=False, loc="lower right", fontsize=6)
    _counts(place)


def _line(place: Any, name: str, points: dict[int, Figure], scale: float) -> None:
    if points:
        values = [scale * value.value for value in points.values()]
        ends = [scale * value.deviation for value in points.values()]
        place.errorbar(list(points), values, yerr=ends, marker="o", ms=3, lw=1, capsize=2, label=name)


def _counts(place: Any) -> None:
    place.set_xscale("log", base=2)
    place.set_xticks(COUNTS, [str(count) for count in COUNTS])
    place.set_xlabel("micro-batches")
    if place.get_legend_handles_labels()[0]:
        place.legend(frameon=False, loc="lower left", fontsize=6)
