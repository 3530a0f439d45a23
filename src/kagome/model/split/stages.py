"""Pipeline stages: a graph of steps cut into stages, and the values that are sent between them.

Where it sits: the chunk engine gives it a graph and a survey of ``model.trace.shapes``, and runs the
resulting stages.

A value goes from the stage that computes it to the next stage that reads it, from there to the next one, and
so on. Each stage that reads a value receives it once, or finds it with an earlier stage of its rank. Values
that need no weights are computed wherever they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kagome.errors import ModelError
from kagome.model.split.balance import SLACK, allowed_pieces, best_cuts, most_pieces
from kagome.model.split.liveness import Liveness
from kagome.model.trace.graph import LayerGraph, Step
from kagome.model.trace.shapes import Survey, Value


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a pipeline.

    Args:
        number: Number of the stage, counted from 0.
        rank: The rank that runs it, among the ranks that hold a part.
        steps: Steps that it runs, in order, including those that other stages compute too.
        takes: Values it takes, by the earlier stage that gives them.
        gives: Values it gives, by the later stage that takes them; some of them it has taken itself.
        inputs: Names of the data's inputs that it reads.
        parameters: Full names of its weights; a weight that several stages use belongs to each of them.
        buffers: Full names of the buffers it uses; buffers that a forward pass changes belong to one stage
            only.
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
    """Cut a graph into stages: minimise the slowest stage, and then the bytes sent.

    A balance to the last percent is not worth extra bytes, because the seconds are measured and vary by more
    from one time to the next. A cut inside a residual block also sends the value that the block adds to.

    Args:
        graph: Steps of the model.
        survey: A survey of the graph.
        stages: Number of stages.
        seconds: Seconds of each step; 0 if missing. A step computed in several stages counts in the first.
        backward: Seconds of each step's backward, if ``seconds`` are those of its forward. If all chunks pass
            forward before any comes back, the slowest stage of each pass counts.
        vertices: Number of vertices, by which the bytes of values with a row for each vertex are compared.
        edges: Number of edges, for values with a row for each edge.
        ranks: Number of ranks to which the stages are dealt in turn; by default one for each stage.
        slack: Share by which the slowest stage may exceed the fastest possible one, to send fewer bytes.

    Raises:
        ModelError: If so many stages are impossible, if the output does not have a row for each vertex, or if
            forward changes an input in place.

    Cost:
        Under a second for 600 steps and 64 stages.
    """
    assert stages >= 1
    output = survey.values.get(graph.output, Value("none"))
    if output.kind != "rows":
        raise ModelError(
            "one tensor with a row a vertex from a pipeline's last stage",
            f"{graph.output} of kind {output.kind!r} and shape {output.shape}",
            where=next((step.line for step in graph.steps if step.name == graph.output), ""),
            hint="return the scores alone; a table of all vertices is read by number, with n_id in the data",
        )
    # Consecutive pieces of the body; each must hold a layer, so that no stage is idle.
    flow = Liveness.of(graph, survey)
    allowed = allowed_pieces([_is_layer(step) for step in flow.body], flow.barred())
    most = most_pieces(allowed, stages)
    if most < stages:
        _refuse(flow, stages, most, stages if ranks is None else ranks)
    # Two passes where forward and backward of all chunks follow each other: in each the slowest stage counts.
    passes = [flow.seconds(each) for each in (seconds, backward) if each is not None]
    cuts = best_cuts(passes, allowed, flow.bytes(survey, vertices, edges), stages, slack)
    return _built(graph, flow, cuts, stages if ranks is None else ranks)


def links(stages: Sequence[Stage]) -> tuple[tuple[int, int], ...]:
    """Return all pairs of a stage that gives a value and a stage that takes it, in order."""
    return tuple(sorted((stage.number, taker) for stage in stages for taker in stage.gives))


def shared_parameters(stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Return the weights that stages of several ranks use, with these ranks."""
    owners: dict[str, set[int]] = {}
    for stage in stages:
        for name in stage.parameters:
            owners.setdefault(name, set()).add(stage.rank)
    return {name: tuple(sorted(ranks)) for name, ranks in owners.items() if len(ranks) > 1}


def stage_bytes(stages: Sequence[Stage], survey: Survey, vertices: int, edges: int) -> int:
    """Return the bytes of all messages of one forward and backward over these numbers of rows.

    Cost:
        A value that requires a gradient counts twice, because its gradient is sent back. Values between
        stages of one rank are not sent.
    """
    return sum(
        survey.values[name].bytes(vertices, edges) * (2 if survey.values[name].grad else 1)
        for stage in stages
        for taker, names in stage.gives.items()
        if stages[taker].rank != stage.rank
        for name in names
    )


def describe(stages: Sequence[Stage], survey: Survey, seconds: Mapping[str, float] | None = None) -> str:
    """Return a line for each stage: its modules, its share of the time, the values it takes and gives."""
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
    # A functional layer counts too: ``F.linear(x, self.weight)`` is a function that reads a weight.
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
    expected, advice = f"pipe={ranks}", f"--parallel.pipe {most}" if most > 1 else "no --parallel.pipe"
    if stages > ranks:
        expected += f" with stages_per_rank={stages // ranks}"
        advice = f"--parallel.stages-per-rank {most // ranks}" if most >= ranks else advice
    raise ModelError(
        f"a model that {expected} can cut into {stages} stages",
        f"one that can be cut into {most} at most: {why}",
        where=where,
        hint=advice + (", or return tensors with a row a vertex between layers" if where else ""),
    )


def _built(graph: LayerGraph, flow: Liveness, cuts: Sequence[int], ranks: int) -> tuple[Stage, ...]:
    # How a value x of stage 0 comes to stages 2 and 3, each of which reads it, on ranks dealt in turn:
    #
    #     4 ranks    0 --x--> 2 --x--> 3      each takes it from the last stage that has it
    #     2 ranks    0 =====> 2 --x--> 3      stages 0 and 2 are on rank 0: nothing is sent between them
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
        recomputed, values, read = flow.needed(wanted)
        names = {step.name for step in body} | recomputed
        steps.append([step for step in graph.steps if step.name in names])
        inputs.append(read)
        for step in flow.body:
            name = step.name
            if name in values and home[name] != number:
                # The last earlier stage that has the value passes it on, preferably one of this rank.
                near = [each for each in holders[name] if (number - each) % ranks == 0]
                giver = (near or holders[name])[-1]
                takes[number].setdefault(giver, []).append(name)
                gives[giver].setdefault(number, []).append(name)
                holders[name].append(number)
    used = [{name for step in each for name in step.parameters} for each in steps]
    # A weight that no step reads still belongs to a stage, so that it is saved and its decay applied.
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
