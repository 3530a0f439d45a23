"""Trace equivalence: checks that a model's steps compute what its forward computes.

Where it sits: ``profile.step_shapes`` and ``model.operators.probe`` call it before a model is cut, because
only the steps are run from then on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kagome.errors import KagomeError, ModelError
from kagome.model.forward_call import ForwardCall
from kagome.model.trace.graph import LayerGraph, Step, failed
from kagome.model.trace.tracer import is_whole

TRACED: Final = "in forward, h = h + a for h += a, and no isinstance(h, Tensor)"
"""Hint for a forward that torch.fx has traced wrongly."""


def refuse_unlike(
    model: nn.Module,
    graph: LayerGraph,
    inputs: Mapping[str, Any],
    *,
    on: Callable[[bool], AbstractContextManager[object]],
    before: Callable[[Step], None],
    where: Callable[[], str] = str,
    hint: str = TRACED,
    halved: bool = False,
    calling: ForwardCall | None = None,
) -> None:
    """Run a model as it is and by its steps, in both modes, and refuse steps that differ.

    Args:
        model: The user's module.
        graph: Its steps.
        inputs: Inputs of a small sample.
        on: Returns a context that puts model, inputs and draws in the same state for each run, in training or
            in evaluation.
        before: Called before each step.
        where: Returns the module that failed.
        hint: Hint of the error.
        halved: Whether part of the model computes in bfloat16.
        calling: How the model is called; by default as a model of a graph.

    Raises:
        ModelError: If the outputs, or a module's values in both runs, differ beyond rounding; or if forward
            or a step fails.

    Cost:
        Two forward passes of the sample in each mode.
    """
    form = calling or ForwardCall.of(model, inputs)
    epsilon = _epsilon(model, inputs, halved=halved)

    def whole(_training: bool) -> Any:
        try:
            return form.call(model, inputs)
        except KagomeError:
            raise
        except Exception as error:
            raise ModelError(
                "forward to run on a small sample, where a pipeline compares it with the model's steps",
                f"{type(error).__name__}: {error}",
                where=where(),
                hint="let sizes come from the input (x.size(0)), not from all the data",
            ) from error

    def by_steps(training: bool) -> Any:
        return _run_steps(model, graph, inputs, before, training=training)

    def ran(run: Callable[[bool], Any], training: bool) -> Heard:
        # Steps leave checkpointing out. Without gradients it has no effect in either run.
        with torch.no_grad(), on(training), _hearing(model, graph) as heard:
            heard.out = _copied(run(training))
        return heard

    for training in (True, False):
        one, other = ran(whole, training), ran(by_steps, training)
        # A forward that does not repeat itself (it draws numbers elsewhere) proves nothing about its steps.
        if _unlike(one, other, epsilon) and not _unlike(one, ran(whole, training), epsilon):
            raise _refusal(graph, one, other, epsilon, training=training, hint=hint)


def _epsilon(model: nn.Module, inputs: Mapping[str, Any], *, halved: bool) -> float:
    """Return the rounding unit of the least precise type that a model computes in."""
    given = [value for value in inputs.values() if isinstance(value, Tensor)]
    # Rounding is that of the coarsest type that takes part, since a value may pass through it.
    kinds = {tensor.dtype for tensor in (*model.parameters(), *given)}
    kinds |= {torch.bfloat16} if halved else set()
    return max((torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), default=0.0)


def _run_steps(
    model: nn.Module,
    graph: LayerGraph,
    inputs: Mapping[str, Any],
    before: Callable[[Step], None],
    *,
    training: bool,
) -> Any:
    """Return the output of a model's steps; an error names the step that failed."""
    begun: list[Step] = []

    def begin(step: Step) -> None:
        begun[:] = [step]
        before(step)

    try:
        found = graph.run(model, inputs, training=training, before=begin, keep=[graph.output])
    except KagomeError:
        raise
    except Exception as error:
        raise failed(begun[0], error) from error
    return found[graph.output]


@dataclass
class Heard:
    """Values recorded in one run of a model.

    Args:
        calls: Values of each call of a module that is or could be a step, by its path and number.
        out: The model's output.
    """

    calls: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    out: list[Tensor] = field(default_factory=list)


