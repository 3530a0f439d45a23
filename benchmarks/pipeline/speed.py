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
from pipeline import sweep, tables  # noqa: E402
from pipeline.bubbles import bubbles  # noqa: E402

from kagome.report.chrome_trace import read_trace  # noqa: E402

GRAPHS = {
    "cornell5": ["--data.name", "cornell5", "--data.project", "128"],
    "squirrel": ["--data.name", "squirrel", "--data.self-loops"],
    "flickr": ["--data.name", "flickr-attributed"],
    "flickr-128": ["--data.name", "flickr-attributed", "--data.project", "128"],
    "tolokers": ["--data.name", "Tolokers"],
    "squirrel-128": ["--data.name", "squirrel", "--data.self-loops", "--data.project", "128"],
    "slashdot": ["--data.name", "npz:{data}/snap/soc-slashdot0902.npz"],
    "digits": ["--data.name", "digits"],
    "made-4k": ["--data.name", "sbm:vertices=4000,degree=40,features=128,classes=5"],
    "made-20k": ["--data.name", "sbm:vertices=20000,degree=80,features=128,classes=5"],
}
NAMES = {
    "graph": "graph={graph}",
    "pipe": "pipe={pipe}",
    "pipe-8": "pipe={pipe}, 8 chunks",
    "dealt-8": "pipe={pipe}, 8 chunks, 2 stages a rank",
    "dealt-6": "pipe={pipe}, 6 chunks, 3 stages a rank",
    "hybrid": "pipe={pipe} x graph={graph}",
}
CUTS = {
    "pipe-8": ["--parallel.chunks", "8"],
    "dealt-8": ["--parallel.chunks", "8", "--parallel.stages-per-rank", "2"],
    "dealt-6": ["--parallel.chunks", "6", "--parallel.stages-per-rank", "3"],
}
"""Meshes that are not cut into a stage a rank and four chunks a stage."""
TRAIN = ["--model.dropout", "0.5", "--train.lr", "0.001", "--train.weight-decay", "0"]
TRAIN += ["--train.eval-every", "1000", "--train.no-check", "--parallel.no-shared-memory"]
QUIET = ["--report.no-page", "--report.no-progress"]
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure epochs of graph parallelism, pipelines and both, on emulated hosts."""

    graphs: list[str] = field(default_factory=lambda: ["cornell5", "squirrel", "flickr", "tolokers"])
    """Graphs (also: digits, which needs no files)."""
    models: list[str] = field(default_factory=lambda: ["gcn", "sage", "gcn2", "resgcn+"])
    """Models, by the names that kagome train knows."""
    meshes: list[str] = field(default_factory=lambda: list(NAMES))
    """How ranks share the work: graph, pipe (16 chunks), pipe-8 (8 chunks), dealt-8 and dealt-6 (several
    stages a rank), hybrid (two stages)."""
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
    """At each rate; the first ones after a change are not among them."""
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


def grid(options: Options) -> Iterator[list[Case]]:
    """Runs, each with its rates; the meshes of one graph and model meet the machine in the same minutes."""
    for graph in options.graphs:
        for model in options.models:
            for mesh in options.meshes:
                pipe = {"graph": 1, "hybrid": 2}.get(mesh, options.hosts)
                if mesh == "hybrid" and (options.hosts % 2 or options.hosts < 4):
                    continue
                cases = []
                for rate in options.rates:
                    words = [graph, model, mesh, f"{rate:g}", f"{options.hosts}x{options.layers}"]
                    words += [f"{options.hidden}", *([options.more] if options.more else [])]
                    key = "/".join(words)
                    if not options.only or any(part in key for part in options.only):
                        cases.append(Case(graph, model, mesh, rate, pipe, options.hosts // pipe, key))
                yield cases


def command(case: Case, options: Options, folder: Path, epochs: int) -> list[str]:
    """What each rank runs."""
    words = [sys.executable, "-m", "kagome", "train"]
    words += [word.format(data=options.data) for word in GRAPHS[case.graph]]
    words += ["--data.root", str(options.data), "--data.undirected", "--model.name", case.model]
    words += ["--model.layers", str(options.layers), "--model.hidden", str(options.hidden)]
    words += ["--parallel.graph", str(case.parts), "--parallel.pipe", str(case.pipe)]
    words += CUTS.get(case.mesh, [])
    words += ["--train.epochs", str(epochs), *TRAIN, *QUIET, "--out", str(folder)]
    return [*words, *options.more.split()]


def nameless(word: str, folder: Path, data: Path) -> str:
    """A word of a command as another machine could say it: without where this one's folders lie."""
    for place, name in ((str(folder), "DIR"), (str(data), "DATA")):
        if word == place or word.startswith(f"{place}/"):
            return name + word.removeprefix(place)
    return word


