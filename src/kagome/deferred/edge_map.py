"""Edge map: a linear map of edge features, applied to sums by target instead of to one row per edge.

Where it sits: ``rewrite_rules`` asks :func:`answer` for calls on its expressions, ``reduce`` sums them.
TransformerConv and its like map few edge features ``e`` to the width of a row and add them to keys and
values. The map is linear, so it commutes with products and sums over in-edges:

::

    <q_i, k_j + W e>            =  <q_i, k_j> + <W^T q_i, e>               EdgeTerm with a target
    sum of a_ij (v_j + W e)     =  sum of a_ij v_j + W (sum of a_ij e)     EdgeTerm with a weight
    <att, W e>                  =  <W^T att, e>                            EdgeMap

``W e`` would have as many numbers per edge as a row has columns; ``e`` has a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import LazyTensor, Versioned, now
from kagome.deferred.message import Message, message_of
from kagome.kernels.base.csr import Structure
from kagome.placement.placement import Placement, PlacementKind, Placements
from kagome.placement.torch_calls import Args, Func, Kwargs
from kagome.sparse_ops import edge_features, edge_softmax, edge_sum, linear as dense

WIDENS = 2
"""A map is deferred if it has at least this many times as many columns as the features."""


@dataclass(frozen=True, eq=False)
class EdgeMap(Versioned):
    """``x W^T + b`` of edge features, not computed.

    Args:
        x: The features, one row per edge.
        weight: The weight matrix.
        bias: The bias.
        inner: The shape of a mapped row.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    inner: tuple[int, ...]

    def noted(self) -> Sequence[Tensor | None]:
        """Return the three tensors whose versions are noted."""
        return self.parts

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the mapped features."""
        return (self.x.size(0), *self.inner)

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        return [part for part in (self.x, self.weight, self.bias) if part is not None]

    @property
    def heads(self) -> tuple[int, int]:
        """Heads, and columns of each: those of the last two axes, or one head."""
        return (1, self.inner[0]) if len(self.inner) == 1 else (self.inner[0], self.inner[1])

    def compute(self) -> Tensor:
        """Compute one row per edge."""
        self.check()
        return dense.linear(self.x, self.weight, self.bias).view(*self.shape)

    def dots(self, own: Tensor, edges: Structure) -> Tensor:
        """Return ``<own[target], W e + b>`` for each edge and head.

        Shapes:
            own ``[own, H, C]`` -> ``[E, H]``.
        """
        self.check()
        heads, columns = self.heads
        # W^T q_i of each head: [own, H, K], where K is the number of edge features.
        turned = torch.einsum("nhc,hck->nhk", own, self.weight.view(heads, columns, -1))
        out = edge_features.dots(turned, self.x, edges)
        if self.bias is None:
            return out
        # <q_i, b> is one number per row and head, and the same for all in-edges of a row.
        return out + edge_sum.gather((own * self.bias.view(heads, columns)).sum(-1), edges, "target")

    def summed(self, weight: Tensor | None, edges: Structure) -> Tensor:
        """Return the weighted sum of ``W e + b`` over each row's in-edges.

        Shapes:
            weight ``[E]`` or ``[E, H]`` -> ``[own, *inner]``.
        """
        self.check()
        # Weights [E, H]; without weights, one head of ones.
        each = self.x.new_ones(self.x.size(0), 1) if weight is None else weight
        each = each.unsqueeze(1) if each.dim() == 1 else each
        heads = (each.size(1), prod(self.inner) // max(each.size(1), 1))
        out = torch.einsum(
            "nhk,hck->nhc", edge_features.sums(each, self.x, edges), self.weight.view(*heads, -1)
        )
        if self.bias is not None:
            # The bias is counted once per edge, times the weight: sum of a_ij * b.
            out = out + edge_sum.edge_sum(each, edges).unsqueeze(-1) * self.bias.view(heads)
        return out.reshape(edges.own, *self.inner)


@dataclass(frozen=True, eq=False)
class EdgeTerm(Versioned):
    """``b_j + W e``, times rows at the target or times a weight.

    Args:
        message: The rows ``b``, read at each edge's source.
        edge: The mapped edge features.
        target: Own rows that it is multiplied with, read at each edge's target.
        weight: One per edge, or one per edge and head.
    """

    message: Message
    edge: EdgeMap
    target: Tensor | None = None
    weight: Tensor | None = None

    def noted(self) -> Sequence[Tensor | None]:
        """Return the rows of the target and the weight."""
        return (self.target, self.weight)

    def check(self) -> None:
        """Refuse tensors that were written to since: their earlier values are lost."""
        super().check()
        self.message.check()
        self.edge.check()

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the sum."""
        return self.edge.shape

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        more = [part for part in (self.target, self.weight) if part is not None]
        return [*self.message.parts, *self.edge.parts, *more]

    def compute(self) -> Tensor:
        """Compute one row per edge."""
        self.check()
        out = self.message.compute() + self.edge.compute()
        if self.target is not None:
            out = out * edge_sum.gather(self.target, self.message.edges.structure, "target")
        if self.weight is not None:
            weight = now(self.weight)
            out = out * weight.view(*weight.shape, *[1] * (out.dim() - weight.dim()))
        return self.message.edges.pairs(out)


Expressions = (EdgeMap, EdgeTerm)


def expression(value: Any) -> EdgeMap | EdgeTerm | None:
    """Return the expression of this module that a tensor stands for; None for any other tensor."""
    waits = isinstance(value, LazyTensor) and value.value is None and isinstance(value.expr, Expressions)
    return value.expr if waits else None


