"""Named layers: modules named by the user that run one after the other, for a forward that cannot be traced.

Where it sits: ``shapes`` re-exports it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from torch_geometric.nn import MessagePassing

from kagome.errors import ModelError
from kagome.model.trace.builder import graph_of, step_of, weight_names
from kagome.model.trace.graph import LayerGraph, Ref, Step


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
