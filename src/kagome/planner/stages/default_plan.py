"""Default plan: a chain of stages of about the same time, and the check of a user's plan for given ranks.

Where it sits: ``pipelining.dag.pipeline`` calls :func:`plan_of` once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kagome.errors import PlanError
from kagome.planner.stages.coarsen import fused
from kagome.planner.stages.operator_costs import OperatorGraph
from kagome.planner.stages.plan import PlannedStage, StagePlan


def plan_of(
    plan: StagePlan | Path | str | None,
    graph: OperatorGraph,
    bound: Iterable[tuple[str, str]],
    devices: int,
    batch: int | None,
    sample: int,
) -> StagePlan:
    """Return the plan to run, with every operator spelled out.

    Args:
        plan: The user's plan, or the file that holds it; None for the default plan. A stage may name a module
            in place of all operators within it that no stage names itself.
        graph: The model's operators.
        bound: Pairs of operators that must be in one stage.
        devices: The number of ranks.
        batch: The number of samples in a batch, if the user gave it.
        sample: The number of samples in the user's sample batch.

    Raises:
        PlanError: If the plan does not fit the model, the ranks or the batch.
    """
    if plan is None:
        # Operators whose value cannot be sent share a stage with its
        # readers, and with all on a path between them.
        whole = fused(graph, bound)
        plan = whole.spelled_out(default_plan(whole.graph, devices, batch or sample))
    elif not isinstance(plan, StagePlan):
        plan = StagePlan.load(plan)
    plan = _spelled_out(plan, graph)
    if batch is not None and batch != plan.batch:
        raise PlanError(f"a plan for batch={batch} samples", f"one for {plan.batch}")
    # Ranks have started already, so their number cannot follow the plan.
    if plan.devices != devices:
        raise PlanError(
            f"a rank for each of the plan's {plan.devices} devices in {len(plan.stages)} stages",
            f"{devices} ranks",
            hint=f"start {plan.devices} ranks",
        )
    for number, stage in enumerate(plan.stages):
        if not stage.operators or not 1 <= stage.devices <= stage.micro_batch:
            raise PlanError(
                "a stage with operators, and a micro-batch with a sample for each of its devices",
                f"{len(stage.operators)} operators, {stage.micro_batch} samples, {stage.devices} devices",
                where=f"stage {number}",
            )
    return plan


def _spelled_out(plan: StagePlan, graph: OperatorGraph) -> StagePlan:
    """Return the plan with each named module replaced by the operators within it."""
    # An operator that a stage names itself is taken out of its module, as in ("tower",), ("tower.3",).
    named = {name for stage in plan.stages for name in stage.operators}

    def within(name: str) -> list[str]:
        if name in graph.by_name:
            return [name]
        parts = [o.name for o in graph.operators if o.name.startswith(f"{name}.") and o.name not in named]
        # An unknown name stays, so that links_of refuses it with the name that the user wrote.
        return parts or [name]

    stages = (
        replace(stage, operators=tuple(o for name in stage.operators for o in within(name)))
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def default_plan(graph: OperatorGraph, devices: int, batch: int) -> StagePlan:
    """Make the default plan: operators in order, cut into a chain of stages of about the same time.

    Args:
        graph: The model's operators.
        devices: The number of ranks.
        batch: The number of samples in a batch.

    Returns:
        A plan with one stage for each device. With fewer operators than devices, the slowest stage has the
        remaining devices too. The micro-batch is the largest that divides the batch and leaves at least
        4 micro-batches for each device, where such a size exists.

    Raises:
        PlanError: If a batch has fewer samples than there are devices.
    """
    if batch < devices:
        raise PlanError(
            f"{devices} samples or more for as many ranks", f"{batch}", hint="a larger batch, or fewer ranks"
        )
    # Seconds of one sample decide the shares. They need not be right in size, only in proportion.
    count = min(devices, len(graph.operators))
    seconds = [operator.seconds(1) for operator in graph.operators]
    total = sum(seconds)
    groups: list[list[str]] = [[]]
    before = 0.0
    for place, (operator, cost) in enumerate(zip(graph.operators, seconds, strict=True)):
        left = len(graph.operators) - place
        need = count - len(groups)  # stages that have no operator yet
        # A stage ends before the operator whose middle lies beyond the stage's share of the time:
        #    |-- stage 0 --|-- stage 1 --|       total * len(groups) / count is the mark at the end of a stage
        #    [ a ][  b ][   c   ][  d   ]        b begins before the mark of stage 0 and has its middle there
        # so each operator is in the stage that its larger half falls into.
        full = before + cost / 2 > total * len(groups) / count
        # Where only as many operators are left as stages without one, each must begin a stage.
        if groups[-1] and need and (full or left <= need):
            groups.append([])
        groups[-1].append(operator.name)
        before += cost
    # With fewer operators than devices, spare devices become replicas of the slowest stage.
    costs = [sum(graph.by_name[name].seconds(1) for name in names) for names in groups]
    spare = devices - count
    widths = [1 + (spare if number == costs.index(max(costs)) else 0) for number in range(count)]
    shares = [max(graph.by_name[name].least for name in names) for names in groups]
    least = max(width * share for width, share in zip(widths, shares, strict=True))
    if batch < least:
        raise PlanError(
            f"a batch of {least} samples or more for a stage, {max(shares)} on each of its devices",
            f"{batch} samples",
            hint="a larger batch, or fewer ranks",
        )
    # Few micro-batches leave stages idle while the pipeline fills and drains; tiny ones compute slowly. Four
    # micro-batches for each device keep the idle share at about a fifth.
    most = max(least, batch // (4 * devices))
    # Only sizes that divide the batch are possible; the smallest of them is taken if all exceed the limit.
    fitting = [size for size in range(least, batch + 1) if batch % size == 0]
    size = max((size for size in fitting if size <= most), default=fitting[0])
    stages = tuple(
        PlannedStage(tuple(names), width, size) for names, width in zip(groups, widths, strict=True)
    )
    return StagePlan(batch, stages)
