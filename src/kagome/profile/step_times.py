"""Step times: seconds of each step of a model, measured on samples of a graph.

Where it sits: ``pipelining.staging`` asks before it cuts a model. ``memory.saved_tensors`` measures bytes in
the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from kagome.components.parallelize import PartOptions
from kagome.deferred import rewrite_rules
from kagome.errors import KagomeError
from kagome.graph.partition.partition import Partition
from kagome.intercept.interceptor import Interceptor
from kagome.model.trace.graph import LayerGraph, Ref, Step, failed, mapped, over_after
from kagome.model.trace.shapes import Survey
from kagome.profile.step_shapes import SAMPLE, Asked, on_sample, one_pass

TIMED: Final = 20_000
"""Most vertices of the sample on which steps are timed."""
RUNS: Final = 3
"""Number of timed runs, after a first run that fills the caches."""

Seconds = tuple[float, float]
"""Seconds forward and backward."""


def timed(
    model: nn.Module,
    graph: LayerGraph,
    seen: Survey,
    part: Partition,
    options: PartOptions,
    *,
    parted: bool = False,
) -> tuple[dict[str, Seconds], dict[str, Seconds]]:
    """Measure the seconds of a call of each step, and of each row in it.

    A large and a small sample separate the two. Steps that do the same work all have the median of their
    times, so that a delay of the machine does not count against one layer.

    Args:
        model: The user's module.
        graph: The steps of the model.
        seen: The survey of the steps' values.
        part: The part to take samples from.
        options: How the model runs on samples.
        parted: Whether the samples stand for parts of the graph.

    Returns:
        Step -> seconds of a call, and step -> seconds of each row.

    Raises:
        EscapeError: If a message reaches code that fast paths do not see.
    """
    # Seconds of a call and of a row, from two samples of `few` and `many` rows:
    #    seconds
    #      most   |            /        row  = (most - least) / (many - few)
    #      least  |_______----          call = least, since 48 rows cost next to nothing
    #             +---------------
    #               few      many
    (most, many), (least, few) = (
        _fastest(model, graph, part, vertices, options, parted=parted) for vertices in (TIMED, SAMPLE)
    )
    # Steps that do the same work, by key.
    kinds: dict[Hashable, list[str]] = {}
    for step in graph.steps:
        kinds.setdefault(_alike(step, model, seen), []).append(step.name)

    def by_row(name: str, way: int) -> float:
        # Of a graph no larger than the small sample, both samples are the same and differ by noise alone.
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
    """Return a key that is equal for steps that do the same work."""
    reads = tuple(
        (value.kind, value.shape, value.dtype, value.grad)
        for value in map(seen.values.get, step.reads)
        if value
    )
    # References to other steps differ by name alone, so only their place among the arguments counts.
    given = mapped((step.args, dict(step.kwargs)), lambda leaf: type(leaf) if isinstance(leaf, Ref) else leaf)
    if step.kind != "module":
        return step.kind, step.target if step.kind != "attribute" else "", reads, repr(given)
    module = model.get_submodule(step.target)
    shapes = tuple(tuple(weight.shape) for weight in module.parameters())
    # repr(module) has the settings (channels, heads, dropout), the shapes have what it leaves out.
    return step.kind, type(module), repr(module), shapes, reads, repr(given)


def _fastest(
    model: nn.Module,
    graph: LayerGraph,
    part: Partition,
    vertices: int,
    options: PartOptions,
    *,
    parted: bool,
) -> tuple[dict[str, Seconds], int]:
    """Time each step on a sample: the fastest of :data:`RUNS` runs, forward and backward apart.

    Returns:
        Step -> seconds, and the number of vertices in the sample.
    """
    net = on_sample(model, part, vertices, options, Asked(options.device, parted=parted))
    seconds: dict[str, list[Seconds]] = {step.name: [] for step in graph.steps}
    # Process time leaves out the time that other processes take meanwhile.
    alone = options.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    for _ in range(1 + RUNS):
        with one_pass(net):
            for step, spent in step_by_step(model, graph, net.scope, clock):
                seconds[step.name].append(spent)
    fastest = {}
    # The first run fills caches: edge layouts, kept rows, compiled kernels.
    for name, each in seconds.items():
        forward, backward = zip(*each[1:], strict=True)
        fastest[name] = min(forward), min(backward)
    return fastest, net.scope.own


def step_by_step(
    model: nn.Module, graph: LayerGraph, scope: Interceptor, clock: Callable[[], float]
) -> Iterator[tuple[Step, tuple[float, float]]]:
    """Run all steps in order, each forward and then at once backward.

    Args:
        model: The module, with the interceptor's hooks.
        graph: The steps of the model.
        scope: The interceptor.
        clock: Returns seconds, or any other quantity that grows and is to be measured.

    Yields:
        Each step, with the increase of the clock in its forward and in its backward.

    Raises:
        ModelError: If a step fails; the error has its line.
    """
    # Autograd's graph of a step is freed before the next step runs, so the memory is that of one step, and
    # each backward has a time of its own.
    values: dict[str, Any] = dict(scope.inputs)
    changed = {name for step in graph.steps for name in step.changes}
    for step, over in zip(graph.steps, over_after(graph.steps), strict=True):
        with _named(step):
            spent = _one(step, model, values, scope, clock=clock, copies=step.name in changed)
        yield step, spent
        for name in over:  # free values early: the whole model may be too large for one rank
            del values[name]


@contextmanager
def _named(step: Step) -> Iterator[None]:
    """Turn an error in this block into one that names the step."""
    try:
        yield
    except KagomeError:
        raise
    except Exception as error:
        raise failed(step, error) from error


def _one(
    step: Step,
    model: nn.Module,
    values: dict[str, Any],
    scope: Interceptor,
    *,
    clock: Callable[[], float],
    copies: bool,
) -> tuple[float, float]:
    """Run a step forward and backward; return the increase of the clock in each.

    Later steps read its results as leaves, so that each step runs backward alone. Results that a later step
    writes to are copies of leaves.
    """
    # A CUDA kernel is only started by its call, so the clock is read when the device has finished.
    _wait(scope.device)
    begun = clock()
    out = mapped(step.call(model, values, training=True), _computed)
    _wait(scope.device)
    turned = clock()
    roots: list[Tensor] = []
    leaves: list[Tensor] = []

    def leaf_of(value: Any) -> Any:
        if not _learns(value):
            return value
        roots.append(value)
        leaves.append(value.detach().requires_grad_())
        # Autograd refuses an in-place write to a leaf that requires a gradient, so such readers get a copy.
        given = leaves[-1].clone() if copies else leaves[-1]
        return _placed(given, value, scope)

    # A weight stays itself: it may be a table with a row for each edge, which is known by identity.
    values[step.name] = out if step.kind == "attribute" else mapped(out, leaf_of)
    token = scope.forward.forward_pass.token
    if token.grad_fn is not None:  # backward must reach all exchanges on all ranks, also without rows read
        roots.append(token)
        leaves.append(token.detach().requires_grad_())
        scope.forward.forward_pass.token = leaves[-1]
    back = 0.0
    if roots:
        # The time of a backward through views of the leaves alone is that of the engine.
        views = [leaf.view_as(leaf) for leaf in leaves]
        ones = [torch.ones_like(root) for root in roots]
        # A real run calls autograd's engine once per chunk, not once per step, so its cost is subtracted.
        with scope.forward.forward_pass.paused():
            empty, back = (_backward(each, ones, clock, scope.device) for each in (views, roots))
        back = max(back - empty, 0.0)
    # The next step's backward must find no gradient: adding to one takes other time than setting it.
    for tensor in (*leaves, *model.parameters()):
        tensor.grad = None
    if scope.edge_tables is not None:  # the graph of cut table rows is freed now, so they must be cut anew
        scope.edge_tables.forget()
    # The graph of this step is freed: later readers of a value that it wrote to need a copy without it.
    for name in step.changes:
        if name in values:
            values[name] = mapped(values[name], lambda value: _copied(value, scope))
    return turned - begun, back


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()


def _copied(value: Any, scope: Interceptor) -> Any:
    """Return a copy of a new leaf if the value needs a gradient, else the value."""
    return _placed(value.detach().requires_grad_().clone(), value, scope) if _learns(value) else value


def _placed(given: Tensor, like: Tensor, scope: Interceptor) -> Tensor:
    placement = scope.placements.get(like)
    return given if placement is None else scope.placements.put(given, placement)


def _computed(value: Any) -> Any:
    return rewrite_rules.computed(value) if isinstance(value, Tensor) else value


def _backward(
    roots: Sequence[Tensor], gradients: Sequence[Tensor], clock: Callable[[], float], device: torch.device
) -> float:
    begun = clock()
    with torch._C.DisableTorchFunction():  # this is not part of the user's computation
        torch.autograd.backward(roots, gradients)
    _wait(device)
    return clock() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
