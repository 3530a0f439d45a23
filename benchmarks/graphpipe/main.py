"""GraphPipe's search against PipeDream's and Piper's: how fast are the plans, how long is the search.

Run: python benchmarks/graphpipe/main.py   (resumes where it stopped; --smoke for a minute)

Operators are measured on this machine; plans run in the simulator, chains of stages as chains. Of each
planner all micro-batches are tried and the fastest plan counts, with the time of all its searches. Chains run
as published, with one micro-batch a turn, and besides with as many as help and fit, as GraphPipe's may.
GraphPipe's plan and BaPipe's chain are also searched for with zero bubble; rows that lack that get it.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from torch import nn

from kagome.errors import PlanError
from kagome.model.examples import DLRM, EXAMPLES, MultimodalTransformer, Uno
from kagome.planner.stages.coarsen import Coarse, coarsened
from kagome.planner.stages.devices import Devices, StageCost
from kagome.planner.stages.graphpipe import GraphPipe
from kagome.planner.stages.operator_costs import OperatorGraph
from kagome.planner.stages.ordering import seconds_of
from kagome.planner.stages.plan import StagePlan
from kagome.planner.stages.simulate_plan import PlanSimulation, longer_turns, trial
from kagome.profile.operators import measure

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from graphpipe.baselines.bapipe import BaPipe  # noqa: E402
from graphpipe.baselines.chain import ChainPlanner  # noqa: E402
from graphpipe.baselines.pipedream import PipeDream  # noqa: E402
from graphpipe.baselines.piper import Piper  # noqa: E402

MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "multimodal": lambda: MultimodalTransformer(width=256, layers=8, joint=4, heads=8),
    "dlrm": lambda: DLRM(bottom=(512, 512, 512, 256), top=(1024, 1024, 1024, 512, 256)),
    "uno": lambda: Uno(width=1024, tower=8, layers=6),
}
SMALL: Mapping[str, Callable[[], nn.Module]] = {"uno": lambda: Uno(width=16, tower=2, layers=2)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Search stages for the paper's three models."""

    models: tuple[str, ...] = tuple(MODELS)
    """Models."""
    devices: tuple[int, ...] = (4, 8, 16, 32)
    """Devices."""
    batches: tuple[int, ...] = (256, 1024)
    """Samples of a batch."""
    sizes: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Micro-batches."""
    operators: int = 40
    """To so many operators chains are taken together, for all planners."""
    bandwidth: float = 7e7
    """Bytes a second between devices. The processor that is measured does about a 175th of a V100's
    multiplications; this is a 175th of 12.5 GB/s, so that computing and sending stand as they do there."""
    memory: float = 16 * 2**30
    """Bytes of a device."""
    limit: float = 300.0
    """Seconds of one search with one micro-batch, after which it counts as not ended."""
    smoke: bool = False
    """A small model, once."""
    out: Path = HERE
    """Folder of the results."""


def operators(options: Options, model: str) -> OperatorGraph:
    """A model's operators as measured here, kept in a file."""
    file = options.out / f"operators_{model}.json"
    if not file.exists():
        torch.manual_seed(0)
        sample, _ = EXAMPLES[model].batch(64)
        built = (SMALL if options.smoke else MODELS)[model]()
        file.write_text(measure(built, sample, (1, *options.sizes), halves=True).to_json())
    return OperatorGraph.from_json(file.read_text())


TURNS = 3
"""GraphPipe's search, of which the median counts: it is over in less time than a machine may pause."""
CHAINS: Mapping[str, type[ChainPlanner]] = {"pipedream": PipeDream, "piper": Piper, "bapipe": BaPipe}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a planner of chains found.

    Args:
        plans: By micro-batch.
        best: The fastest of them.
        seconds: Of all searches.
        unended: How many did not end.
    """

    plans: tuple[StagePlan, ...]
    best: StagePlan | None
    seconds: float
    unended: int


def best(cost: StageCost, options: Options, planner: type[ChainPlanner]) -> Found:
    """The fastest chain over all micro-batches."""
    begun, found, ended = time.perf_counter(), [], 0
    for size in options.sizes:
        try:
            found.append(planner(cost, size, seconds=options.limit).plan())
        except PlanError:
            ended += 1
            if time.perf_counter() - begun > options.limit:
                ended += len(options.sizes) - options.sizes.index(size) - 1
                break
    plan = min(found, key=lambda each: seconds_of(cost, each, sequential=True)) if found else None
    return Found(plans=tuple(found), best=plan, seconds=time.perf_counter() - begun, unended=ended)


def with_any_k(cost: StageCost, found: Found, *, split: bool = False) -> float:
    """Samples a second of the fastest chain with longer turns, under kFkB or zero bubble."""
    return cost.batch / min(
        seconds_of(cost, plan, split=split, sequential=True)
        for one in found.plans
        for _, plan in longer_turns(cost, one, split=split, sequential=True)
    )


def zero_bubble(options: Options, cost: StageCost) -> dict[str, Any]:
    """What GraphPipe finds with zero bubble among its schedules, and the fastest of BaPipe's chains."""
    plan = GraphPipe(cost, options.sizes, schedules=("kfkb", "zero-bubble")).plan()
    found = trial(cost, plan)
    return {
        "schedule": plan.schedule,
        "throughput": found.throughput,
        "most_in_flight": max(found.run.held),
        "bubble": found.run.bubble,
        "bapipe": with_any_k(cost, best(cost, options, BaPipe), split=True),
    }


