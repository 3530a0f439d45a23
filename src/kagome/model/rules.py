"""Rules for single layer classes that look at the whole graph in a way of their own.

Where it sits: ``run.engine`` applies them to a model's modules before the first forward, and takes them off
afterwards. PyG's classes stay as they are: a rule sets an attribute on one instance.

To add a rule: write a function (module, scope) -> list of (instance, name, value) to set, and add it to
``RULES`` beside the class it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, get_laplacian

from kagome.errors import ModelError
from kagome.model.scope import Scope


class LayerScope(Scope, Protocol):
    """What a rule may ask of the interception beyond what a handler may."""

    remembered: dict[Any, Any]

    def everyone(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, own ones first, with gradient."""

    def is_input(self, value: Any) -> bool:
        """Whether a tensor is one that the model was given, the same in every forward."""

    def as_targets(self, index: Tensor) -> Tensor:
        """Say that a tensor holds ids of own rows."""

    def names_targets(self, index: Any) -> bool:
        """Whether a tensor holds ids of own rows: each edge's target."""

    def last_row(self) -> int:
        """Own vertices up to the last one of the whole graph that has an edge."""


Settings = list[tuple[nn.Module, str, Any]]
Rule = Callable[[Any, LayerScope], Settings]


def apply_rules(model: nn.Module, scope: LayerScope) -> Callable[[], None]:
    """Set what each rule asks for on the model's layers; refuse those that no split makes exact.

    Returns:
        A function that takes it off again.

    Raises:
        ModelError: For a layer of :data:`REFUSED`, with its reason.
    """
    for path, module in model.named_modules():
        for kind, reason in REFUSED:
            if isinstance(module, kind) and scope.size > 1:
                raise ModelError(
                    f"{kind.__name__} was to be split over {scope.size} parts",
                    reason,
                    where=path,
                    hint="train it on one rank, or take another layer",
                )
    undo: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for kind, rule in RULES:
            if isinstance(module, kind):
                for target, name, value in rule(module, scope):
                    undo.append((target, name, target.__dict__.get(name)))
                    target.__dict__[name] = value

    def remove() -> None:
        for module, name, before in reversed(undo):
            if before is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = before  # the user's own

    return remove


def _with_globals(module: nn.Module, name: str, replaced: dict[str, Any]) -> Any:
    """The module's own method with some of its global names standing for others; no global is touched."""
    method = getattr(type(module), name)
    code = method.__code__
    return MethodType(
        _copied(
            FunctionType(
                code, {**method.__globals__, **replaced}, name, method.__defaults__, method.__closure__
            ),
            method,
        ),
        module,
    )


def _copied(function: FunctionType, method: Any) -> FunctionType:
    function.__kwdefaults__ = method.__kwdefaults__
    return function


class _Remembered:
    """A function of the graph alone, computed once: degree normalisation of constant edges.

    The first call runs under the interception like any other, so its degrees are the whole graph's.
    """

    def __init__(self, function: Callable[..., Any], scope: LayerScope, name: str) -> None:
        self._function, self._scope, self._name = function, scope, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if not all(self._scope.is_input(value) for value in given if isinstance(value, Tensor)):
            return self._function(*args, **kwargs)
        # Inputs live as long as the scope, so an id is never given twice; all layers share one result.
        values = tuple(id(value) if isinstance(value, Tensor) else value for value in given)
        key = (self._name, values, tuple(kwargs))
        if key not in self._scope.remembered:
            with torch.no_grad():
                self._scope.remembered[key] = self._function(*args, **kwargs)
        return self._scope.remembered[key]


def _normalised(module: Any, scope: LayerScope) -> Settings:
    """Layers that call ``gcn_norm``: once for constant edges."""
    names = type(module).forward.__code__.co_names
    found = type(module).forward.__globals__
    replaced: dict[str, Any] = {}
    if "gcn_norm" in names and found.get("gcn_norm") is gcn_norm:
        replaced["gcn_norm"] = _Remembered(gcn_norm, scope, "gcn_norm")
    if (
        "add_remaining_self_loops" in names
        and found.get("add_remaining_self_loops") is add_remaining_self_loops
    ):
        # EGConv leaves the number of vertices to be guessed from the edges, which are the part's here.
        def loops(edge_index: Tensor, *args: Any, **kwargs: Any) -> Any:
            if scope.is_input(edge_index) and len(args) < 3:
                kwargs.setdefault("num_nodes", scope.last_row())
            return add_remaining_self_loops(edge_index, *args, **kwargs)

        replaced["add_remaining_self_loops"] = loops
    return [(module, "forward", _with_globals(module, "forward", replaced))] if replaced else []


