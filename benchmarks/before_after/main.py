"""Is any way of training slower than it was at another commit? Two checkouts, run by turns.

Run as ``python benchmarks/before_after/main.py --before CHECKOUT [--turns 5]``; see README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GRAPH = "sbm:vertices=20000,degree=20,features=128,classes=8,communities=8"
EPOCHS, SETTLED = 14, 4
"""Epochs of a run, and from which on they are timed."""
CASES: dict[str, str] = {
    "gcn, 1 rank": "--model.name gcn",
    "sage, 1 rank": "--model.name sage",
    "gat, 1 rank": "--model.name gat --model.heads 4",
    "gcn, 2 parts": "--model.name gcn --parallel.graph 2 --nproc 2",
    "gat, 2 parts": "--model.name gat --model.heads 4 --parallel.graph 2 --nproc 2",
    "gcn, 2 parts, one bit, late": (
        "--model.name gcn --parallel.graph 2 --parallel.codec onebit --parallel.max-age 1 --nproc 2"
    ),
    "gcn, 2 slices": "--model.name gcn --parallel.tensor 2 --nproc 2",
    "gcn2, 2 stages, history": (
        "--model.name gcn2 --model.layers 8 --parallel.pipe 2 --parallel.chunks 4 --nproc 2"
    ),
    "gcn, 2 stages, exact": (
        "--model.name gcn --parallel.pipe 2 --parallel.chunks 4 --parallel.cross-chunk exact --nproc 2"
    ),
}


def run(checkout: Path, flags: str) -> dict[str, float]:
    """Train once by a checkout's own code.

    Returns:
        ``epoch``: the median of settled epochs; ``command``: the whole command; seconds of the wall.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kagome.cli", "train", "--data.name", GRAPH]
        command += ["--model.layers", "3", "--model.hidden", "128", *flags.split()]
        command += ["--train.epochs", str(EPOCHS), "--out", f"{folder}/out"]
        env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        begin = time.perf_counter()
        subprocess.run(command, env=env, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - begin
        lines = Path(folder, "out", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = [json.loads(line)["seconds"] for line in lines][SETTLED:]
        return {"epoch": statistics.median(seconds), "command": whole}


def pairs(before: Path, case: str, turns: int, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """So many pairs of runs, of which those that were kept are not run again; who goes first alternates."""
    rows = list(kept)
    while len(rows) < turns:
        sides = {"before": before, "now": ROOT}
        order = sorted(sides, reverse=bool(len(rows) % 2))
        found = {name: run(sides[name], CASES[case]) for name in order}
        rows.append(found)
        ratios = ", ".join(
            f"{what} {found['now'][what] / found['before'][what]:.3f}" for what in found["now"]
        )
        print(f"{case}: {ratios}", flush=True)
    return rows


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Medians, and the ratios of the pairs: their median, least and most."""
    lines = [
        "| case | pairs | epoch before | now | ratio | command before | now | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, rows in results.items():
        cells = [case, str(len(rows))]
        for what in ("epoch", "command"):
            old, new = ([row[side][what] for row in rows] for side in ("before", "now"))
            ratios = [late / early for early, late in zip(old, new, strict=True)]
            cells += [f"{statistics.median(old):.3f} s", f"{statistics.median(new):.3f} s"]
            cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the pairs that are missing and write ``results.json`` and ``results.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--fresh", action="store_true", help="throw away what was run before")
    arguments = parser.parse_args()
    path = HERE / "results.json"
    results = {} if arguments.fresh or not path.exists() else json.loads(path.read_text(encoding="utf-8"))
    for case in arguments.only:
        results[case] = pairs(arguments.before, case, arguments.turns, results.get(case, []))
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (HERE / "results.md").write_text(table(results) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
