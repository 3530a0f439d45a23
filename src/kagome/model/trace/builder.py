"""Graph builder: turns a tracer's recorded calls into steps, and the steps of both modes into one list.

Where it sits: ``shapes.trace`` gives it the calls that ``tracer`` has recorded.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing

from kagome.errors import ModelError
from kagome.model.trace.graph import Flag, LayerGraph, Ref, Step, StepKind, attribute_of, mapped, refs
from kagome.model.trace.tracer import CURE, HINT

WHOLE: Final = "model"
"""Name of a step that calls the whole model."""


@dataclass(frozen=True)
class Words:
    """Terms and hints that error messages use for a kind of model.

    Args:
        output: The value that the model should return.
        several: Hint for a model that returns several values.
        hint: Hint for a forward that cannot be followed.
        autocast: Hint for a forward that turns autocast on.
    """

    output: str
    several: str
    hint: str
    autocast: str


OF_GRAPHS: Final = Words(
    "forward to return one tensor with a row a vertex, which a pipeline's last stage gives",
    "return the scores alone",
    HINT,
    f"take it out of forward, as train.amp computes in bfloat16 by itself; or {HINT}",
)
OF_SAMPLES: Final = Words(
    "a pipeline's model to return one tensor with samples along axis 0",
    "return what the loss reads as one tensor: torch.cat([one, two], dim=1), say, and split it in the loss",
    CURE,
    "take it out of forward and put it around kagome.pipeline, step and predict; or put these lines into a "
    "module of their own: what cannot be followed is one operator",
)


def _kind_of(value: Any) -> str:
    """Return a description of a value that is not a single tensor."""
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, tuple | list):
        return f"a {_container_of(value)} of {len(value)} value{'' if len(value) == 1 else 's'}"
    return f"a value of type {type(value).__name__}"


def _container_of(value: Any) -> str:
    return next(kind.__name__ for kind in (dict, list, tuple) if isinstance(value, kind))


def _cure(value: Any, words: Words) -> str:
    """Return a hint for a forward that does not return a single value."""
    if not isinstance(value, dict | tuple | list) or not value:
        return "return a tensor that forward computes from its inputs"
    if len(value) == 1:
        return f"return that value alone, without the {_container_of(value)} around it"
    return words.several


def steps_of(model: nn.Module, fx_graph: fx.Graph, words: Words = OF_GRAPHS) -> LayerGraph:
    """Turn the recorded calls of one mode into steps.

    Args:
        model: The user's module.
        fx_graph: Recorded calls.
        words: Terms and hints for error messages.

    Raises:
        ModelError: If forward does not return a single value.
        ForeignError: If it reads a value of another forward pass.
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

    for node in fx_graph.nodes:
        if node.op == "output":
            returned = node.args[0]
            if not isinstance(returned, fx.Node):
                raise ModelError(words.output, _kind_of(returned), hint=_cure(returned, words))
            return graph_of(model, steps, plain(returned).name, inputs)
        # A model that is itself a layer of torch or PyG is a single step.
        own = WHOLE if node.op == "call_module" and not node.target else node.name
        names[node] = node.target if node.op == "placeholder" else own
        if node.op == "placeholder":
            inputs.append(node.target)
            continue
        # Lists and dicts of torch.fx are immutable, which a called function would notice: copy them.
        args, kwargs = mapped(tuple(node.args), plain), mapped(dict(node.kwargs), plain)
        step = step_of(model, canonical, own, kinds[node.op], node.target, args, kwargs)
        # An attribute step hands out a weight; the function that reads it is the one that uses it. A stage
        # that runs the function then holds the weight.
        given = {name: None for read in step.reads for name in weights.get(read, ())}
        if step.kind == "attribute":
            weights[step.name] = step.parameters
        meta = {key: node.meta[key] for key in ("within", "line", "grad")}
        steps.append(replace(step, parameters=tuple({**given, **dict.fromkeys(step.parameters)}), **meta))
    raise AssertionError("a graph without an output")


