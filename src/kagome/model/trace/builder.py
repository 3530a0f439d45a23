"""Notes: what a tracer has noted as steps, and the steps of both modes as one list.

Where it sits: ``layers.trace`` gives it what ``tracer`` has found.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing

from kagome.errors import ModelError
from kagome.model.trace.graph import Flag, LayerGraph, Ref, Step, StepKind, attribute_of, mapped, refs
from kagome.model.trace.tracer import CURE, HINT

WHOLE: Final = "model"
"""The step that is a call of the whole model."""


@dataclass(frozen=True)
class Words:
    """What messages call the output of a model, and what they say to try.

    Args:
        output: What the model is to return.
        several: What to try where it returns several values.
        hint: What to try where a forward cannot be followed.
        autocast: What to try where it turns autocast on.
    """

    output: str
    several: str
    hint: str
    autocast: str


OF_GRAPHS: Final = Words(
    "a pipeline's last stage gives what forward returns, one tensor with a row a vertex",
    "return the scores alone",
    HINT,
    f"take it out of forward, as train.amp computes in bfloat16 by itself; or {HINT}",
)
OF_SAMPLES: Final = Words(
    "a pipeline's model returns one tensor with samples along axis 0",
    "return what the loss reads as one tensor: torch.cat([one, two], dim=1), say, and split it in the loss",
    CURE,
    "take it out of forward and put it around kagome.pipeline, step and predict; or put these lines into a "
    "module of their own: what cannot be followed is one operator",
)


def _kind_of(value: Any) -> str:
    """What a value that is no single one is, in words."""
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, tuple | list):
        return f"a {_box_of(value)} of {len(value)} value{'' if len(value) == 1 else 's'}"
    return f"a value of type {type(value).__name__}"


def _box_of(value: Any) -> str:
    return next(kind.__name__ for kind in (dict, list, tuple) if isinstance(value, kind))


def _cure(value: Any, words: Words) -> str:
    """What to try where forward returns no single value."""
    if not isinstance(value, dict | tuple | list) or not value:
        return "return a tensor that forward computes from its inputs"
    if len(value) == 1:
        return f"return that value alone, without the {_box_of(value)} around it"
    return words.several


def steps_of(model: nn.Module, notes: fx.Graph, words: Words = OF_GRAPHS) -> LayerGraph:
    """The calls of one mode as steps.

    Raises:
        ModelError: If the forward returns no single value.
        ForeignError: If it reads one that is not of this forward.
    """
    kinds: dict[str, StepKind] = {
        "call_module": "module",
        "call_function": "function",
        "call_method": "method",
        "get_attr": "attribute",
    }
    names: dict[fx.Node, str] = {}
    canonical = weight_names(model)
    weights: dict[str, tuple[str, ...]] = {}
    steps: list[Step] = []
    inputs: list[str] = []

    def plain(item: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        if item not in names:
            raise ForeignError
        return Ref(names[item])

    for node in notes.nodes:
        if node.op == "output":
            returned = node.args[0]
            if not isinstance(returned, fx.Node):
                raise ModelError(
                    words.output, f"it returns {_kind_of(returned)}", hint=_cure(returned, words)
                )
            return graph_of(model, steps, plain(returned).name, inputs)
        # The model itself is one step where it is a layer of torch or PyG.
        own = WHOLE if node.op == "call_module" and not node.target else node.name
        names[node] = node.target if node.op == "placeholder" else own
        if node.op == "placeholder":
            inputs.append(node.target)
            continue
        # Lists and dicts of torch.fx cannot be changed, and tell that to whoever is given them.
        args, kwargs = mapped(tuple(node.args), plain), mapped(dict(node.kwargs), plain)
        step = step_of(model, canonical, own, kinds[node.op], node.target, args, kwargs)
        given = {name: None for read in step.reads for name in weights.get(read, ())}
        if step.kind == "attribute":
            weights[step.name] = step.parameters
        meta = {key: node.meta[key] for key in ("within", "line", "grad")}
        steps.append(replace(step, parameters=tuple({**given, **dict.fromkeys(step.parameters)}), **meta))
    raise AssertionError("a graph without an output")


def weight_names(model: nn.Module) -> dict[int, str]:
    """Full names of weights and buffers by their id; one under several names goes by the first."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {id(tensor): name for name, tensor in named}


def graph_of(model: nn.Module, steps: Sequence[Step], output: str, inputs: Sequence[str]) -> LayerGraph:
    """A graph of steps, with those of the inputs that they read."""
    read = {name for step in steps for name in step.reads} | {output}
    parameters = tuple(name for name, _ in model.named_parameters())
    return LayerGraph(tuple(steps), tuple(n for n in inputs if n in read), output, parameters)


