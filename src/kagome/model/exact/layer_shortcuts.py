"""Layer shortcuts: cached results that depend on the graph alone, and kernels for reductions over in-edges.

Where it sits: ``layer_rules`` sets them on a model's layers and aggregations. PyG's functions stay as they
are: a layer's own methods get replacements for single global names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch_geometric import utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from kagome.kernels.base.address import address
from kagome.model.exact.scope import Scope
from kagome.scope.constants import Constants
from kagome.sparse_ops.edge_view import EdgeView


class LayerScope(Scope, Protocol):
    """The interceptor as layer rules see it: they may ask for more than handlers may."""

    constants: Constants
    views: list[EdgeView]
    runs_once: bool

    def run_once(self) -> AbstractContextManager[None]:
        """Return a context for a function that plain PyG would run again in backward; here it runs once."""


Settings = list[tuple[nn.Module, str, Any]]


def cached_call(function: Callable[..., Any], scope: LayerScope, name: str) -> Callable[..., Any]:
    """Cache a function of the graph alone, such as degrees, or self-loops of constant edges.

    The first call runs under the interceptor like any other, so that its degrees are those of the whole
    graph.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        # The key has the arguments in the order of the call and the names of the named ones: two spellings of
        # one call are two entries, which costs a second computation and no error.
        given = (*args, *kwargs.values())
        with torch._C.DisableTorchFunction():  # this is not the user's computation
            lasts = all(scope.constants.is_constant(value) for value in given if isinstance(value, Tensor))
            # Constant tensors are kept alive, so an address identifies them; all layers share one result.
            key = (name, tuple(_place(value) for value in given), tuple(kwargs)) if lasts else None
            found = scope.constants.cached(key)
        if key is None:
            return function(*args, **kwargs)
        if found is None:
            with scope.constants.once():
                found = scope.constants.cache(key, function(*args, **kwargs))
        return found

    return call


def _place(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return address(value), tuple(value.shape)


def _softmax(function: Callable[..., Any], scope: LayerScope, name: str) -> Callable[..., Any]:
    """Compute the softmax over in-edges by a kernel if the ids are the graph's targets."""

    def call(
        src: Tensor, index: Any = None, ptr: Any = None, num_nodes: int | None = None, dim: int = 0
    ) -> Tensor:
        # With ``ptr`` groups are consecutive rows, which PyG's own function handles.
        found = (
            scope.deferral.edge_softmax(src, index, dim)
            if ptr is None and isinstance(index, Tensor)
            else None
        )
        return function(src, index, ptr, num_nodes, dim) if found is None else found

    return call


def _loops(function: Callable[..., Any], scope: LayerScope, name: str) -> Callable[..., Any]:
    """Pass EGConv's number of vertices, which PyG would guess from the edges of the part alone."""
    once = cached_call(function, scope, name)

    def call(edge_index: Tensor, *args: Any, **kwargs: Any) -> Any:
        # ``num_nodes`` is the fourth argument. A vertex behind the graph's last edge gets no loop, as in PyG.
        if scope.constants.is_constant(edge_index) and len(args) < 3:
            kwargs.setdefault("num_nodes", scope.ids.last_row())
        return once(edge_index, *args, **kwargs)

    return call


_STAND_INS: dict[str, tuple[Callable[..., Any], Callable[..., Callable[..., Any]]]] = {
    "gcn_norm": (gcn_norm, cached_call),
    "add_self_loops": (utils.add_self_loops, cached_call),
    "remove_self_loops": (utils.remove_self_loops, cached_call),
    "add_remaining_self_loops": (utils.add_remaining_self_loops, _loops),
    "softmax": (utils.softmax, _softmax),
}
"""Global names in PyG's layers, the functions they refer to, and the makers of their replacements."""


def with_shortcuts(module: Any, scope: LayerScope) -> Settings:
    """Return the module's own methods that use a name of the table, with the replacement in place."""
    found: Settings = []
    # Methods of base classes too: a user's subclass of GCNConv calls ``gcn_norm`` in PyG's own forward. Names
    # are listed first: another thread's ``deepcopy`` may add ``__slotnames__`` to a class meanwhile.
    for name in {n for kind in type(module).__mro__ if kind is not nn.Module for n in list(vars(kind))}:
        method = getattr(type(module), name, None)
        if not isinstance(method, FunctionType) or name in ("__init__", "__call__"):
            continue
        # The function itself is compared, not its name alone: a ``softmax`` of the user's own stays.
        replaced = {
            word: make(function, scope, word)
            for word, (function, make) in _STAND_INS.items()
            if word in method.__code__.co_names and method.__globals__.get(word) is function
        }
        if replaced:
            found.append((module, name, _with_globals(module, method, replaced)))
    return found


def _with_globals(module: nn.Module, method: FunctionType, replaced: dict[str, Any]) -> Any:
    """Return a module's method with some of its global names replaced; the globals stay as they are."""
    # Setting the global itself would change PyG for all models of the process.
    names = {**method.__globals__, **replaced}
    copy = FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    return MethodType(copy, module)


def reduced_by_kernels(module: Any, scope: LayerScope) -> Settings:
    """Compute an aggregation's sums, means and extremes over the graph's targets by one kernel each."""
    inner = module.reduce

    def reduce(
        x: Tensor,
        index: Tensor | None = None,
        ptr: Any = None,
        dim_size: int | None = None,
        dim: int = -2,
        reduce: str = "sum",
    ) -> Tensor:
        found = None
        # With another number of groups it is a pooling, and no reduction over in-edges.
        if ptr is None and index is not None and scope.deferral.writes_all(index, dim_size):
            found = scope.deferral.edge_reduce(x, index, dim, reduce)
        return inner(x, index, ptr, dim_size, dim, reduce) if found is None else found

    return [(module, "reduce", reduce)]


def spread_of_messages(module: Any, scope: LayerScope) -> Settings:
    """Drop terms that are equal for all in-edges from a variance over in-edges, which they do not change."""
    inner = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return inner(scope.deferral.spread(x), *args, **kwargs)

    return [(module, "forward", forward)]
