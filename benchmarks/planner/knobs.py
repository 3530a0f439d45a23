"""Memory knobs: what the planner predicts for each of them, beside what a run holds and takes.

Run: python benchmarks/planner/knobs.py    (resumes where it stopped; --fresh begins anew)

Each model runs on all ranks with activations on the device, with layers that run again, and on a GPU with
activations in host memory, by turns. A prediction is made once for each model, before its runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro

from kagome.autoplan.local_gpus import local_gpus
from kagome.autoplan.plan import LOCAL, here, studied
from kagome.cli.app import _builder, parse_train
from kagome.config.commands import PlanCommand
from kagome.planner.candidates import Candidate
from kagome.planner.memory_knobs import on_host, run_again
from kagome.profile.cache import MeasurementCache

HERE = Path(__file__).parent
QUIET = ("--report.no-page", "--report.no-trace", "--report.no-progress", "--train.no-check")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
SETTLED = 2
"""First epochs of a run, which are not counted."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict and run each memory knob on the made graph of 100,000 vertices and 2.1 million edges."""

    graph: str = "sbm:vertices=100000,degree=21,features=128"
    """Graph."""
    models: list[str] = field(default_factory=lambda: ["sage", "gat", "deepgcn"])
    """Models that kagome train knows."""
    layers: int = 6
    """Layers."""
    hidden: int = 64
    """Width."""
    ranks: int = 2
    """Ranks, each with one part."""
    turns: int = 3
    """Runs of each knob."""
    epochs: int = 6
    """Epochs of a run that count."""
    fresh: bool = False
    """Begin anew."""
    out: Path = HERE
    """Folder of the results."""

    def words(self, model: str) -> list[str]:
        """Return the flags of a model on the graph."""
        sizes = ["--model.layers", str(self.layers), "--model.hidden", str(self.hidden)]
        return ["--data.name", self.graph, "--model.name", model, *sizes]


def predicted(options: Options, model: str) -> dict[str, dict[str, float]]:
    """Return the predictions for parts of a model, by what becomes of activations."""
    run = parse_train(options.words(model))
    asked = PlanCommand(data=run.data, model=run.model, train=run.train, devices=options.ranks)
    gpus = local_gpus(options.ranks)
    study, _ = studied(asked, _builder(asked.model, asked.train), MeasurementCache(), gpus=gpus is not None)
    cluster = gpus or here(options.ranks, LOCAL)
    name = f"graph={options.ranks}" if options.ranks > 1 else "one rank"

    def parts(plans: Any) -> Candidate:
        both = [*plans.fitting, *(one for one, _ in plans.refused)]
        return next(one for one in both if one.name == name)

    plain = parts(study.plans(cluster, eases=False))
    twin = None if study.recomputed is None else parts(study.recomputed.plans(cluster))
    ways = {"device": plain, "recompute": run_again(plain, twin), "host": on_host(plain, twin, cluster)}
    return {
        way: {"seconds": one.epoch_seconds, "memory": one.memory_bytes, "moved": max(one.moved, default=0.0)}
        for way, one in ways.items()
        if one is not None
    }


def ran(options: Options, model: str, way: str) -> dict[str, Any]:
    """Run a model, and return what an epoch took and what the fullest rank held."""
    folder = options.out / "runs" / "knobs"
    shutil.rmtree(folder, ignore_errors=True)
    epochs = SETTLED + options.epochs
    words = [sys.executable, "-m", "kagome", "train", *options.words(model), "--nproc", str(options.ranks)]
    words += ["--parallel.graph", str(options.ranks), "--parallel.activations", way]
    words += ["--train.epochs", str(epochs), "--train.eval-every", str(epochs), *QUIET, "--out", str(folder)]
    env = {**os.environ, **({} if torch.cuda.is_available() else THREADS)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit("\n".join((done.stderr or done.stdout).splitlines()[-20:]))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    each = [one["measured"] for one in summary["memory"]]
    full = max(each, key=lambda kinds: kinds["total"] - (kinds["other"] or 0))
    return {
        "seconds": median(line["seconds"] for line in lines[SETTLED:]),
        "held": full["total"] - (full["other"] or 0),
        "activations": full["activations"],
        "peak": max(summary["peak_memory_bytes"]),
        "moved": summary.get("activations_moved_bytes", 0),
        "loss": lines[-1]["loss"],
    }


def rows(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a row for each model and knob."""
    for model, ways in found["predicted"].items():
        runs = {way: found["runs"].get(f"{model}/{way}", []) for way in ways}
        base = median(one["seconds"] for one in runs["device"]) if runs["device"] else None
        for way, told in ways.items():
            if not runs[way] or base is None:
                continue
            took = [one["seconds"] for one in runs[way]]
            last = runs[way][-1]
            more = told["seconds"] - ways["device"]["seconds"]
            yield (
                f"| {model} | {way} | {told['memory'] / 1e6:,.0f} MB | {last['held'] / 1e6:,.0f} MB | "
                f"{last['activations'] / 1e6:,.0f} MB | {last['peak'] / 1e6:,.0f} MB | "
                f"{1e3 * told['seconds']:,.0f} ms | {1e3 * median(took):,.0f} ms "
                f"({1e3 * min(took):,.0f} to {1e3 * max(took):,.0f}) | {1e3 * more:+,.0f} ms | "
                f"{1e3 * (median(took) - base):+,.0f} ms | {last['loss']:.6f} |"
            )


def table(found: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    heads = ("model", "activations", "memory, predicted", "held, measured", "activations, measured", "peak")
    heads += ("an epoch, predicted", "measured", "the knob costs, predicted", "measured", "loss")
    lines = ["# Memory knobs", "", found["about"], "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *rows(found)]) + "\n"


def main(options: Options) -> None:
    """Predict, run all by turns, and write ``results_knobs.json`` and its table after each."""
    if not torch.cuda.is_available():
        os.environ.update(THREADS)  # predictions are for ranks of as many threads as the runs have
    file = options.out / "results_knobs.json"
    about = (
        f"{options.graph}; {options.layers} layers of width {options.hidden}; {options.ranks} ranks, a part "
        "each. Predicted memory counts one layer that runs again, or whose activations are back; what is "
        "held does not. The peak is that of the process."
    )
    found: dict[str, Any] = {"about": about, "predicted": {}, "runs": {}}
    if file.exists() and not options.fresh:
        found = json.loads(file.read_text())
        if found["about"] != about:
            raise SystemExit(f"{file} is of other settings: --fresh, or another --out")

    def keep() -> None:
        file.write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "results_knobs.md").write_text(table(found))

    options.out.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        if model not in found["predicted"]:
            found["predicted"][model] = predicted(options, model)
            keep()
        for turn in range(options.turns):
            for way in found["predicted"][model]:
                done = found["runs"].setdefault(f"{model}/{way}", [])
                if len(done) <= turn:
                    done.append(ran(options, model, way))
                    print(model, way, done[-1], flush=True)
                    keep()
    print(table(found))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
