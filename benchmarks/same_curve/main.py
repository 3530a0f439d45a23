"""Does a run's curve depend on the number of ranks? Real graphs on 1, 2, 3 and 4 ranks, dropout on.

Run: python benchmarks/same_curve/main.py --data ../shared/data  (resumes where it stopped)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNS = {
    "Cora-gcn": ["--data.name", "Cora", "--model.name", "gcn"],
    "Cora-gat": ["--data.name", "Cora", "--model.name", "gat", "--train.lr", "0.005"],
    "Cora-gcn2-16": ["--data.name", "Cora", "--model.name", "gcn2", "--model.layers", "16"],
    "Cora-appnp": ["--data.name", "Cora", "--model.name", "appnp"],
    "Tolokers-sage": ["--data.name", "Tolokers", "--model.name", "sage", "--train.metric", "roc_auc",
                      "--train.weight-decay", "0"],
    "squirrel-gcn": ["--data.name", "squirrel", "--model.name", "gcn", "--data.undirected",
                     "--data.self-loops"],
}  # fmt: skip


def run(name: str, ranks: int, epochs: int, data: Path) -> dict[str, object]:
    """Train once; the curve and the summary, from the run's own files."""
    folder = HERE / "runs" / f"{name}-{ranks}"
    done = folder / "summary.json"
    if not done.exists():
        command = [
            sys.executable,
            "-m",
            "kagome",
            "train",
            *RUNS[name],
            "--nproc",
            str(ranks),
            "--out",
            str(folder),
        ]
        command += ["--train.epochs", str(epochs), "--report.no-page", "--report.no-trace"]
        env = {**os.environ, "KAGOME_DATA": str(data.resolve())}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"curve": curve, "summary": json.loads(done.read_text())}


def main() -> None:
    """Run the grid and write ``results.json`` and ``results.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=list(RUNS))
    options = parser.parse_args()
    rows = []
    for name in options.only:
        runs = {ranks: run(name, ranks, options.epochs, options.data) for ranks in (1, 2, 3, 4)}
        one = runs[1]["curve"]
        row: dict[str, object] = {"run": name, "metric": runs[1]["summary"]["metric_name"]}
        for ranks, found in runs.items():
            pairs = list(zip(one, found["curve"], strict=True))
            summary = found["summary"]
            row[str(ranks)] = {
                "test": summary["test_metric"],
                "largest_loss_difference": max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs),
                "loss_difference_after_10_epochs": abs(pairs[9][0]["loss"] - pairs[9][1]["loss"])
                / pairs[9][0]["loss"],
                "largest_val_difference": max(abs(a["val_metric"] - b["val_metric"]) for a, b in pairs),
                "best_epoch": summary["best_epoch"],
                "memory": summary["peak_memory_bytes"],
                "bytes": summary["bytes_per_epoch"],
            }
        rows.append(row)
        print(
            json.dumps(
                {k: v if not isinstance(v, dict) else {a: v[a] for a in list(v)[:4]} for k, v in row.items()}
            )
        )
    import torch

    facts = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "epochs": options.epochs,
    }
    (HERE / "results.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    lines = [
        "| run | metric | test on 1 / 2 / 3 / 4 ranks | largest difference of validation metric, any epoch "
        "| largest relative difference of loss: epoch 10 / any |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row[str(r)] for r in (1, 2, 3, 4)]
        tests = " / ".join(f"{c['test']:.4f}" for c in cells)
        val = max(c["largest_val_difference"] for c in cells)
        ten = max(c["loss_difference_after_10_epochs"] for c in cells)
        loss = max(c["largest_loss_difference"] for c in cells)
        lines.append(f"| {row['run']} | {row['metric']} | {tests} | {val:.4f} | {ten:.1e} / {loss:.1e} |")
    (HERE / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
