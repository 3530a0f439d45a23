"""HGT: PyG's heterogeneous graph transformer, computed edge type by edge type.

Where it sits: a layer rule of ``layer_rules``. PyG joins the edges of all types to one list, with ids counted
over the rows of all types. On a part such ids have no meaning, so the same sums are taken type by type::

    a_e = <q_i, W_t k_j> p_t / sqrt(D)       for the edges e = (j, i) of type t
    out_i = sum over t, e of softmax(a)_e W'_t v_j        one softmax over the in-edges of all types

Source: Hu et al., Heterogeneous Graph Transformer, equations 3 to 5; PyG's ``HGTConv``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from kagome.kernels.base.ordered_sums import add_at

EPSILON: Final = 1e-16
"""What PyG's softmax adds to its denominator."""

EdgeType = tuple[str, str, str]


def type_by_type(
    layer: Any, rows: Mapping[str, Tensor], edges: Mapping[EdgeType, Tensor]
) -> dict[str, Tensor | None]:
    """Return what an ``HGTConv`` returns.

    Args:
        layer: The layer.
        rows: The rows of each vertex type.
        edges: The edges of each edge type.

    Cost:
        A message of the layer's width for each edge, as PyG's own.
    """
    # [n, 3 * heads * D] of each type: its keys, queries and values side by side, as PyG's kqv_lin gives them.
    parts = {kind: torch.tensor_split(each, 3, dim=1) for kind, each in layer.kqv_lin(rows).items()}
    shape = layer.heads, layer.out_channels // layer.heads
    key, query, value = (
        {kind: each[place].reshape(each[place].size(0), *shape) for kind, each in parts.items()}
        for place in range(3)
    )
    scores: dict[str, list[tuple[EdgeType, Tensor]]] = {}
    for kind, index in edges.items():
        # The relation's map is applied to rows, of which there are fewer than edges; halo rows are mapped by
        # their owners.
        mapped = _mapped(layer, layer.k_rel, kind, key[kind[0]])[index[0]]
        score = (query[kind[2]][index[1]] * mapped).sum(dim=-1) * layer.p_rel["__".join(kind)]
        scores.setdefault(kind[2], []).append((kind, score / math.sqrt(mapped.size(-1))))
    out: dict[str, Tensor | None] = {kind: None for kind in rows if kind in layer.dst_node_types}
    for written, found in scores.items():
        out[written] = _weighted(layer, query[written], value, edges, found)
    return _with_skips(layer, rows, out)


def _mapped(layer: Any, linear: Any, kind: EdgeType, rows: Tensor) -> Tensor:
    """Return rows times the weight of an edge type, by head: ``[n, H, D]``."""
    # PyG keeps the weights of all heads and types in one tensor: head h of type t is entry h * types + t.
    types, at = len(layer.edge_types), layer.edge_types_map[kind]
    weight = torch.stack([linear.weight[head * types + at] for head in range(layer.heads)])
    return torch.stack([rows[:, head] @ weight[head] for head in range(layer.heads)], dim=1)


def _weighted(
    layer: Any,
    query: Tensor,
    value: Mapping[str, Tensor],
    edges: Mapping[EdgeType, Tensor],
    scores: list[tuple[EdgeType, Tensor]],
) -> Tensor:
    """Return the sum of messages into one vertex type, weighted by a softmax over all its in-edges."""
    # The largest score of each row over all types first: exp of a difference from it cannot overflow. It has
    # no gradient, since the softmax does not depend on it.
    # Under autocast rows are in bf16, and scores and what they weigh in float32, as in PyG.
    weighed = scores[0][1].dtype
    most = torch.full_like(query[..., 0], -torch.inf, dtype=weighed)
    for kind, score in scores:
        ends = edges[kind][1].view(-1, 1).expand(-1, layer.heads)
        most = most.scatter_reduce(0, ends, score.detach(), "amax", include_self=True)
    # [n, H] sums of shares and [n, H, D] of messages, over the types one after the other.
    total, out = (torch.zeros_like(each, dtype=weighed) for each in (query[..., 0], query))
    for kind, score in scores:
        ends = edges[kind][1]
        share = (score - most.detach()[ends]).exp()
        total = add_at(total.clone(), ends, share)
        message = _mapped(layer, layer.v_rel, kind, value[kind[0]])[edges[kind][0]]
        out = add_at(out.clone(), ends, message * share.unsqueeze(-1))
    return (out / (total + EPSILON).unsqueeze(-1)).flatten(1)


def _with_skips(
    layer: Any, rows: Mapping[str, Tensor], out: dict[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Apply the layer's last maps and its skip connections."""
    last = layer.out_lin(
        {kind: None if each is None else functional.gelu(each) for kind, each in out.items()}
    )
    for kind in out:
        each = last[kind]
        if each is not None and each.size(-1) == rows[kind].size(-1):
            share = layer.skip[kind].sigmoid()
            each = share * each + (1 - share) * rows[kind]
        out[kind] = each
    return out
