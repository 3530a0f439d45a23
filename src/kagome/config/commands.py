"""Commands: the flags of each command, as dataclasses.

Where it sits: ``cli.main`` parses them; what they do is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from kagome import config
from kagome.config.fields import check_kinds
from kagome.errors import ConfigError

MOST = {"devices": 65_536, "vertices": 10**13, "edges": 10**15, "features": 10**7, "classes": 10**6}
"""The most that ``kagome plan`` takes of each: its sample has all features and classes."""


@dataclass(frozen=True, kw_only=True)
class TrainCommand(config.Run):
    """Train a model on a graph, over as many ranks as are given.

    A TOML file with the same sections may stand first: ``kagome train RUN.toml --train.epochs 50``.
    """

    nproc: int | None = None
    """Local ranks to start; by default the product of the mesh. Under torchrun or srun, theirs are used."""
    out: str | None = None
    """Folder for the run's files; by default a new one under runs/."""
    overwrite: bool = False
    """Remove a run that is in that folder already."""
    resume: str | None = None
    """Folder of a run to go on with, on any number of ranks; its settings are the defaults. Where it has no
    checkpoint yet, a new run begins in it."""
    max_restarts: int = 0
    """How often local ranks are started again after one has died, from the last whole checkpoint."""


@dataclass(frozen=True, kw_only=True)
class PredictCommand(config.Run):
    """Score a graph with the weights of a run; the graph need have no labels.

    The settings of the run are the defaults; flags win.
    """

    checkpoint: Annotated[str, tyro.conf.arg(metavar="RUN")]
    """Folder of a run (its best epoch counts), one of its checkpoints, or a .safetensors file of weights."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """Where scores go, a row a vertex in the original order: FILE.npz (as ``scores``) or FILE.npy."""
    nproc: int | None = None
    """Local ranks to start; by default the product of the mesh."""


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Compare split with whole on a sample of the graph: all outputs and gradients.

    The exit code is 1 if they differ.
    """

    data: config.Data = field(default_factory=config.Data)
    model: config.Model = field(default_factory=config.Model)
    parallel: config.Parallel = field(default_factory=config.Parallel)
    train: config.Train = field(default_factory=config.Train)
    vertices: int = 200
    """Vertices of the sample."""
    all: bool = False
    """Show all compared tensors, not only those that differ."""

    def __post_init__(self) -> None:
        config.at_least("check", self, vertices=1)


@dataclass(frozen=True, kw_only=True)
class PartitionCommand:
    """Cut a graph and save the parts: then ``kagome train --data.partition DIR`` loads one part a rank."""

    data: config.Data = field(default_factory=config.Data)
    parts: int = 2
    """How many."""
    partitioner: config.Partitioner = "auto"
    """How vertices are given to parts; ``auto`` takes METIS where it fits into memory, else streaming."""
    seed: int = 0
    """The partitioner's seed."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """Folder for the parts."""

    def __post_init__(self) -> None:
        check_kinds("partition", self)
        config.at_least("partition", self, parts=1)


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Predict what each cut would cost on some devices, and say which is best and why.

    The graph is loaded and cut; with --vertices and --edges it need not be there.
    """

    data: config.Data = field(default_factory=config.Data)
    model: config.Model = field(default_factory=config.Model)
    train: config.Train = field(default_factory=config.Train)
    devices: int = 2
    """Local ranks to plan for, where no cluster is named."""
    cluster: str | None = None
    """A cluster's TOML file, or one of h100x8, h100x64, a5000x16."""
    allow: tuple[config.Allowed, ...] = ()
    """What may be taken: another model (``decoupled``), rows of an earlier epoch in other chunks
    (``history``) or of other parts (``stale``), one bit a number of those (``onebit``)."""
    vertices: int | None = None
    """Vertices of a graph that is not there."""
    edges: int | None = None
    """Its edges, each way counted."""
    features: int = 128
    """Its features a vertex."""
    classes: int = 16
    """Its classes."""
    reuse: bool = True
    """Take what was measured on this machine within a day."""
    page: str = "runs/plan.html"
    """The page that shows the plans, and an epoch of the best; empty for none."""
    json: bool = False
    """Print plans as JSON, and write no page."""

    def __post_init__(self) -> None:
        check_kinds("plan", self)
        config.at_least("plan", self, devices=1, vertices=1, edges=1, features=1, classes=1)
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigError(f"plan.{name} to be {most:,} or less", f"{value:,}")


@dataclass(frozen=True)
class ReportCommand:
    """Write a run's report page again and print its table."""

    run: tyro.conf.Positional[str]
    """The run's folder."""


@dataclass(frozen=True)
class DoctorCommand:
    """Say what this machine offers, and whether ranks can talk to each other here."""


COMMANDS = {
    "train": TrainCommand,
    "predict": PredictCommand,
    "plan": PlanCommand,
    "check": CheckCommand,
    "partition": PartitionCommand,
    "report": ReportCommand,
    "doctor": DoctorCommand,
}
