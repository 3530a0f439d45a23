"""Loss curves of every strategy, as they are written down in ``tests/golden/runs/curves.json``.

Where it sits: ``test_unchanged`` compares with them. A change of structure leaves each number as it was; a
change that means to alter one writes the file anew, and its diff says which::

    PYTHONPATH=tests:tests/support python tests/support/golden_runs.py
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data

import kagome
from dags import trained
from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.config import Model, Parallel, Report, Train
from kagome.model.zoo import build_model
from kagome.planner.stages.plan import PlannedStage, StagePlan

FILE = Path(__file__).parents[1] / "golden" / "runs" / "curves.json"
EPOCHS = 10
SBM = "sbm:vertices=240,degree=6,features=8,classes=4,communities=4"
QUIET = Report(page=False, trace=False, progress=False)


@dataclass(frozen=True)
class Run:
    """A run of which the losses are kept.

    Args:
        ranks: How many.
        model: Of the zoo, or of the examples of ``kagome.pipeline``.
        parallel: Settings of the cut.
    """

    ranks: int
    model: str = "gcn"
    parallel: dict[str, Any] = field(default_factory=dict)


RUNS: dict[str, Run] = {
    "one rank": Run(1),
    "one rank, gat": Run(1, "gat"),
    "graph 2": Run(2, "sage", {"graph": 2}),
    "graph 3": Run(3, "gat", {"graph": 3}),
    "hybrid": Run(4, "gcn2", {"graph": 2, "pipe": 2, "chunks": 2}),
    "pipe, history": Run(2, "gcn2", {"pipe": 2, "chunks": 3}),
    "pipe, exact": Run(2, "gcn2", {"pipe": 2, "chunks": 3, "cross_chunk": "exact"}),
    "pipe, drop": Run(2, "gcn", {"pipe": 2, "chunks": 3, "cross_chunk": "drop"}),
    "tensor": Run(2, "gcn", {"tensor": 2}),
    "tensor, gat": Run(2, "gat", {"tensor": 2}),
    "decoupled": Run(2, "gcn", {"tensor": 2, "decouple": True}),
    "one bit": Run(2, "gcn", {"graph": 2, "codec": "onebit"}),
    "late rows": Run(3, "sage", {"graph": 3, "max_age": 2}),
    "one bit, late": Run(2, "gcn", {"graph": 2, "codec": "onebit", "max_age": 1}),
    "sampled rows": Run(2, "gcn", {"graph": 2, "halo_sample": 0.5}),
}
"""By name; dropout is on in all of them."""
DAG = "DAG of stages"


def graph() -> Data:
    """The graph of all runs, in float64."""
    data = kagome.load(SBM)
    data.x = data.x.double()
    return data


def model_of(name: str) -> nn.Module:
    """A model in float64, the same wherever it is made."""
    torch.manual_seed(1)
    settings = Model(name=name, layers=4, hidden=8, heads=2, dropout=0.3)
    return build_model(settings, in_channels=8, out_channels=4, num_nodes=240).double()


def curve(channel: Channel, run: Run) -> list[str]:
    """The losses of a run, and the sum of its scores, digit by digit."""
    train = Train(epochs=EPOCHS, check=False, timeout=60.0)
    cut = Parallel(reuse=False, partitioner="contiguous", **run.parallel)
    with Trainer(model_of(run.model), graph(), parallel=cut, train=train, report=QUIET) as trainer:
        trainer.fit()
        losses = [record.loss for record in trainer.records]
        return [float(value or math.nan).hex() for value in (*losses, trainer.predict().double().sum())]


def dag_curve(channel: Channel) -> list[str]:
    """The losses of ten updates of a DAG of stages, the first on two ranks, with dropouts."""
    stages = (
        PlannedStage(("first", "relu", "right", "drop", "left", "table"), 2, 8),
        PlannedStage(("turned", "norm", "relu#2", "out"), 1, 4),
    )
    found = trained(channel, "odd drop", StagePlan(8, stages), updates=EPOCHS)
    return [float(value).hex() for value in (*found["losses"], found["scores"].sum())]


def found(run: Callable[..., list[Any]]) -> dict[str, list[str]]:
    """All curves, on ranks that ``run`` starts."""
    curves = {name: run(one.ranks, curve, one)[0] for name, one in RUNS.items()}
    return {**curves, DAG: run(3, dag_curve)[0]}


def machine() -> str:
    """What the last digits of float64 depend on: the processor's instructions and maker, and torch.

    MKL has other products for processors of another maker, with the same instructions too.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability} {_maker()} torch {torch.__version__}"


def _maker() -> str:
    """The processor's maker, as Linux tells it; ``unknown`` elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "unknown")


def read() -> dict[str, Any]:
    """What is written down: ``machine``, and ``curves`` by name."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def write() -> None:
    """Write all curves anew."""
    from pool import Pool

    pool = Pool()
    try:
        told = {"machine": machine(), "curves": found(pool.run)}
    finally:
        pool.close()
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    import golden_runs  # ranks look for its functions by this name

    golden_runs.write()
