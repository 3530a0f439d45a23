"""Reduce: reductions of messages, deferred or computed, over each row's in-edges.

Where it sits: ``deferred.deferral`` calls it for an aggregation or a softmax by the graph's targets. The
form of the message decides which of ``sparse_ops.edge_sum`` and ``sparse_ops.edge_softmax`` computes it.
Constant sums are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kagome.deferred import sliced_attention, sliced_reduce
from kagome.deferred.edge_map import EdgeTerm
from kagome.deferred.lazy_tensor import LazyTensor, now
from kagome.deferred.message import EdgeSet, Linear, Message, Shared, SoftmaxShare, flat
from kagome.kernels.base.address import address
from kagome.sparse_ops import edge_softmax, edge_sum, linear as dense
from kagome.sparse_ops.sparse_features import SparseFeatures, is_sparse, sparse_of

Reduce = Literal["sum", "mean", "max", "min"]
NAMES: dict[str, Reduce] = {
    "sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min", "amin": "min",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Total:
    """A sum or mean of messages over in-edges, not computed: a narrowing linear map may come first."""

    message: Message
    how: Reduce

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the sum: one row for each own vertex."""
        return (self.message.edges.structure.own, *self.message.trailing)

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        return self.message.parts

    def compute(self) -> Tensor:
        """Compute the sum, including the exchange of rows that it needs."""
        return self.message.edges.rows(now(_linear_sum(self.message, self.how)))

    def cached(self) -> Tensor | SparseFeatures | None:
        """Return the sum, for a product with a weight, if it is constant across forward passes; else None."""
        source, deferral = self.message.source, self.message.edges.deferral
        assert source is not None
        self.message.check()
        if isinstance(source.rows, LazyTensor) or not (
            deferral.constants.is_constant(source.rows)
            and deferral.constants.is_constant(self.message.weight)
        ):
            return None
        return _cached_sum(self.message, source.rows, self.how, multiplied=True)


def settled(value: Any) -> Any:
    """Compute a deferred sum as far as feature slices, if it is reduced in slices."""
    if not isinstance(value, LazyTensor) or value.value is not None or not isinstance(value.expr, Total):
        return value
    # With a halo exchange a sum stays deferred, since a linear map may still follow. In slices the next call
    # may be a sum or multiple, which keeps slices as they are.
    if sliced_reduce.edge_layout_for(value.expr.message) is None:
        return value
    with torch._C.DisableTorchFunction():  # this is not the user's computation
        found = _linear_sum(value.expr.message, value.expr.how)
    inside = sliced_reduce.in_slices(found)
    if inside is None:
        value.keep(value.expr.message.edges.rows(now(found)))
    else:
        value.expr = inside
    return value


def reduced(value: Tensor, edges: EdgeSet, how: Reduce) -> Tensor:
    """Reduce one row per edge, lazy or not, over each row's in-edges; a row without in-edges gives zeros.

    Shapes:
        ``[E, ...]`` -> ``[n, ...]``.
    """
    expr = value.expr if isinstance(value, LazyTensor) and value.value is None else None
    s = edges.structure
    if isinstance(expr, Shared) and how == "sum" and expr.message.one_ended and len(expr.shape) == 2:
        # Softmax aggregation (GENConv): logits and values are functions of the source's row alone.
        edge_layout = sliced_reduce.edge_layout_for(expr.message)
        if edge_layout is not None:
            return sliced_reduce.column_softmax(expr.share.logits, expr.message, edge_layout)
        z, m = expr.share.logits.with_halo(), expr.message.with_halo()
        return edges.rows(edge_softmax.column_softmax(z, m, s))
    if isinstance(expr, EdgeTerm) and expr.target is None and how in ("sum", "mean"):
        return _with_edges(expr, how)
    if isinstance(expr, Message) and expr.source is not None and expr.form == "sum":
        if how in ("sum", "mean"):
            return _total(expr, how)
        if expr.weight is None:
            best = _extreme(expr, 1 if how == "max" else -1)
            # max of (a_i + b_j) = a_i + max of b_j; a row without in-edges stays 0.
            if expr.target is not None:
                some = _column(s.degree > 0, best)
                best = torch.where(some, best + expr.target, best)
            return edges.rows(best)
    # All other forms are computed, one row per edge, and then reduced by kernels.
    values = now(value)
    if how in ("max", "min"):
        best = edge_sum.edge_extreme(flat(values), s, 1 if how == "max" else -1)
        return edges.rows(best.view(s.own, *values.shape[1:]))
    out = edge_sum.edge_sum(values, s)
    return edges.rows(out if how == "sum" else out / _column(s.degree.clamp(min=1), out))


