"""Is a pipeline over layers faster than graph parallelism, and on which links? On hosts emulated here.

Run: python benchmarks/pipeline/speed.py    (as root; resumes where it stopped)
     python benchmarks/pipeline/speed.py --graphs cornell5 --models gcn --rates 250 1000 --hours 1
     python benchmarks/pipeline/speed.py --hours 0    (measures nothing, writes the tables again)
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import tyro

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from cluster import Cluster, NotPermittedError, default_share, end_on_sigterm  # noqa: E402
from pipeline import tables  # noqa: E402

GRAPHS = {
    "cornell5": ["--data.name", "cornell5", "--data.project", "128"],
    "squirrel": ["--data.name", "squirrel", "--data.self-loops"],
    "flickr": ["--data.name", "flickr-attributed"],
    "flickr-128": ["--data.name", "flickr-attributed", "--data.project", "128"],
    "tolokers": ["--data.name", "Tolokers"],
    "squirrel-128": ["--data.name", "squirrel", "--data.self-loops", "--data.project", "128"],
    "slashdot": ["--data.name", "npz:{data}/snap/soc-slashdot0902.npz"],
    "digits": ["--data.name", "digits"],
}
NAMES = {"graph": "graph={graph}", "pipe": "pipe={pipe}", "hybrid": "pipe={pipe} x graph={graph}"}
TRAIN = ["--model.dropout", "0.5", "--train.lr", "0.001", "--train.weight-decay", "0"]
TRAIN += ["--train.eval-every", "1000", "--train.no-check", "--parallel.no-shared-memory"]
QUIET = ["--report.no-page", "--report.no-trace", "--report.no-progress"]
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure epochs of graph parallelism, pipelines and both, on emulated hosts."""

    graphs: list[str] = field(default_factory=lambda: ["cornell5", "squirrel", "flickr", "tolokers"])
    """Graphs (also: digits, which needs no files)."""
    models: list[str] = field(default_factory=lambda: ["gcn", "sage", "gcn2", "resgcn+"])
    """Models, by the names that kagome train knows."""
    meshes: list[str] = field(default_factory=lambda: list(NAMES))
    """How ranks share the work: graph, pipe, hybrid (two stages)."""
    rates: list[float] = field(default_factory=lambda: [100.0, 250.0, 500.0, 1000.0])
    """Mbit/s of each host's link, each way."""
    only: list[str] = field(default_factory=list)
    """Only rows whose key (graph/model/mesh/rate/...) has one of these in it."""
    hosts: int = 4
    """Emulated hosts, one rank each."""
    share: float | None = None
    """Cores of a host; by default equal parts of nine tenths of all."""
    layers: int = 32
    """Layers of a model."""
    hidden: int = 100
    """Hidden width."""
    epochs: int = 6
    """Of a run; the first is not counted."""
    more: str = ""
    """Further flags of kagome train, for each run (kept in its key)."""
    hours: float | None = None
    """Begin no run after so long."""
    limit: float = 1800.0
    """Seconds after which a run is ended."""
    fresh: bool = False
    """Measure again what is there."""
    data: Path = Path("../shared/data")
    """Folder of raw data sets."""
    runs: Path = HERE / "runs"
    """Folder of the runs."""
    out: Path = HERE
    """Folder of the results."""


@dataclass(frozen=True)
class Case:
    """One row of the results: what to run, and on what links."""

    graph: str
    model: str
    mesh: str
    rate: float
    pipe: int
    parts: int
    key: str