def figures(
    plan: StagePlan | None, found: PlanSimulation | None, seconds: float, unended: int
) -> dict[str, Any]:
    """What is kept of a search."""
    told: dict[str, Any] = {"search_seconds": seconds, "searches_not_ended": unended}
    if plan is not None and found is not None:
        told |= {
            "throughput": found.throughput,
            "stages": len(plan.stages),
            "depth": found.depth,
            "devices": plan.devices,
            "micro_batches": sorted({stage.micro_batch for stage in plan.stages}),
            "memory_bytes": max(found.memory),
            "most_in_flight": max(found.run.held),
            "bubble": found.run.bubble,
        }
    return told


def cost_of(options: Options, coarse: Coarse, devices: int, batch: int) -> StageCost:
    """The costs of all stages on so many devices."""
    return StageCost(coarse.graph, Devices(devices, options.memory, options.bandwidth), batch)


def row(options: Options, coarse: Coarse, devices: int, batch: int) -> dict[str, Any]:
    """All planners on so many devices."""
    cost = cost_of(options, coarse, devices, batch)
    times = []
    for _ in range(TURNS):
        begun = time.perf_counter()
        plan = GraphPipe(cost, options.sizes).plan()
        times.append(time.perf_counter() - begun)
    seconds = median(times)
    told = {"graphpipe": figures(plan, trial(cost, plan), seconds, 0)}
    for name, planner in CHAINS.items():
        chain = best(cost, options, planner)
        found = None if chain.best is None else trial(cost, chain.best, sequential=True)
        told[name] = figures(chain.best, found, chain.seconds, chain.unended)
        if chain.plans:
            told[name]["throughput_with_any_k"] = with_any_k(cost, chain)
    return told | {"zero_bubble": zero_bubble(options, cost)}


def table(rows: Mapping[str, Any]) -> str:
    """Throughput and search time, and GraphPipe's over the others'."""
    lines = [
        "| model | devices | batch | samples/s GraphPipe | PipeDream | Piper | BaPipe |"
        " over PipeDream and Piper | over all chains | over them with any k |"
        " in flight GraphPipe / PipeDream / Piper | search s | PipeDream | Piper | BaPipe |"
        " shorter than PipeDream's, Piper's | samples/s with zero bubble | over kFkB |"
        " over PipeDream and Piper | over BaPipe with it and any k |",
        "|" + "---|" * 20,
    ]
    for key, told in rows.items():
        model, devices, batch = key.split("/")
        own, others = told["graphpipe"], [told[name] for name in CHAINS]
        known = [each for each in others if "throughput" in each]
        rates = [f"{each['throughput']:.1f}" if "throughput" in each else "-" for each in others]
        held = [f"{e['most_in_flight']:.0f}" if "throughput" in e else "-" for e in (own, *others[:2])]
        published = [each for each in others[:2] if "throughput" in each]
        over = [
            f"{own['throughput'] / max(each[name] for each in some):.2f}" if some else "-"
            for some, name in (
                (published, "throughput"),
                (known, "throughput"),
                (known, "throughput_with_any_k"),
            )
        ]
        marks = ["> " if each["searches_not_ended"] else "" for each in others]
        times = [f"{mark}{e['search_seconds']:.2f}" for mark, e in zip(marks, others, strict=True)]
        shorter = [
            f"{mark}{each['search_seconds'] / own['search_seconds']:.0f}"
            for mark, each in zip(marks[:2], others[:2], strict=True)
        ]
        lines.append(
            f"| {model} | {devices} | {batch} | {own['throughput']:.1f} | {' | '.join(rates)} |"
            f" {' | '.join(over)} | {' / '.join(held)} | {own['search_seconds']:.2f} | {' | '.join(times)} |"
            f" {', '.join(shorter)} | {split_columns(told, [each['throughput'] for each in published])} |"
        )
    return "\n".join(lines) + "\n"


def split_columns(told: Mapping[str, Any], published: list[float]) -> str:
    """Samples a second with zero bubble, and that over kFkB and over chains."""
    if "zero_bubble" not in told:
        return " | ".join("-" * 4)
    split = told["zero_bubble"]
    others = [told["graphpipe"]["throughput"], max(published, default=None), split["bapipe"]]
    over = [f"{split['throughput'] / other:.2f}" if other else "-" for other in others]
    return " | ".join([f"{split['throughput']:.1f}", *over])


def warm_up(options: Options, coarse: Coarse) -> None:
    """Load the compiled loops, which is no search."""
    cost = StageCost(coarse.graph, Devices(2, options.memory, options.bandwidth), options.batches[0])
    GraphPipe(cost, options.sizes).plan()


def main(options: Options) -> None:
    """Search what is missing, write the table."""
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    rows: dict[str, Any] = json.loads(file.read_text())["rows"] if file.exists() else {}
    for model in ("uno",) if options.smoke else options.models:
        fine = operators(options, model)
        coarse = coarsened(fine, options.operators)
        print(
            f"{model}: {len(fine.operators)} operators, {len(coarse.graph.operators)} taken together",
            flush=True,
        )
        warm_up(options, coarse)
        for devices, batch in product((2,) if options.smoke else options.devices, options.batches):
            key = f"{model}/{devices}/{batch}"
            if key not in rows or "zero_bubble" not in rows[key]:
                if key in rows:
                    cost = cost_of(options, coarse, devices, batch)
                    rows[key]["zero_bubble"] = zero_bubble(options, cost)
                else:
                    rows[key] = row(options, coarse, devices, batch)
                facts = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
                file.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1))
                (options.out / "results.md").write_text(table(rows))
                print(table({key: rows[key]}).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