@contextmanager
def _hearing(model: nn.Module, graph: LayerGraph) -> Iterator[Heard]:
    """Record what modules return inside a block; the caller sets the output."""
    heard, counts = Heard(), Counter[str]()
    steps = {id(model.get_submodule(step.path)): step.path for step in graph.steps if step.kind == "module"}

    def listeners(module: nn.Module, path: str) -> Iterator[tuple[nn.Module, str]]:
        # A layer that no step calls listens too: a trace that has missed it can then be named in the error.
        if path and (id(module) in steps or is_whole(module)):
            yield module, steps.get(id(module), path)
            return  # modules inside a step are not compared
        for name, inner in module.named_children():
            yield from listeners(inner, f"{path}.{name}" if path else name)

    def listen(module: nn.Module, path: str) -> Any:
        def hear(_module: nn.Module, _args: Any, out: Any) -> None:
            heard.calls[path, counts[path]] = _copied(out)  # it may be changed in place later
            counts[path] += 1

        return module.register_forward_hook(hear)

    each = {id(module): (module, path) for module, path in listeners(model, "")}
    # A scripted module takes no hooks.
    takers = [pair for pair in each.values() if not isinstance(pair[0], torch.jit.ScriptModule)]
    hooks = [listen(module, path) for module, path in takers]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _copied(value: Any) -> list[Tensor]:
    """Return copies of the tensors in a value."""
    with torch._C.DisableTorchFunction():  # this is not the user's computation
        return [
            leaf.detach().clone()
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        ]


@dataclass(frozen=True)
class _Gap:
    """The difference of two values: the greatest difference, and the greatest number."""

    most: float = 0.0
    size: float = 0.0

    def told(self) -> str:
        if math.isinf(self.most):
            return "differ in kind, in shape, or in what is finite"
        return f"differ by up to {self.most:.2g}, where the greatest number is {self.size:.2g}"


def _unlike(whole: Heard, steps: Heard, epsilon: float) -> bool:
    """Return whether two runs differ by more than rounding, in the output or in a call that both make."""
    shared = whole.calls.keys() & steps.calls.keys()
    pairs = [(whole.calls[call], steps.calls[call]) for call in shared]
    return any(_gap(one, other, epsilon) for one, other in [(whole.out, steps.out), *pairs])


def _refusal(
    graph: LayerGraph, whole: Heard, steps: Heard, epsilon: float, *, training: bool, hint: str
) -> ModelError:
    """Build the error for steps that do not compute what forward computes."""
    gap = _gap(whole.out, steps.out, epsilon)
    left_out: dict[str, None] = {}
    before = differs = ""
    for (path, number), value in whole.calls.items():
        inner = steps.calls.get((path, number))
        if inner is None:
            left_out[path] = None
        elif _gap(value, inner, epsilon):
            differs = path
            break
        else:
            before = path
    after = f", after {before}" if before else ""
    got = f"outputs in {'training' if training else 'evaluation'} that "
    got += gap.told() if gap else "are alike, but not what they are made of"
    got += f"; the first module whose output differs is {differs}{after}" if differs else ""
    got += f"; no step calls {', '.join(left_out)}, which forward does" if left_out else ""
    got += "" if differs or left_out else f"; no module's output does: look behind the last one{after}"
    return ModelError(
        "a model's steps to give what its forward gives",
        got,
        where=next((step.line for step in graph.steps if differs and step.path == differs), ""),
        hint=hint,
    )


def _gap(one: list[Tensor], other: list[Tensor], epsilon: float) -> _Gap | None:
    """Return the difference of two values; None if it is within rounding. NaN counts as equal to NaN."""
    if [(a.shape, a.dtype) for a in one] != [(b.shape, b.dtype) for b in other]:
        return _Gap(math.inf)
    worst = None
    for a, b in zip(one, other, strict=True):
        a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
        same = (a == b) | (a.isnan() & b.isnan())
        if bool(same.all()):
            continue
        most = float((a - b)[~same].abs().nan_to_num(math.inf).max())
        finite = torch.cat([a[a.isfinite()], b[b.isfinite()]]).abs()
        size = float(finite.max()) if finite.numel() else 0.0
        # Where terms cancel, sums in another order differ by more than the last digit.
        if most > math.sqrt(epsilon) * size and (worst is None or most > worst.most):
            worst = _Gap(most, size)
    return worst
