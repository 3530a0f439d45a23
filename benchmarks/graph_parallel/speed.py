"""Are 2 ranks faster than 1, one thread each, and than public systems? Interleaved, medians kept.

Run: python benchmarks/graph_parallel/speed.py  (resumes where it stopped)
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
from typing import Any

HERE = Path(__file__).parent
GRAPH = "sbm:vertices=100000,degree=21,features=128"
TINY = "sbm:vertices=300,degree=6,features=16,classes=4"
HIDDEN = 128
SHAPES = {"SAGE, 3 layers": ("sage", 3), "GCN, 3 layers": ("gcn", 3), "GCN, 2 layers": ("gcn", 2)}
PUBLIC = {
    "SAGE, 3 layers": {"SAR": 460, "BNS-GCN": 875, "PipeGCN": 990},
    "GCN, 3 layers": {"SANCUS": 686},
    "GCN, 2 layers": {"CAGNET 1D": 497, "NeutronStarLite": 1487},
}
"""Milliseconds an epoch of 2 ranks with one thread each, measured before on a machine of this kind: 100k
vertices, 2.1M edges, hidden 128."""
FASTER, OF_THE_BEST = 1.7, 0.8


def cut(ranks: int, options: argparse.Namespace) -> Path:
    """The graph in parts, made once: no run's time or memory has the cutting in it."""
    folder = parts_of(ranks, options)
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        graph = TINY if options.smoke else GRAPH
        kagome(options, "partition", "--data.name", graph, "--parts", str(ranks), "--out", str(part))
        part.rename(folder)
    return folder


def parts_of(ranks: int, options: argparse.Namespace) -> Path:
    """The folder of the parts for so many ranks."""
    return Path(options.runs) / f"parts-{'tiny' if options.smoke else 'made'}-{ranks}"


def run(name: str, ranks: int, turn: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run's summary, from its folder."""
    words = f"speed-{name}-{ranks}-{turn}-{options.epochs}-{options.threads}"
    folder = options.runs / (words.replace(", ", "-").replace(" ", "-") + ("-tiny" if options.smoke else ""))
    done = folder / "summary.json"
    if options.fresh or not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        model, layers = SHAPES[name]
        parts = cut(ranks, options)
        command = ["train", "--data.partition", str(parts), "--nproc", str(ranks), "--out", str(folder)]
        command += ["--model.name", model, "--model.layers", str(layers), "--model.hidden", str(HIDDEN)]
        command += ["--model.dropout", "0", "--train.epochs", str(options.epochs), "--train.no-check"]
        command += ["--train.eval-every", str(options.epochs), "--report.no-page", "--report.no-trace"]
        kagome(options, *command)
    found = dict(json.loads(done.read_text()))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The first epoch builds what the others use.
    found["seconds"] = statistics.median(line["seconds"] for line in lines[1:])
    return found


def kagome(options: argparse.Namespace, *words: str) -> None:
    """Run a command of Kagome with so many threads a rank, and with the variables ``options.env``.

    Raises:
        SystemExit: If it fails, with the last lines of what it said.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    env = {**os.environ, **options.env, **dict.fromkeys(names, str(options.threads))}
    done = subprocess.run(
        [sys.executable, "-m", "kagome", *words], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit("\n".join((done.stderr or done.stdout).splitlines()[-20:]))


def moving(summary: dict[str, Any]) -> dict[str, Any]:
    """What the summary says of the wires: seconds a rank waits an epoch; shares hidden, by kind."""
    shares = summary.get("hidden_share") or {}
    waited = summary.get("waited_per_epoch")
    return {
        "waited_seconds": sum(waited.values()) if waited else None,
        "hidden_share": {kind: shares[kind] for kind in ("halo", "weights") if kind in shares},
    }


def row(name: str, found: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """One shape's figures."""
    one, two = ([r["seconds"] for r in found[ranks]] for ranks in (1, 2))
    pairs = [a / b for a, b in zip(one, two, strict=True)]
    peaks = {k: statistics.median(max(r["peak_memory_bytes"]) for r in runs) for k, runs in found.items()}
    best = min(PUBLIC[name].values()) / 1e3
    middle = statistics.median(two)
    return {
        "shape": name,
        "seconds": {ranks: [statistics.median(s), min(s), max(s)] for ranks, s in ((1, one), (2, two))},
        "faster": [statistics.median(one) / middle, min(pairs), max(pairs)],
        "public_ms": PUBLIC[name],
        "of_the_best": middle / best,
        "peak_memory_bytes": peaks,
        "bytes_per_epoch": found[2][0]["bytes_per_epoch"]["total"],
        **moving(found[2][-1]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| hidden 128 | 1 rank | 2 ranks | times faster | best public system | of its time "
        "| sent an epoch | waited an epoch, a rank | hidden | peak memory, 1 / 2 ranks |",
        "|---" * 10 + "|",
    ]
    for r in rows:
        times = [f"{1e3 * m:,.0f} ms ({1e3 * a:,.0f} to {1e3 * b:,.0f})" for m, a, b in r["seconds"].values()]
        middle, low, high = r["faster"]
        best = min(r["public_ms"], key=r["public_ms"].get)
        waited = "-" if r["waited_seconds"] is None else f"{1e3 * r['waited_seconds']:,.1f} ms"
        hidden = ", ".join(f"{kind} {share:.0%}" for kind, share in r["hidden_share"].items()) or "-"
        cells = [r["shape"], *times]
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f}); at least {FASTER}: {said(middle >= FASTER)}")
        cells.append(f"{best}, {r['public_ms'][best]} ms")
        share = r["of_the_best"]
        cells.append(f"{share:.2f}; at most {OF_THE_BEST}: {said(share <= OF_THE_BEST)}")
        cells += [f"{r['bytes_per_epoch'] / 1e6:,.1f} MB", waited, hidden]
        cells.append(" / ".join(f"{size / 1e6:,.0f} MB" for size in r["peak_memory_bytes"].values()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def said(holds: bool) -> str:
    return "yes" if holds else "**no**"


def main() -> None:
    """Run the grid and write ``results_speed.json`` and ``results_speed.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--epochs", type=int, default=9, help="of a run; the first is not counted")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="a rank")
    parser.add_argument("--fresh", action="store_true", help="run again what is there")
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--smoke", action="store_true", help="a tiny graph, to see that it works")
    parser.set_defaults(env={})
    options = parser.parse_args()
    if options.smoke:
        options.only, options.turns, options.epochs = options.only[:1], 1, 3
    options.runs.mkdir(parents=True, exist_ok=True)
    for ranks in (1, 2):
        if options.fresh:
            shutil.rmtree(parts_of(ranks, options), ignore_errors=True)
    rows = []
    for name in options.only:
        found: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
        for turn in range(options.turns):
            for ranks, runs in found.items():
                runs.append(run(name, ranks, turn, options))
        rows.append(row(name, found))
        print(rows[-1], flush=True)
    import torch

    facts = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "graph": GRAPH,
        "threads": options.threads,
        "epochs": options.epochs,
        "turns": options.turns,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    told = json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n"
    (options.out / "results_speed.json").write_text(told)
    (options.out / "results_speed.md").write_text(table(rows))


if __name__ == "__main__":
    main()
