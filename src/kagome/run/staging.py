"""Staging: a user's model traced, looked at on a small sample, timed, and cut into the stages of a mesh.

Where it sits: ``pipeline`` asks for it once; rank 0 looks and times, all ranks cut alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.config import Parallel, Train
from kagome.errors import ModelError
from kagome.graph.partition import Partition, partition
from kagome.model.exact import HANDLERS
from kagome.model.layers import Survey, chain, survey, trace
from kagome.model.rules import apply_rules
from kagome.model.stages import Stage, cut
from kagome.model.steps import LayerGraph, Ref, Step, mapped, over_after
from kagome.neighbors import algebra
from kagome.neighbors.install import install
from kagome.neighbors.intercept import Interception
from kagome.neighbors.marks import Kind
from kagome.run.holdings import ledger_of
from kagome.run.sample import take_sample

SAMPLE: Final = 48
"""Vertices of the sample on which values are looked at."""
TIMED: Final = 20_000
"""Most vertices of the sample on which steps are timed."""
RUNS: Final = 3
"""How often, after a first run that builds what the others use."""


@dataclass(frozen=True)
class Staging:
    """A model cut into stages.

    Args:
        graph: Its steps.
        survey: What each step's value looks like.
        stages: The stages, in order.
        seconds: What each step takes for all chunks of a part, forward and backward, told from samples.
        kept: Bytes that autograd keeps of each step, on a sample.
    """

    graph: LayerGraph
    survey: Survey
    stages: tuple[Stage, ...]
    seconds: Mapping[str, float]
    kept: Mapping[str, int]

    def kept_by(self, rank: int) -> float:
        """The share of what autograd keeps of a forward that the stages of a pipeline's rank keep."""
        return sum(self.kept_of(stage) for stage in self.stages if stage.rank == rank)

    def kept_of(self, stage: Stage) -> float:
        """The share of one of the stages."""
        return sum(self.kept[step.name] for step in stage.steps) / max(sum(self.kept.values()), 1)


def needed(stages: Sequence[Stage], part: Partition) -> Partition:
    """What some stages and the loss read of a part: features lie with the stages that use them."""
    names = {name for stage in stages for name in stage.inputs} | {"y"}
    names |= {name for name in part.nodes if name.endswith("_mask")}
    nodes = {name: value for name, value in part.nodes.items() if name in names}
    edges = {name: value for name, value in part.edges.items() if name in names}
    return replace(part, nodes=nodes, edges=edges)


Seconds = tuple[float, float]
"""Seconds forward, and backward."""


@dataclass(frozen=True)
class Steps:
    """A model's steps, looked at and timed.

    Args:
        graph: The steps.
        survey: What each one's value looks like.
        calls: Seconds of a call of each, forward and backward.
        rows: Seconds of each row in it, besides.
        kept: Bytes that autograd keeps of each, on a sample.
    """

    graph: LayerGraph
    survey: Survey
    calls: Mapping[str, Seconds]
    rows: Mapping[str, Seconds]
    kept: Mapping[str, int]

    def staging(self, parallel: Parallel, rows: int) -> Staging:
        """Cut them.

        Args:
            parallel: How many stages, ranks and chunks.
            rows: Of a part.

        Raises:
            ModelError: If there cannot be so many stages.
        """
        chunks = parallel.chunks or 1
        forward, backward = (
            {name: chunks * call[way] + rows * self.rows[name][way] for name, call in self.calls.items()}
            for way in (0, 1)
        )
        seconds = {name: forward[name] + backward[name] for name in forward}
        # By 1F1B a chunk's forward waits for another one's backward, else all chunks go forward first.
        apart = parallel.pattern == "fill-drain"
        stages = cut(
            self.graph,
            self.survey,
            parallel.pipe * parallel.stages_per_rank,
            forward if apart else seconds,
            backward=backward if apart else None,
            ranks=parallel.pipe,
        )
        return Staging(self.graph, self.survey, stages, seconds, self.kept)


