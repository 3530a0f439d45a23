"""Layer graph: a model's forward as a list of steps, each of which can be run alone.

Where it sits: ``shapes`` makes a :class:`LayerGraph` of a module, ``model.split.stages`` cuts it, and the
pipeline's executor runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from kagome.errors import ModelError

__steps__ = True  # for ``user_frame``: frames named ``call`` in this module run a step of a forward

StepKind = Literal["module", "function", "method", "attribute"]


@dataclass(frozen=True)
class Ref:
    """Stands for a value in the arguments of a step.

    Args:
        name: Name of the step that computes the value, or of the input.
    """

    name: str


@dataclass(frozen=True)
class Flag:
    """Stands for the training flag in the arguments of a step.

    Args:
        training: Its value in training; it is the opposite in evaluation.
    """

    training: bool


@dataclass(frozen=True, eq=False)
class Constant:
    """Returns a tensor that forward creates without reading its inputs, always the same.

    Args:
        value: The tensor.
    """

    value: Tensor

    def __call__(self) -> Tensor:
        """Return the tensor that the forward made without reading its inputs."""
        return self.value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return NotImplemented
        mine, its = self.value, other.value
        return mine.dtype == its.dtype and mine.shape == its.shape and torch.equal(mine, its)

    def __hash__(self) -> int:
        return hash((self.value.dtype, self.value.shape))


@dataclass(frozen=True, eq=False)
class Step:
    """One call in a model's forward.

    Args:
        name: Name of the step and of its value.
        kind: Kind of the call; ``attribute`` reads a weight, a buffer or a module.
        target: A module's path, a function, a method's name, or the attribute's path.
        args: Arguments by position, with :class:`Ref` and :class:`Flag` in place of values and the flag.
        kwargs: Arguments by name.
        path: Module path of a module step, else empty.
        within: Path of the module whose forward makes the call; empty for the model's own.
        line: ``file:line`` of the call, or empty.
        parameters: Full names of the weights it uses: its own, or those passed directly.
        buffers: Full names of the buffers it uses.
        reads: Steps and inputs it reads.
        layer: Whether it is a module that has weights or a state, or passes messages.
        grad: Whether it is called with gradients enabled if the model is.
        changes: Values that it changes in place.
    """

    name: str
    kind: StepKind
    target: Any
    args: tuple[Any, ...] = field(default=(), repr=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    path: str = ""
    within: str = ""
    line: str = ""
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    layer: bool = False
    grad: bool = True
    changes: tuple[str, ...] = ()

    @property
    def called(self) -> str:
        """Name by which the user knows the step: a module's path, or the name of a function's value."""
        return self.path or self.name

    def call(self, model: nn.Module, values: Mapping[str, Any], *, training: bool) -> Any:
        """Run this step alone, on the modules and attributes that the model has now."""
        if self.kind == "attribute":
            return attribute_of(model, self.target)

        def filled(item: Any) -> Any:
            if isinstance(item, Ref):
                return values[item.name]
            # Recorded as ``training=self.training`` or as ``not self.training``: both follow the mode.
            return item.training == training if isinstance(item, Flag) else item

        args = tuple(mapped(arg, filled) for arg in self.args)
        kwargs = {name: mapped(arg, filled) for name, arg in self.kwargs.items()}
        # A block under ``no_grad`` has been taken apart into steps, each of which opens it again.
        with nullcontext() if self.grad else torch.no_grad():
            if self.kind == "module":
                return _called(_module(model, self.target), args, kwargs)
            if self.kind == "method":
                return getattr(args[0], self.target)(*args[1:], **kwargs)
            return self.target(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """A model's forward as steps in topological order.

    Args:
        steps: All steps.
        inputs: Names of the data's inputs that they read.
        output: The step, or the input, whose value the model returns.
        parameters: Full names of all the model's weights, used or not.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    output: str
    parameters: tuple[str, ...]

    def run(
        self,
        model: nn.Module,
        values: Mapping[str, Any],
        *,
        training: bool,
        steps: Sequence[Step] | None = None,
        before: Callable[[Step], None] | None = None,
        after: Callable[[Step, Any], None] | None = None,
        keep: Collection[str] = (),
    ) -> dict[str, Any]:
        """Run steps, and release each value after its last use.

        Args:
            model: The model, already in the mode that ``training`` names.
            values: Inputs, and values of other steps, by name.
            training: The training flag passed to steps that take it.
            steps: The steps to run, in order; by default all.
            before: Called before each step.
            after: Called after each step with its value.
            keep: Names of the values to return.

        Returns:
            The values of ``keep`` by name.
        """
        steps = self.steps if steps is None else steps
        over, kept = over_after(steps), set(keep)
        read = {name for step in steps for name in step.reads}
        held = {name: value for name, value in values.items() if name in read or name in kept}
        for step, done in zip(steps, over, strict=True):
            if before is not None:
                before(step)
            value = step.call(model, held, training=training)
            if after is not None:
                after(step, value)
            held[step.name] = value
            del value
            # As where a forward overwrites a local variable: activations without a reader are freed at once.
            for name in done - kept:
                del held[name]
        return {name: held[name] for name in keep}


def failed(step: Step, error: Exception) -> ModelError:
    """Build the error for a step that fails on a sample of the graph."""
    return ModelError(
        "each step of the model to run on a small sample of the graph, to look at it and to time it",
        f"{step.name}, which raised {type(error).__name__}: {error}",
        where=step.line,
        hint="let sizes come from the input (x.size(0)), not from the whole graph",
    )


def over_after(steps: Sequence[Step]) -> list[set[str]]:
    """Return for each step the values whose last use is in that step."""
    # A value that nothing reads ends with its own step.
    last = {name: place for place, step in enumerate(steps) for name in (*step.reads, step.name)}
    over: list[set[str]] = [set() for _ in steps]
    for name, place in last.items():
        over[place].add(name)
    return over


def _module(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path.

    torch's own lookup is several times slower, and each chunk looks up each module.
    """
    found: Any = model
    try:
        for name in path.split("."):
            found = found._modules[name]
    except KeyError:
        return model.get_submodule(path)
    return cast(nn.Module, found)


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module, unless its replaced forward already knows the result of the call."""
    # On a part, ``intercept.hooks`` has replaced forward by an object that may replay the layer's last call.
    # This leaves out torch's ``Module.__call__`` with its hooks as well, once for each chunk.
    known = getattr(vars(module).get("forward"), "known", None)
    found = None if known is None else known(args, kwargs)
    return module(*args, **kwargs) if found is None else found


def mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to each leaf of nested tuples, lists, dicts and slices; lists and dicts are copied."""
    if isinstance(item, tuple):
        parts = [mapped(each, change) for each in item]
        if hasattr(item, "_fields"):
            return type(item)(*parts)
        # The result of h.max(-1) is a named tuple of torch, which takes its parts as one sequence.
        return type(item)(parts) if type(item).__module__ == "torch.return_types" else tuple(parts)
    if isinstance(item, list):
        return [mapped(each, change) for each in item]
    if isinstance(item, dict):
        return {key: mapped(each, change) for key, each in item.items()}
    if isinstance(item, slice):
        return slice(*(mapped(each, change) for each in (item.start, item.stop, item.step)))
    return change(item)


def refs(item: Any) -> Iterator[str]:
    """Return the names of the values that nested arguments refer to, each once."""
    found: dict[str, None] = {}

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            found[leaf.name] = None
        return leaf

    mapped(item, look)
    return iter(found)


def attribute_of(model: nn.Module, path: str) -> Any:
    """Return the attribute at a dotted path."""
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name)
    return found
