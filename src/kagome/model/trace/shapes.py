"""Step shapes: traces a module's forward into a graph of steps, and finds the shape of each step's value.

Where it sits: ``model.split.stages`` cuts such a graph into the stages of a pipeline, which the executor
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kagome.errors import KagomeError, ModelError
from kagome.model.forward_call import ForwardCall
from kagome.model.trace.builder import OF_GRAPHS, ForeignError, Words, both_modes, same, steps_of
from kagome.model.trace.containers import Contents
from kagome.model.trace.graph import LayerGraph, Step, failed
from kagome.model.trace.tracer import FaultError, Tracer

ValueKind = Literal["rows", "edges", "fixed", "none"]


@dataclass(frozen=True)
class Value:
    """The value of a step, as a survey saw it.

    Args:
        kind: ``rows`` for a row for each vertex, ``edges`` for a row for each edge, ``fixed`` for a tensor
            with neither, ``none`` for no tensor.
        shape: Shape without axis 0 for ``rows`` and ``edges``; empty for ``none``.
        dtype: Type of the tensor; None for ``none``.
        grad: Whether it requires a gradient.
    """

    kind: ValueKind
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    grad: bool = False

    def bytes(self, vertices: int, edges: int) -> int:
        """Return the bytes of the value for these numbers of rows."""
        if self.dtype is None:
            return 0
        size = self.dtype.itemsize * torch.Size(self.shape).numel()
        return size * {"rows": vertices, "edges": edges, "fixed": 1}[self.kind]


@dataclass(frozen=True)
class Survey:
    """The values of all steps of a graph, recorded in one run.

    Args:
        values: Values by name of the step.
        draws: The counter of random draws before each step, in training.
        changed: Full names of the buffers that a forward pass changes.
        beyond: The first layer that reads more than the in-edges of a vertex supply; empty if none does.
        named: The first layer that reads rows of vertices by id; empty if none does.
        writes: Step -> the values that it was seen to change in place, whatever the name of its call.
        eval_draws: The counter of draws before each step in evaluation, where most are left out.
    """

    values: Mapping[str, Value]
    draws: Mapping[str, int]
    changed: frozenset[str] = frozenset()
    beyond: str = ""
    named: str = ""
    writes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    eval_draws: Mapping[str, int] = field(default_factory=dict)

    def told(self, graph: LayerGraph) -> LayerGraph:
        """Return the graph with all in-place changes that its steps were seen to make."""
        steps = (
            replace(step, changes=tuple(dict.fromkeys((*step.changes, *self.writes.get(step.name, ())))))
            for step in graph.steps
        )
        return replace(graph, steps=tuple(steps))


def trace(
    model: nn.Module,
    names: Sequence[str],
    plain: Mapping[str, Any] | None = None,
    words: Words = OF_GRAPHS,
    calling: ForwardCall | None = None,
) -> LayerGraph:
    """Return the steps of a model's forward, valid in training and evaluation except for the training flag.

    A submodule that cannot be traced becomes one step. No other thread may run a model meanwhile. The
    contents of modules' lists and dicts are left as they were.

    Args:
        model: The user's module; its modes are left as they are.
        names: Inputs that the data has.
        plain: Inputs that are numbers and strings, on which forward may branch.
        words: Terms and hints for error messages.
        calling: How the model is called; by default as a model of a graph.

    Raises:
        ModelError: If the model's own forward cannot be traced, differs between training and evaluation, does
            not return a single value, or asks for an input that the data does not have.
    """
    # Each round traces both modes with the modules of ``whole`` as single steps. A round
    # ends with a graph, with a refusal, or with one more module in ``whole``: the innermost
    # that fx cannot follow, or that makes other calls in evaluation than in training. So it
    # comes to an end, at the latest when the model's own forward is to blame.
    form, contents = calling or ForwardCall.of(model, names), Contents(model)
    whole: set[str] = set()

    def noted(training: bool) -> LayerGraph:
        return steps_of(model.train(training), Tracer(model, form, names, whole, plain).noted(), words)

    while True:
        train: LayerGraph | None = None
        try:
            with _modes_kept(model):
                train = noted(True)
                # Forward has left values in a list or dict. That is served if
                # each pass writes what it reads: then a third trace, which finds
                # those of two passes, makes the same calls and leaves the same.
                kept = contents.form() if contents.changed() else None
                eval_ = noted(False)
                if kept is not None and not (same(train, noted(True)) and kept == contents.form()):
                    raise ForeignError
        except (FaultError, ForeignError) as fault:
            label = contents.changed()
            if isinstance(fault, ForeignError) or (label and train is not None):
                raise _remembers(label, words) from fault
            if not fault.path:
                raise fault.told(words.hint, words.autocast) from fault.cause
            whole.add(fault.path)
            continue
        finally:
            contents.restore()
        steps, blamed = both_modes(train, eval_, words)
        if blamed is None:
            return replace(train, steps=steps)
        whole.add(blamed)


def _remembers(label: str, words: Words) -> ModelError:
    """Build the error for a forward that reads, or adds to, values left in a container by an earlier one."""
    return ModelError(
        "a forward that a pipeline can follow from layer to layer",
        f"one that keeps values in {label or 'an object that outlives it'} from one forward to the next",
        where=label,
        hint=words.hint,
    )


def survey(
    graph: LayerGraph,
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    look: Callable[[Any], str],
    draws: Callable[[], int],
) -> Survey:
    """Run all steps in training mode and record each value; run them in evaluation, which may draw less.

    Modes and buffers of the model are left as they were; the caches of layers are not.

    Args:
        graph: Steps of the model.
        model: The user's module.
        inputs: Inputs of a small sample, by name.
        look: Returns ``rows``, ``edges``, ``fixed`` or ``none`` for a step's value.
        draws: Returns the present counter of draws.

    Raises:
        ModelError: If a step fails, with its line.

    Cost:
        Two forward passes; autograd records the first, but no gradient is computed.
    """
    record = _Record(look)
    training: dict[str, int] = {}
    evaluation: dict[str, int] = {}
    begun, counts, first = graph.steps[:1], training, 0

    def before(step: Step) -> None:
        nonlocal begun
        begun = (step,)
        counts[step.name] = draws() - first

    with torch._C.DisableTorchFunction():  # this is not the user's computation
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with _modes_kept(model), torch.enable_grad():
            for name in graph.inputs:
                record.versions.note(name, inputs[name])
            graph.run(model.train(), inputs, training=True, before=before, after=record.after)
            # ``before`` now counts for evaluation, from 0 again: the counter itself runs on.
            counts, first = evaluation, draws()
            with torch.no_grad():
                graph.run(model.eval(), inputs, training=False, before=before)
    except KagomeError:
        raise
    except Exception as error:
        raise failed(begun[0], error) from error
    finally:
        changed = _restored(model, buffers)
    return Survey(record.values, training, changed, eval_draws=evaluation, writes=record.writes)


def _restored(model: nn.Module, buffers: Mapping[str, Tensor]) -> frozenset[str]:
    """Give a model's buffers their old values, and return the names of those that had changed."""
    changed = set()
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for name, buffer in model.named_buffers():
            old = buffers.get(name)
            # A buffer that forward moves belongs to one stage, with all steps that move it.
            if old is None or old.shape != buffer.shape or not torch.equal(old, buffer):
                changed.add(name)
            if old is not None and old.shape == buffer.shape:
                buffer.copy_(old)
    return frozenset(changed)


