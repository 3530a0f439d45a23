"""What does an epoch cost as the graph, the width and the depth grow? Kagome on one device; drawn as curves.

As the graph grows, the time an edge and epoch should stay the same.

Run: python benchmarks/single_device/growth.py  (resumes where it stopped)
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trial import Result, Trial, figure, interleaved, prepare, run, warm_up

HERE = Path(__file__).parent
MODELS = ("gcn", "sage", "gat")
DEGREE, FEATURES = 21, 128
VERTICES = (50_000, 100_000, 200_000, 400_000, 800_000)
WIDTHS = (32, 64, 128, 256)
DEPTHS = (2, 4, 8, 16)
BASE = 50_000
"""Vertices of the graph on which width and depth grow."""
AXES = ("vertices", "hidden width", "layers")


def main() -> None:
    """Run the grid; write ``results_growth.json``, ``.md`` and ``.svg``."""
    options = arguments()
    do = partial(run, runs=options.runs, data=None, fresh=options.fresh, limit=options.limit)
    axes = grid(options)
    trials = [trial for axis in axes.values() for line in axis.values() for _, trial in line]
    prepare([trial.graph for trial in trials], options.runs, None, options.threads)
    if not options.smoke:
        warm_up(options.models, options.runs, options.threads)
    found = interleaved(trials, options.turns, do, lambda line: print(line, flush=True))
    results = dict(zip(trials, found, strict=True))
    told = {
        axis: {model: [point(size, results[trial]) for size, trial in line] for model, line in lines.items()}
        for axis, lines in axes.items()
    }
    told = beside_others(told, options)
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {"threads": options.threads, "turns": options.turns, "degree": DEGREE, "features": FEATURES}
    (options.out / "results_growth.json").write_text(json.dumps({"facts": facts, **told}, indent=1) + "\n")
    (options.out / "results_growth.md").write_text(text(told))
    print(text(told))
    draw(told, options.out / "results_growth.svg")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--axes", nargs="*", choices=AXES, default=list(AXES), help="what grows")
    parser.add_argument("--vertices", type=int, nargs="*", default=list(VERTICES))
    parser.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS))
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS))
    parser.add_argument("--base", type=int, default=BASE, help="vertices where width and depth grow")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of timed epochs a run, about; at least 2")
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.models, options.base, options.turns, options.epochs = ["gcn"], 200, 1, 2
        options.vertices, options.widths, options.depths = [200, 400], [8], [2]
    return options


def grid(options: argparse.Namespace) -> dict[str, dict[str, list[tuple[int, Trial]]]]:
    """What grows -> model -> (size, trial)s; else 3 layers, hidden 128 (GAT: 8 heads)."""
    limits = {"epochs": options.epochs, "seconds": options.seconds, "threads": options.threads}

    def trial(model: str, vertices: int, **more: Any) -> Trial:
        graph = f"sbm:vertices={vertices},degree={DEGREE},features={FEATURES}"
        return Trial(side="kagome", graph=graph, model=model, **more, **limits)

    base = options.base
    axes = {
        "vertices": {m: [(n, trial(m, n)) for n in options.vertices] for m in options.models},
        "hidden width": {m: [(w, trial(m, base, hidden=w)) for w in options.widths] for m in options.models},
        "layers": {m: [(d, trial(m, base, layers=d)) for d in options.depths] for m in options.models},
    }
    return {axis: lines for axis, lines in axes.items() if axis in options.axes}


def beside_others(told: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What grew, with what grew in an earlier call and not in this one, in the order of :data:`AXES`."""
    earlier = options.out / "results_growth.json"
    then = json.loads(earlier.read_text()) if earlier.exists() and not options.smoke else {}
    return {axis: told.get(axis) or then[axis] for axis in AXES if axis in told or axis in then}


def point(size: int, results: Sequence[Result]) -> dict[str, Any]:
    found = figure(results)
    if found is None:
        return {"size": size, "epoch_seconds": None, "edge_seconds": None, "peak_memory_bytes": None}
    return {
        "size": size,
        "epoch_seconds": found.seconds,
        "edge_seconds": found.seconds / results[0]["edges"],
        "spread": [found.low, found.high],
        "peak_memory_bytes": found.peak,
    }


def power(points: list[dict[str, Any]], key: str) -> float | None:
    """The exponent p of cost ~ size ** p through all points (least squares of logarithms): 1 is linear."""
    pairs = [(math.log(p["size"]), math.log(p[key])) for p in points if p.get(key)]
    if len(pairs) < 2:
        return None
    xs, ys = zip(*pairs, strict=True)
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    across = sum((a - x) ** 2 for a in xs)
    return sum((a - x) * (b - y) for a, b in pairs) / across if across else None


def text(told: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """A table for each thing that grows."""
    parts = []
    for axis, lines in told.items():
        sizes = [p["size"] for p in next(iter(lines.values()))]
        head = f"| {axis} | {' | '.join(f'{s:,}' for s in sizes)} | cost ~ size to the power |"
        rows = [head, "|---" * (len(sizes) + 2) + "|"]
        for model, points in lines.items():
            for key, name, shown in (
                ("epoch_seconds", "an epoch", lambda v: f"{1e3 * v:,.0f} ms"),
                ("edge_seconds", "an edge and epoch", lambda v: f"{1e9 * v:,.1f} ns"),
                ("peak_memory_bytes", "peak memory", lambda v: f"{v / 1e6:,.0f} MB"),
            ):
                if axis != "vertices" and key == "edge_seconds":
                    continue  # the edges stay the same: it says what the epoch says
                cells = [shown(p[key]) if p.get(key) is not None else "-" for p in points]
                exponent = power(points, key)
                last = "-" if exponent is None else f"{exponent:.2f}"
                rows.append(f"| {model}, {name} | {' | '.join(cells)} | {last} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def draw(told: dict[str, dict[str, list[dict[str, Any]]]], path: Path) -> None:
    """Two rows of curves: seconds and memory; a dotted line through the first point is linear growth."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same figures give the same file.
    mpl.rcParams.update({"svg.hashsalt": "kagome", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot as plt

    drawing, axes = plt.subplots(2, len(told), figsize=(8, 4.6), squeeze=False)
    kinds = (("epoch_seconds", "ms an epoch", 1e3), ("peak_memory_bytes", "peak memory, MB", 1e-6))
    for column, (axis, lines) in enumerate(told.items()):
        for row, (key, name, scale) in enumerate(kinds):
            place = axes[row][column]
            for model, points in lines.items():
                known = [(p["size"], scale * p[key]) for p in points if p[key]]
                if known:
                    (line,) = place.plot(*zip(*known, strict=True), marker="o", ms=3, lw=1, label=model)
                    straight = [(size, known[0][1] * size / known[0][0]) for size, _ in known]
                    place.plot(*zip(*straight, strict=True), ":", lw=0.8, color=line.get_color())
            place.set_xlabel(axis)
            place.set_ylabel(name if column == 0 else "")
            place.set_xlim(left=0)
            place.set_ylim(bottom=0)
    axes[0][0].legend(frameon=False)
    drawing.tight_layout()
    drawing.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(drawing)


if __name__ == "__main__":
    main()
