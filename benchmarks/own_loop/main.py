"""Measures what a step of a training loop of one's own costs on ``kagome.shard``, beside the plain model.

Run as ``python benchmarks/own_loop/main.py``; see README.md.
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
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import kagome

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WAYS = {"plain PyTorch": (1, "plain"), "shard, 1 rank": (1, "shard"), "shard, 2 ranks": (2, "shard")}
SETTLED = 2
"""Steps of a start that do not count."""


class Layer(nn.Module):
    """A processor layer after MeshGraphNet: edges have a state, and then vertices are updated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.vertex = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, h: Tensor, state: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edge_index
        state = state + self.edge(torch.cat([state, h[source], h[target]], dim=-1))
        sums = torch.zeros_like(h).index_add(0, target, state)
        return h + self.vertex(torch.cat([h, sums], dim=-1)), state


class Net(nn.Module):
    """Encoder, layers, decoder."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.vertices, self.edges, self.decoder = (
            nn.Linear(8, width),
            nn.Linear(4, width),
            nn.Linear(width, 3),
        )
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h, state = self.vertices(x), self.edges(edge_attr)
        for layer in self.layers:
            h, state = layer(h, state, edge_index)
        return self.decoder(h)


def mesh(side: int) -> Data:
    """Return a square of triangles: six edges a vertex."""
    place = torch.arange(side * side).view(side, side)
    pairs = [(place[:, :-1], place[:, 1:]), (place[:-1], place[1:]), (place[:-1, :-1], place[1:, 1:])]
    one = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], dim=1)
    edges = torch.cat([one, one.flip(0)], dim=1)
    generator = torch.Generator().manual_seed(0)
    points = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    x = torch.randn(side * side, 8, generator=generator)
    return Data(
        x=x, pos=points, edge_index=edges, edge_attr=torch.randn(edges.size(1), 4, generator=generator)
    )


def steps(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank's steps; return their seconds, the last loss and the peak of resident memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, model = mesh(options.side), Net(options.width, options.layers)
    optimizer, seconds = torch.optim.Adam(model.parameters()), []
    parallel = kagome.Parallel(partitioner="coordinates")
    net = model if way == "plain" else kagome.shard(model, data, parallel=parallel, log=str)
    y = torch.sin(data.x[:, :3])
    y = y if way == "plain" else net.place(y)
    loss = torch.zeros(())
    for _ in range(SETTLED + options.steps):
        begin = time.perf_counter()
        squares = (net(data.x, data.edge_index, data.edge_attr) - y) ** 2
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
    port, processes = str(random.randrange(20_000, 60_000)), []
    for rank in range(ranks):
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MASTER_PORT": port}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, __file__, "--rank-of", kind, "--side", str(options.side)]
        command += [
            "--width",
            str(options.width),
            "--layers",
            str(options.layers),
            "--steps",
            str(options.steps),
        ]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return {**found[0], "peak": max(each["peak"] for each in found)}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Medians over the starts, and the ratio to the plain model of the same turn."""
    lines = ["| way | a step | plain over it | peak of a rank | loss |", "|---|---|---|---|---|"]
    base = [statistics.median(start["seconds"]) for start in results["plain PyTorch"]]
    for way, starts in results.items():
        each = [statistics.median(start["seconds"]) for start in starts]
        ratios = [plain / one for plain, one in zip(base, each, strict=True)]
        cells = [f"{1e3 * statistics.median(each):.0f} ms"]
        cells += [f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        cells += [f"{max(start['peak'] for start in starts) / 2**20:,.0f} MiB", f"{starts[-1]['loss']:.5f}"]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run all ways by turns, and write ``results.md`` and ``results.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=140, help="vertices along a side of the mesh")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="steps of a start that count")
    parser.add_argument("--turns", type=int, default=3, help="starts of each way")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--rank-of", choices=["plain", "shard"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        print(json.dumps(steps(options.rank_of, options)))
        return
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for turn in range(options.turns):
        for way in sorted(WAYS, reverse=bool(turn % 2)):
            results[way].append(started(way, options))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results) + "\n", encoding="utf-8")
    (options.out / "results.md").write_text(table(results) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
