"""Stages: a graph of steps cut into the stages of a pipeline, and what crosses between them.

Where it sits: ``run`` gives it a graph and a survey of ``model.trace.shapes``, and runs the stages it gets.

A value goes from the stage that makes it to the next one that reads it, from there to the next one, and so
on: each stage that reads a value is sent it once, or finds it with an earlier stage of its rank. What needs
no weights is computed wherever it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kagome.errors import ModelError
from kagome.model.split.balance import SLACK, allowed_pieces, best_cuts, most_pieces
from kagome.model.split.liveness import Liveness
from kagome.model.trace.graph import Step
from kagome.model.trace.shapes import LayerGraph, Survey, Value


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a pipeline.

    Args:
        number: Counted from 0.
        rank: Of the ranks that hold a part, the one that runs it.
        steps: Those it runs, in order, what it computes again included.
        takes: Values it takes, by the earlier stage that gives them.
        gives: Values it gives, by the later stage that takes them; some it has taken itself.
        inputs: Names of the data's inputs that it reads.
        parameters: Full names of the weights it has; one that several stages use belongs to each.
        buffers: Full names of the buffers it uses; those that a forward changes belong to one stage alone.
        output: Name of the model's output in the last stage, else None.
    """

    number: int
    rank: int
    steps: tuple[Step, ...]
    takes: Mapping[int, tuple[str, ...]]
    gives: Mapping[int, tuple[str, ...]]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    output: str | None


def cut(
    graph: LayerGraph,
    survey: Survey,
    stages: int,
    seconds: Mapping[str, float],
    *,
    backward: Mapping[str, float] | None = None,
    vertices: int = 1,
    edges: int = 1,
    ranks: int | None = None,
    slack: float = SLACK,
) -> tuple[Stage, ...]:
    """Cut a graph into stages: the slowest is about as fast as can be, then the fewest bytes cross.

    A balance to the last percent is not worth bytes: the seconds are measured, and differ by more from one
    time to the next. A cut inside a residual block sends what the block adds to as well.

    Args:
        graph: Of the model.
        survey: Of the graph.
        stages: How many.
        seconds: Of each step; 0 where it has none. What is computed in several stages counts in the first.
        backward: Of each step's backward, if ``seconds`` are of its forward: where all chunks pass forward
            before any comes back, the slowest stage of each pass counts.
        vertices: Rows of a value with a row a vertex, where bytes are compared.
        edges: Rows of a value with a row an edge.
        ranks: Among how many the stages are dealt, round and round; by default each has its own.
        slack: What share the slowest stage may take above the least, where fewer bytes then cross.

    Raises:
        ModelError: If there cannot be so many, if the output has not a row a vertex, or if forward changes
            an input in place.

    Cost:
        Under a second for 600 steps and 64 stages.
    """
    assert stages >= 1
    output = survey.values.get(graph.output, Value("none"))
    if output.kind != "rows":
        raise ModelError(
            "a pipeline's last stage gives one tensor with a row a vertex",
            f"{graph.output} is of kind {output.kind!r} and shape {output.shape}",
            where=next((step.line for step in graph.steps if step.name == graph.output), ""),
            hint="return the scores alone; a table of all vertices is read by number, with n_id in the data",
        )
    flow = Liveness.of(graph, survey)
    allowed = allowed_pieces([_is_layer(step) for step in flow.body], flow.barred())
    most = most_pieces(allowed, stages)
    if most < stages:
        _refuse(flow, stages, most, stages if ranks is None else ranks)
    passes = [flow.seconds(each) for each in (seconds, backward) if each is not None]
    cuts = best_cuts(passes, allowed, flow.bytes(survey, vertices, edges), stages, slack)
    return _built(graph, flow, cuts, stages if ranks is None else ranks)


def links(stages: Sequence[Stage]) -> tuple[tuple[int, int], ...]:
    """All pairs of a stage that gives and one that takes, in order."""
    return tuple(sorted((stage.number, taker) for stage in stages for taker in stage.gives))


