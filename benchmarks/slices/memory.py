"""What do sums within a quarter of their working set cost? Interleaved.

Run: python benchmarks/slices/memory.py    (about 2 minutes)

Two ranks of one thread each, interleaved. The working set is what the sums take in one piece, as a run with
a bound that nothing meets reports it; then a quarter of that is the bound.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

HERE = Path(__file__).parent
ENOUGH = "64"
"""GiB that no sum here needs."""
QUIET = ["--report.no-page", "--report.no-trace", "--report.no-progress"]
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time epochs of a GCN in feature slices on the made graph of 100k vertices and 2.1M edges."""

    graph: str = "sbm:vertices=100000,degree=21,features=128"
    """Graph."""
    layers: int = 3
    """Layers."""
    hidden: int = 128
    """Width."""
    turns: int = 3
    """Runs of each."""
    epochs: int = 6
    """Of a run; the first is not counted."""
    out: Path = HERE
    """Folder of the results."""


def run(flags: Sequence[str], options: Options) -> dict[str, Any]:
    """One run: its median epoch, and what it took."""
    folder = options.out / "runs" / "memory"
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, "-m", "kagome", "train", "--data.name", options.graph, "--nproc", "2"]
    words += ["--model.name", "gcn", "--parallel.tensor", "2"]
    words += ["--model.layers", str(options.layers), "--model.hidden", str(options.hidden)]
    words += ["--train.epochs", str(options.epochs)]
    words += ["--train.eval-every", str(options.epochs), "--train.no-check", *QUIET]
    words += ["--out", str(folder), *flags]
    done = subprocess.run(words, env={**os.environ, **THREADS}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit("\n".join((done.stderr or done.stdout).splitlines()[-20:]))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "seconds": statistics.median(line["seconds"] for line in lines[1:]),
        "working": summary.get("working_memory_bytes", 0),
        "peak": max(summary["peak_memory_bytes"]),
        "loss": lines[-1]["loss"],
        "bytes": summary["bytes_per_epoch"]["transpose"],
    }


def table(rows: Mapping[str, Sequence[Mapping[str, Any]]], bound: int) -> str:
    """The rows as Markdown."""
    base = _seconds(rows["in one piece"])
    lines = [
        "| | an epoch | times | working memory of sums | peak memory | loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in rows.items():
        taken = [one["seconds"] for one in runs]
        middle = statistics.median(taken)
        one = runs[0]
        lines.append(
            f"| {name} | {1e3 * middle:,.0f} ms ({1e3 * min(taken):,.0f} to {1e3 * max(taken):,.0f}) "
            f"| {middle / base:.2f} | {one['working'] / 1e6:,.1f} MB "
            f"| {one['peak'] / 1e6:,.0f} MB | {one['loss']:.6f} |"
        )
    return "\n".join([*lines, "", f"The bound is {bound / 1e6:,.1f} MB."]) + "\n"


def _seconds(runs: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(one["seconds"] for one in runs)


def main(options: Options) -> None:
    """Find the working set, then run all in turn; write ``results_memory.json`` and ``.md``."""
    whole = run(["--parallel.memory-gib", ENOUGH], options)
    bound = whole["working"] // 4
    quarter = ["--parallel.memory-gib", str(bound / 2**30)]
    ways = {
        "without a bound": [],
        "in one piece": ["--parallel.memory-gib", ENOUGH],
        "a quarter": quarter,
    }
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(options.turns):
        for name, flags in ways.items():
            rows[name].append(run(flags, options))
            print(name, rows[name][-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results_memory.json").write_text(
        json.dumps({"bound": bound, "rows": rows}, indent=1) + "\n"
    )
    (options.out / "results_memory.md").write_text(table(rows, bound))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