def _cheb(module: Any, scope: LayerScope) -> Settings:
    """ChebConv scales its Laplacian by twice the largest entry, which may lie on another rank."""
    inner = module.__norm__

    def norm(
        edge_index: Tensor,
        num_nodes: int | None,
        edge_weight: Tensor | None,
        normalization: str | None,
        lambda_max: Any = None,
        dtype: Any = None,
        batch: Tensor | None = None,
    ) -> Any:
        if lambda_max is None:
            weight = get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)[1]
            low = weight.new_full((), torch.finfo(weight.dtype).min)
            lambda_max = 2.0 * scope.greatest(weight.detach().amax() if weight.numel() else low)
        return inner(edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype=dtype, batch=batch)

    return [(module, "__norm__", _Remembered(norm, scope, "ChebConv"))]


def _supergat(module: Any, scope: LayerScope) -> Settings:
    """SuperGATConv also samples pairs for an attention loss of its own, not added here: none are drawn."""
    none = lambda edge_index, *_: edge_index.new_zeros(2, 0)  # noqa: E731
    return [(module, "negative_sampling", none), (module, "positive_sampling", none)]


def _gps(module: Any, scope: LayerScope) -> Settings:
    """GPSConv attends to all vertices: queries are own rows, keys and values everybody's.

    Cost:
        All ranks' rows once forward and once backward; N x n attention weights.
    """
    inner = module.attn.forward
    performer = not isinstance(module.attn, nn.MultiheadAttention)

    def attend(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if scope.size == 1:
            return inner(query, *args, **kwargs)
        if query.size(0) != 1 or query.size(1) != scope.own:
            raise ModelError(
                "GPSConv attends to all vertices of one graph",
                "it was given a batch vector",
                where=scope.where(),
                hint="leave batch out: there is one graph",
            )
        whole = scope.everyone(query.squeeze(0)).unsqueeze(0)
        if query.size(1) == 0:
            # A rank without vertices: nothing to compute, but its gradient must ask for the same collectives.
            none = whole[:, :0] + sum(p.sum() * 0 for p in module.attn.parameters())
            return none if performer else (none, None)
        if performer:
            return inner(whole)[:, : query.size(1)]
        return inner(query, whole, whole, need_weights=False)

    return [(module.attn, "forward", attend)]


def _first_group(module: Any, scope: LayerScope) -> Settings:
    """Quantiles and LSTMs fail where the first vertex, or all, have no in-edge: give them one that has."""
    inner = module.forward

    def forward(
        x: Tensor,
        index: Tensor | None = None,
        ptr: Any = None,
        dim_size: int | None = None,
        dim: int = -2,
        **more: Any,
    ) -> Tensor:
        axis = dim % x.dim()
        if index is None or axis != 0:
            return inner(x, index, ptr, dim_size, dim, **more)  # type: ignore[no-any-return]
        ahead = torch.cat([x.new_zeros(2, *x.shape[1:]), x])
        group = scope.as_targets(torch.cat([index.new_zeros(2), index + 1]))
        size = scope.own if dim_size is None else dim_size
        out: Tensor = inner(ahead, group, None, size + 1, dim, **more)
        return out[1:]

    return [(module, "forward", forward)]


def _needs_all(module: Any, scope: LayerScope) -> Settings:
    """Aggregations that want a group's rows in order, or in one dense block: a vertex's neighbours only."""
    inner = module.forward

    def forward(x: Tensor, index: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if scope.size > 1 and not scope.names_targets(index):
            raise ModelError(
                f"{type(module).__name__} takes the rows that edges bring to a vertex",
                "it pools vertices, which lie on several ranks, and needs them in one place",
                where=scope.where(),
                hint="pool all vertices by a sum, mean, maximum, minimum or softmax",
            )
        return inner(x, index, *args, **kwargs)

    return [(module, "forward", forward)]


REFUSED: Sequence[tuple[type[nn.Module], str]] = (
    (pyg.HypergraphConv, "it reads vertex-hyperedge incidences, not edges between vertices"),
    (pyg.WLConv, "it numbers colours in the order in which it meets them, and has no gradient"),
    (pyg.HGTConv, "it takes several vertex types as dicts, not one homogeneous graph"),
    (pyg.HANConv, "it takes several vertex types as dicts, not one homogeneous graph"),
    (pyg.HeteroConv, "it takes several vertex types as dicts, not one homogeneous graph"),
)
"""Layers that no split makes exact, each with its reason."""


_IN_ONE_PLACE = (
    pyg.aggr.QuantileAggregation,
    pyg.aggr.LSTMAggregation,
    pyg.aggr.GRUAggregation,
    pyg.aggr.SortAggregation,
    pyg.aggr.MLPAggregation,
    pyg.aggr.LCMAggregation,
    pyg.aggr.SetTransformerAggregation,
    pyg.aggr.GraphMultisetTransformer,
    pyg.aggr.PatchTransformerAggregation,
)

RULES: Sequence[tuple[type[nn.Module], Rule]] = (
    (pyg.MessagePassing, _normalised),
    (pyg.ChebConv, _cheb),
    (pyg.SuperGATConv, _supergat),
    (pyg.GPSConv, _gps),
    (pyg.aggr.QuantileAggregation, _first_group),
    (pyg.aggr.LSTMAggregation, _first_group),
    *((kind, _needs_all) for kind in _IN_ONE_PLACE),
)