def stage_model(
    model: nn.Module, part: Partition, world: Channel, parallel: Parallel, train: Train, device: torch.device
) -> Staging:
    """Trace, look, time, cut. All ranks call it.

    Args:
        model: The user's module, as it was given.
        part: This rank's part.
        world: All ranks.
        parallel: How many stages and chunks; the names of layers, if the user gave them.
        train: Seed and mixed precision.
        device: Where the model runs.

    Raises:
        ModelError: If the model cannot be traced, or not be cut into so many stages.

    Cost:
        As :func:`steps_of`.
    """
    steps = steps_of(model, part, world, parallel.layers, train, device)
    return steps.staging(parallel, part.own.numel())


def steps_of(
    model: nn.Module,
    part: Partition,
    world: Channel,
    layers: Sequence[str],
    train: Train,
    device: torch.device,
) -> Steps:
    """Trace, look, time. All ranks call it.

    Args:
        model: The user's module, as it was given.
        part: This rank's part.
        world: All ranks.
        layers: Names of layers that follow each other, if the user gave them.
        train: Seed and mixed precision.
        device: Where the model runs.

    Raises:
        ModelError: If the model cannot be traced.

    Cost:
        On rank 0 some forwards and backwards of a sample of at most :data:`TIMED` vertices.
    """
    names = ["edge_index", *part.nodes, *part.edges]
    graph = chain(model, layers, names) if layers else trace(model, names)
    found: Any = None
    if world.rank == 0:
        found = _looked_at(model, graph, part, train, device)
        if isinstance(found, tuple):
            timed = _timed(model, graph, found[0], part, train, device)
            found = (*found, *timed, _kept(model, graph, part, train, device))
    found = world.gather_objects(found, "look at the model's steps")[0]
    if isinstance(found, ModelError):
        raise found
    return Steps(graph, *found)


def _sample_scope(part: Partition, vertices: int, train: Train, device: torch.device) -> Interception:
    sample = take_sample(part, vertices, train.seed)
    whole = partition(sample, parts=1, method="contiguous")[0]
    solo = Channel(None, device)
    return Interception(whole, solo, device=device, seed=train.seed, handlers=HANDLERS, fast=False)


def _looked_at(
    model: nn.Module, graph: LayerGraph, part: Partition, train: Train, device: torch.device
) -> tuple[Survey] | ModelError:
    scope = _sample_scope(part, SAMPLE, train, device)

    def look(value: Any) -> str:
        if not isinstance(value, Tensor):
            return "none"
        mark = scope.marks.get(value)
        if mark is None:
            return "fixed"
        if mark.kind in (Kind.ROWS, Kind.PAIRS):
            return {Kind.ROWS: "rows", Kind.PAIRS: "edges"}[mark.kind] if mark.axis == 0 else "none"
        return "none"

    try:
        with _On(model, scope, train):
            return (survey(graph, model, scope.inputs, look=look, draws=lambda: scope.draws),)
    except ModelError as error:
        return error


class _On(ExitStack):
    """A model with an interception's hooks, in training, for a block; afterwards it is as it was."""

    def __init__(self, model: nn.Module, scope: Interception, train: Train) -> None:
        super().__init__()
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        modes = [(module, module.training) for module in model.modules()]

        def restore() -> None:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for module, mode in modes:
                module.training = mode

        self.callback(restore)
        self.callback(apply_rules(model, scope))
        self.callback(install(model, scope))
        self.enter_context(torch.random.fork_rng(devices=[]))
        model.train()
        self.enter_context(scope.running(0, training=True))
        device = scope.device.type
        self.enter_context(torch.autocast(device, torch.bfloat16) if train.amp == "bf16" else nullcontext())


def _timed(
    model: nn.Module,
    graph: LayerGraph,
    seen: Survey,
    part: Partition,
    train: Train,
    device: torch.device,
) -> tuple[dict[str, Seconds], dict[str, Seconds]]:
    """Seconds of a call of each step, and of each row in it.

    A sample of most rows and one of few tell them apart. Steps that are alike take alike: one that the
    machine held up says nothing of its layer.
    """
    most, many = _fastest(model, graph, part, TIMED, train, device)
    least, few = _fastest(model, graph, part, SAMPLE, train, device)
    kinds: dict[Hashable, list[str]] = {}
    for step in graph.steps:
        kinds.setdefault(_alike(step, model, seen), []).append(step.name)

    def by_row(name: str, way: int) -> float:
        # A graph of no more than the few is in both samples, which differ by noise alone.
        more = max(most[name][way] - least[name][way], 0.0)
        return more / (many - few) if many > few else 0.0

    calls: dict[str, Seconds] = {}
    rows: dict[str, Seconds] = {}
    for alike in kinds.values():
        call = median(least[name][0] for name in alike), median(least[name][1] for name in alike)
        row = median(by_row(name, 0) for name in alike), median(by_row(name, 1) for name in alike)
        calls |= dict.fromkeys(alike, call)
        rows |= dict.fromkeys(alike, row)
    return calls, rows


