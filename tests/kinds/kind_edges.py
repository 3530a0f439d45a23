"""Kind 2: tables of the edges, and edges told apart by their place in the list."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv

from cases import Case, with_targets
from edge_models import EDGES, FAN_IN, ONE_RANK, ORDERS, TABLES, D, P, graph, summed, table


def square() -> Data:
    """A graph with as many edges as vertices: a size does not tell which of them an attribute is of."""
    draw = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    return Data(
        x=drawn(EDGES, FAN_IN) * 2 - 1,
        edge_index=torch.randint(EDGES, (2, EDGES), generator=draw),
        edge_weight=drawn(EDGES) + 0.5,
        edge_attr=drawn(EDGES, D) - 0.5,
        edge_kind=torch.randint(3, (EDGES,), generator=draw),
        node_kind=torch.randint(3, (EDGES,), generator=draw),
        e_id=torch.randperm(EDGES, generator=draw),
    )


class Square(nn.Module):
    """Vertices and edges told apart by attributes, none of which has a size that tells whose it is."""

    def __init__(self, function: Callable[..., Tensor], **held: object) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)
        self.first, self.last = nn.Linear(FAN_IN, 8), GraphConv(8, 4)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor,
        edge_attr: Tensor,
        edge_kind: Tensor,
        node_kind: Tensor,
        e_id: Tensor,
    ) -> Tensor:
        given = {"weight": edge_weight, "attr": edge_attr, "edge_kind": edge_kind, "node_kind": node_kind}
        given["e_id"] = e_id
        x = self.function(self, self.first(x), edge_index, given)
        return self.last(x.tanh(), edge_index, edge_weight)


def _by_hand(how: Callable[..., Tensor], **held: Callable[[], object]) -> Callable[[], nn.Module]:
    return lambda: Square(how, **{name: made() for name, made in held.items()})


SQUARE: dict[str, Callable[[], nn.Module]] = {
    "as many: weights of edges": _by_hand(lambda m, x, e, d: summed(x, e, d["weight"])),
    "as many: attributes of edges": _by_hand(
        lambda m, x, e, d: summed(x, e, m.map(d["attr"])), map=lambda: nn.Linear(D, 8)
    ),
    "as many: kinds of edges": _by_hand(
        lambda m, x, e, d: summed(x, e, m.of(d["edge_kind"])), of=lambda: nn.Embedding(3, 8)
    ),
    "as many: kinds of vertices": _by_hand(
        lambda m, x, e, d: x * m.of(d["node_kind"]), of=lambda: nn.Embedding(3, 8)
    ),
    "as many: vertices of a kind": _by_hand(
        lambda m, x, e, d: torch.where(d["node_kind"][:, None] == 1, m.a(x), x), a=lambda: nn.Linear(8, 8)
    ),
    "as many: a table by an edge's id": _by_hand(
        lambda m, x, e, d: summed(x, e, m.w[d["e_id"]]), w=lambda: P(table(EDGES))
    ),
    "as many: a learned weight an edge": _by_hand(
        lambda m, x, e, d: summed(x, e, m.w), w=lambda: P(table(EDGES))
    ),
    "as many: a learned row an edge": _by_hand(
        lambda m, x, e, d: summed(x, e, m.w), w=lambda: P(table(EDGES, 8))
    ),
    "as many: a learned weight a vertex": _by_hand(
        lambda m, x, e, d: x * m.w.view(-1, 1), w=lambda: P(table(EDGES))
    ),
    "as many: a learned row a vertex": _by_hand(lambda m, x, e, d: x + m.w, w=lambda: P(table(EDGES, 8))),
    "as many: an embedding of vertices": _by_hand(
        lambda m, x, e, d: x + m.of.weight, of=lambda: nn.Embedding(EDGES, 8)
    ),
    "as many: the first edges": _by_hand(lambda m, x, e, d: summed(x, e[:, :50], d["weight"][:50])),
    "as many: the first vertices": _by_hand(
        lambda m, x, e, d: torch.cat([m.a(x[:50]), x[50:]]), a=lambda: nn.Linear(8, 8)
    ),
}
"""Models of a graph with as many edges as vertices."""


def _data(order: str) -> Data:
    return with_targets(graph(order))


_TURN = [order for order in ORDERS if order != "by target"]
CASES = {
    **{
        name: Case(build, partial(_data, _TURN[place % len(_TURN)]))
        for place, (name, build) in enumerate([*TABLES.items(), *ONE_RANK.items()])
    },
    **{name: Case(build, lambda: with_targets(square())) for name, build in SQUARE.items()},
}