def _with_edges(term: EdgeTerm, how: Reduce) -> Tensor:
    """Return the sum or mean of ``w_e * (b_j + W e)``: rows and edge features are summed separately."""
    term.check()
    edges = term.message.edges
    rows = now(_linear_sum(replace(term.message, weight=term.weight), how))
    features = term.edge.summed(term.weight, edges.structure)
    if how == "mean":
        features = features / _column(edges.structure.degree.clamp(min=1), features)
    return edges.rows(rows + features)


def _extreme(message: Message, sign: int) -> Tensor:
    edge_layout = sliced_reduce.edge_layout_for(message)
    if edge_layout is not None:
        return now(sliced_reduce.extreme(message, sign, edge_layout))
    s = message.edges.structure
    return edge_sum.neighbor_extreme(flat(message.with_halo()), s, sign).view(s.own, *message.trailing)


def _total(message: Message, how: Reduce) -> Tensor:
    message.check()
    edges, target = message.edges, message.target
    alone = replace(message, target=None)
    if target is None:
        assert message.source is not None
        rows = message.source.rows
        # A linear map that may follow takes rows of two axes, so only their sum is worth deferring. A
        # ``Linear`` has already chosen its order: see ``_linear_sum``.
        if rows.dim() == 2 and not isinstance(rows, LazyTensor):
            return edges.rows(LazyTensor(Total(alone, how)))
        return edges.rows(_linear_sum(alone, how))
    # The sum of (a_i + b_j) is degree_i * a_i + the sum of b_j. For the mean, a_i counts once, or not at all
    # in a row without in-edges.
    degree = edges.structure.degree
    degree = degree if how == "sum" else degree.clamp(max=1)
    return edges.rows(now(_linear_sum(alone, how)) + target * _column(degree, target).to(target.dtype))


def _linear_sum(message: Message, how: Reduce) -> Tensor:
    """Return the sum or mean of a source's rows, reusing what was computed before.

    Where columns are reduced separately, the result stays in feature slices.
    """
    source, deferral = message.source, message.edges.deferral
    assert source is not None
    message.check()
    rows = source.rows
    if isinstance(rows, LazyTensor) and rows.value is None and isinstance(rows.expr, Linear):
        linear: Linear = rows.expr
        linear.check()
        # x has fewer columns than x W^T, or its sum is constant: sum first, map afterwards.
        narrow = linear.weight.size(1) < linear.weight.size(0)
        if narrow or (
            deferral.constants.is_constant(linear.x) and deferral.constants.is_constant(message.weight)
        ):
            first = Total(replace(message, source=replace(source, rows=linear.x), versions=()), how)
            cached = first.cached()
            return dense.linear(
                now(_linear_sum(first.message, how)) if cached is None else cached, linear.weight
            )
    rows = rows if sliced_reduce.in_slices(rows) is not None else now(rows)
    if not (deferral.constants.is_constant(rows) and deferral.constants.is_constant(message.weight)):
        return _sum(message, rows, how)
    found = _cached_sum(message, rows, how, multiplied=False)
    assert isinstance(found, Tensor)
    return found


def _cached_sum(message: Message, rows: Tensor, how: Reduce, *, multiplied: bool) -> Tensor | SparseFeatures:
    """Return a sum of constant rows, computed once. For a product with a weight it may be sparse.

    All ranks call this in the same order, and each exchanges rows the first time. Which form a rank caches is
    local, since it can produce both forms without another exchange.
    """
    deferral = message.edges.deferral
    # The address and shape of rows and weight identify them: constants are kept, so no address is used twice.
    key = ("sum", how, message.edges.number, _place(rows), _place(message.weight))
    found: Tensor | SparseFeatures | None = deferral.constants.cached(key)
    if found is None:
        with deferral.constants.once():
            found = deferral.constants.cache(key, _first_sum(message, rows, how, multiplied=multiplied))
    if isinstance(found, Tensor):
        # The dense sum may be sparse enough for a product. ``as_sparse`` caches its answer.
        return deferral.as_sparse(found) if multiplied else found
    if multiplied:
        return found
    dense_sum: Tensor | None = deferral.constants.cached(("dense", key))
    return deferral.constants.cache(("dense", key), found.to_dense()) if dense_sum is None else dense_sum


def _first_sum(message: Message, rows: Tensor, how: Reduce, *, multiplied: bool) -> Tensor | SparseFeatures:
    """Compute the sum of constant rows, with the exchange that it needs."""
    source, weight, edges = message.source, message.weight, message.edges
    assert source is not None
    # The sparse form is of use to a product alone. In slices a rank has some columns only, and gathers dense
    # rows afterwards.
    if not multiplied or sliced_reduce.edge_layout_for(message) is not None or not is_sparse(rows):
        return now(_sum(message, rows, how))
    if not source.has_halo and edges.deferral.ranks.size > 1:
        with_halo = edges.deferral.reads.held(rows, edges.placement)
        if with_halo is None:
            halo = (
                edges.halo_exchange.halo_work(rows, edges.deferral.forward.forward_pass, source.site)
                .start_gather(rows)
                .wait()
            )
            with_halo = torch.cat([rows, halo])
        rows = with_halo
    scale = edges.structure.degree.clamp(min=1).to(rows.dtype).reciprocal() if how == "mean" else None
    sparse = sparse_of(rows, edges.structure, weight, scale)
    if sparse is not None:
        return sparse
    # The rows are not sparse after all. Their halo is there, so the sum sends nothing more.
    known = replace(message, source=replace(source, rows=rows, has_halo=True), versions=())
    return now(_sum(known, rows, how))