class _Record:
    """The values of a run in training mode, and which of them each step writes to.

    Args:
        look: Returns ``rows``, ``edges``, ``fixed`` or ``none`` for a step's value.
    """

    def __init__(self, look: Callable[[Any], str]) -> None:
        self.look = look
        self.values: dict[str, Value] = {}
        self.writes: dict[str, tuple[str, ...]] = {}
        self.versions = _Versions()

    def after(self, step: Step, value: Any) -> None:
        """Record the value of a step that has run."""
        found = self.versions.risen(step.reads)
        if found:
            self.writes[step.name] = found
        for name in found:  # a tensor of zeros may require a gradient once it was written to
            if name in self.values and self.versions.learns(name):
                self.values[name] = replace(self.values[name], grad=True)
        if step.kind != "attribute":  # weights and buffers are tracked elsewhere
            self.versions.note(step.name, value)
        kind = self.look(value) if isinstance(value, Tensor) else "none"
        if kind in ("rows", "edges", "fixed"):
            shape = tuple(value.shape) if kind == "fixed" else tuple(value.shape[1:])
            self.values[step.name] = Value(kind, shape, value.dtype, value.requires_grad)  # type: ignore[arg-type]
        else:
            self.values[step.name] = Value("none")


class _Versions:
    """Version counters of values in a run, to see which of them a step changes in place."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[str, Tensor, int]]] = {}
        self._places: dict[str, set[int]] = {}

    def note(self, name: str, value: Any) -> None:
        """Record a value and hold it: if it were freed, another one could take its address."""
        with torch._C.DisableTorchFunction():  # this is not the user's computation
            for leaf in tree_leaves(value):
                if type(leaf) is Tensor and leaf.layout is torch.strided:
                    # By storage: a view and its base share memory and version, so a write changes both.
                    place = leaf.untyped_storage().data_ptr()
                    self._found.setdefault(place, []).append((name, leaf, leaf._version))
                    self._places.setdefault(name, set()).add(place)

    def learns(self, name: str) -> bool:
        """Return whether a value requires a gradient by now."""
        held = (one for place in self._places.get(name, ()) for one in self._found[place])
        return any(tensor.requires_grad for other, tensor, _ in held if other == name)

    def risen(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the values in the same memory as these that were written to since the last call."""
        changed: dict[str, None] = {}
        with torch._C.DisableTorchFunction():
            for place in {place for name in names for place in self._places.get(name, ())}:
                for number, (name, tensor, version) in enumerate(self._found[place]):
                    if tensor._version > version:
                        self._found[place][number] = name, tensor, tensor._version
                        changed[name] = None
        return tuple(changed)


