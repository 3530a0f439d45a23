"""Hooks: forward hooks on a user's modules that tell the interceptor which module is running.

Where it sits: ``components.parallelize`` installs them after the layer rules, and removes them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from kagome.deferred.lazy_tensor import LazyTensor, now
from kagome.halo.forward_pass import transformed
from kagome.intercept import sparse_adjacency
from kagome.intercept.interceptor import Interceptor
from kagome.placement.torch_calls import Args, Kwargs
from kagome.positions.vertex_tables import (
    given_rows,
    given_sizes,
    refuse_other_rows,
    refuse_some_rows,
    refuse_unknown_edges,
)
from kagome.replay.layer_calls import States
from kagome.user_code.autograd_functions import refuse_old_hooks, watch
from kagome.user_code.torch_checkpoint import once


# The order of one layer's call, from the outside:
#
#     enter          notes the path and the number of running layers, which name sites and draws
#     _edges         replaces an adjacency matrix among the arguments by edges
#     _turn_round    replaces in-edges by out-edges, for layers with flow="target_to_source"
#     _Watched       replays the layer's recorded calls, or runs and records its forward
#       propagate    replays the last deferred sum, or runs PyG's code
#     leave          computes deferred results, drops the rows that the layer has read, pops the path
def install(model: nn.Module, scope: Interceptor) -> Callable[[], None]:
    """Hook a model's modules, so that the interceptor knows which module and ``propagate`` is running.

    Args:
        model: The user's module.
        scope: The interceptor, or the proxy of the running one.

    Returns:
        A function that removes all hooks and drops what layers have cached for this part.

    Raises:
        ModelError: If it is unknown which rows a kept tensor holds. The model is unchanged.
    """
    for each in scope.scopes:
        each.keeps(model)
    several = len(set(scope.scopes)) > 1
    removers: list[Callable[[], None]] = [once(), watch()]
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no hooks; what it does is named after the module that calls it
        caches = any(key.startswith("_cached_") for key in vars(module))
        hooks = _ModuleHooks(path or type(module).__name__, scope, model, caches, several)
        removers.append(module.register_forward_pre_hook(hooks.enter).remove)
        removers.append(module.register_forward_hook(hooks.leave, always_call=True).remove)
        forget(module)
        # Layers are replayed: message-passing layers with all that is inside them, and modules without
        # children, such as a Linear. A container's forward is the user's code.
        if isinstance(module, MessagePassing) or next(module.children(), None) is None:
            removers.append(replaced(module, "forward", _Watched(module, hooks.name, scope)))
        if isinstance(module, MessagePassing):
            removers += _install_edges(module, scope)

    def remove() -> None:
        for take_off in removers:
            take_off()
        for module in model.modules():
            forget(module)

    return remove


@dataclass(frozen=True)
class _ModuleHooks:
    """Forward hooks of one module: they follow the forward's path, and settle what a layer caches.

    Args:
        name: The module's path in the model.
        scope: The interceptor, or the proxy of the running one.
        model: The user's whole module.
        caches: Whether the module has a cache of its own, as ``GCNConv(cached=True)`` has.
        several: Whether several interceptors run the module: a cache of one chunk is wrong for another.
    """

    name: str
    scope: Interceptor
    model: nn.Module
    caches: bool
    several: bool

    def __deepcopy__(self, _memo: dict[int, Any]) -> _ModuleHooks:
        """Return the same hooks, as a copy of a function is: a copied module copies no interceptor."""
        return self

    def enter(self, module: nn.Module, _args: Any) -> None:
        """Note that the module runs, before its forward."""
        # GCNConv(cached=True) keeps normalised edges. With several interceptors they are another chunk's.
        if self.caches and self.several:
            forget(module)
        forward = self.scope.forward
        if forward.forward_pass.outside:
            return  # the loss runs this module: leave it to torch
        forward.forward_pass.refuse_rerun(self.name)
        forward.path.append(self.name)
        refuse_old_hooks(self.scope, module)
        if isinstance(module, MessagePassing):
            forward.layers += 1

    def leave(self, module: nn.Module, _args: Any, out: Any) -> Any:
        """Note that the module has run, and return its rows as the layers after it take them."""
        forward = self.scope.forward
        if forward.forward_pass.outside:
            return None
        # Also called after an error, innermost first: the first module called is the one to name.
        forward.fault = (forward.fault or self.name) if out is None else ""
        if forward.path:
            forward.path.pop()
        if self.caches:
            (forget if self.several else _settle)(module)
        if module is self.model and out is not None:
            refuse_some_rows(self.scope, out, "the model")
        return self.scope.deferral.leave_layer(out) if isinstance(module, MessagePassing) else None


def _install_edges(module: MessagePassing, scope: Interceptor) -> list[Callable[[], None]]:
    """Wrap what a layer does with edges; return what removes it."""
    removers = [_wrap(module, "propagate", scope), _wrap(module, "edge_updater", scope)]
    if any(each.matrix is not None for each in scope.scopes):
        removers.append(module.register_forward_pre_hook(_edges(scope), with_kwargs=True).remove)
    if module.flow == "target_to_source":
        removers.append(module.register_forward_pre_hook(_turn_round(scope), with_kwargs=True).remove)
    return removers


def is_installed(model: nn.Module) -> bool:
    """Return whether a model has hooks of an interceptor now, so that it is on a part."""
    return any(isinstance(vars(module).get("forward"), _Watched) for module in model.modules())


def forget(module: nn.Module) -> None:
    """Drop what a layer has cached for another graph or part (GCNConv(cached=True), SGConv, ...)."""
    for name, value in vars(module).items():
        if name.startswith("_cached_") and value is not None:
            setattr(module, name, None)


def _settle(module: nn.Module) -> None:
    """Compute deferred rows that a layer has cached, because its cache outlives this forward."""
    for name, value in vars(module).items():
        if name.startswith("_cached_") and isinstance(value, LazyTensor):
            setattr(module, name, now(value))


def _wrap(module: MessagePassing, name: str, scope: Interceptor) -> Callable[[], None]:
    inner = getattr(module, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        # In the loss, or in a transform of torch.func, calls are not intercepted, so no halo can be read.
        if scope.forward.forward_pass.outside or transformed():
            if scope.size > 1:
                scope.forward.forward_pass.refuse_outside(type(module).__name__)
            return inner(*args, **kwargs)
        if kwargs.get("size") is not None:
            edges = args[0] if args else kwargs.get("edge_index")
            kwargs = {**kwargs, "size": given_sizes(scope, edges, kwargs["size"])}
        cache = scope.propagate_cache if name == "propagate" else None
        found = None if cache is None else cache.call(module, args, kwargs)
        if found is not None:
            return found
        refuse_unknown_edges(scope, args[0] if args else kwargs.get("edge_index"))
        refuse_other_rows(scope, module, kwargs)
        scope.forward.arguments.append(kwargs)
        noted = None if scope.recorder is None else scope.recorder.paused()
        try:
            out = inner(*args, **kwargs)
        finally:
            scope.forward.arguments.pop()
            if noted is not None:
                noted()
        if cache is not None:
            cache.learn(module, args, kwargs, out)
        return out

    return replaced(module, name, outer)


class _Watched:
    """Replacement for a layer's forward that replays the last call where it can; see ``layer_calls``.

    Args:
        layer: The layer whose forward is replaced.
        name: Its path in the model.
        scope: The interceptor, or the proxy of the running one.
    """

    def __init__(self, layer: nn.Module, name: str, scope: Interceptor) -> None:
        self.layer, self.inner, self.scope = layer, layer.forward, scope
        self.states = States(layer, name)
        update_wrapper(self, self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scope, states = self.scope, self.states
        if scope.forward.forward_pass.outside or transformed():
            return self.inner(*args, **kwargs)
        found = scope.layer_replay.call(states, args, kwargs)
        if found is not None:
            return found
        # A layer may be called with an embedding of all vertices: it gets own rows of that table.
        if scope.parted and isinstance(self.layer, MessagePassing):
            axis = self.layer.node_dim
            args, kwargs = given_rows(scope, args, axis), given_rows(scope, kwargs, axis)
        recorder = scope.layer_replay.watch(states, args, kwargs)
        try:
            out = self.inner(*args, **kwargs)
        finally:
            if recorder is not None:
                scope.recorder = None
        if recorder is not None:
            scope.layer_replay.learn(recorder, states, args, kwargs, out)
        return out

    def known(self, args: Args, kwargs: Kwargs) -> Any:
        """Return the layer's result by replay if this call is like the last one; else None."""
        return (
            None
            if self.scope.forward.forward_pass.outside
            else self.scope.layer_replay.call_module(self.states, args, kwargs)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain forward: a copied layer has its own weights and runs as its class says."""
        copied = memo.get(id(self.layer), self.layer)
        return MethodType(type(copied).forward, copied)


def replaced(module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method on one module. The returned function restores it."""
    # On the instance, not on its class: other instances of the class are untouched, and nested replacements
    # restore the one before.
    own = vars(module).get(name)
    module.__dict__[name] = method

    def unwrap() -> None:
        if own is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = own

    return unwrap


def _edges(scope: Interceptor) -> Callable[..., Any]:
    """Return a pre-hook that gives a layer the graph's edges for its matrix, where the result is the same."""
    return lambda module, args, kwargs: sparse_adjacency.swap(scope, module, args, kwargs)


def _turn_round(scope: Interceptor) -> Callable[..., Any]:
    """Return a pre-hook that gives a target-to-source layer the out-edges, with their attributes."""

    def swap(_module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        # Only the graph's own edges and attributes are replaced. Tensors that forward computed from them are
        # in-edges, which ``edge_alignment`` converts.
        names = {id(value): name for name, value in scope.inputs.items() if isinstance(value, Tensor)}
        edge_names = {"edge_index", *scope.views[0].attributes}

        def turned(value: Any) -> Any:
            name = names.get(id(value))
            if name not in edge_names:
                return value
            view = scope.reads.out_edges()
            return view.given if name == "edge_index" else view.attributes[str(name)]

        return tuple(turned(a) for a in args), {k: turned(v) for k, v in kwargs.items()}

    return swap
