"""kFkB against zero bubble on real ranks: seconds of an update, measured and by forecast.

Run: torchrun --nproc-per-node 2 benchmarks/graphpipe/measured.py   (a quiet machine, a core for each rank)

Each schedule runs the plan that the search finds for it, update by update in turn, so that a change of the
machine's pace meets both. Each rank computes on one core. In the table a stage is its operators, devices,
micro-batch and k.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import get_args

import torch
import tyro
from torch import Tensor, nn

import kagome
from kagome.comm.channel import Channel
from kagome.comm.mesh import open_mesh
from kagome.config import Parallel
from kagome.model.examples import DLRM, EXAMPLES, MultimodalTransformer, Uno
from kagome.pipelining.dag.pipeline import Pipeline
from kagome.planner.stages.plan import DagSchedule


@dataclass(frozen=True, kw_only=True)
class Options:
    """Updates of the three models, smaller than in the simulation."""

    models: tuple[str, ...] = ("multimodal", "dlrm", "uno")
    """Models."""
    batch: int = 256
    """Samples of a batch."""
    updates: int = 10
    """Updates of each schedule, after one that does not count."""


def built(name: str) -> nn.Module:
    """A model of the size that two cores update in about a second."""
    if name == "multimodal":
        return MultimodalTransformer(width=128, layers=4, joint=2, heads=4)
    return (
        DLRM(bottom=(512, 256), top=(1024, 512, 256)) if name == "dlrm" else Uno(width=512, tower=4, layers=4)
    )


def seconds(pipe: Pipeline, inputs: dict[str, Tensor], target: Tensor) -> float:
    """Seconds of one update, over all ranks."""
    pipe.channel.gather_objects(0, "begin")
    begun = time.perf_counter()
    pipe.step(inputs, target)
    pipe.channel.gather_objects(0, "end")
    return time.perf_counter() - begun


def compare(name: str, options: Options, channel: Channel) -> str:
    """A row of the table."""
    example = EXAMPLES[name]
    torch.manual_seed(1)  # the same batch on all ranks
    inputs, target = example.batch(options.batch)
    pipes: dict[str, Pipeline] = {}
    for schedule in get_args(DagSchedule):
        torch.manual_seed(0)
        pipes[schedule] = kagome.pipeline(
            built(name), inputs, loss=example.loss, plan="auto", schedule=schedule, channel=channel
        )
    found: dict[str, list[float]] = {schedule: [] for schedule in pipes}
    losses: dict[str, float] = {}
    for update in range(options.updates + 1):
        for schedule, pipe in pipes.items():
            took = seconds(pipe, inputs, target)
            if update:
                found[schedule].append(took)
            else:
                losses[schedule] = pipe.evaluate(inputs, target)
    whole, split = (median(found[schedule]) for schedule in pipes)
    stages = [
        ", ".join(f"{len(s.operators)}/{s.devices}/{s.micro_batch}/{s.k}" for s in pipe.plan.stages)
        for pipe in pipes.values()
    ]
    apart = abs(losses["kfkb"] - losses["zero-bubble"])
    cells = [name, channel.size, *stages, f"{whole:.4f}", f"{split:.4f}", f"{whole / split:.3f}"]
    return f"| {' | '.join(map(str, cells))} | {pipes['zero-bubble'].plan.why} | {apart:.1e} |"


def main(options: Options) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with open_mesh(Parallel()) as mesh:
        for number, name in enumerate(options.models):
            line = compare(name, options, mesh.world)
            if mesh.world.rank == 0:
                if number == 0:
                    print(
                        "| model | ranks | stages under kFkB | under zero bubble | kFkB s | zero bubble s |"
                        " times | forecasts | losses differ by |\n" + "|" + "---|" * 9
                    )
                print(line, flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
