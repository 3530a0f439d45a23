"""Measures an epoch of ``kagome.Trainer`` beside one of a loop of one's own on ``kagome.shard``, on Cora.

Run as ``python benchmarks/own_loop/trainer.py --data ...``; see README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import GCN
from torch_geometric.transforms import NormalizeFeatures

import kagome

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SETTLED = 10
"""Epochs of a turn that do not count."""


class Seconds:
    """A callback that keeps the seconds of each epoch."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def on_epoch_end(self, record: Any) -> None:
        self.all.append(record.seconds)


def model_of(data: Data) -> GCN:
    """Return a GCN of two layers of 64, with dropout."""
    torch.manual_seed(0)
    return GCN(data.num_features, 64, 2, out_channels=int(data.y.max()) + 1, dropout=0.5)


def by_trainer(data: Data, epochs: int, ranks: int) -> list[float]:
    """Return the seconds of the epochs of a ``Trainer``, training alone."""
    seconds = Seconds()
    train = kagome.Train(epochs=epochs, eval_every=epochs, check=False, lr=0.01)
    report = kagome.Report(progress=False)
    parallel = kagome.Parallel(graph=ranks)
    with kagome.Trainer(
        model_of(data), data, parallel=parallel, train=train, report=report, callbacks=[seconds]
    ) as trainer:
        trainer.fit()
    return seconds.all


def by_loop(data: Data, epochs: int, ranks: int) -> list[float]:
    """Return the seconds of the steps of an own loop on ``kagome.shard``."""
    model, seconds = model_of(data), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with kagome.shard(model, data, parallel=kagome.Parallel(graph=ranks), log=str) as net:
        y, mask = net.place(data.y), net.place(data.train_mask)
        for _ in range(epochs):
            begin = time.perf_counter()
            out = net(data.x, data.edge_index)
            loss = net.mean(functional.cross_entropy(out[mask], y[mask], reduction="none"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            seconds.append(time.perf_counter() - begin)
    return seconds


def rank_of(options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Run both ways by turns in this rank; return the seconds of the epochs that count."""
    torch.set_num_threads(1)
    data = Planetoid(str(options.root), "Cora", transform=NormalizeFeatures())[0]
    ways = {"Trainer": by_trainer, "own loop": by_loop}
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    for turn in range(options.turns):
        for way in sorted(ways, reverse=bool(turn % 2)):
            seconds = ways[way](data, SETTLED + options.epochs, options.rank_of)
            found[way].append(seconds[SETTLED:])
    return found


def started(ranks: int, words: list[str]) -> dict[str, list[list[float]]]:
    """Start the ranks; return what rank 0 found."""
    port, processes = str(random.randrange(20_000, 60_000)), []
    for rank in range(ranks):
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MASTER_PORT": port}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, __file__, "--rank-of", str(ranks), *words]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    told = [process.communicate()[0] for process in processes]
    return json.loads(told[0].splitlines()[-1])


def table(results: dict[str, dict[str, list[list[float]]]]) -> str:
    """Medians over the turns, and the ratio of the own loop over the Trainer of the same turn."""
    lines = ["| ranks | Trainer, an epoch | own loop, a step | own loop over Trainer |", "|---|---|---|---|"]
    for ranks, ways in results.items():
        each = {way: [statistics.median(turn) for turn in turns] for way, turns in ways.items()}
        ratios = [own / trainer for trainer, own in zip(each["Trainer"], each["own loop"], strict=True)]
        cells = [f"{1e3 * statistics.median(each[way]):.1f} ms" for way in ("Trainer", "own loop")]
        cells += [f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        lines.append(f"| {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run one and two ranks, and write ``trainer.md`` and ``trainer.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with planetoid/Cora/raw")
    parser.add_argument("--epochs", type=int, default=100, help="epochs of a turn that count")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        print(json.dumps(rank_of(options)))
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shutil.copytree(options.data / "planetoid" / "Cora" / "raw", root / "Cora" / "raw")
        Planetoid(name, "Cora", transform=NormalizeFeatures())  # ranks find it made
        words = ["--root", name, "--epochs", str(options.epochs), "--turns", str(options.turns)]
        results = {str(ranks): started(ranks, words) for ranks in (1, 2)}
    (options.out / "trainer.json").write_text(json.dumps(results) + "\n", encoding="utf-8")
    (options.out / "trainer.md").write_text(table(results) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