def measure(
    cases: Sequence[Case], options: Options, cluster: Cluster, epochs: Sequence[int] | None = None
) -> dict[str, dict[str, Any]]:
    """Rows of one run, by key.

    Args:
        cases: The same but for their rates.
        options: What is the same for all.
        cluster: Hosts.
        epochs: That count at each rate, where they are not ``options.epochs``.

    Returns:
        Rows; with ``error``, the last lines of the first rank that failed, where that happened.
    """
    first = cases[0]
    each = epochs or [options.epochs] * len(cases)
    stretches = [sweep.Stretch(case.rate, count) for case, count in zip(cases, each, strict=True)]
    # One rate less in the name than in the keys: it is a folder of all.
    folder = options.runs / "-".join(first.key.replace(f"/{first.rate:g}", "").split("/")).replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    words = command(first, options, folder, sweep.length(stretches))
    told = " ".join(["kagome", *(nameless(word, folder, options.data) for word in words[3:])])
    rows = {
        case.key: {
            "key": case.key,
            "graph": case.graph,
            "model": case.model,
            "mesh": case.mesh,
            "rate": case.rate,
            "pipe": case.pipe,
            "parts": case.parts,
            "hidden": options.hidden,
            "command": told,
        }
        for case in cases
    }
    try:
        done, lines, cores = sweep.swept(
            cluster, words, folder, stretches, env=THREADS, seconds=options.limit * len(cases)
        )
    except subprocess.TimeoutExpired as error:
        return {key: {**row, "error": f"no end after {error.timeout:g} seconds"} for key, row in rows.items()}
    # Ranks that were ended because of another (-9) say less than the one that failed.
    failed = sorted((one for one in done if one.returncode), key=lambda one: one.returncode < 0)
    if failed:
        said = (failed[0].stderr or failed[0].stdout).splitlines()[-20:]
        why = "\n".join(said) or f"exit code {failed[0].returncode}"
        return {key: {**row, "error": why} for key, row in rows.items()}
    summary = json.loads((folder / "summary.json").read_text())
    spans = read_trace(folder / "trace.json") if first.pipe > 1 else []
    sent = summary["bytes_per_epoch"].get("stage", 0)
    for row, found, used in zip(rows.values(), lines, cores, strict=True):
        row |= figures(found, summary) if found else {"error": "no epochs at this rate"}
        row |= {"cores": used, "cpu_share": cluster.cpu_share}
        if spans and found:
            row["bubble"] = bubbles(spans, [line["epoch"] for line in found], row["rate"], sent)
    return rows


def figures(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the epochs of one rate say, and the run's summary."""
    seconds = [line["seconds"] for line in lines]
    waited = mean_by_kind(lines, "waited")
    under_way = mean_by_kind(lines, "under_way")
    return {
        "epochs": len(lines),
        "epoch_seconds": median(seconds),
        "spread": [min(seconds), max(seconds)],
        "bytes_per_epoch": summary["bytes_per_epoch"],
        "waited_per_epoch": waited,
        "hidden_share": {
            kind: 1 - waited.get(kind, 0.0) / whole for kind, whole in under_way.items() if whole
        },
        "exposed_share": sum(waited.values()) / fmean(seconds),
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "held_bytes": held(summary),
        "set_up_seconds": summary.get("set_up_seconds"),
        "balance": balance(summary),
    }


def mean_by_kind(lines: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """The mean over epochs of seconds by kind."""
    kinds = dict.fromkeys(kind for line in lines for kind in line.get(name, {}))
    return {kind: fmean(line.get(name, {}).get(kind, 0.0) for line in lines) for kind in kinds}


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
            for asked in grid(options):
                cases = [
                    case
                    for case in asked
                    if options.fresh or "error" in rows.get(case.key, {"error": "not measured"})
                ]
                if not cases:
                    continue
                if options.hours is not None and time.monotonic() - begun >= 3600 * options.hours:
                    print("the time is up; the same command goes on from here", flush=True)
                    break
                if cluster is None:
                    cluster = stack.enter_context(
                        Cluster(options.hosts, cases[0].rate, options.share, name="kagome-speed")
                    )
                    told = facts(options, cluster.quota)
                rows |= measure(cases, options, cluster)
                failed += any("error" in rows[case.key] for case in cases)
                write(options, told, list(rows.values()))
                for case in cases:
                    print(f"{case.key}: {rows[case.key].get('error') or said(rows[case.key])}", flush=True)
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