def _alike(step: Step, model: nn.Module, seen: Survey) -> Hashable:
    """What is the same for steps that do the same work."""
    reads = tuple(
        (value.kind, value.shape, value.dtype, value.grad)
        for value in map(seen.values.get, step.reads)
        if value
    )
    given = mapped((step.args, dict(step.kwargs)), lambda leaf: type(leaf) if isinstance(leaf, Ref) else leaf)
    if step.kind != "module":
        return step.kind, step.target if step.kind != "attribute" else "", reads, repr(given)
    module = model.get_submodule(step.target)
    shapes = tuple(tuple(weight.shape) for weight in module.parameters())
    return step.kind, type(module), repr(module), shapes, reads, repr(given)


def _fastest(
    model: nn.Module, graph: LayerGraph, part: Partition, vertices: int, train: Train, device: torch.device
) -> tuple[dict[str, Seconds], int]:
    """Seconds of each step on a sample, each way the least of :data:`RUNS` after a first; its vertices."""
    scope = _sample_scope(part, vertices, train, device)
    scope.fast = True
    seconds: dict[str, list[Seconds]] = {step.name: [] for step in graph.steps}
    for _ in range(1 + RUNS):
        with _On(model, scope, train):
            values: dict[str, Any] = dict(scope.inputs)
            for step, over in zip(graph.steps, over_after(graph.steps), strict=True):
                seconds[step.name].append(_one(step, model, values, scope))
                for name in over:  # the model may be too large for one rank
                    del values[name]
    fastest = {}
    for name, each in seconds.items():
        forward, backward = zip(*each[1:], strict=True)
        fastest[name] = min(forward), min(backward)
    return fastest, scope.own


def _kept(
    model: nn.Module, graph: LayerGraph, part: Partition, train: Train, device: torch.device
) -> dict[str, int]:
    """Bytes that autograd keeps of each step; of what several keep the first one's."""
    scope = _sample_scope(part, SAMPLE, train, device)
    scope.fast = True
    found: dict[str, int] = {}
    with _On(model, scope, train):
        values: dict[str, Any] = dict(scope.inputs)
        ledger = ledger_of(scope, model)
        alive: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            if not scope.lasting(tensor):
                alive.append(tensor.detach())
            return tensor

        for step in graph.steps:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                values[step.name] = step.call(model, values, training=True)
            before = ledger.bytes["activations"]
            ledger.add("activations", alive)
            found[step.name] = ledger.bytes["activations"] - before
    return found


def _one(step: Step, model: nn.Module, values: dict[str, Any], scope: Interception) -> Seconds:
    """Run a step forward and backward; the seconds of each."""
    # A thread's own time does not count what the machine gives to others meanwhile.
    alone = scope.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    _wait(scope.device)
    begun = clock()
    out = step.call(model, values, training=True)
    plain = algebra.computed(out) if isinstance(out, Tensor) else out
    _wait(scope.device)
    turned = clock()
    back = 0.0
    if isinstance(plain, Tensor) and plain.requires_grad and plain.is_floating_point():
        ones = torch.ones_like(plain)
        leaf = plain.detach().requires_grad_()
        view = leaf.view_as(leaf)
        # The call of autograd's engine is one a chunk, not one a step: it is timed apart.
        empty, back = (_backward(each, ones, clock, scope.device) for each in (view, plain))
        back = max(back - empty, 0.0)
        leaf.grad = None
        mark = scope.marks.get(plain)
        plain = leaf if mark is None else scope.mark(leaf, mark)
    values[step.name] = plain
    for parameter in model.parameters():
        parameter.grad = None
    return turned - begun, back


def _backward(root: Tensor, gradient: Tensor, clock: Callable[[], float], device: torch.device) -> float:
    begun = clock()
    torch.autograd.backward([root], [gradient])
    _wait(device)
    return clock() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