def answer(placements: Placements, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the result of a call on an edge map or term, or NotImplemented where it needs the values."""
    what = name.strip("_")
    if what in ("view", "reshape") and not kwargs:
        return _viewed(placements, args)
    # Sums and products commute: the edge map or term is put first.
    if what in ("add", "radd", "mul", "rmul") and len(args) == 2 and not kwargs:
        one, two = args if expression(args[1]) is None else (args[1], args[0])
        found = _added(one, two) if what.endswith("add") else _multiplied(placements, one, two)
        return (
            NotImplemented if found is None else placements.put(LazyTensor(found), _pairs(placements, args))
        )
    if what == "sum":
        return _contracted(placements, args, kwargs)
    return NotImplemented


def _pairs(placements: Placements, args: Args) -> Placement:
    """Return the placement of the first operand that has one row per edge."""
    found = [placement for value in args if (placement := placements.get(value)) is not None]
    return next(placement for placement in found if placement.kind is PlacementKind.PAIRS)


def _viewed(placements: Placements, args: Args) -> Any:
    edge = expression(args[0])
    shape: Any = args[1:] if len(args) != 2 or not isinstance(args[1], (tuple, list)) else args[1]
    if not isinstance(edge, EdgeMap) or not shape or not all(isinstance(size, int) for size in shape):
        return NotImplemented
    first, *inner = shape
    columns, given = prod(edge.inner), prod(size for size in inner if size != -1)
    # Decide by width alone, not by the number of edges: all ranks must defer the same calls.
    if inner.count(-1) == 1 and first != -1 and given:
        inner = [columns // given if size == -1 else size for size in inner]
    if first not in (-1, edge.x.size(0)) or -1 in inner or prod(inner) != columns or len(inner) not in (1, 2):
        return NotImplemented
    viewed = replace(edge, inner=tuple(inner))
    return placements.put(LazyTensor(viewed), _pairs(placements, args))


def _added(one: Any, two: Any) -> EdgeTerm | None:
    """Return ``b_j + W e``."""
    edge, message = expression(one), message_of(two)
    if not isinstance(edge, EdgeMap) or message is None:
        return None
    fits = message.one_ended and message.source is not None and tuple(message.shape) == tuple(edge.shape)
    # In feature slices a rank sums some columns over all edges, but has the features of its own edges only.
    if not fits or message.edges.deferral.sliced.on or message.parts[0].dtype != edge.x.dtype:
        return None
    return EdgeTerm(message, edge)


def _multiplied(placements: Placements, one: Any, two: Any) -> EdgeMap | EdgeTerm | None:
    """Return ``a_i * (b_j + W e)``, ``w_e * (b_j + W e)``, or ``att * W e``."""
    term = expression(one)
    if term is not None:
        term.check()
    if isinstance(term, EdgeMap):
        # ``att * W e`` with att [1, H, C]: the factor of each column is multiplied into the rows of W and
        # into b.
        plain = isinstance(two, Tensor) and not isinstance(two, LazyTensor) and placements.get(two) is None
        if not plain or two.dim() > len(term.inner) + 1 or (two.dim() > len(term.inner) and two.size(0) != 1):
            return None
        if two.dtype != term.x.dtype or two.shape[-1:] != term.inner[-1:]:
            return None
        factor = two.reshape(two.shape[-len(term.inner) :]).expand(term.inner).reshape(-1)
        bias = None if term.bias is None else term.bias * factor
        return replace(term, weight=term.weight * factor.unsqueeze(1), bias=bias)
    if term is None or term.target is not None or term.weight is not None:
        return None
    message = message_of(two)
    if message is not None:
        fits = message.one_ended and message.source is None and message.edges is term.message.edges
        if not fits or message.shape != term.shape:
            return None
        # ``q_i * (k_j + W e)``, the scores of TransformerConv before their sum over columns.
        return replace(term, target=message.target, versions=term.versions + message.versions)
    # ``alpha * (v_j + W e)``: one weight per edge, or one per edge and head.
    placement = placements.get(two)
    if placement is None or placement.kind is not PlacementKind.PAIRS or two.dim() != len(term.shape):
        return None
    if two.dtype != term.edge.x.dtype or expression(two) is not None:
        return None
    inner = tuple(two.shape[1:])
    if all(size == 1 for size in inner):
        return replace(term, weight=now(two).reshape(-1))
    if len(inner) == 2 and inner == (term.edge.inner[0], 1):
        return replace(term, weight=now(two).squeeze(-1))
    return None


def _contracted(placements: Placements, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``.sum(-1)``: a number per edge and head."""
    term = expression(args[0])
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if term is None or not isinstance(dim, int) or kwargs.get("dtype") is not None:
        return NotImplemented
    term.check()
    dims = len(term.shape)
    if dim % dims != dims - 1:
        return NotImplemented
    edge = term if isinstance(term, EdgeMap) else term.edge
    heads, columns = edge.heads
    if isinstance(term, EdgeMap):
        # A sum over columns of W e is a product with W's rows summed over the columns of each head.
        weight = edge.weight.view(heads, columns, -1).sum(1)
        out = dense.linear(
            edge.x, weight, None if edge.bias is None else edge.bias.view(heads, columns).sum(1)
        )
    elif term.target is None:
        return NotImplemented
    else:
        # <q_i, k_j> + <W^T q_i, e>: the two scores are computed apart.
        s, own = term.message.edges.structure, term.target.reshape(-1, heads, columns)
        with_halo = term.message.with_halo().reshape(-1, heads, columns)
        out = edge_softmax.dots(own, with_halo, s) + edge.dots(own, s)
    out = out if dims == 3 else out.squeeze(-1)
    return placements.put(out.unsqueeze(-1) if keepdim else out, _pairs(placements, args))
