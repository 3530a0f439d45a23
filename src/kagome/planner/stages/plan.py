"""Stage plan: stages that form a DAG, each with its operators, devices, micro-batch and k.

Where it sits: what the stage planners return, what ``run`` and ``schedule`` take; a JSON file that can be
read, edited and given back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kagome.config.fields import path_of
from kagome.errors import PlanError
from kagome.planner.stages.operator_costs import OperatorGraph
from kagome.schedule.dag_schedules import DagShape, Turns


@dataclass(frozen=True)
class PlannedStage:
    """One stage.

    Args:
        operators: Names of its operators.
        devices: Replicas among which each of its micro-batches is divided.
        micro_batch: Samples of a micro-batch, over all replicas.
        k: Micro-batches that go forward, and then backward, in one turn.
    """

    operators: tuple[str, ...]
    devices: int = 1
    micro_batch: int = 1
    k: int = 1


@dataclass(frozen=True)
class StagePlan:
    """Stages of a DAG, in an order in which sources come before readers.

    Args:
        batch: Samples of a batch, after which weights change.
        stages: The stages; ranks are given out in their order.
    """

    batch: int
    stages: tuple[PlannedStage, ...]

    @property
    def devices(self) -> int:
        """Devices of all stages."""
        return sum(stage.devices for stage in self.stages)

    def shape(self, graph: OperatorGraph) -> DagShape:
        """What its programs are made for.

        Raises:
            PlanError: If an operator is in no stage or in two, or stages read each other in a circle.
        """
        return DagShape(
            self.batch,
            tuple(Turns(stage.micro_batch, stage.k) for stage in self.stages),
            links_of(graph, [stage.operators for stage in self.stages]),
        )

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> StagePlan:
        """The plan that a text holds.

        Raises:
            PlanError: If it holds none.
        """
        try:
            record = json.loads(text)
            stages = tuple(
                PlannedStage(**{**stage, "operators": tuple(stage["operators"])})
                for stage in record["stages"]
            )
            return StagePlan(int(record["batch"]), stages)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(
                "a plan is JSON with batch and stages of operators, devices, micro_batch and k",
                f"{type(error).__name__}: {error}",
                hint="take a file that kagome.pipeline or a planner wrote, and change its numbers",
            ) from None

    @staticmethod
    def load(path: Path | str) -> StagePlan:
        """The plan in a file.

        Raises:
            PlanError: If it cannot be read, or holds none.
        """
        file = path_of(path, "plan")
        try:
            return StagePlan.from_json(file.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                "plan takes auto, or the file of a plan",
                f"{file} cannot be read: {getattr(error, 'strerror', None) or error}",
            ) from None


def links_of(graph: OperatorGraph, stages: Sequence[Sequence[str]]) -> tuple[tuple[int, int], ...]:
    """Which stages read which.

    Raises:
        PlanError: If an operator is in no stage or in two, or a stage reads a later one.
    """
    place: dict[str, int] = {}
    for number, names in enumerate(stages):
        for name in names:
            if name in place or name not in graph.by_name:
                found = f"stages {place[name]} and {number}" if name in place else "the model has none of it"
                raise PlanError(
                    "each operator is in one stage", f"{name!r}: {found}", where=f"stage {number}"
                )
            place[name] = number
    missing = [operator.name for operator in graph.operators if operator.name not in place]
    if missing:
        raise PlanError("each operator is in one stage", f"{missing} are in none")
    links: set[tuple[int, int]] = set()
    for operator in graph.operators:
        for read in operator.reads:
            one, other = place[read], place[operator.name]
            if one > other:
                raise PlanError(
                    "a stage reads earlier ones",
                    f"{operator.name!r} in stage {other} reads {read!r} in stage {one}",
                    where=f"stage {other}",
                    hint="order the stages so that sources come first",
                )
            if one != other:
                links.add((one, other))
    return tuple(sorted(links))
