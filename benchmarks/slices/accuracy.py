"""What does decoupling cost in accuracy? GCN and GAT, coupled and decoupled, the same seeds on both sides.

Run: python benchmarks/slices/accuracy.py --data ../shared/data   (resumes where it stopped)
     python benchmarks/slices/accuracy.py --hours 0               (trains nothing, writes the table again)

One rank: the number of ranks changes neither model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import tyro

HERE = Path(__file__).parent
GRAPHS: Mapping[str, dict[str, Any]] = {
    "cora": {"name": "Cora"},
    "citeseer": {"name": "CiteSeer"},
    "flickr": {"name": "flickr-attributed", "project": 128},
    "tolokers": {"name": "Tolokers"},
    "digits": {"name": "digits"},
}
METRICS = {"tolokers": "roc_auc"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train GCN and GAT as they are and decoupled."""

    data: str = "../shared/data"
    """Folder of raw data sets."""
    graphs: tuple[str, ...] = ("cora", "citeseer", "flickr", "tolokers")
    """Graphs (also: digits, without files)."""
    models: tuple[str, ...] = ("gcn", "gat")
    """Models."""
    layers: tuple[int, ...] = (2, 4)
    """Layers."""
    seeds: int = 5
    """Seeds of each row."""
    epochs: int = 200
    """Epochs of a run."""
    hidden: int = 64
    """Width."""
    jobs: int = 2
    """Runs at a time, one thread each."""
    hours: float | None = None
    """Begin no run after so many hours; what is there stays."""
    out: Path = HERE
    """Folder of the results."""


def grid(options: Options) -> Iterator[tuple[str, str, str, int, bool, int]]:
    """All runs."""
    for graph in options.graphs:
        for model in options.models:
            for layers in options.layers:
                for seed in range(options.seeds):
                    for decoupled in (False, True):
                        side = "decoupled" if decoupled else "coupled"
                        key = f"{graph}/{model}/{layers}/{options.hidden}/{options.epochs}/{seed}/{side}"
                        yield key, graph, model, layers, decoupled, seed


def run(options: Options, graph: str, model: str, layers: int, decoupled: bool, seed: int) -> dict[str, Any]:
    """One training, on one thread."""
    import torch

    from kagome import config, load
    from kagome.model.zoo import build_model
    from kagome.train.trainer import Trainer

    torch.set_num_threads(1)
    named = dict(GRAPHS[graph])
    data = load(named.pop("name"), root=options.data, **named)
    torch.manual_seed(seed)
    settings = config.Model(name=model, layers=layers, hidden=options.hidden)
    classes = int(data.y.max()) + 1
    module = build_model(
        settings, in_channels=data.num_features, out_channels=classes, num_nodes=int(data.num_nodes)
    )
    train = config.Train(epochs=options.epochs, seed=seed, check=False, metric=METRICS.get(graph, "auto"))
    begun = time.perf_counter()
    with Trainer(
        module,
        data,
        parallel=config.Parallel(decouple=decoupled),
        train=train,
        report=config.Report(page=False, trace=False, progress=False),
    ) as trainer:
        summary = trainer.fit()
    return {
        "test": summary["test_metric"],
        "val": summary["val_metric"],
        "metric": summary["metric_name"],
        "seconds": time.perf_counter() - begun,
    }


def main(options: Options) -> None:
    """Run what is missing; write ``results_accuracy.json`` and its table after each run."""
    file = options.out / "results_accuracy.json"
    rows: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    missing = [case for case in grid(options) if case[0] not in rows]
    begun = time.monotonic()
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"))
    if options.hours != 0:
        context = get_context("forkserver")
        context.set_forkserver_preload(["kagome.train.trainer"])
        with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
            while missing:
                if options.hours is not None and time.monotonic() - begun >= 3600 * options.hours:
                    break
                batch, missing = missing[: options.jobs], missing[options.jobs :]
                going = {pool.submit(run, options, *case[1:]): case[0] for case in batch}
                for done in as_completed(going):
                    rows[going[done]] = done.result()
                    write(options, file, rows)
                    print(f"{going[done]}: {rows[going[done]]['test']:.4f}", file=sys.stderr, flush=True)
    write(options, file, rows)


def write(options: Options, file: Path, rows: Mapping[str, Any]) -> None:
    """Both files of results."""
    options.out.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    part.replace(file)
    (options.out / "results_accuracy.md").write_text(table(rows))


def table(rows: Mapping[str, Any]) -> str:
    """Mean and spread of each side, and of their paired difference."""
    lines = [
        "| graph | model | layers | metric | seeds | coupled | decoupled | decoupled - coupled |",
        "|" + "---|" * 8,
    ]
    cases: dict[tuple[str, ...], dict[str, dict[str, float]]] = {}
    metrics: dict[tuple[str, ...], str] = {}
    for key, row in rows.items():
        graph, model, layers, _, _, seed, side = key.split("/")
        cases.setdefault((graph, model, layers), {}).setdefault(side, {})[seed] = row["test"]
        metrics[graph, model, layers] = row["metric"]
    for case, sides in cases.items():
        seeds = sorted(set(sides.get("coupled", {})) & set(sides.get("decoupled", {})))
        if not seeds:
            continue
        one, two = ([sides[side][seed] for seed in seeds] for side in ("coupled", "decoupled"))
        gaps = [b - a for a, b in zip(one, two, strict=True)]
        cells = [*case, metrics[case], str(len(seeds)), *map(_spread, (one, two, gaps))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    around = stdev(values) if len(values) > 1 else 0.0
    return f"{fmean(values):.4f} ± {around:.4f}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
