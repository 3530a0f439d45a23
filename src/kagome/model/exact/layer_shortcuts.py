"""Shortcuts: what a layer computes of the graph alone is kept; reductions over in-edges go to kernels.

Where it sits: ``layer_rules`` sets them on a model's layers and aggregations. PyG's functions stay as they
are: a layer's own methods are given stand-ins for single global names.
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


class LayerScope(Scope, Protocol):
    """What a rule may ask of the interception beyond what a handler may."""

    runs_once: bool

    def run_once(self) -> AbstractContextManager[None]:
        """Around a function that plain PyG would run again in backward."""

    def everyone(self, rows: Tensor, *, ordered: bool = True) -> Tensor:
        """The rows of all ranks, with gradient: in the order of the graph, or own ones first."""

    def knows_everyone(self) -> object:
        """Say, where all rows are here, that rows of all vertices are read."""

    def lasting(self, tensor: Tensor | None) -> bool:
        """Whether a tensor is the same in every forward."""

    def keep(self, key: Any, value: Any) -> Any:
        """Keep for all forwards what was computed from lasting tensors alone."""

    def kept(self, key: Any) -> Any:
        """What was kept, unless it was written to since; else None."""

    def once(self) -> AbstractContextManager[None]:
        """Around the computation of what is kept."""

    def spread(self, value: Tensor) -> Tensor:
        """A message without what is the same for all in-edges of a row: its variance is the same."""

    def edge_softmax(self, value: Tensor, index: Any, dim: int) -> Tensor | None:
        """Softmax over each row's in-edges, where ``index`` names the graph's targets; else None."""

    def edge_reduce(self, value: Tensor, index: Any, dim: int, how: str) -> Tensor | None:
        """A reduction over each row's in-edges, where ``index`` names the graph's targets; else None."""

    def as_targets(self, index: Tensor) -> Tensor:
        """Say that a tensor holds ids of own rows."""

    def names_targets(self, index: Any) -> bool:
        """Whether a tensor holds ids of own rows: each edge's target."""

    def last_row(self) -> int:
        """Own vertices up to the last one of the whole graph that has an edge."""


Settings = list[tuple[nn.Module, str, Any]]


def remembered(function: Callable[..., Any], scope: LayerScope, name: str) -> Callable[..., Any]:
    """A function of the graph alone, computed once: degrees, self-loops of edges that stay.

    The first call runs under the interception like any other, so its degrees are the whole graph's.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        with torch._C.DisableTorchFunction():  # it is not the user's computation
            lasts = all(scope.lasting(value) for value in given if isinstance(value, Tensor))
            # Lasting tensors are kept alive, so a place in memory is theirs; all layers share one result.
            key = (name, tuple(_place(value) for value in given), tuple(kwargs)) if lasts else None
            found = scope.kept(key)
        if key is None:
            return function(*args, **kwargs)
        if found is None:
            with scope.once():
                found = scope.keep(key, function(*args, **kwargs))
        return found

    return call


def _place(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return address(value), tuple(value.shape)


def _softmax(function: Callable[..., Any], scope: LayerScope, name: str) -> Callable[..., Any]:
    """Softmax over in-edges, by a kernel where the ids are the graph's targets."""

    def call(
        src: Tensor, index: Any = None, ptr: Any = None, num_nodes: int | None = None, dim: int = 0
    ) -> Tensor:
        found = scope.edge_softmax(src, index, dim) if ptr is None and isinstance(index, Tensor) else None
        return function(src, index, ptr, num_nodes, dim) if found is None else found

    return call


def _loops(function: Callable[..., Any], scope: LayerScope, name: str) -> Callable[..., Any]:
    """EGConv leaves the number of vertices to be guessed from the edges, which are the part's here."""
    once = remembered(function, scope, name)

    def call(edge_index: Tensor, *args: Any, **kwargs: Any) -> Any:
        if scope.lasting(edge_index) and len(args) < 3:
            kwargs.setdefault("num_nodes", scope.last_row())
        return once(edge_index, *args, **kwargs)

    return call


_STAND_INS: dict[str, tuple[Callable[..., Any], Callable[..., Callable[..., Any]]]] = {
    "gcn_norm": (gcn_norm, remembered),
    "add_self_loops": (utils.add_self_loops, remembered),
    "remove_self_loops": (utils.remove_self_loops, remembered),
    "add_remaining_self_loops": (utils.add_remaining_self_loops, _loops),
    "softmax": (utils.softmax, _softmax),
}
"""Global names of PyG's layers, the functions they stand for, and what stands in for them."""


def with_shortcuts(module: Any, scope: LayerScope) -> Settings:
    """The module's own methods that use a name of the table, with what stands in for it."""
    found: Settings = []
    for name in {n for kind in type(module).__mro__ for n in vars(kind) if kind is not nn.Module}:
        method = getattr(type(module), name, None)
        if not isinstance(method, FunctionType) or name in ("__init__", "__call__"):
            continue
        replaced = {
            word: make(function, scope, word)
            for word, (function, make) in _STAND_INS.items()
            if word in method.__code__.co_names and method.__globals__.get(word) is function
        }
        if replaced:
            found.append((module, name, _with_globals(module, method, replaced)))
    return found


def _with_globals(module: nn.Module, method: FunctionType, replaced: dict[str, Any]) -> Any:
    """The module's own method with some of its global names standing for others; no global is touched."""
    copy = FunctionType(
        method.__code__,
        {**method.__globals__, **replaced},
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    copy.__kwdefaults__ = method.__kwdefaults__
    return MethodType(copy, module)


def reduced_by_kernels(module: Any, scope: LayerScope) -> Settings:
    """An aggregation's sums, means and extremes over the graph's targets, in one step each."""
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
        if ptr is None and index is not None and dim_size in (None, scope.own):
            found = scope.edge_reduce(x, index, dim, reduce)
        return inner(x, index, ptr, dim_size, dim, reduce) if found is None else found

    return [(module, "reduce", reduce)]


def spread_of_messages(module: Any, scope: LayerScope) -> Settings:
    """A variance over in-edges does not see what is the same for all of them."""
    inner = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return inner(scope.spread(x), *args, **kwargs)

    return [(module, "forward", forward)]
