"""Layer rules: adjustments of single layer classes that look at the whole graph in a way of their own.

Where it sits: ``components.parallelize`` applies them to a model's modules before it installs hooks, and
removes them after those. PyG's classes stay as they are: a rule sets an attribute on one instance.

To add a rule: write a function (module, scope) -> list of (instance, name, value) to set, and add it to
``RULES`` beside the class it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.models.rev_gnn import InvertibleModule
from torch_geometric.utils import get_laplacian

from kagome.errors import ModelError
from kagome.model.exact.hgt import type_by_type
from kagome.model.exact.layer_shortcuts import (
    LayerScope,
    Settings,
    cached_call,
    reduced_by_kernels,
    spread_of_messages,
    with_shortcuts,
)

Rule = Callable[[Any, LayerScope], Settings]


def apply_rules(model: nn.Module, scope: LayerScope) -> Callable[[], None]:
    """Set the attributes of each rule on the model's layers; refuse layers that no split makes exact.

    Returns:
        A function that restores the attributes.

    Raises:
        ModelError: For a layer of :data:`REFUSED`, with its reason. The model is unchanged after any error.
    """
    refused = REFUSED if scope.views[0].name else (*REFUSED, *OF_SEVERAL_SETS)
    for path, module in model.named_modules():
        for kind, reason in refused:
            if isinstance(module, kind) and scope.size > 1:
                raise ModelError(
                    f"a layer that can be split over {scope.size} parts",
                    f"{kind.__name__}: {reason}",
                    where=path,
                    hint="train it on one rank, or take another layer",
                )
    with ExitStack() as undo:
        for module in model.modules():
            # A rule reads the method that earlier rules have set, so the later of two for one class wraps the
            # earlier one. Undoing in reverse order ends with what was there at first.
            for kind, rule in RULES:
                if isinstance(module, kind):
                    for target, name, value in rule(module, scope):
                        undo.callback(_restore, target, name, target.__dict__.get(name))
                        target.__dict__[name] = value
        return undo.pop_all().close


def _restore(module: nn.Module, name: str, before: Any) -> None:
    if before is None:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = before  # the user's own attribute


def _cheb(module: Any, scope: LayerScope) -> Settings:
    """Scale ChebConv's Laplacian by twice its largest entry, which may be on another rank."""
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
            # A rank without edges takes part in the maximum with the least number, and does not win.
            low = weight.new_full((), torch.finfo(weight.dtype).min)
            # This rank's maximum alone: a maximum over all ranks would be a step that a rank without edges
            # does not take part in.
            with torch._C.DisableTorchFunction():
                own = weight.detach().amax() if weight.numel() else low
            lambda_max = 2.0 * scope.ranks.greatest(own)
        return inner(edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype=dtype, batch=batch)

    return [(module, "__norm__", cached_call(norm, scope, "ChebConv"))]


def _supergat(module: Any, scope: LayerScope) -> Settings:
    """Let SuperGATConv draw no pairs for its own attention loss, which is not used here."""
    none = lambda edge_index, *_: edge_index.new_zeros(2, 0)  # noqa: E731
    return [(module, "negative_sampling", none), (module, "positive_sampling", none)]