def step_of(
    model: nn.Module,
    weights: Mapping[int, str],
    name: str,
    kind: StepKind,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Step:
    """A step, with what it reads, uses and changes.

    Args:
        model: The user's module.
        weights: What :func:`weight_names` gives for it.
        name: Of the step.
        kind: What is called.
        target: A path, a function or a method's name.
        args: Arguments by place.
        kwargs: Arguments by name.
    """
    held: list[Tensor] = []
    layer = in_place = False
    if kind == "module":
        module = model.get_submodule(target)
        held = [*module.parameters(), *module.buffers()]
        layer = bool(held) or any(isinstance(inner, MessagePassing) for inner in module.modules())
        in_place = getattr(module, "inplace", False) is True
    elif kind == "attribute":
        found = attribute_of(model, target)
        held = [*found.parameters(), *found.buffers()] if isinstance(found, nn.Module) else [found]
    else:
        called = target if kind == "method" else getattr(target, "__name__", "")
        in_place = target is operator.setitem or kwargs.get("inplace") is True
        in_place = in_place or (called.endswith("_") and not called.endswith("__"))
    named = [(isinstance(value, nn.Parameter), weights[id(value)]) for value in held if id(value) in weights]
    changed = [*(list(refs(args))[:1] if in_place else ()), *refs(kwargs.get("out"))]
    return Step(
        name,
        kind,
        target,
        args,
        kwargs,
        path=target if kind == "module" else "",
        parameters=tuple(name for is_weight, name in named if is_weight),
        buffers=tuple(name for is_weight, name in named if not is_weight),
        reads=tuple(refs((args, kwargs))),
        layer=layer,
        changes=tuple(changed),
    )


class ForeignError(Exception):
    """A forward reads a value that an earlier one has left somewhere."""


class _DifferError(Exception):
    """Two arguments differ by more than the training flag."""


def _both(train: Any, eval_: Any) -> Any:
    """An argument of both modes, with the flag where it is a truth value that follows the mode."""
    if type(train) is not type(eval_):
        raise _DifferError
    if isinstance(train, bool):
        return train if train == eval_ else Flag(train)
    if isinstance(train, tuple | list) and len(train) == len(eval_):
        parts = [_both(a, b) for a, b in zip(train, eval_, strict=True)]
        return type(train)(*parts) if hasattr(train, "_fields") else type(train)(parts)
    if isinstance(train, dict) and train.keys() == eval_.keys():
        return {key: _both(value, eval_[key]) for key, value in train.items()}
    if isinstance(train, slice):
        mine, its = (train.start, train.stop, train.step), (eval_.start, eval_.stop, eval_.step)
        return slice(*_both(mine, its))
    if train is eval_ or train == eval_:
        return train
    raise _DifferError


def both_modes(
    train: LayerGraph, eval_: LayerGraph, words: Words = OF_GRAPHS
) -> tuple[tuple[Step, ...], str | None]:
    """The steps of both modes, or the submodule to blame.

    Raises:
        ModelError: If the model's own forward is to blame.
    """
    steps: list[Step] = []
    for place in range(max(len(train.steps), len(eval_.steps))):
        mine, its = (g.steps[place] if place < len(g.steps) else None for g in (train, eval_))
        try:
            if mine is None or its is None:
                raise _DifferError
            if (mine.name, mine.kind, mine.grad) != (its.name, its.kind, its.grad):
                raise _DifferError
            if mine.target != its.target or mine.within != its.within:
                raise _DifferError
            steps.append(
                replace(mine, args=_both(mine.args, its.args), kwargs=_both(mine.kwargs, its.kwargs))
            )
        except _DifferError:
            places = [step.within for step in (mine, its) if step is not None]
            deepest = max(places, key=lambda path: (bool(path), path.count(".")))
            if deepest:
                return (), deepest
            _refuse(mine, its, words)
    if train.output != eval_.output:
        _refuse(train.steps[-1], eval_.steps[-1], words)
    return tuple(steps), None


def same(one: LayerGraph, other: LayerGraph) -> bool:
    """Whether two traces of one mode do the same."""
    try:
        steps, blamed = both_modes(one, other)
    except ModelError:
        return False
    flags: list[Flag] = []

    def look(item: Any) -> Any:
        flags.extend([item] if isinstance(item, Flag) else [])
        return item

    for step in steps:
        mapped((step.args, dict(step.kwargs)), look)
    return blamed is None and not flags


def _refuse(train: Step | None, eval_: Step | None, words: Words) -> NoReturn:
    def told(step: Step | None) -> str:
        return f"{step.name} (at {step.line})" if step is not None else "nothing more"

    raise ModelError(
        "a pipeline's forward does the same in training and in evaluation, but for a training=self.training",
        f"in training it calls {told(train)}, in evaluation {told(eval_)}",
        where=next((step.line for step in (train, eval_) if step is not None), ""),
        hint="put what differs into a module of its own, as torch.nn.Dropout does; or " + words.hint,
    )