def grid(options: Options) -> Iterator[Case]:
    """The cases that were asked for; the meshes of one case and rate meet the machine in the same minutes."""
    for graph in options.graphs:
        for model in options.models:
            for rate in options.rates:
                for mesh in options.meshes:
                    pipe = {"graph": 1, "pipe": options.hosts, "hybrid": 2}[mesh]
                    if mesh == "hybrid" and (options.hosts % 2 or options.hosts < 4):
                        continue
                    words = [graph, model, mesh, f"{rate:g}", f"{options.hosts}x{options.layers}"]
                    words += [f"{options.hidden}", *([options.more] if options.more else [])]
                    key = "/".join(words)
                    if not options.only or any(part in key for part in options.only):
                        yield Case(graph, model, mesh, rate, pipe, options.hosts // pipe, key)


def command(case: Case, options: Options, folder: Path) -> list[str]:
    """What each rank runs."""
    words = [sys.executable, "-m", "kagome", "train"]
    words += [word.format(data=options.data) for word in GRAPHS[case.graph]]
    words += ["--data.root", str(options.data), "--data.undirected", "--model.name", case.model]
    words += ["--model.layers", str(options.layers), "--model.hidden", str(options.hidden)]
    words += ["--parallel.graph", str(case.parts), "--parallel.pipe", str(case.pipe)]
    words += ["--train.epochs", str(options.epochs), *TRAIN, *QUIET, "--out", str(folder)]
    return [*words, *options.more.split()]


def measure(case: Case, options: Options, cluster: Cluster) -> dict[str, Any]:
    """One row; with ``error``, the last lines of the first rank that failed, where that happened."""
    row: dict[str, Any] = {
        "key": case.key,
        "graph": case.graph,
        "model": case.model,
        "mesh": case.mesh,
        "rate": case.rate,
        "pipe": case.pipe,
        "parts": case.parts,
        "epochs": options.epochs,
    }
    folder = options.runs / case.key.replace("/", "-").replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    words = command(case, options, folder)
    row["command"] = " ".join(["kagome", *words[3:]]).replace(str(folder), "DIR")
    try:
        done = cluster.launch(words, env=THREADS, seconds=options.limit)
    except subprocess.TimeoutExpired:
        return {**row, "error": f"no end after {options.limit:g} seconds"}
    # Ranks that were ended because of another (-9) say less than the one that failed.
    failed = sorted((one for one in done if one.returncode), key=lambda one: one.returncode < 0)
    if failed:
        said = (failed[0].stderr or failed[0].stdout).splitlines()[-20:]
        return {**row, "error": "\n".join(said) or f"exit code {failed[0].returncode}"}
    return {**row, **figures(folder)}


def figures(folder: Path) -> dict[str, Any]:
    """What a run's folder says of its epochs after the first, which builds what the others use."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    later = lines[1:] or lines
    seconds = [line["seconds"] for line in later]
    waited = [sum(line.get("waited", {}).values()) for line in later]
    return {
        "epoch_seconds": median(seconds),
        "spread": [min(seconds), max(seconds)],
        "bytes_per_epoch": summary["bytes_per_epoch"],
        "waited_per_epoch": summary.get("waited_per_epoch", {}),
        "hidden_share": summary.get("hidden_share", {}),
        "exposed_share": fmean(waited) / fmean(seconds),
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "held_bytes": held(summary),
        "set_up_seconds": summary.get("set_up_seconds"),
        "balance": balance(summary),
    }


def held(summary: Mapping[str, Any]) -> list[int]:
    """Bytes of all tensors that each rank holds at once: its peak without what is there for a moment."""
    return [
        sum(size or 0 for kind, size in rank["measured"].items() if kind not in ("other", "total"))
        for rank in summary.get("memory") or []
    ]


def balance(summary: Mapping[str, Any]) -> float | None:
    """Time in computing of the rank that computes longest, over the mean."""
    compute = [sum(rank.get(name, 0.0) for name in ("forward", "backward")) for rank in summary["phases"]]
    return max(compute) / fmean(compute) if compute and sum(compute) else None


def facts(options: Options, quota: str) -> dict[str, Any]:
    """What is the same for all rows."""
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": version("torch"),
        "hosts": options.hosts,
        "cpu_share": default_share(options.hosts) if options.share is None else options.share,
        "quota": quota,
        "layers": options.layers,
        "hidden": options.hidden,
        "epochs": options.epochs,
    }


def write(options: Options, told: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Both files of results; the first whole or not at all, as a later call goes on from it."""
    meshes = {row["mesh"]: row for row in rows}
    names = {
        mesh: name.format(pipe=meshes[mesh]["pipe"], graph=meshes[mesh]["parts"])
        for mesh, name in NAMES.items()
        if mesh in meshes
    }
    values = {"facts": told, "rows": rows, "conclusions": tables.conclusions(rows)}
    options.out.mkdir(parents=True, exist_ok=True)
    part = options.out / "results_speed.json.part"
    part.write_text(json.dumps(values, indent=1) + "\n")
    part.replace(options.out / "results_speed.json")
    (options.out / "results_speed.md").write_text(tables.page(told, rows, names))


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is not there yet; write ``results_speed.json`` and ``results_speed.md`` after each run."""
    end_on_sigterm()
    options = tyro.cli(Options, args=argv, prog="speed.py")
    file = options.out / "results_speed.json"
    before = json.loads(file.read_text()) if file.exists() else {"facts": {}, "rows": []}
    rows = {row["key"]: row for row in before["rows"]}
    told = before["facts"] or facts(options, "not measured")
    begun, failed = time.monotonic(), 0
    try:
        with ExitStack() as stack:
            cluster: Cluster | None = None
            for case in grid(options):
                if not options.fresh and "error" not in rows.get(case.key, {"error": ""}):
                    continue
                if options.hours is not None and time.monotonic() - begun >= 3600 * options.hours:
                    print("the time is up; the same command goes on from here", flush=True)
                    break
                if cluster is None:
                    cluster = stack.enter_context(
                        Cluster(options.hosts, case.rate, options.share, name="kagome-speed")
                    )
                    told = facts(options, cluster.quota)
                cluster.shape(case.rate)
                row = rows[case.key] = measure(case, options, cluster)
                failed += "error" in row
                write(options, told, list(rows.values()))
                print(f"{case.key}: {row.get('error') or said(row)}", flush=True)
    except NotPermittedError as error:
        print(f"speed.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    write(options, told, list(rows.values()))
    raise SystemExit(1 if failed else 0)


def said(row: Mapping[str, Any]) -> str:
    return (
        f"{row['epoch_seconds']:.3f} s an epoch, {row['bytes_per_epoch']['total'] / 1e6:,.1f} MB, "
        f"{row['exposed_share']:.0%} exposed"
    )


if __name__ == "__main__":
    main()