def _place(tensor: Tensor | None) -> Any:
    return None if tensor is None else (address(tensor), tuple(tensor.shape))


def _sum(message: Message, rows: Tensor, how: Reduce) -> Tensor:
    edges, s, weight = message.edges, message.edges.structure, message.weight
    assert message.source is not None
    edge_layout = sliced_reduce.edge_layout_for(message)
    if edge_layout is not None:
        return sliced_reduce.summed(message, rows, how, edge_layout)
    rows = now(rows)
    share = None if weight is None else sliced_attention.share_of(weight)
    if share is not None and share.edge_layout is None:
        complete = message.source.has_halo or edges.deferral.ranks.size == 1
        out = share.summed(rows) if complete and how == "sum" else None
        if out is not None:
            return out
        # Attention that only this sum reads is computed in the order of ``walked``, over a structure of that
        # order.
        weight, s = sliced_attention.flattened(share.walked(), rows), s.walked
    elif weight is not None:
        weight = sliced_attention.computed(weight, rows)
    trailing = rows.shape[1:]
    headed = weight is not None and weight.dim() == 2
    # [.., H, C] for weights by head, else [.., F]. An empty tensor cannot infer an axis of size -1.
    shaped = rows.reshape(rows.size(0), trailing[0], -1) if headed and rows.numel() else rows
    shaped = shaped if headed else flat(rows)
    scale = s.degree.clamp(min=1).to(rows.dtype).reciprocal() if how == "mean" else None
    factor = edges.factors(weight)
    if factor is not None:
        # w_ij = r_i * r_j: r_j multiplies the rows that are read and r_i the result. See [Note: root] in
        # ``factored_weights``.
        weight, root = None, factor[: s.own]
        scale = root if scale is None else root * scale
    if weight is not None:
        s = s.with_edges()
    halo_work = None
    # Rows that this layer has read before are used as they are. Others are exchanged while own rows are
    # summed.
    if not message.source.has_halo and edges.deferral.ranks.size > 1:
        with_halo = edges.deferral.reads.held(rows, edges.placement)
        if with_halo is None:
            exchange, summed = edges.halo_exchange, edges.deferral.summed
            sums = None if summed is None else summed.of(edges, message.weight)
            if sums is not None:
                exchange, s, weight, factor = sums.exchange, sums.edges, sums.weight, sums.factor
            halo_work = exchange.halo_work(rows, edges.deferral.forward.forward_pass, message.source.site)
        else:
            shaped = with_halo.reshape(with_halo.size(0), *shaped.shape[1:])
    out = edge_sum.neighbor_sum(
        shaped.contiguous(),
        s,
        weight=weight,
        scale=scale,
        factor=factor,
        halo_work=halo_work,
        forward_pass=edges.deferral.forward.forward_pass,
    )
    return out.reshape(s.own, *trailing)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def softmax(value: Tensor, edges: EdgeSet) -> Tensor:
    """Return the softmax over each row's in-edges, lazy or not.

    Shapes:
        ``[E, ...]`` -> the same shape.
    """
    expr = value.expr if isinstance(value, LazyTensor) and value.value is None else None
    s = edges.structure
    if isinstance(expr, Message) and expr.target is not None and expr.source is not None:
        joint = expr.form == "leaky" or (expr.form == "sum" and expr.weight is None)
        if joint and expr.att is None:
            # With slope 1 leaky_relu is the identity, so one kernel serves a_i + b_j as well.
            slope = expr.slope if expr.form == "leaky" else 1.0
            edge_layout = sliced_reduce.edge_layout_for(expr)
            if edge_layout is not None:
                return sliced_attention.defer(expr, slope, edge_layout)
            # Defer, so that a sum need not store the weights, or can read them in walking order.
            return sliced_attention.defer(expr, slope, None, sliced_attention.ends(expr))
    if isinstance(expr, Message) and expr.one_ended and expr.source is not None and len(expr.shape) == 2:
        return edges.pairs(LazyTensor(SoftmaxShare(expr)))
    logits = now(value)
    out = edge_softmax.edge_softmax(flat(logits), s)
    return edges.pairs(out.view(logits.shape))
