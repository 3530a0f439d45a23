"""What does an epoch's delay cost where nothing is split? One device, each step with the gradient before.

Run: python benchmarks/wire/delay.py --data ../shared/data   (resumes where it stopped)
     python benchmarks/wire/delay.py --hours 0               (trains nothing, writes the table again)

Late rows delay a part of each gradient by an epoch. Here all of it comes an epoch late, and nothing else
differs: no ranks, no halo, no codec.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import accuracy
import torch
import tyro
from torch import Tensor

HERE = Path(__file__).parent
DECAY = 5e-4
"""Kagome's weight decay."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train on one device, with each step's own gradient and with the one before."""

    data: str = "../shared/data"
    """Folder of raw data sets."""
    graphs: tuple[str, ...] = ("cora", "squirrel", "flickr", "tolokers")
    """Graphs."""
    models: tuple[str, ...] = ("gcn", "sage")
    """Models."""
    rates: tuple[float, ...] = (0.01, 0.001)
    """Learning rates of Adam."""
    seeds: int = 3
    """Seeds of each row."""
    epochs: int = 200
    """Epochs of a run."""
    hidden: int = 64
    """Width."""
    jobs: int = 2
    """Runs at a time, a core each."""
    hours: float = 100.0
    """Begin no run after so long."""
    out: Path = HERE
    """Folder of the results."""


class Delayed(torch.optim.Adam):
    """Adam that takes each step with the gradients of the step before; the first with its own."""

    before: list[Tensor | None] | None = None

    def step(self, closure: Any = None) -> Any:
        """One step."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        now = [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, self.before or now, strict=True):
            parameter.grad = grad
        self.before = [None if grad is None else grad.clone() for grad in now]
        return super().step(closure)


@dataclass(frozen=True)
class Case:
    """One run."""

    graph: str
    model: str
    rate: float
    delayed: bool
    seed: int

    @property
    def key(self) -> str:
        """Under which its result is kept."""
        return f"{self.graph}/{self.model}/{self.rate}/{'delayed' if self.delayed else 'own'}/{self.seed}"


def cases(options: Options) -> Iterator[Case]:
    """All runs, pairs of a seed next to each other."""
    for seed in range(options.seeds):
        for graph in options.graphs:
            for model in options.models:
                for rate in options.rates:
                    for delayed in (False, True):
                        yield Case(graph, model, rate, delayed, seed)


def run(options: Options, case: Case) -> dict[str, Any]:
    """Train once, in a process of its own core."""
    from kagome.config import Data
    from kagome.graph.datasets.load import load_data

    torch.set_num_threads(1)
    kind = Delayed if case.delayed else torch.optim.Adam
    same = accuracy.Options(hidden=options.hidden, ranks=1)
    found = accuracy.trained(
        same,
        accuracy.Case(case.graph, case.model, "none", "waits", False, case.seed, "", options.epochs),
        load_data(Data(root=options.data, **accuracy.GRAPHS[case.graph])),
        optimizer=lambda parameters: kind(parameters, lr=case.rate, weight_decay=DECAY),
    )
    return {name: found[name] for name in ("test", "val", "best_epoch", "loss", "epochs")}


def main(options: Options) -> None:
    """Run what is missing, write the table."""
    path = options.out / "results_delay.json"
    kept, until = accuracy.read(path), time.monotonic() + options.hours * 3600
    missing = [case for case in cases(options) if kept.get(case.key, {}).get("epochs") != options.epochs]
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = "1"
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        while missing and time.monotonic() < until:
            block, missing = missing[: options.jobs], missing[options.jobs :]
            for case, found in zip(block, pool.map(run, [options] * len(block), block), strict=True):
                accuracy.put(path, case.key, found)
                print(f"{case.key}: {found['test']:.4f}, loss {found['loss']:.3f}", flush=True)
    (options.out / "results_delay.md").write_text(table(accuracy.read(path)))


def table(kept: Mapping[str, Any]) -> str:
    """What the delay costs in points, by graph, model and rate; intervals over pairs of the same seed."""
    groups: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for key, row in kept.items():
        graph, model, rate, kind, seed = key.split("/")
        groups.setdefault((graph, model, rate), {}).setdefault(kind, {})[seed] = row
    lines = [
        "| graph | model | Adam's rate | seeds | test % | with a delayed gradient, 95 % | loss | delayed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (graph, model, rate), kinds in sorted(groups.items()):
        own, late = kinds.get("own", {}), kinds.get("delayed", {})
        both = [(own[seed], late[seed]) for seed in own if seed in late]
        if both:
            pairs = [(b["test"] - a["test"]) * 100 for a, b in both]
            losses = [fmean(row["loss"] for row in rows) for rows in zip(*both, strict=True)]
            test = fmean(row["test"] * 100 for row, _ in both)
            lines.append(
                f"| {graph} | {model} | {rate} | {len(both)} | {test:.2f} | {accuracy.interval(pairs)} "
                f"| {losses[0]:.3f} | {losses[1]:.3f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