def shared_parameters(stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Weights that stages of several ranks have, with these ranks."""
    owners: dict[str, set[int]] = {}
    for stage in stages:
        for name in stage.parameters:
            owners.setdefault(name, set()).add(stage.rank)
    return {name: tuple(sorted(ranks)) for name, ranks in owners.items() if len(ranks) > 1}


def stage_bytes(stages: Sequence[Stage], survey: Survey, vertices: int, edges: int) -> int:
    """Bytes of all messages of one forward and backward over so many rows.

    Cost:
        A value that needs a gradient counts twice: its gradient comes back the same way. What one stage of a
        rank gives another one is not sent.
    """
    return sum(
        survey.values[name].bytes(vertices, edges) * (2 if survey.values[name].grad else 1)
        for stage in stages
        for taker, names in stage.gives.items()
        if stages[taker].rank != stage.rank
        for name in names
    )


def describe(stages: Sequence[Stage], survey: Survey, seconds: Mapping[str, float] | None = None) -> str:
    """A line a stage: its modules, its share of the time, what it takes and gives with widths."""
    spent = [sum((seconds or {}).get(step.name, 0.0) for step in stage.steps) for stage in stages]
    several = len({stage.rank for stage in stages}) < len(stages)
    lines = []
    for stage, own in zip(stages, spent, strict=True):
        place = f" (rank {stage.rank} of its part)" if several else ""
        share = f", {100 * own / sum(spent):.0f} % of the time" if sum(spent) > 0 else ""
        lines.append(
            f"stage {stage.number}{place}: {_modules(stage)}{share}"
            f"{_traffic('takes', 'from', stage.takes, survey)}{_traffic('gives', 'to', stage.gives, survey)}"
        )
    return "\n".join(lines)


def _modules(stage: Stage) -> str:
    paths = list(dict.fromkeys(step.path or step.name for step in stage.steps if _is_layer(step)))
    return paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]} ({len(paths)} layers)"


def _traffic(verb: str, way: str, values: Mapping[int, tuple[str, ...]], survey: Survey) -> str:
    def told(name: str) -> str:
        value = survey.values[name]
        return f"{name} {value.kind} x {'x'.join(map(str, value.shape)) or 1}"

    parts = [f"{', '.join(map(told, names))} {way} {other}" for other, names in sorted(values.items())]
    return f"; {verb} {'; '.join(parts)}" if parts else ""


def _is_layer(step: Step) -> bool:
    return step.layer or (step.kind != "attribute" and bool(step.parameters))


def _refuse(flow: Liveness, stages: int, most: int, ranks: int) -> None:
    layers = sum(_is_layer(step) for step in flow.body)
    why = f"it has {layers} step{'s' * (layers != 1)} with weights or messages"
    blocked = flow.blocked()
    where = ""
    if most < layers and blocked is not None:
        reader, name, reason = blocked
        maker = next(step for step in flow.body if step.name == name)
        why += f", and there is no cut between {name} and {reader.name}, as {name} {reason}"
        where = maker.line
    asked, advice = f"pipe={ranks}", f"--parallel.pipe {most}" if most > 1 else "no --parallel.pipe"
    if stages > ranks:
        asked += f" with stages_per_rank={stages // ranks}"
        advice = f"--parallel.stages-per-rank {most // ranks}" if most >= ranks else advice
    raise ModelError(
        f"{asked} cuts the model into {stages} stages",
        f"it can be cut into {most} at most: {why}",
        where=where,
        hint=advice + (", or return tensors with a row a vertex between layers" if where else ""),
    )


def _built(graph: LayerGraph, flow: Liveness, cuts: Sequence[int], ranks: int) -> tuple[Stage, ...]:
    count = len(cuts) - 1
    home: dict[str, int] = {}
    for number in range(count):
        home |= {step.name: number for step in flow.body[cuts[number] : cuts[number + 1]]}
    takes: list[dict[int, list[str]]] = [{} for _ in range(count)]
    gives: list[dict[int, list[str]]] = [{} for _ in range(count)]
    holders: dict[str, list[int]] = {name: [number] for name, number in home.items()}
    steps: list[list[Step]] = []
    inputs: list[set[str]] = []
    for number in range(count):
        body = flow.body[cuts[number] : cuts[number + 1]]
        wanted = {name for step in body for name in step.reads}
        wanted |= {graph.output} if number == count - 1 else set()
        again, values, read = flow.needed(wanted)
        names = {step.name for step in body} | again
        steps.append([step for step in graph.steps if step.name in names])
        inputs.append(read)
        for step in flow.body:
            name = step.name
            if name in values and home[name] != number:
                # The last stage before this one that has the value passes it on, one of this rank first.
                near = [each for each in holders[name] if (number - each) % ranks == 0]
                giver = (near or holders[name])[-1]
                takes[number].setdefault(giver, []).append(name)
                gives[giver].setdefault(number, []).append(name)
                holders[name].append(number)
    used = [{name for step in each for name in step.parameters} for each in steps]
    used[0] |= set(graph.parameters) - set().union(*used)
    return tuple(
        Stage(
            number=number,
            rank=number % ranks,
            steps=tuple(steps[number]),
            takes={other: tuple(names) for other, names in takes[number].items()},
            gives={other: tuple(names) for other, names in gives[number].items()},
            inputs=tuple(name for name in graph.inputs if name in inputs[number]),
            parameters=tuple(name for name in graph.parameters if name in used[number]),
            buffers=tuple(dict.fromkeys(name for step in steps[number] for name in step.buffers)),
            output=graph.output if number == count - 1 else None,
        )
        for number in range(count)
    )
