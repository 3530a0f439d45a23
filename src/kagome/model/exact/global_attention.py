"""Global attention: attention among all vertices, or split into single calls where it drops or pools.

Where it sits: ``handlers`` adds :data:`ATTENTION` to its handlers; ``model.operators.sample_dropout`` runs
:func:`attention` for a pipeline's samples.

::

    q, k, v [.., n, d]    rows attend to all rows       own queries, keys and values of all ranks
    q, k, v [n, .., d]    each row within itself        torch's own kernel, unless it drops
    q [.., m, d]          m queries to all rows         call by call: a softmax, then a sum over ranks
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from kagome.errors import ModelError
from kagome.model.exact import dropout
from kagome.model.exact.scope import Args, Func, Handler, Kwargs, Scope
from kagome.scope.rows import draw_refused
from kagome.user_code.functional import opened


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    drop: Callable[[Tensor, float], Tensor],
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` of torch, with dropout by ``drop(weights, p)``.

    Shapes:
        ``query [..., L, E]``, ``key [..., S, E]``, ``value [..., S, V]`` -> ``[..., L, V]``.

    Cost:
        Keeps the weights ``[..., L, S]`` for backward.
    """
    # Grouped queries: fewer heads of keys than of queries, each of which serves consecutive query heads.
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    if attn_mask is None:
        return drop(scores.softmax(-1), dropout_p) @ value
    nobody = (scores == -math.inf).all(-1, keepdim=True)  # torch returns 0 for a query that sees no key
    weights = scores.masked_fill(nobody, 0.0).softmax(-1).masked_fill(nobody, 0.0)
    return drop(weights, dropout_p) @ value


