"""Memory and time of a large graph, from the command to the end, set-up included.

Run: python benchmarks/large_graph/main.py            (2 M vertices, 40 M edges, 4 ranks; then from the cache)
     python benchmarks/large_graph/main.py --set-up   (kagome partition alone, and each step by itself)
     python benchmarks/large_graph/main.py --vertices 500000     (any other size)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUNS = HERE / "runs"
EVERY_SECONDS = 0.2
MODEL = ["--model.name", "sage", "--model.layers", "2", "--model.hidden", "64"]
QUIET = ["--train.no-check", "--report.no-page", "--report.no-trace", "--report.no-progress"]
GIB = 2**30


# Watching ----------------------------------------------------------------------------------------


def family(root: int) -> dict[int, str]:
    """A process and all below it, with their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, fresh = {root}, {root}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
        found |= fresh
    words = {}
    for pid in found:
        try:
            words[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return words


def proportional(pid: int) -> int:
    """Bytes of a process, a page that n processes share counted as an nth."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def watched(
    command: list[str], phase: Callable[[dict[int, str]], str], env: dict[str, str]
) -> dict[str, Any]:
    """Run a command; seconds and peak bytes of all its processes together, by phase and in all."""
    phases: dict[str, dict[str, float]] = {}
    with (RUNS / "said.txt").open("w") as said:
        begun = last = time.perf_counter()
        child = subprocess.Popen(command, env=env, stdout=said, stderr=said)
        while child.poll() is None:
            processes = family(child.pid)
            held = sum(proportional(pid) for pid in processes)
            now, name = time.perf_counter(), phase(processes)
            row = phases.setdefault(name, {"seconds": 0.0, "peak_bytes": 0})
            row["seconds"] += now - last
            row["peak_bytes"] = max(row["peak_bytes"], held)
            last = now
            time.sleep(EVERY_SECONDS)
    if child.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {child.returncode}:\n{(RUNS / 'said.txt').read_text()}"
        )
    return {
        "command": " ".join(["kagome", *command[3:]]).replace(str(RUNS), "runs"),
        "seconds": time.perf_counter() - begun,
        "peak_bytes": max(row["peak_bytes"] for row in phases.values()),
        "phases": phases,
    }


# What is run ---------------------------------------------------------------------------------------


def train(graph: str, options: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """``kagome train``, from its command to its end."""
    out = RUNS / "train"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "kagome", "train", "--data.name", graph, *MODEL, *QUIET]
    command += ["--train.epochs", str(options.epochs), "--train.eval-every", str(options.epochs)]
    command += ["--parallel.partitioner", options.partitioner]
    command += ["--nproc", str(options.ranks), "--out", str(out)]

    def phase(processes: dict[int, str]) -> str:
        if any("kagome.graph.prepare" in words for words in processes.values()):
            return "loading, cutting, writing"
        if not out.exists():
            return "starting, reading the parts"
        metrics = out / "metrics.jsonl"
        return "training" if metrics.exists() and metrics.stat().st_size else "first epoch"

    found = watched(command, phase, {**os.environ, "KAGOME_CACHE": str(cache)})
    summary = json.loads((out / "summary.json").read_text())
    keys = ("epoch_seconds", "bytes_per_epoch", "peak_memory_bytes", "partition")
    return {**found, **{key: summary[key] for key in keys}}


def partition(graph: str, options: argparse.Namespace) -> dict[str, Any]:
    """``kagome partition`` alone."""
    command = [sys.executable, "-m", "kagome", "partition", "--data.name", graph]
    command += ["--parts", str(options.ranks), "--partitioner", options.partitioner]
    command += ["--out", str(RUNS / "parts")]
    return watched(command, lambda _: "loading, cutting, writing", dict(os.environ))


def steps(graph: str, options: argparse.Namespace) -> dict[str, Any]:
    """Each step of the set-up by itself, in a process of its own."""
    words = [sys.executable, __file__, "--one-by-one", graph, str(options.ranks), options.partitioner]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def one_by_one(graph: str, parts: int, method: str) -> dict[str, Any]:
    """Seconds of each step, and the largest resident size during it."""
    begun = time.perf_counter()
    from kagome import config
    from kagome.graph.datasets import builtin, load
    from kagome.graph.partition import store
    from kagome.graph.partition.choice import available_bytes, choose
    from kagome.graph.partition.partition import each_part, fingerprint
    from kagome.graph.partition.partitioners import assign
    from kagome.graph.structure.validate import validate

    rows: dict[str, dict[str, float]] = {
        "import": {"seconds": time.perf_counter() - begun, "peak_bytes": peak()}
    }

    def step(name: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        made = work()
        rows[name] = {"seconds": time.perf_counter() - begun, "peak_bytes": peak()}
        return made

    settings = config.Data(name=graph)
    if graph.startswith("sbm"):
        made = step("generate", lambda: builtin.sbm(graph))
        made, notes = step("validate", lambda: validate(made))
    else:
        made = step("load, validate", lambda: load.load_data(settings))
        notes = list(made.notes)
    chosen, said = choose(method, made.edge_index, made.num_nodes, parts, available_bytes())
    owner = step(f"cut ({chosen})", lambda: assign(chosen, made.edge_index, made.num_nodes, parts, 0))
    mark = step("fingerprint", lambda: fingerprint(made, chosen, 0, parts))
    meta, readers = step(
        "measure the cut",
        lambda: store.measure(
            made, owner, parts, fingerprint=mark, method=chosen, seed=0, notes=[*notes, *said]
        ),
    )
    pieces = each_part(made, owner, parts, fingerprint=mark, readers=readers)
    folder = RUNS / "steps"
    step("take out the parts, write them", lambda: store.save(pieces, folder, meta))
    step("open a part", lambda: store.load_part(folder, 0))
    shutil.rmtree(folder)
    return {"steps": rows, "vertices": meta.num_nodes, "edges": meta.num_edges, "cut": meta.quality.cut}


def peak() -> int:
    """Largest resident size of this process since the peak started anew."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


# Results -------------------------------------------------------------------------------------------


def keep(name: str, found: dict[str, Any]) -> None:
    """Put a result under its name into ``results.json`` and write ``results.md`` anew."""
    path = HERE / "results.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    import torch

    kept["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, PyTorch {torch.__version__}"
    kept.setdefault("results", {})[name] = found
    path.write_text(json.dumps(kept, indent=1) + "\n")
    lines: list[str] = []
    for title, result in kept["results"].items():
        lines += [f"## {title}", ""]
        if "command" in result:
            lines += [f"`{result['command']}`", ""]
        lines += ["| | seconds | peak, GiB |", "|---|---|---|"]
        for step, row in (result.get("phases") or result["steps"]).items():
            lines.append(f"| {step} | {row['seconds']:.1f} | {row['peak_bytes'] / GIB:.2f} |")
        if "seconds" in result:
            lines.append(f"| all | {result['seconds']:.1f} | {result['peak_bytes'] / GIB:.2f} |")
        if "epoch_seconds" in result:
            lines += ["", f"An epoch takes {result['epoch_seconds']:.2f} s (median, evaluation excluded)."]
        lines.append("")
    (HERE / "results.md").write_text("\n".join(lines))


def main() -> None:
    """Run what was asked for and write ``results.json`` and ``results.md``."""
    if sys.argv[1:2] == ["--one-by-one"]:
        print(json.dumps(one_by_one(sys.argv[2], int(sys.argv[3]), sys.argv[4])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graph", help="a --data.name; by default a made graph")
    parser.add_argument("--vertices", type=int, default=2_000_000)
    parser.add_argument("--degree", type=float, default=20)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--partitioner", default="auto")
    parser.add_argument("--set-up", action="store_true", help="kagome partition and the steps, no training")
    options = parser.parse_args()
    RUNS.mkdir(exist_ok=True)
    made = f"sbm:vertices={options.vertices},degree={options.degree:g},features={options.features}"
    graph = options.graph or made
    name = f"{graph}, {options.ranks} parts, {options.partitioner}"
    if options.set_up:
        keep(f"{name}: steps", steps(graph, options))
        keep(f"{name}: kagome partition", partition(graph, options))
    else:
        cache = RUNS / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        keep(f"{name}: kagome train", train(graph, options, cache))
        keep(f"{name}: kagome train, partition reused", train(graph, options, cache))
        shutil.rmtree(cache)


if __name__ == "__main__":
    main()
