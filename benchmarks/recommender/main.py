"""Measures the memory of a recommender's learned table: whole on every rank, and cut with its rows.

Run as ``python benchmarks/recommender/main.py``; see README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import LGConv

import kagome
from kagome.graph.partition import store
from kagome.graph.partition.partition import each_part
from kagome.graph.structure.validate import validate

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WAYS = {"one rank": (1, False), "4 ranks, whole table": (4, False), "4 ranks, cut table": (4, True)}
TASTES = 64
"""Groups of users and items; nine of ten interactions are within one."""
BATCH = 4096
SETTLED = 1
"""Steps of a start that do not count."""


class LightGCN(nn.Module):
    """Three propagations of a learned table of users and items."""

    def __init__(self, vertices: int, columns: int, device: str) -> None:
        super().__init__()
        self.table = nn.Embedding(vertices, columns, device=device)
        self.hops = nn.ModuleList(LGConv() for _ in range(3))

    def forward(self, edge_index: Tensor) -> Tensor:
        h = self.table.weight
        out = h / 4
        for hop in self.hops:
            h = hop(h, edge_index)
            out = out + h / 4
        return out


def interactions(options: argparse.Namespace) -> Tensor:
    """Return pairs of a user and an item, ``[2, P]``; items are numbered after users."""
    generator = torch.Generator().manual_seed(0)
    user = torch.randint(options.users, (options.interactions,), generator=generator)
    item = torch.randint(options.items, (options.interactions,), generator=generator)
    within = torch.rand(options.interactions, generator=generator) < 0.9
    # Users and items with one remainder by TASTES are one group.
    near = (item - item % TASTES + user % TASTES).clamp(max=options.items - 1)
    return torch.stack([user, options.users + torch.where(within, near, item)])


def prepare(options: argparse.Namespace) -> None:
    """Write the parts of the graph for 1 and for 4 ranks, and some pairs to learn from."""
    pairs = interactions(options)
    torch.save(pairs[:, : 16 * BATCH].clone(), options.folder / "pairs.pt")
    vertices = options.users + options.items
    data = Data(edge_index=torch.cat([pairs, pairs.flip(0)], dim=1), num_nodes=vertices)
    data, _ = validate(data)
    number = torch.arange(vertices)
    taste = torch.where(number < options.users, number, number - options.users) % TASTES
    for ranks in (1, 4):
        owner = taste * ranks // TASTES
        meta, readers = store.measure(data, owner, ranks, fingerprint="bench", method="tastes", seed=0)
        pieces = each_part(data, owner, ranks, fingerprint="bench", readers=readers)
        store.save(pieces, options.folder / str(ranks), meta)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank's steps; return their seconds, the last loss, and what memory was taken."""
    ranks, cut = WAYS[options.rank_of]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    first = os.environ["RANK"] == "0"
    model = LightGCN(options.users + options.items, options.columns, "cpu" if first or not cut else "meta")
    optimizer, seconds = torch.optim.Adam(model.parameters(), lr=0.01), []
    net = kagome.shard(model, options.folder / str(ranks), cut=cut, log=str)
    before, edges = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, net.inputs["edge_index"]
    pairs, loss = torch.load(options.folder / "pairs.pt"), torch.zeros(())
    for step in range(SETTLED + options.steps):
        begin = time.perf_counter()
        # From the beginning again once all are used: a small graph has fewer pairs than a batch.
        batch = pairs[:, torch.arange(step * BATCH, (step + 1) * BATCH) % pairs.size(1)]
        h = net(edges)
        user, item = net.pairs(h, batch[:, net.rank :: net.ranks])
        other = net.read(h, net.negatives(batch.size(1), seed=7, step=step)[1])
        loss = -net.mean(functional.logsigmoid((user * item).sum(1) - (user * other).sum(1)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    weight, gradient = model.table.weight, model.table.weight.grad
    assert gradient is not None
    moments = sum(v.nbytes for v in optimizer.state[weight].values() if v.dim())
    return {
        "seconds": seconds[SETTLED:],
        "loss": loss.item(),
        "rows": weight.size(0),
        "learned": weight.nbytes + gradient.nbytes + moments,
        "peak of the start": before,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def started(way: str, command: list[str]) -> list[dict[str, Any]]:
    """Start the ranks of one way; return what each found."""
    ranks, _ = WAYS[way]
    port, processes = str(random.randrange(20_000, 60_000)), []
    for rank in range(ranks):
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MASTER_PORT": port}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        command_of = [*command, "--rank-of", way]
        processes.append(subprocess.Popen(command_of, env=env, stdout=subprocess.PIPE, text=True))
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """The largest of the ranks in each column."""
    lines = [
        "| way | rows of a rank | table, gradient and Adam | peak | peak of the start | a step | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, ranks in results.items():
        most = {name: max(each[name] for each in ranks) for name in ("rows", "learned", "peak")}
        start = max(each["peak of the start"] for each in ranks)
        cells = [
            f"{most['rows']:,}",
            f"{most['learned'] / 2**20:,.0f} MiB",
            f"{most['peak'] / 2**20:,.0f} MiB",
        ]
        cells += [f"{start / 2**20:,.0f} MiB", f"{statistics.median(ranks[0]['seconds']):.2f} s"]
        lines.append(f"| {way} | {' | '.join(cells)} | {ranks[0]['loss']:.6f} |")
    return "\n".join(lines)


def main() -> None:
    """Run all ways one after another, and write ``results.md`` and ``results.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--interactions", type=int, default=10_000_000)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="steps of a way that count")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", choices=["prepare", *WAYS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of == "prepare":
        prepare(options)
    elif options.rank_of:
        print(json.dumps(train(options)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--folder", folder]
            for name in ("users", "items", "interactions", "columns", "steps"):
                command += [f"--{name}", str(getattr(options, name))]
            env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
            subprocess.run([*command, "--rank-of", "prepare"], env=env, check=True)
            results = {way: started(way, command) for way in options.ways}
        size = f"{options.users:,} users, {options.items:,} items, {options.interactions:,} interactions"
        text = f"{size}, {options.columns} columns.\n\n{table(results)}\n"
        (options.out / "results.md").write_text(text)
        (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(text)


if __name__ == "__main__":
    main()