_NAMES: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _attention(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``F.scaled_dot_product_attention`` among all vertices, or within each of them."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    ends = [given[each] for each in _NAMES[:3]]
    # Along the second last axis, the sequence of torch's attention, rows of vertices attend to each other.
    # Along any other they are a batch, and each attends within itself.
    along = [scope.axes.of(end) == end.dim() - 2 for end in ends]
    if all(along) and all(map(scope.axes.of_each_vertex, ends)):
        return _among_all(scope, func, given)
    # Torch's kernel would draw in the order of rows; and a few queries that attend to rows of vertices need a
    # softmax over all ranks. Both are served call by call, by the handlers of the single calls.
    drops = given.get("dropout_p", 0.0) > 0.0 and (scope.parted or not scope.forward.own_seed())
    if drops or (scope.parted and any(along[1:])):
        return scope.within(partial(attention, **given, drop=functional.dropout))
    return NotImplemented


def _among_all(scope: Scope, func: Func, given: Kwargs) -> Any:
    """Compute attention of every vertex to every vertex.

    Cost:
        The keys and values of all ranks on each rank, once forward and once backward; with dropout, and where
        torch's kernel keeps them, n x N weights a head.
    """
    query, key, value = (given[each] for each in _NAMES[:3])
    drops = given.get("dropout_p", 0.0)
    if not scope.parted:
        # Nothing is sent; a survey notices the call: see ``layer_rules._gps``.
        scope.reads.all_rows_exchange()
        if not drops or scope.forward.own_seed():
            return NotImplemented
    elif drops and scope.forward.own_seed():
        raise draw_refused(
            scope, "attention", "forward seeds torch's generator, which draws in the order of rows"
        )
    elif given.get("attn_mask") is not None or given.get("is_causal", False):
        raise ModelError(
            "attention among all vertices that is the same wherever their rows lie",
            "attention with a mask of all pairs of vertices, or with is_causal",
            where=scope.where(),
            hint="leave the mask out, or let edges say who attends to whom (TransformerConv)",
        )
    else:
        # Keys and values [.., n, d] in one exchange: [n, columns of both], gathered to [N, columns of both].
        flat = [end.movedim(-2, 0).flatten(1) for end in (key, value)]
        both = scope.reads.gather_all(torch.cat(flat, 1)).split([each.size(1) for each in flat], 1)
        key, value = (
            each.unflatten(1, (*end.shape[:-2], end.shape[-1])).movedim(0, -2)
            for each, end in zip(both, (key, value), strict=True)
        )
    given = {**given, "query": query, "key": key, "value": value}
    if drops:
        path, index = scope.forward.call()
        word, ids = (
            dropout.call_key(scope.seed, scope.forward.forward_pass.epoch, path, index),
            scope.ids.row_counters(query),
        )
        # Each key is a column, in the order of the graph.
        drop = lambda weights, p: dropout.dropout(weights, ids, word, p, weights.dim() - 2)  # noqa: E731
        return scope.axes.like(attention(**given, drop=drop), query)
    return scope.axes.like(func(**given), query)


def _heads(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``F.multi_head_attention_forward``, whose softmax over the vertices spans all ranks."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    ends = [asked[each] for each in _NAMES[:3]]
    scope.axes.refuse_lost(*ends)
    # Rows along axis 0, [n, (batch,) d]: every vertex attends to every vertex. Along axis 1, [L, n, d]: a
    # vertex is a sample, and attends within its own sequence of length L.
    axes = {scope.axes.of(end) for end in ends}
    if axes == {0} and all(map(scope.axes.of_each_vertex, ends)):
        # Torch's function runs, and its inner ``scaled_dot_product_attention`` comes to ``_attention``.
        if not scope.parted or not asked["need_weights"]:
            scope.reads.all_rows_exchange()
            return NotImplemented
        # The weights of all pairs are left out, because no part has them.
        out, _ = scope.within(partial(opened(func), **{**asked, "need_weights": False}))
        heads = () if asked["average_attn_weights"] else (asked["num_heads"],)
        whole = scope.axes.length(placement) if (placement := scope.axes.placements.get(ends[0])) else 0
        none = out.new_zeros(()).expand(*[1] * (out.dim() - 2), *heads, ends[0].size(0), whole)
        return out, scope.axes.lost(none, "the attention weights of all pairs of vertices")
    # Torch joins batch and heads to one axis, [n * heads, L, d / heads],
    # after which no axis has a row for each vertex. So the common case is
    # computed here with both apart; rare options stay with torch's function.
    odd = ("bias_k", "bias_v", "static_k", "static_v", "key_padding_mask", "attn_mask")
    if axes != {1} or ends[0].dim() != 3 or any(asked[each] is not None for each in odd):
        return NotImplemented
    return NotImplemented if asked["add_zero_attn"] else scope.within(partial(_of_each_row, asked))


def _of_each_row(asked: Kwargs) -> tuple[Tensor, Tensor | None]:
    """Compute multi-head attention within each sample, with the sample axis kept apart from all others."""
    embed, heads = asked["embed_dim_to_check"], asked["num_heads"]
    weights = [asked[f"{each}_proj_weight"] for each in "qkv"]
    if not asked["use_separate_proj_weight"]:
        weights = asked["in_proj_weight"].split(embed)
    bias = asked["in_proj_bias"]
    biases = [None] * 3 if bias is None else bias.split(embed)
    # [L, n, embed] -> [n, heads, L, embed / heads]
    query, key, value = (
        functional.linear(asked[each], weight, shift)
        .unflatten(-1, (heads, embed // heads))
        .permute(1, 2, 0, 3)
        for each, weight, shift in zip(_NAMES, weights, biases, strict=False)
    )
    p, shares = asked["dropout_p"] if asked["training"] else 0.0, None
    if asked["need_weights"]:
        shares = (query @ key.transpose(-2, -1) / math.sqrt(embed // heads)).softmax(-1)
        shares = functional.dropout(shares, p) if p > 0 else shares
        found = shares @ value
        shares = shares.mean(1) if asked["average_attn_weights"] else shares
    else:
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=p)
    out = found.permute(2, 0, 1, 3).flatten(2)
    return functional.linear(out, asked["out_proj_weight"], asked["out_proj_bias"]), shares


ATTENTION: Final[Mapping[str, Handler]] = {
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _heads,
}
