"""Is the planner right: what it predicts beside what runs on emulated hosts take.

Run: python benchmarks/planner/main.py --data ../shared/data    (as root; resumes where it stopped)
     python benchmarks/planner/main.py --data ../shared/data --fresh --hours 0    (predicts anew, no runs)

A setting is predicted before its cuts are run, and twice again after those of all; the median counts: a
machine that others share has fast minutes and slow ones. Predictions are made from the model measured on one
core of this machine, of which a host is a share.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import tyro

from kagome.autoplan.plan import studied
from kagome.cli.app import _builder, parse_train
from kagome.config.commands import PlanCommand
from kagome.planner.candidates import Candidate
from kagome.planner.cluster import Cluster as Declared
from kagome.profile.cache import MeasurementCache

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from cluster import Cluster, NotPermittedError, end_on_sigterm  # noqa: E402
from pipeline import speed  # noqa: E402
from planner.settings import CODED, DECOUPLED, STAGES, Setting, settings  # noqa: E402

from planner import hosts  # noqa: E402

HOSTS = 4
MEMORY = 5e9
"""Bytes of each host, for the planner."""
ALLOW = ("decoupled", "history", "onebit", "stale")
RUN_SECONDS, FEWEST, MOST = 5.0, 6, 40
"""Epochs that count at a rate: about so long, by the prediction, but so many at least and at most."""
GROUPS: Mapping[str, Sequence[str]] = {
    "parts": ("graph=4",),
    "slices": ("tensor=4", "graph=2 tensor=2"),
    "decoupled": DECOUPLED,
    "one bit, or late rows": CODED,
    "stages": STAGES,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict epochs, and run them on emulated hosts."""

    data: Path = Path("../shared/data")
    """Folder of raw data sets."""
    graphs: list[str] = field(
        default_factory=lambda: ["cornell5", "flickr-128", "squirrel-128", "tolokers", "slashdot"]
    )
    """Graphs (also: digits, which needs no files)."""
    models: list[str] = field(default_factory=lambda: ["sage", "gcn", "gcn2", "gat"])
    """sage on made graphs, gcn and gat with few layers, by parts and slices; gcn2 with 16, by stages too."""
    rates: list[float] = field(default_factory=lambda: [100.0, 300.0, 1000.0])
    """Mbit/s of each host's link, each way."""
    passes: int = 3
    """Predictions of each setting."""
    fresh: bool = False
    """Predict anew what was predicted before."""
    hours: float | None = None
    """Begin no run after so long."""
    out: Path = HERE
    """Folder of the results."""


def emulated(rate: float, hosts: Mapping[str, Any]) -> Declared:
    """The emulated hosts, as the planner knows clusters."""
    link, latency = hosts["links"][f"{rate:g}"]
    return Declared("emulated hosts", HOSTS, 1, MEMORY, hosts["pace"], link, link, latency)