def weight_names(model: nn.Module) -> dict[int, str]:
    """Return the full names of weights and buffers by id; a shared one goes by its first name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {id(tensor): name for name, tensor in named}


def graph_of(model: nn.Module, steps: Sequence[Step], output: str, inputs: Sequence[str]) -> LayerGraph:
    """Return a graph of steps, with those of the inputs that the steps read."""
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
    """Return a step, with the values it reads, the weights it uses and the values it changes.

    Args:
        model: The user's module.
        weights: Names of the model's weights, from :func:`weight_names`.
        name: Name of the step.
        kind: Kind of the call.
        target: A module's path, a function, or a method's name.
        args: Arguments by position.
        kwargs: Arguments by name.
    """
    held: list[Tensor] = []
    layer = in_place = False
    if kind == "module":
        module = model.get_submodule(target)
        held = [*module.parameters(), *module.buffers()]
        # A layer without weights that passes messages (``APPNP``) is worth a stage; an activation is not.
        layer = bool(held) or any(isinstance(inner, MessagePassing) for inner in module.modules())
        in_place = getattr(module, "inplace", False) is True
    elif kind == "attribute":
        found = attribute_of(model, target)
        held = [*found.parameters(), *found.buffers()] if isinstance(found, nn.Module) else [found]
    else:
        called = target if kind == "method" else getattr(target, "__name__", "")
        in_place = target is operator.setitem or kwargs.get("inplace") is True
        # Torch's convention: ``relu_`` and ``index_add_`` write to their first argument.
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
    """A forward reads a value that an earlier forward pass has left somewhere."""


class _DifferError(Exception):
    """Two arguments differ by more than the training flag."""


def _both(train: Any, eval_: Any) -> Any:
    """Return an argument for both modes, with a flag where a truth value follows the mode."""
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
    """Return the steps of both modes, or the submodule whose forward differs between them.

    Args:
        train: Steps of training.
        eval_: Steps of evaluation.
        words: Terms and hints for error messages.

    Raises:
        ModelError: If the model's own forward differs.
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
            # The innermost of the two forwards becomes one step; the outer one may then be the same in both.
            deepest = max(places, key=lambda path: (bool(path), path.count(".")))
            if deepest:
                return (), deepest
            _refuse(mine, its, words)
    if train.output != eval_.output:
        _refuse(train.steps[-1], eval_.steps[-1], words)
    return tuple(steps), None


def same(one: LayerGraph, other: LayerGraph) -> bool:
    """Return whether two traces of one mode consist of the same calls."""
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
        "a forward that does the same in training and in evaluation, but for a training=self.training",
        f"{told(train)} in training, {told(eval_)} in evaluation",
        where=next((step.line for step in (train, eval_) if step is not None), ""),
        hint="put what differs into a module of its own, as torch.nn.Dropout does; or " + words.hint,
    )


# Layers by name, for a forward that cannot be traced ------------------------------------------------


def chain(model: nn.Module, layers: Sequence[str], names: Sequence[str]) -> LayerGraph:
    """Build a graph of the modules at these paths, in which each takes the value of the one before.

    Args:
        model: The user's module.
        layers: Paths of modules in the order in which they run.
        names: Inputs that the data has; each module also receives those that its forward names.

    Raises:
        ModelError: If a path names no module, or if a module asks for an input that the data does not have.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    known.pop("", None)
    unknown = [path for path in layers if path not in known]
    if unknown or not layers or "x" not in names:
        near = difflib.get_close_matches(unknown[0], known, n=1) if unknown else []
        raise ModelError(
            "the layers of a pipeline to be named by their paths, and the first one to be given x",
            f"{unknown[0]!r} for a model with the modules {', '.join(known)}"
            if unknown
            else f"the layers {list(layers)} and data with {', '.join(names)}",
            hint=f"--parallel.layers ... {near[0]}" if near else "",
        )
    weights = weight_names(model)
    steps: list[Step] = []
    taken = set(names)
    last = "x"
    for path in layers:
        name = base = path.replace(".", "_")
        count = 0
        # A layer may be named twice, or as an input is; values of steps and inputs share one space of names.
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        taken.add(name)
        args, kwargs = _given(known[path], path, last, names)
        steps.append(step_of(model, weights, name, "module", path, args, kwargs))
        last = name
    return graph_of(model, steps, last, names)


def _given(
    module: nn.Module, path: str, last: str, names: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer of a chain: the last value, then the inputs that its forward names."""
    if type(module).__module__.startswith("torch.nn."):
        return (Ref(last),), {}
    parameters = list(inspect.signature(module.forward).parameters.values())
    # The second argument is the edges, whatever its name, unless a later one is called edge_index.
    edges = "edge_index" in names and all(p.name != "edge_index" for p in parameters[2:])
    # ``pyg.Sequential`` takes ``*args``: the edges follow the rows if any layer inside passes messages.
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        passes = any(isinstance(inner, MessagePassing) for inner in module.modules())
        return (Ref(last), Ref("edge_index")) if passes and "edge_index" in names else (Ref(last),), {}
    args: list[Any] = [Ref(last)]
    kwargs: dict[str, Any] = {}
    for place, parameter in enumerate(parameters[1:], 1):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        needed = parameter.default is parameter.empty
        by_place = place == 1 and needed and parameter.kind is not parameter.KEYWORD_ONLY
        if by_place and (parameter.name in names or edges):
            args.append(Ref(parameter.name if parameter.name in names else "edge_index"))
        elif parameter.name in names:
            kwargs[parameter.name] = Ref(parameter.name)
        elif needed:
            raise ModelError(
                f"data with {parameter.name!r} for the layer {path}",
                f"data with {', '.join(names)}",
                hint=f"give the Data an attribute {parameter.name!r} with a row a vertex or an edge",
            )
    return tuple(args), kwargs
