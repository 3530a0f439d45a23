"""Stage plan: stages that form a DAG, each with its operators, devices, micro-batch and k.

Where it sits: stage planners return it, and ``pipelining.dag`` and ``schedule`` use it. As a JSON file it can
be read, edited and passed in again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from kagome.config.fields import path_of
from kagome.errors import PlanError
from kagome.planner.stages.operator_costs import OperatorGraph
from kagome.schedule.actions import Programs
from kagome.schedule.schedules import Shape, k_forward_k_backward, zero_bubble

DagSchedule = Literal["kfkb", "zero-bubble"]
"""The schedules of stages that form a DAG."""
SCHEDULES: Final[tuple[DagSchedule, ...]] = get_args(DagSchedule)


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan.

    Args:
        operators: The names of its operators.
        devices: The number of replicas, which share each of its micro-batches.
        micro_batch: The number of samples in a micro-batch, over all replicas.
        k: The number of micro-batches that run forward, and then backward, in one group (kFkB).
        order: The order of zero bubble: F, I and W for each micro-batch; see ``schedule.schedules``. Empty in
            all stages of a plan for kFkB.
    """

    operators: tuple[str, ...]
    devices: int = 1
    micro_batch: int = 1
    k: int = 1
    order: str = ""


@dataclass(frozen=True)
class StagePlan:
    """The stages of a DAG in topological order.

    Args:
        batch: The number of samples in a batch, after which weights are updated.
        stages: The stages; ranks are assigned in their order.
        why: Why it has this schedule, in the planner's words.
    """

    batch: int
    stages: tuple[PlannedStage, ...]
    why: str = ""

    @property
    def devices(self) -> int:
        """The number of devices of all stages."""
        return sum(stage.devices for stage in self.stages)

    @property
    def k(self) -> tuple[int, ...]:
        """The number of micro-batches that each stage takes in one turn."""
        return tuple(stage.k for stage in self.stages)

    @property
    def schedule(self) -> DagSchedule:
        """The schedule: zero bubble if a stage has an order."""
        return "zero-bubble" if any(stage.order for stage in self.stages) else "kfkb"

    def with_orders(self, orders: Sequence[str], why: str = "") -> StagePlan:
        """Return the plan with the order of each stage for zero bubble; empty ones for kFkB."""
        stages = (replace(stage, order=order) for stage, order in zip(self.stages, orders, strict=True))
        return StagePlan(self.batch, tuple(stages), why)

    def programs(self, shape: Shape) -> Programs:
        """Return the program of each stage.

        Args:
            shape: The plan's :meth:`shape`.

        Raises:
            ScheduleError: If the order of a stage is not one of its micro-batches.
        """
        if self.schedule == "zero-bubble":
            return zero_bubble(shape, [stage.order for stage in self.stages])
        return k_forward_k_backward(shape, self.k)

    def shape(self, graph: OperatorGraph) -> Shape:
        """Return the shape that programs of this plan are generated for.

        Raises:
            PlanError: If an operator is in no stage or in two, or a stage reads a later one.
        """
        links = links_of(graph, [stage.operators for stage in self.stages])
        sizes = tuple(stage.micro_batch for stage in self.stages)
        return Shape(len(self.stages), range(self.batch), links, sizes=sizes)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> StagePlan:
        """Read a plan from JSON text.

        Raises:
            PlanError: If the text is not a plan.
        """
        try:
            record = json.loads(text)
            stages = tuple(_stage_of(stage) for stage in record["stages"])
            return StagePlan(int(record["batch"]), stages, str(record.get("why", "")))
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(
                "a plan in JSON with batch and stages of operators, devices, micro_batch and k",
                f"{type(error).__name__}: {error}",
                hint="take a file that kagome.pipeline or a planner wrote, and change its numbers",
            ) from None

    @staticmethod
    def load(path: Path | str) -> StagePlan:
        """Read a plan from a file.

        Raises:
            PlanError: If the file cannot be read, or is not a plan.
        """
        file = path_of(path, "plan")
        try:
            return StagePlan.from_json(file.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                "plan to be auto, or the file of a plan",
                f"{file}, which cannot be read: {getattr(error, 'strerror', None) or error}",
            ) from None


def _stage_of(record: Mapping[str, Any]) -> PlannedStage:
    """Return a stage of a plan's file; a TypeError says what is wrong with it."""
    # An unknown key is a TypeError of the constructor, which names it.
    stage = PlannedStage(**{**record, "operators": tuple(record["operators"])})
    for name, kind in {"devices": int, "micro_batch": int, "k": int, "order": str}.items():
        value = getattr(stage, name)
        if type(value) is not kind:  # True is an instance of int
            raise TypeError(f"{name} of a stage is {value!r}, not {kind.__name__}")
    return stage


def links_of(graph: OperatorGraph, stages: Sequence[Sequence[str]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of stages of which the second reads the first.

    Raises:
        PlanError: If an operator is in no stage or in two, or a stage reads a later one.
    """
    place: dict[str, int] = {}
    for number, names in enumerate(stages):
        for name in names:
            # A plan is often edited by hand, so both mistakes get the name and the stages.
            if name in place or name not in graph.by_name:
                known = f"in stages {place[name]} and {number}" if name in place else "that the model lacks"
                raise PlanError("each operator in one stage", f"{name!r} {known}", where=f"stage {number}")
            place[name] = number
    missing = [operator.name for operator in graph.operators if operator.name not in place]
    if missing:
        raise PlanError("each operator in one stage", f"{missing} in none")
    links: set[tuple[int, int]] = set()
    for operator in graph.operators:
        for read in operator.reads:
            one, other = place[read], place[operator.name]
            # Ranks are assigned to stages in order, and programs are generated in that order: a link
            # backwards would make them wait for each other.
            if one > other:
                raise PlanError(
                    "a stage to read earlier ones",
                    f"{operator.name!r} in stage {other}, which reads {read!r} in stage {one}",
                    where=f"stage {other}",
                    hint="order the stages so that sources come first",
                )
            if one != other:
                links.add((one, other))
    return tuple(sorted(links))