def _gps(module: Any, scope: LayerScope) -> Settings:
    """Let GPSConv attend to all vertices: queries are own rows, keys and values the rows of all ranks.

    Cost:
        All ranks' rows once forward and once backward; N x n attention weights.
    """
    inner = module.attn.forward
    performer = not isinstance(module.attn, nn.MultiheadAttention)

    def attend(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if scope.size == 1:
            # Sends nothing. A survey of a sample (``profile.step_shapes``) sees the call on its channel and
            # learns that the layer reads all vertices.
            scope.reads.all_rows_exchange()
            return inner(query, *args, **kwargs)
        if query.size(0) != 1 or query.size(1) != scope.sets[0].own:
            raise ModelError(
                "GPSConv to attend to all vertices of one graph",
                "a batch vector",
                where=scope.where(),
                hint="leave batch out: there is one graph",
            )
        # Torch's attention is intercepted further inside, where ``global_attention``
        # fetches keys and values. The Performer sums over all vertices in several
        # places of its kernel, so it is given all rows, in any order.
        if not performer:
            return inner(query, query, query, need_weights=False)
        whole = scope.reads.gather_all(query.squeeze(0), ordered=False).unsqueeze(0)
        if query.size(1) == 0:
            # A rank without vertices computes nothing, but its backward must run the same collectives.
            return whole[:, :0] + sum(p.sum() * 0 for p in module.attn.parameters())
        return inner(whole)[:, : query.size(1)]

    return [(module.attn, "forward", attend)]


def _reversible(module: Any, scope: LayerScope) -> Settings:
    """Let a reversible block keep its activations: recomputation would repeat its exchanges in backward."""
    # One rank with all rows has no exchange to repeat: PyG's own recomputation stays.
    if not scope.runs_once:
        return []

    def apply(args: tuple[Any, ...], fn: Callable[..., Any], inverse: Callable[..., Any]) -> Any:
        with scope.run_once():
            out = fn(*args)
        # As PyG's own ``_fn_apply`` returns a layer's only result.
        return out[0] if isinstance(out, tuple) and len(out) == 1 else out

    return [(module, "_fn_apply", apply)]


def _first_group(module: Any, scope: LayerScope) -> Settings:
    """Add a first vertex with in-edges: quantiles and LSTMs fail if the first one, or all, have none."""
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
        #     index   [3 3 5]         group 0 is empty: PyG's quantile looks at place -1
        #     group   [0 0 4 4 6]     two rows of zeros in front; their result, out[0], is dropped
        #
        # Two rows, because groups at the end that are empty look at the last row but one.
        ahead = torch.cat([x.new_zeros(2, *x.shape[1:]), x])
        group = scope.axes.targets(torch.cat([index.new_zeros(2), index + 1]))
        held = scope.axes.placements.get(index)
        written = scope.sets[0 if held is None else scope.views[held.view].targets]
        size = written.own if dim_size is None else dim_size
        out: Tensor = inner(ahead, group, None, size + 1, dim, **more)
        return out[1:]

    return [(module, "forward", forward)]


def _hgt(module: Any, scope: LayerScope) -> Settings:
    """Let HGTConv compute edge type by edge type: its own ids count the rows of all types."""
    # One rank with all rows can count them so.
    if not scope.parted:
        return []
    return [(module, "forward", lambda rows, edges: type_by_type(module, rows, edges))]


def _refuse_sample(module: Any, scope: LayerScope) -> Settings:
    """Allow aggregations that need a whole group, in order or as a block, only over a vertex's neighbours."""
    inner = module.forward

    def forward(x: Tensor, index: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        # All in-edges of a vertex are on its rank, so a reduction by target has its groups whole.
        if scope.size > 1 and not scope.axes.names_targets(index):
            raise ModelError(
                f"{type(module).__name__} to take the rows that edges bring to a vertex",
                "vertices to pool, which lie on several ranks and are needed in one place",
                where=scope.where(),
                hint="pool all vertices by a sum, mean, maximum, minimum or softmax",
            )
        return inner(x, index, *args, **kwargs)

    return [(module, "forward", forward)]


REFUSED: Sequence[tuple[type[nn.Module], str]] = (
    (pyg.HypergraphConv, "it reads vertex-hyperedge incidences, not edges between vertices"),
    (pyg.WLConv, "it numbers colours in the order in which it meets them, and has no gradient"),
)
"""Layers that no split makes exact, each with its reason."""
_DICTS: Final = "it takes several vertex types as dicts, of a HeteroData"
OF_SEVERAL_SETS: Sequence[tuple[type[nn.Module], str]] = (
    (pyg.HGTConv, _DICTS),
    (pyg.HANConv, _DICTS),
    (pyg.HeteroConv, _DICTS),
)
"""Layers that run on a graph of several vertex sets only."""


# Aggregations that look at the rows of a group in an order, or as one dense block, and are no sum over rows.
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

# From the general to the particular: a rule further down wraps what those above have set.
RULES: Sequence[tuple[type[nn.Module], Rule]] = (
    (pyg.MessagePassing, with_shortcuts),
    (pyg.aggr.Aggregation, with_shortcuts),
    (pyg.aggr.Aggregation, reduced_by_kernels),
    (pyg.aggr.VarAggregation, spread_of_messages),
    (pyg.ChebConv, _cheb),
    (pyg.SuperGATConv, _supergat),
    (pyg.GPSConv, _gps),
    (pyg.HGTConv, _hgt),
    (InvertibleModule, _reversible),
    (pyg.aggr.QuantileAggregation, _first_group),
    (pyg.aggr.LSTMAggregation, _first_group),
    *((kind, _refuse_sample) for kind in _IN_ONE_PLACE),
)