def settled(one: Survey, other: Survey, vertices: tuple[int, int], edges: tuple[int, int]) -> Survey:
    """Decide between rows, edges and fixed for values of which only shapes are known, by two surveys.

    Args:
        one: Survey of a sample.
        other: Survey of a sample of another size.
        vertices: Number of vertices of both samples.
        edges: Number of edges of both samples.

    Returns:
        The first survey. A fixed value whose shape differs between both becomes ``rows`` or ``edges`` if it
        follows their number, and ``none`` otherwise, so that it is not sent.
    """

    def kind(value: Value, its: Value) -> Value:
        if value.kind != "fixed":
            return value
        # 100 vertices, 400 edges     50 vertices, 200 edges
        # [7, 3]                      [7, 3]                     fixed
        # [100, 3]                    [50, 3]                    rows, of shape [3]
        # [400, 3]                    [200, 3]                   edges, of shape [3]
        # [3, 100] or [130, 3]        [3, 50] or [60, 3]         none: it cannot be cut into chunks
        if its.kind != "fixed":
            return Value("none")
        if value.shape == its.shape:
            return value
        if not value.shape or value.shape[1:] != its.shape[1:]:
            return Value("none")
        first = value.shape[0], its.shape[0]
        if first not in (vertices, edges):
            return Value("none")
        return replace(value, kind="rows" if first == vertices else "edges", shape=value.shape[1:])

    return replace(one, values={name: kind(value, other.values[name]) for name, value in one.values.items()})


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
