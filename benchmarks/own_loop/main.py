"""Measures what a step of a training loop of one's own costs on ``kagome.shard``, beside the plain model.

Run as ``python benchmarks/own_loop/main.py``; see README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from models import case_of

import kagome

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WAYS = {
    "plain PyTorch": (1, "plain"),
    "plain PyTorch, Kagome's malloc": (1, "plain"),
    "shard, 1 rank": (1, "shard"),
    "shard, 2 ranks": (2, "shard"),
    "half the graph, two alone": (2, "half"),
}
"""How many processes a way has, and what each runs.

The last way is the floor of two ranks: what two cores of one machine do at the same time, each to half of the
vertices, with no halo and no exchange.
"""
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""What Kagome sets when it starts (``launch/allocator.py``): memory that was freed stays in the process."""
SETTLED = 2
"""Steps of a start that do not count."""


def steps(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank's steps; return their seconds, the last loss and the peak of resident memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = case_of(options.model, options.side, options.width, options.layers)
    model, graph = case.model, case.graph
    optimizer, seconds = torch.optim.Adam(model.parameters()), []
    parallel = kagome.Parallel(partitioner="coordinates")
    net: Any = model if way == "plain" else kagome.shard(model, graph, parallel=parallel, log=str)
    y = torch.sin(case.x[:, :3])
    y = y if way == "plain" else net.place(y, case.rows)
    loss = torch.zeros(())
    for _ in range(SETTLED + options.steps):
        begin = time.perf_counter()
        squares = (net(*case.inputs) - y) ** 2
        loss = squares.mean() if way == "plain" else net.mean(squares)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds[SETTLED:], "loss": loss.item(), "peak": peak}


def started(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of one way; return what rank 0 found, with the largest peak of all."""
    ranks, kind = WAYS[way]
    world = 1 if kind == "half" else ranks
    port, processes = random.randrange(20_000, 60_000), []
    for rank in range(ranks):
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_PORT": str(port + rank // world)}
        env |= {"RANK": str(rank % world), "LOCAL_RANK": str(rank % world), "MASTER_ADDR": "127.0.0.1"}
        env |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        env |= MALLOC if "malloc" in way else {}
        side = round(options.side / math.sqrt(2)) if kind == "half" else options.side
        command = [sys.executable, __file__, "--rank-of", kind, "--side", str(side)]
        for name in ("model", "width", "layers", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return {**found[0], "peak": max(each["peak"] for each in found)}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Medians over the starts, and the ratios to the plain model and to one rank of the same turn."""
    lines = [
        "| way | a step | plain over it | one rank over it | peak of a rank | loss |",
        "|---|---|---|---|---|---|",
    ]
    each = {way: [statistics.median(start["seconds"]) for start in starts] for way, starts in results.items()}
    for way, starts in results.items():
        cells = [f"{1e3 * statistics.median(each[way]):.0f} ms"]
        for base in ("plain PyTorch", "shard, 1 rank"):
            ratios = [one / own for one, own in zip(each[base], each[way], strict=True)]
            cells += [f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        cells += [f"{max(start['peak'] for start in starts) / 2**20:,.0f} MiB", f"{starts[-1]['loss']:.5f}"]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(out: Path, case: str, results: dict[str, list[dict[str, Any]]]) -> None:
    """Add a case to ``results.json``, and write the tables of all cases to ``results.md``."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    every = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    every[case] = results
    path.write_text(json.dumps(every) + "\n", encoding="utf-8")
    tables = [f"## {name}\n\n{table(found)}\n" for name, found in every.items()]
    (out / "results.md").write_text("\n".join(["# Steps of an own loop\n", *tables]), encoding="utf-8")


def main() -> None:
    """Run all ways by turns, and write the table and every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["mesh", "weather"], default="mesh")
    parser.add_argument("--side", type=int, default=140, help="vertices along a side of the mesh")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="steps of a start that count")
    parser.add_argument("--turns", type=int, default=3, help="starts of each way")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--rank-of", choices=["plain", "shard", "half"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        print(json.dumps(steps(options.rank_of, options)))
        return
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for turn in range(options.turns):
        for way in sorted(WAYS, reverse=bool(turn % 2)):
            results[way].append(started(way, options))
    case = f"{options.model}, side {options.side}, width {options.width}, {options.layers} layers"
    write(options.out, case, results)
    print(table(results))


if __name__ == "__main__":
    main()
