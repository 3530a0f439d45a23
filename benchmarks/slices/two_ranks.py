"""What do parts and slices, coupled and decoupled, take on two ranks of one thread each? Interleaved.

Run: python benchmarks/slices/two_ranks.py    (about 4 minutes)
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

HERE = Path(__file__).parent
CUTS = {
    "parts": ["--parallel.graph", "2"],
    "slices": ["--parallel.tensor", "2"],
    "parts, decoupled": ["--parallel.graph", "2", "--parallel.decouple"],
    "slices, decoupled": ["--parallel.tensor", "2", "--parallel.decouple"],
}
NEUTRON = 218
"""Milliseconds of NeutronTP's own code for the decoupled model, on another machine of this kind, on which one
rank takes 0.55 of the time that it takes here; not run here."""
QUIET = ["--report.no-page", "--report.no-trace", "--report.no-progress"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time epochs of 3 layers, hidden 128, 16 classes, on the made graph of 100k vertices and 2.1M edges."""

    graph: str = "sbm:vertices=100000,degree=21,features=128"
    """Graph."""
    models: tuple[str, ...] = ("gcn", "gat")
    """Models."""
    turns: int = 3
    """Runs of each."""
    epochs: int = 9
    """Of a run; the first is not counted."""
    out: Path = HERE
    """Folder of the results."""


def dense(rows: int) -> float:
    """Seconds of the decoupled model's dense products alone, forward and back, for so many rows."""
    import torch

    from kagome.sparse_ops.linear import linear

    x = torch.randn(rows, 128)
    weights = [torch.randn(fan_out, 128).requires_grad_() for fan_out in (128, 128, 16)]
    taken = []
    for _ in range(7):
        begun, y = time.perf_counter(), x
        for place, weight in enumerate(weights):
            y = linear(y, weight)
            y = y.relu() if place < len(weights) - 1 else y
        y.sum().backward()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[2:])


def run(model: str, cut: str, options: Options) -> dict[str, Any]:
    """One run's median epoch and bytes."""
    folder = options.out / "runs" / "two-ranks"
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, "-m", "kagome", "train", "--data.name", options.graph, "--nproc", "2"]
    words += ["--model.name", model, "--model.layers", "3", "--model.hidden", "128", "--model.dropout", "0"]
    words += ["--train.epochs", str(options.epochs), "--train.eval-every", str(options.epochs)]
    words += ["--train.no-check", *QUIET, "--out", str(folder), *CUTS[cut]]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    done = subprocess.run(
        words, env={**os.environ, **dict.fromkeys(names, "1")}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit("\n".join((done.stderr or done.stdout).splitlines()[-20:]))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "seconds": statistics.median(line["seconds"] for line in lines[1:]),
        "bytes": summary["bytes_per_epoch"]["total"],
        "peak_memory_bytes": max(summary["peak_memory_bytes"]),
    }


def table(rows: dict[str, dict[str, list[dict[str, Any]]]], floor: float) -> str:
    """The rows as Markdown."""
    lines = ["| model | cut | an epoch | sent | peak memory |", "|---|---|---|---|---|"]
    for model, cuts in rows.items():
        for cut, runs in cuts.items():
            taken = [1e3 * one["seconds"] for one in runs]
            middle = statistics.median(taken)
            lines.append(
                f"| {model} | {cut} | {middle:,.0f} ms ({min(taken):,.0f} to {max(taken):,.0f}) | "
                f"{runs[0]['bytes'] / 1e6:,.1f} MB | {runs[0]['peak_memory_bytes'] / 1e6:,.0f} MB |"
            )
    lines += [
        "",
        f"Dense products of the decoupled GCN alone, a rank's rows, one thread: {1e3 * floor:,.0f} ms. "
        f"NeutronTP's own code: {NEUTRON} ms, on a machine on which one rank takes 0.55 of the time (not run "
        "here).",
    ]
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    """Run the grid, one after the other; write ``results_two_ranks.json`` and ``.md``."""
    import torch

    rows: dict[str, dict[str, list[dict[str, Any]]]] = {
        model: {cut: [] for cut in CUTS} for model in options.models
    }
    for _ in range(options.turns):
        for model in options.models:
            for cut in CUTS:
                rows[model][cut].append(run(model, cut, options))
                print(model, cut, rows[model][cut][-1], flush=True)
    torch.set_num_threads(1)
    floor = dense(50_000)
    options.out.mkdir(parents=True, exist_ok=True)
    told = {"rows": rows, "dense_seconds": floor, "torch": torch.__version__}
    (options.out / "results_two_ranks.json").write_text(json.dumps(told, indent=1) + "\n")
    (options.out / "results_two_ranks.md").write_text(table(rows, floor))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
