"""Does history cost accuracy? Deep models by chunks with history, beside the same seeds on one device.

Run: python benchmarks/pipeline/accuracy.py --data ../shared/data   (resumes where it stopped)
     python benchmarks/pipeline/accuracy.py --hours 0               (trains nothing, writes the tables again)

How many stages the layers are cut into changes no number (tests/pipelining/test_pipeline.py), so a pipeline
of 4 stages with 16 chunks trains here as one rank with 16 chunks, and the hybrid of 2 stages by 2 parts as
two ranks with 8 chunks each. Graph parallelism gives the one device's numbers but for rounding: ``--modes
graph`` shows it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import tyro
from scipy.stats import t as student

HERE = Path(__file__).parent
RESULTS = HERE / "results_accuracy.json"
GRAPHS = {
    "squirrel": ["--data.name", "squirrel", "--data.undirected", "--data.self-loops"],
    "cora": ["--data.name", "Cora"],
    "flickr": ["--data.name", "flickr-attributed"],
    "cornell5": ["--data.name", "cornell5", "--data.project", "128"],
}
PIPE = ("--nproc", "1", "--parallel.chunks", "16")
BARE = (*PIPE, "--parallel.no-guard")
NO_SHUFFLE = ("--parallel.no-shuffle-chunks",)
NO_FREEZE = ("--parallel.history-epochs", "1")
STALE = ("--parallel.stale-gradients",)
MODES: Mapping[str, Sequence[str]] = {
    "single": ("--nproc", "1"),
    "pipe": PIPE,
    "hybrid": ("--nproc", "2", "--parallel.graph", "2", "--parallel.chunks", "8"),
    "graph": ("--nproc", "2", "--parallel.graph", "2"),  # as single, but for rounding
    "unfrozen": (*PIPE, *NO_FREEZE),  # as pipe, with rows of the last epoch in each
    "both": (*PIPE, *NO_FREEZE, *STALE),  # and gradients of the last epoch where this one has none
    # The paper's ablation, without the guard: all its techniques, each left out, none.
    "unguarded": BARE,
    "no shuffle": (*BARE, *NO_SHUFFLE),
    "no freeze": (*BARE, *NO_FREEZE),
    "stale gradients": (*BARE, *STALE),
    "no technique": (*BARE, *NO_SHUFFLE, *NO_FREEZE, *STALE),
}
QUIET = ["--report.no-page", "--report.no-trace", "--report.no-progress", "--train.no-check"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train deep models on one device and by chunks with history."""

    data: Path = Path("../shared/data")
    """Folder of raw data sets."""
    graphs: list[str] = field(default_factory=lambda: list(GRAPHS))
    """Graphs."""
    models: list[str] = field(default_factory=lambda: ["gcn2", "resgcn+", "sage", "gcn"])
    """Models."""
    modes: list[str] = field(default_factory=lambda: ["single", "pipe", "hybrid"])
    """How to train."""
    seeds: int = 10
    """Seeds, from 0."""
    layers: int = 32
    """Layers."""
    hidden: int = 100
    """Width of hidden layers."""
    epochs: int = 300
    """Epochs at most."""
    patience: int | None = 100
    """End a run whose validation accuracy has not risen for so many epochs."""
    jobs: int = 2
    """Runs at a time, a core each."""
    hours: float = 100.0
    """Begin no run after so long."""


def cases(options: Options) -> Iterator[tuple[str, str, str, int]]:
    """Graph, model, mode and seed of each run; all modes of a seed before the next seed."""
    for seed in range(options.seeds):
        for graph in options.graphs:
            for model in options.models:
                for mode in options.modes:
                    yield graph, model, mode, seed


def key_of(options: Options, graph: str, model: str, mode: str, seed: int) -> str:
    """What a run is kept under."""
    patience = "" if options.patience is None else f", patience {options.patience}"
    epochs = f"{options.epochs}{patience}"
    return f"{graph}/{model}/{mode}/{options.layers}x{options.hidden}/{epochs}/{seed}"


