"""What does one rank hold at its peak? Kagome, PyG over edges, PyG over CSR and DGL, tensor by tensor.

Run: python benchmarks/memory/main.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "single_device"))

SIDES = {"kagome": "Kagome", "csr": "PyG CSR", "edge_index": "PyG edge_index", "dgl": "DGL"}
MODELS = ("gcn", "sage", "gat")
MB = 1e6


def main() -> None:
    """Run every side of every model in a process of its own, twice, and write the results."""
    options = arguments()
    if options.one:
        import one_run

        one_run.main(json.loads(options.one), options.runs)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "results.json"
    rows = [] if options.fresh or not kept.exists() else json.loads(kept.read_text())
    for model in options.models:
        for side in options.sides:
            if side == "csr" and model == "gat":
                continue  # a weight an edge comes out of every forward: PyG has no product with an adjacency
            if any((row["model"], row["side"], row["graph"]) == (model, side, options.graph) for row in rows):
                continue
            row = measured(model, side, options)
            print(model, side, row.get("error") or f"{row['peak'] / MB:,.0f} MB", flush=True)
            rows.append(row)
            kept.write_text(json.dumps(rows, indent=1) + "\n")
    (options.out / "results.md").write_text(text(rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="made", help="a graph of benchmarks/single_device, or sbm:...")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sides", nargs="*", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--fresh", action="store_true", help="run again what results.json holds")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.graph, options.models, options.sides = "tiny", ["gcn"], ["kagome", "edge_index"]
        options.epochs = 2
    return options


def measured(model: str, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """A run that nothing watches, for the process; and one of one epoch, for its tensors."""
    row: dict[str, Any] = {"model": model, "side": side, "graph": options.graph}
    for watched in (False, True):
        what = {
            **row,
            "watched": watched,
            "epochs": 1 if watched else options.epochs,
            "threads": options.threads,
        }
        words = [str(HERE / "main.py"), "--one", json.dumps(what), "--runs", str(options.runs)]
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(options.threads)
        )
        done = subprocess.run(
            [sys.executable, *words], env=os.environ | threads, capture_output=True, text=True
        )
        if done.returncode:
            return {**row, "error": (done.stderr.strip().splitlines() or ["failed"])[-1]}
        row |= json.loads(done.stdout.splitlines()[-1])
    return row


# Text --------------------------------------------------------------------------------------------


def text(rows: Sequence[dict[str, Any]]) -> str:
    """The process of every side, then the tensors at the peak of each."""
    lines = [
        "| model | side | peak of the process | tensors at their peak | freed and kept at the end "
        "| page faults an epoch | system time an epoch | processor time an epoch |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['model']} | {SIDES[row['side']]} | {row['error']} |" + " |" * 5)
            continue
        cells = (
            *(f"{row['peak'] / MB:,.0f} MB", f"{row['peak_tensors']['live'] / MB:,.0f} MB"),
            *(f"{row['freed'] / MB:,.0f} MB", f"{row['faults']:,.0f}"),
            *(f"{1e3 * row['system']:,.0f} ms", f"{1e3 * row['processor']:,.0f} ms"),
        )
        lines.append(f"| {row['model']} | {SIDES[row['side']]} | {' | '.join(cells)} |")
    for row in rows:
        if "error" in row:
            continue
        lines += ["", f"## {row['model']}, {SIDES[row['side']]}", ""]
        lines += ["| bytes | tensor | layer | made by | held for |", "|---|---|---|---|---|"]
        for each in row["peak_tensors"]["largest"]:
            cells = (
                *(f"{each['bytes'] / MB:,.1f} MB", f"{each['dtype']} {list(each['shape'])}"),
                *(each["layer"] or "-", f"`{each['made_by']}`" if each["made_by"] else "-", each["reason"]),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