def predicted(setting: Setting, options: Options, hosts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A setting's plans by rate and name, from what is measured now."""
    run = parse_train(setting.words(options.data))
    asked = PlanCommand(data=run.data, model=run.model, train=run.train, allow=ALLOW, cluster="emulated")
    study, _ = studied(asked, _builder(asked.model, asked.train), MeasurementCache())
    found = {}
    for rate in options.rates:
        plans = study.plans(emulated(rate, hosts), ALLOW)
        told = [*plans.fitting, *(one for one, _ in plans.refused)]
        found[f"{rate:g}"] = {one.name: noted(one) for one in told if one.name in setting.cuts}
    return found


def noted(plan: Candidate) -> dict[str, Any]:
    """What is kept of a plan."""
    names = (
        "exact",
        "epoch_seconds",
        "compute_seconds",
        "exposed_seconds",
        "bytes_per_epoch",
        "memory_bytes",
    )
    record = plan.record()
    return {name: record[name] for name in names}


def epochs(plans: Mapping[str, Mapping[str, Any]], cut: str, rates: Sequence[float]) -> list[int]:
    """Epochs that count at each rate."""
    seconds = [plans[f"{rate:g}"].get(cut, {}).get("epoch_seconds", 1.0) for rate in rates]
    return [min(MOST, max(FEWEST, round(RUN_SECONDS / each))) for each in seconds]


def table(runs: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Each run beside its prediction, then how far off they are and how good the choices."""
    lines = [
        "| what, Mbit/s | cut | an epoch, s: predicted | measured | off by | MB sent: predicted | measured |"
        " MB held by the fullest rank: predicted | measured |",
        "|" + "---|" * 9,
    ]
    pairs = [
        (key, plan, row)
        for key, row in runs.items()
        if "epoch_seconds" in row and (plan := _plan(found, key)) is not None
    ]
    for key, plan, row in pairs:
        case, _, cut = key.rpartition("/")
        guess, took = plan["epoch_seconds"], row["epoch_seconds"]
        size, held = sum(plan["bytes_per_epoch"].values()), measured_memory(cut, row)
        lines.append(
            f"| {case} | {cut} | {guess:.3f} | {took:.3f} | {guess / took - 1:+.0%} | {size / 1e6:,.2f} |"
            f" {row['bytes_per_epoch']['total'] / 1e6:,.2f} | {plan['memory_bytes'] / 1e6:,.1f} |"
            f" {'not known' if held is None else f'{held / 1e6:,.1f}'} |"
        )
    return "\n".join([*lines, "", *errors(pairs), "", *choices(pairs)]) + "\n"


def measured_memory(cut: str, row: Mapping[str, Any]) -> float | None:
    """Bytes that the fullest rank held; a stage does not say what its activations take."""
    return None if cut in STAGES else float(max(row["held_bytes"]))


def _plan(found: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """What is predicted for a run, its seconds the median of all predictions; None where nothing is."""
    *setting, rate, cut = key.split("/")
    passes = found.get("/".join(setting), [])
    plans = [one["rates"][rate][cut] for one in passes if cut in one["rates"].get(rate, {})]
    return {**plans[-1], "epoch_seconds": median(one["epoch_seconds"] for one in plans)} if plans else None


def errors(pairs: Sequence[tuple[str, Any, Any]]) -> Iterator[str]:
    """How far off seconds, bytes and memory are, over all and by kind of cut."""
    heads = ["runs", "how many", "seconds off by, median", "90th percentile", "in the middle"]
    heads += ["bytes off by, at most", "memory within 10 %", "off by, at most"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for name, cuts in {"all": None, **GROUPS}.items():
        those = [one for one in pairs if cuts is None or one[0].rpartition("/")[2] in cuts]
        if len(those) < 2:
            continue
        off = [plan["epoch_seconds"] / row["epoch_seconds"] - 1 for _, plan, row in those]
        size = [
            abs(sum(plan["bytes_per_epoch"].values()) / row["bytes_per_epoch"]["total"] - 1)
            for _, plan, row in those
        ]
        memory = [
            (plan["memory_bytes"], measured_memory(key.rpartition("/")[2], row)) for key, plan, row in those
        ]
        held = [abs(guess / there - 1) for guess, there in memory if there is not None]
        many = quantiles(map(abs, off), n=10, method="inclusive")[-1]
        cells = [name, f"{len(off)}", f"{median(map(abs, off)):.0%}", f"{many:.0%}", f"{median(off):+.0%}"]
        cells += [f"{max(size):.2%}", f"{sum(each <= 0.1 for each in held)} of {len(held)}"]
        cells.append(f"{max(held):.0%}" if held else "-")
        yield f"| {' | '.join(cells)} |"


def choices(pairs: Sequence[tuple[str, Any, Any]]) -> Iterator[str]:
    """How slow the plan that would be taken is beside the fastest run."""
    settings: dict[str, list[tuple[Any, Any]]] = {}
    for key, plan, row in pairs:
        settings.setdefault(key.rpartition("/")[0], []).append((plan, row))
    for name, only in (("exact cuts", True), ("all cuts", False)):
        ratios, like = [], 0
        for each in settings.values():
            asked = [(plan, row) for plan, row in each if plan["exact"] or not only]
            if len(asked) < 2:
                continue
            _, taken = min(asked, key=lambda one: one[0]["epoch_seconds"])
            best = min((row for _, row in asked), key=lambda row: row["epoch_seconds"])
            ratios.append(taken["epoch_seconds"] / best["epoch_seconds"])
            like += ratios[-1] <= 1.05 or taken["epoch_seconds"] <= best["spread"][1]
        if ratios:
            good = sum(ratio <= 1.05 for ratio in ratios)
            yield (
                f"Of {name} the chosen one is within 5 % of the best in {good} of {len(ratios)} settings, "
                f"within that or no slower than the best one's slowest epoch in {like}; at worst "
                f"{max(ratios):.2f} times as slow.  "
            )


def main(options: Options) -> None:
    """Predict and run what is missing; write the results after each run."""
    end_on_sigterm()
    torch.set_num_threads(1)
    kept: dict[str, Any] = {"plans": {}, "runs": {}}
    file = options.out / "results.json"
    if file.exists():
        kept = json.loads(file.read_text())
    plans, runs = kept["plans"], kept["runs"]

    def write() -> None:
        options.out.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(kept, indent=1) + "\n")
        part.replace(file)
        (options.out / "results.md").write_text(table(runs, plans))

    begun = time.monotonic()
    asked = list(settings(options.graphs, options.models))
    try:
        with ExitStack() as stack:
            cluster = stack.enter_context(Cluster(HOSTS, options.rates[0], name="kagome-plans"))
            for turn, setting in product(range(options.passes), asked):
                if options.fresh and not turn:
                    plans.pop(setting.name, None)
                passes = plans.setdefault(setting.name, [])
                if len(passes) <= turn:
                    since, facts = time.perf_counter(), hosts.measured(cluster, options.rates)
                    passes.append({"hosts": facts, "rates": predicted(setting, options, facts)})
                    took = time.perf_counter() - since
                    print(f"{setting.name}: planned in {took:.1f} s, {facts}", flush=True)
                    write()
                for cut in () if turn else setting.cuts:
                    cases = [
                        case
                        for case in setting.cases(cut, options.rates)
                        if "epoch_seconds" not in runs.get(case.key, {})
                    ]
                    late = options.hours is not None and time.monotonic() - begun >= 3600 * options.hours
                    if late or not cases:
                        continue
                    more = setting.options(cut, options.data, options.out / "runs")
                    counts = epochs(passes[0]["rates"], cut, [case.rate for case in cases])
                    runs |= speed.measure(cases, more, cluster, counts)
                    write()
                    for case in cases:
                        guess, row = _plan(plans, case.key), runs[case.key]
                        told = "no plan" if guess is None else f"{guess['epoch_seconds']:.3f} s predicted"
                        print(f"{case.key}: {told}, {row.get('error') or speed.said(row)}", flush=True)
    except NotPermittedError as error:
        print(f"main.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    write()
    print(table(runs, plans))


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