def train(options: Options, graph: str, model: str, mode: str, seed: int) -> dict[str, Any]:
    """One run; what its summary says."""
    folder = HERE / "runs" / key_of(options, graph, model, mode, seed).translate({ord(c): "-" for c in "/, "})
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "kagome", "train", *GRAPHS[graph], "--data.root", str(options.data)]
    command += ["--model.name", model, "--model.layers", str(options.layers)]
    command += ["--model.hidden", str(options.hidden), "--model.dropout", "0.5", "--train.lr", "0.001"]
    command += ["--train.weight-decay", "0", "--train.epochs", str(options.epochs)]
    command += [] if options.patience is None else ["--train.patience", str(options.patience)]
    command += ["--train.eval-every", "5", "--train.seed", str(seed), *MODES[mode], *QUIET]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    done = subprocess.run([*command, "--out", str(folder)], env=env, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr or done.stdout).strip().splitlines()[-1:]}
    summary = json.loads((folder / "summary.json").read_text())
    shutil.rmtree(folder, ignore_errors=True)
    notes = [note for note in summary["notes"] if "history" in note or "exact" in note]
    return {
        "test": summary["test_metric"],
        "val": summary["val_metric"],
        "best_epoch": summary["best_epoch"],
        "epoch_seconds": summary["epoch_seconds"],
        "guard": notes,
        "seconds": time.perf_counter() - begun,
    }


def main(options: Options) -> None:
    """Run what is missing, then write the tables."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    missing = [case for case in cases(options) if lacks(found.get(key_of(options, *case), {}))]
    until = time.monotonic() + options.hours * 3600

    def one(case: tuple[str, str, str, int]) -> None:
        if time.monotonic() > until:
            return
        key = key_of(options, *case)
        found[key] = train(options, *case)
        RESULTS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        print(key, found[key].get("test"), found[key].get("error", ""), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, missing))
    (HERE / "results_accuracy.md").write_text(table(found))


def lacks(row: Mapping[str, Any]) -> bool:
    """Whether a run is missing, or was watched by a guard that did otherwise."""
    return "test" not in row or "earlier" in row


def table(found: Mapping[str, Any]) -> str:
    """All runs as a table: means, and the paired difference to one device with its 95 % interval."""
    groups: dict[tuple[str, str, str, str], dict[str, dict[str, float]]] = {}
    for key, row in found.items():
        if row.get("test") is not None:
            graph, model, mode, size, epochs, seed = key.split("/")
            mode += ", earlier guard" if "earlier" in row else ""
            groups.setdefault((graph, model, size, epochs), {}).setdefault(mode, {})[seed] = 100 * row["test"]
    lines = ["| graph | model | epochs | mode | seeds | test % | less one device, same seeds | goal |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for (graph, model, size, epochs), modes in sorted(groups.items()):
        base = modes.get("single", {})
        for mode, values in modes.items():
            pairs = [value - base[seed] for seed, value in values.items() if seed in base]
            spread = f" ± {stdev(values.values()):.1f}" if len(values) > 1 else ""
            lines.append(
                f"| {graph} | {model} {size} | {epochs} | {mode} | {len(values)} "
                f"| {fmean(values.values()):.1f}{spread} | {difference(mode, pairs)} |"
            )
    return "\n".join(lines) + "\n"


def difference(mode: str, pairs: Sequence[float]) -> str:
    """The mean difference with its interval, and the goal: not wholly below -0.5 points.

    An interval on both sides of that does not miss it, and does not show more.
    """
    if mode == "single" or not pairs:
        return "- | -"
    mean = fmean(pairs)
    if len(pairs) == 1:
        return f"{mean:+.1f} | one seed"
    half = float(student.ppf(0.975, len(pairs) - 1)) * stdev(pairs) / math.sqrt(len(pairs))
    reached = "**no**" if mean + half < -0.5 else "yes" if mean - half >= -0.5 else "yes, but wide"
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f}) | {reached}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
