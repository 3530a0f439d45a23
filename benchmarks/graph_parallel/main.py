"""What does a rank hold, send and take, on 1, 2 and 4 ranks? Runs of one graph are interleaved, medians kept.

Run: python benchmarks/graph_parallel/main.py --data ../shared/data  (resumes where it stopped)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RANKS = (1, 2, 4)
GRAPHS = {
    "made graph, 100k vertices, 2M edges": [
        "--data.name",
        "sbm:vertices=100000,degree=20,features=128,mixing=0.1",
    ],
    "ego-twitter, 81k vertices, 2.7M edges": [
        "--data.name",
        "npz:{data}/snap/ego-twitter.npz",
        "--data.undirected",
    ],
    "Cornell5, 18.7k vertices, 1.6M edges": ["--data.name", "cornell5", "--data.project", "128"],
}
MODEL = ["--model.name", "sage", "--model.layers", "2", "--model.hidden", "128"]


def run(name: str, ranks: int, turn: int, epochs: int, data: Path) -> dict[str, object]:
    """One run's summary, from its folder."""
    folder = HERE / "runs" / f"{name.split(',')[0].replace(' ', '-')}-{ranks}-{turn}"
    done = folder / "summary.json"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        graph = [word.format(data=data.resolve()) for word in GRAPHS[name]]
        command = [
            sys.executable,
            "-m",
            "kagome",
            "train",
            *graph,
            *MODEL,
            "--nproc",
            str(ranks),
            "--out",
            str(folder),
        ]
        command += ["--train.epochs", str(epochs), "--train.eval-every", str(epochs), "--train.no-check"]
        command += ["--report.no-page", "--report.no-trace"]
        env = {**os.environ, "KAGOME_DATA": str(data.resolve())}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads(done.read_text())


def main() -> None:
    """Run the grid and write ``results.json`` and ``results.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for name in GRAPHS:
        found: dict[int, list[dict]] = {ranks: [] for ranks in RANKS}
        for turn in range(options.turns):
            for ranks in RANKS:
                found[ranks].append(run(name, ranks, turn, options.epochs, options.data))
        for ranks, runs in found.items():
            seconds = [r["epoch_seconds"] for r in runs]
            parts = runs[0]["partition"]["rows"]
            rows.append(
                {
                    "graph": name,
                    "ranks": ranks,
                    "epoch_seconds": statistics.median(seconds),
                    "spread": [min(seconds), max(seconds)],
                    "peak_memory_bytes": statistics.median(max(r["peak_memory_bytes"]) for r in runs),
                    "sent": runs[0]["bytes_per_epoch"],
                    "vertices": max(p["vertices"] for p in parts),
                    "halo": max(p["halo"] for p in parts),
                }
            )
            print(rows[-1], flush=True)
    import torch

    facts = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "model": "GraphSAGE, 2 layers, hidden 128",
        "epochs": options.epochs,
        "turns": options.turns,
    }
    (HERE / "results.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    lines = [
        "| graph | ranks | own + halo rows, fullest part | peak memory, largest rank | sent | an epoch |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['graph']} | {row['ranks']} | {row['vertices']:,} + {row['halo']:,} "
            f"| {row['peak_memory_bytes'] / 1e6:,.0f} MB | {row['sent']['total'] / 1e6:,.1f} MB "
            f"| {row['epoch_seconds']:.2f} s ({row['spread'][0]:.2f} to {row['spread'][1]:.2f}) |"
        )
    (HERE / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
