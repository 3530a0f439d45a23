"""Commands: the flags of each command, as dataclasses.

Where it sits: ``cli.app`` parses them and runs the commands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from kagome import config
from kagome.config.fields import check_kinds
from kagome.errors import ConfigError

MOST = {"devices": 65_536, "vertices": 10**13, "edges": 10**15, "features": 10**7, "classes": 10**6}
"""Largest values that ``kagome plan`` accepts: its sample has all features and classes."""


@dataclass(frozen=True, kw_only=True)
class TrainCommand(config.Run):
    """Train a model on a graph, on one rank or several.

    A TOML file with the same sections may come first: ``kagome train RUN.toml --train.epochs 50``.
    """

    nproc: int | None = None
    """Number of local ranks to start; by default the product of the mesh. Under torchrun or srun, the
    ranks that they started are used."""
    out: str | None = None
    """Folder for the run's files; by default a new one under runs/."""
    overwrite: bool = False
    """Remove a run that is already in that folder."""
    resume: str | None = None
    """Folder of a run to continue, on any number of ranks; its settings are the defaults. If it has no
    checkpoint yet, a new run begins in it."""
    max_restarts: int = 0
    """Number of times that local ranks are started again after one of them died, from the last complete
    checkpoint."""


@dataclass(frozen=True, kw_only=True)
class PredictCommand(config.Run):
    """Score a graph with the weights of a run; labels are not needed.

    The settings of the run are the defaults; flags override them.
    """

    checkpoint: Annotated[str, tyro.conf.arg(metavar="RUN")]
    """Folder of a run (its best epoch is used), one of its checkpoints, or a .safetensors file of
    weights."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """File for the scores, one row for each vertex in the original order: FILE.npz (as ``scores``) or
    FILE.npy."""
    nproc: int | None = None
    """Local ranks to start; by default the product of the mesh."""


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Compare all outputs and gradients of a split model and a whole one, on a sample of the graph.

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
    """Cut a graph and save its parts, for ``kagome train --data.partition DIR``."""

    data: config.Data = field(default_factory=config.Data)
    parts: int = 2
    """Number of parts."""
    partitioner: config.Partitioner = "auto"
    """Method that assigns vertices to parts. ``auto`` uses METIS if it fits into memory, otherwise
    streaming."""
    part_weights: tuple[float, ...] = ()
    """Work of each part relative to the others, as ``--parallel.part-weights``."""
    seed: int = 0
    """The partitioner's seed."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """Folder for the parts."""

    def __post_init__(self) -> None:
        check_kinds("partition", self)
        config.at_least("partition", self, parts=1)
        # The same refusals as of a run that cuts by itself.
        config.Parallel(graph=self.parts, part_weights=self.part_weights).fit(self.parts)

    @property
    def method(self) -> str:
        """The partitioner with the weights, as ``graph.partition`` takes it."""
        cut = config.Parallel(partitioner=self.partitioner, part_weights=self.part_weights)
        return cut.cutter(self.parts)


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Predict what each cut would cost on given devices, and explain which is best.

    The graph is loaded and cut, unless --vertices and --edges state its size.
    """

    data: config.Data = field(default_factory=config.Data)
    model: config.Model = field(default_factory=config.Model)
    train: config.Train = field(default_factory=config.Train)
    devices: int = 2
    """Number of local ranks to plan for, if no cluster is named."""
    cluster: str | None = None
    """A cluster's TOML file, or one of h100x8, h100x64, a5000x16."""
    allow: tuple[config.Allowed, ...] = ()
    """Inexact methods that plans may use: another model (``decoupled``), rows of an earlier epoch in
    other chunks (``history``) or in other parts (``stale``), one bit for each number of those
    (``onebit``)."""
    vertices: int | None = None
    """Number of vertices, to plan for a graph that is not on this machine."""
    edges: int | None = None
    """Number of its edges; an edge in both directions counts twice."""
    features: int = 128
    """Number of its features for each vertex."""
    classes: int = 16
    """Number of its classes."""
    reuse: bool = True
    """Reuse measurements made on this machine within a day."""
    page: str = "runs/plan.html"
    """File for the page that shows the plans and one epoch of the best; empty writes none."""
    json: bool = False
    """Print the plans as JSON, and do not write a page."""

    def __post_init__(self) -> None:
        check_kinds("plan", self)
        config.at_least("plan", self, devices=1, vertices=1, edges=1, features=1, classes=1)
        # A sample graph with all features and classes is made, and
        # each divisor of the devices is planned for.
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
    """Report what this machine offers, and whether ranks can communicate on it."""


COMMANDS = {
    "train": TrainCommand,
    "predict": PredictCommand,
    "plan": PlanCommand,
    "check": CheckCommand,
    "partition": PartitionCommand,
    "report": ReportCommand,
    "doctor": DoctorCommand,
}
