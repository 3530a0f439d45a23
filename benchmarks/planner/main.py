"""Is the planner right: what it predicts beside what runs on emulated hosts took.

Run: python benchmarks/planner/main.py --data ../shared/data    (resumes where it stopped)

The runs are those of benchmarks/slices (results_speed.json there): four hosts of 0.45 cores each, links of
200 Mbit/s. Predictions are made here, from the model measured on one core of this machine.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import tyro

from kagome.cli import _builder, parse_train
from kagome.commands import PlanCommand
from kagome.run.planning import planned

HERE = Path(__file__).parent
NAMES: Mapping[str, str] = {
    "parts": "graph={hosts}",
    "slices": "tensor={hosts}",
    "parts decoupled": "graph={hosts} decouple=True",
    "slices decoupled": "tensor={hosts} decouple=True",
}
EXACT = ("parts", "slices")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict what was measured."""

    data: str = "../shared/data"
    """Folder of raw data sets."""
    measured: Path = HERE.parent / "slices" / "results_speed.json"
    """Measured rows."""
    hosts: int = 4
    """Emulated hosts of those rows."""
    cores: float = 0.45
    """Of each."""
    memory: float = 5e9
    """Bytes of each."""
    latency: float = 2e-4
    """Seconds of a message between them."""
    out: Path = HERE
    """Folder of the results."""


def cluster(options: Options, rate: float, folder: Path) -> Path:
    """The emulated hosts as a cluster's file."""
    file = folder / "emulated.toml"
    link = rate * 1e6 / 8
    values = {"hosts": options.hosts, "devices": 1, "memory": options.memory, "speed": options.cores}
    values |= {"inside": link, "between": link, "latency": options.latency}
    lines = ['name = "emulated hosts"', *(f"{name} = {value}" for name, value in values.items())]
    file.write_text("\n".join(lines) + "\n")
    return file


def predictions(options: Options, command: str, rate: float) -> dict[str, Any]:
    """All plans for what one measured command trained, by name."""
    words = shlex.split(command)[2:]
    words = [*words[: words.index("--out")], "--data.root", options.data]
    run = parse_train(words)
    asked = PlanCommand(
        data=run.data,
        model=run.model,
        train=run.train,
        cluster=str(cluster(options, rate, options.out)),
        allow=("decoupled",),
    )
    begun = time.perf_counter()
    found = planned(asked, _builder(asked.model))
    seconds = time.perf_counter() - begun
    plans = [*found.fitting, *(one for one, _ in found.refused)]
    return {
        "plan_seconds": seconds,
        "plans": {
            one.name: {
                "epoch_seconds": one.epoch_seconds,
                "compute_seconds": one.compute_seconds,
                "exposed_seconds": one.exposed_seconds,
                "bytes_per_epoch": dict(one.bytes_per_epoch),
            }
            for one in plans
        },
    }


def table(options: Options, measured: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Each run beside its prediction, then how far off they are and how good the choices."""
    lines = [
        "| graph | model | cut | an epoch, s: predicted | measured | off by | MB: predicted | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors, bytes_off, choices = [], [], []
    for case, told in found.items():
        seen: dict[str, tuple[float, float]] = {}
        for way, name in NAMES.items():
            row = measured.get(f"{case}/{way}", {})
            plan = told["plans"].get(name.format(hosts=options.hosts))
            if "epoch_seconds" not in row or plan is None:
                continue
            guess, took = plan["epoch_seconds"], row["epoch_seconds"]
            sizes = sum(plan["bytes_per_epoch"].values()), row["bytes_per_epoch"]["total"]
            errors.append(abs(guess / took - 1))
            bytes_off.append(abs(sizes[0] / sizes[1] - 1))
            seen[way] = guess, took
            graph, model, *_ = case.split("/")
            lines.append(
                f"| {graph} | {model} | {way} | {guess:.3f} | {took:.3f} | {guess / took - 1:+.0%} |"
                f" {sizes[0] / 1e6:,.2f} | {sizes[1] / 1e6:,.2f} |"
            )
        for ways in (EXACT, tuple(NAMES)):
            there = {way: seen[way] for way in ways if way in seen}
            if len(there) > 1:
                chosen = min(there, key=lambda way: there[way][0])
                best = min(took for _, took in there.values())
                choices.append((case, ways is EXACT, chosen, there[chosen][1] / best))
    if len(errors) > 1:
        tenth = quantiles(errors, n=10)[-1]
        lines += [
            "",
            f"{len(errors)} runs: off by {median(errors):.0%} (median), {tenth:.0%} (90th percentile);"
            f" bytes by {max(bytes_off):.2%} at most.",
        ]
    for exact, name in ((True, "exact cuts"), (False, "all cuts")):
        ratios = [ratio for _, only, _, ratio in choices if only is exact]
        if ratios:
            good = sum(ratio <= 1.05 for ratio in ratios)
            lines.append(
                f"Of {name} the chosen one is within 5 % of the best in {good} of {len(ratios)};"
                f" at worst {max(ratios):.2f} times as slow."
            )
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    """Predict what is missing, write the table."""
    torch.set_num_threads(1)
    measured = json.loads(options.measured.read_text())
    file = options.out / "results.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for key, row in measured.items():
        case, _, way = key.rpartition("/")
        if way == "parts" and "epoch_seconds" in row and case not in found:
            found[case] = predictions(options, row["command"], row["rate"])
            file.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{case}: planned in {found[case]['plan_seconds']:.1f} s", flush=True)
    (options.out / "results.md").write_text(table(options, measured, found))
    print(table(options, measured, found))


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
