"""Attention as people write it: among all vertices, within each vertex, from and to a few tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from convolutions import sample_graph
from kagome import check
from kagome.errors import ModelError
from kagome.model.exact.global_attention import attention
from parity import assert_equal, one_rank, random_owner, split, whole

WIDE = 8
Built = Callable[[], nn.Module]
Rows = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""Of the layer, rows, tokens and edges."""


def heads(**settings: object) -> Built:
    return lambda: nn.MultiheadAttention(WIDE, 2, **settings)


def layer(**settings: object) -> Built:
    return lambda: nn.TransformerEncoderLayer(WIDE, 2, 16, **settings)


def stack() -> nn.Module:
    return nn.TransformerEncoder(layer(batch_first=True)(), 2)


def hops(h: Tensor, e: Tensor) -> Tensor:
    """A vertex's rows of 0, 1 and 2 steps, as NAGphormer takes them. Shapes: ``[n, d]`` -> ``[n, 3, d]``."""
    out = [h]
    for _ in range(2):
        out.append(h.new_zeros(h.shape).index_add_(0, e[1], out[-1][e[0]]) / 4)
    return torch.stack(out, 1)


def by_heads(h: Tensor) -> Tensor:
    return h.view(h.size(0), 2, WIDE // 2).transpose(0, 1)


class OfHops(nn.Module):
    """Attention over a vertex's hops by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDE, WIDE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        n, count, wide = x.shape
        q, k, v = (lin(x).view(n, count, 2, wide // 2).transpose(1, 2) for lin in (self.q, self.k, self.v))
        shares = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.3, self.training)
        return (shares @ v).transpose(1, 2).reshape(n, count, wide)


ALL: dict[str, tuple[Built, Rows]] = {
    "batch first": (heads(batch_first=True), lambda m, h, t, e: m(h[None], h[None], h[None])[0][0]),
    "one sequence": (heads(), lambda m, h, t, e: m(*[h.unsqueeze(1)] * 3)[0].squeeze(1)),
    "no batch": (heads(dropout=0.3), lambda m, h, t, e: m(h, h, h)[0]),
    "dropout": (heads(dropout=0.3, batch_first=True), lambda m, h, t, e: m(*[h[None]] * 3)[0][0]),
    "other keys": (
        heads(kdim=6, vdim=6, batch_first=True),
        lambda m, h, t, e: m(h[None], h[None, :, :6], h[None, :, :6])[0][0],
    ),
    "encoder layer": (layer(batch_first=True), lambda m, h, t, e: m(h.unsqueeze(0)).squeeze(0)),
    "encoder layer, sequence first": (layer(), lambda m, h, t, e: m(h.unsqueeze(1)).squeeze(1)),
    "encoder layer, no batch": (layer(norm_first=True, activation="gelu"), lambda m, h, t, e: m(h)),
    "encoder": (stack, lambda m, h, t, e: m(h.unsqueeze(0)).squeeze(0)),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(WIDE, 2, 16, batch_first=True),
        lambda m, h, t, e: m(h[None], 2 * h[None])[0],
    ),
    "by function": (nn.Identity, lambda m, h, t, e: F.scaled_dot_product_attention(h, h, h)),
    "by function, heads, dropout": (
        nn.Identity,
        lambda m, h, t, e: (
            F.scaled_dot_product_attention(*[by_heads(h)] * 3, dropout_p=0.2).transpose(0, 1).flatten(1)
        ),
    ),
    "GPS": (
        lambda: pyg.GPSConv(WIDE, pyg.SAGEConv(WIDE, WIDE), heads=2, attn_kwargs={"dropout": 0.3}),
        lambda m, h, t, e: m(h, e),
    ),
}

EACH: dict[str, tuple[Built, Rows]] = {
    "encoder layer of hops": (layer(batch_first=True), lambda m, h, t, e: m(hops(h, e)).mean(1)),
    "encoder layer of hops, first": (
        layer(),
        lambda m, h, t, e: m(hops(h, e).transpose(0, 1)).mean(0),
    ),
    "encoder of hops": (stack, lambda m, h, t, e: m(hops(h, e))[:, 0]),
    "heads over hops": (
        heads(dropout=0.3, batch_first=True),
        lambda m, h, t, e: m(*[hops(h, e)] * 3)[0][:, 0],
    ),
    "weights over hops": (
        heads(dropout=0.3, batch_first=True),
        lambda m, h, t, e: h * m(*[hops(h, e)] * 3, average_attn_weights=False)[1].sum((1, 2, 3))[:, None],
    ),
    "by hand": (OfHops, lambda m, h, t, e: m(hops(h, e)).sum(1)),
    "tokens ask": (
        heads(dropout=0.3, batch_first=True),
        lambda m, h, t, e: h + m(t[None], h[None], h[None])[0][0].mean(0),
    ),
    "tokens ask, no weights": (
        heads(dropout=0.3, batch_first=True),
        lambda m, h, t, e: h + m(t[None], h[None], h[None], need_weights=False)[0][0].mean(0),
    ),
    "tokens are asked": (
        heads(dropout=0.3, batch_first=True),
        lambda m, h, t, e: m(h[None], t[None], t[None], need_weights=False)[0][0],
    ),
    "shares of all edges": (
        nn.Identity,
        lambda m, h, t, e: h.new_zeros(h.shape).index_add_(
            0, e[1], h[e[0]] * (h[e[0]] * h[e[1]]).sum(1).softmax(0)[:, None]
        ),
    ),
}


class Attending(nn.Module):
    def __init__(self, build: Built, rows: Rows) -> None:
        super().__init__()
        self.first, self.last, self.rows = nn.Linear(6, WIDE), pyg.SAGEConv(WIDE, 3), rows
        self.layer, self.tokens = build(), nn.Parameter(torch.rand(4, WIDE))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.rows(self.layer, self.first(x), self.tokens, edge_index)
        return self.last(h, edge_index)


@pytest.mark.some(14)
@pytest.mark.parametrize("name", [*ALL, *EACH])
def test_attention_is_plain_pyg_s_and_drops_the_same_on_any_ranks(name):
    torch.manual_seed(0)
    found = check(Attending(*{**ALL, **EACH}[name]), sample_graph(1))
    assert found.first is None, found.text()


REFUSED: dict[str, tuple[Built, Rows, str]] = {
    "weights of all pairs": (
        heads(batch_first=True),
        lambda m, h, t, e: m(*[h[None]] * 3)[1][0] @ h,
        "the attention weights of all pairs of vertices",
    ),
    "causal": (
        nn.Identity,
        lambda m, h, t, e: F.scaled_dot_product_attention(h, h, h, is_causal=True),
        "or with is_causal",
    ),
    "some keys": (
        nn.Identity,
        lambda m, h, t, e: F.scaled_dot_product_attention(h, h[:9], h[:9]),
        "rows that went through matmul",
    ),
    "by product": (
        nn.Identity,
        lambda m, h, t, e: (h @ h.t()).softmax(-1) @ h,
        r"(?s)rows that went through matmul.*F\.scaled_dot_product_attention",
    ),
    "all edges": (
        nn.Identity,
        lambda m, h, t, e: h.new_zeros(h.shape).index_add_(
            0, e[1], F.scaled_dot_product_attention(h[e[0]], h[e[0]], h[e[0]])
        ),
        "rows that went through matmul",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_part_has_is_refused_by_name(name):
    build, rows, words = REFUSED[name]
    with pytest.raises(ModelError, match=words):
        check(Attending(build, rows), sample_graph(1))


class Encoded(Attending):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(layer(batch_first=True, dropout=dropout), ALL["encoder layer"][1])


class Dry(Encoded):
    def __init__(self) -> None:
        super().__init__(0.0)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_which_one_has_no_vertex_attend_to_all(ranks, world):
    data = sample_graph(1)
    owner = random_owner(data.num_nodes, world)
    assert_equal(split(ranks, world, Dry, data, owner), whole(Dry, data))
    owner = random_owner(data.num_nodes, world - 1)
    found = split(ranks, world, Encoded, data, owner, epochs=2)
    assert_equal(found, one_rank(Encoded, data, epochs=2))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_who_may_attend_to_nobody_gets_0_as_torch_gives_it(kind: str) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[:, 1] = False
    if kind == "float":
        mask = torch.zeros(2, 4, 4, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    found = attention(*given, mask, drop=lambda weights, p: weights)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*given, mask))
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(found.sum(), given))
