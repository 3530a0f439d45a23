"""Graphs of several vertex sets where sizes agree by chance, and where a rank owns all or none of a set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import both, grads
from test_vertex_sets import net_of
from torch import Tensor, nn
from torch_geometric.utils import scatter

import kagome
from kagome.comm.channel import Channel
from kagome.errors import ModelError

SIZE = 12
Rows = dict[str, Tensor]


def twins() -> kagome.Graph:
    """Two vertex sets of one size, of which each of two ranks owns as many rows, but other ones."""
    generator = torch.Generator().manual_seed(3)
    along = torch.arange(SIZE, dtype=torch.float64)
    turned = torch.stack([torch.arange(SIZE), (5 * torch.arange(SIZE)) % SIZE])
    drawn = torch.randint(SIZE, (2, 31), generator=generator)
    return kagome.Graph(
        a=kagome.Vertices(SIZE, pos=torch.stack([along, 0 * along], 1)),
        b=kagome.Vertices(SIZE, pos=torch.stack([(along * 5) % SIZE + 0.5, 0 * along], 1)),
        ab=kagome.Edges("a", "b", drawn),
        ba=kagome.Edges("b", "a", drawn.flip(0).contiguous()),
        # Each vertex has one edge: as many own edges as own vertices, on each rank.
        one=kagome.Edges("a", "b", turned),
        two=kagome.Edges("a", "b", turned.flip(0).contiguous()),
    )


class Called(nn.Module):
    """A model of two vertex sets, with the body of a test."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.la, self.lb = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = pyg.HeteroBatchNorm(4, 2)

    def forward(self, a: Tensor, b: Tensor, *edges: Tensor) -> Any:
        return self.body(self, self.la(a), self.lb(b), *edges)


def put(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:, 0] = b[:, 0]
    return a


def rows_of(ids: Tensor, rows: Tensor, base: Tensor) -> Tensor:
    return base.index_add(0, ids[1], rows[ids[0]])


MEETINGS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda m, a, b, *e: a + b,
    "product over rows": lambda m, a, b, *e: a.t() @ b,
    "einsum": lambda m, a, b, *e: torch.einsum("nf,ng->fg", a, b),
    "linear": lambda m, a, b, *e: torch.nn.functional.linear(a.t(), b.t()),
    "dot": lambda m, a, b, *e: torch.dot(a[:, 0], b[:, 0]),
    "write": lambda m, a, b, *e: put(a, b),
    "mask": lambda m, a, b, *e: a[b[:, 0] > 0].sum(0),
    "write by ids of the other": lambda m, a, b, ab, ba, *e: rows_of(ba, b, b),
    "edges of two sets": lambda m, a, b, ab, ba, one, two: a[one[0]] * a[two[0]],
    "written edges of the other": lambda m, a, b, ab, ba, one, two: b.index_add(0, one[1], a[two[0]]),
}


def meeting(channel: Channel, kind: str) -> str:
    """What is said where rows of two sets meet that have as many own rows on each rank."""
    graph, parallel = twins(), kagome.Parallel(partitioner="coordinates")
    with kagome.shard(Called(MEETINGS[kind]), graph, parallel=parallel, log=str) as net:
        assert net.own("a").numel() == net.own("b").numel() == net.own("one").numel()
        assert not torch.equal(net.own("a"), net.own("b"))
        placed = [net.place(torch.ones(SIZE, 4), name) for name in "ab"]
        try:
            net(*placed, *(each.index for each in graph.edges.values()))
        except ModelError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", MEETINGS)
def test_rows_of_two_sets_do_not_meet_by_their_places(ranks: Any, kind: str) -> None:
    for found in ranks(2, meeting, kind):
        assert "rows of one vertex set or edge set" in found
        assert " and " in found


def counted(model: Called, a: Tensor, b: Tensor, *edges: Tensor) -> Rows:
    """Tensors with as many rows as a rank of two owns, made by a plain number, beside rows of vertices."""
    weight = model.la.weight[:1]
    half = SIZE // 2
    kind = torch.arange(b.size(0)) % half
    pooled = b.new_zeros(half, 4).index_add(0, kind, b)
    return {
        "full": (a.new_full((half, 4), 2.0) * weight).sum(0),
        "ones": (b.new_ones(half, 4) * weight).mean(0),
        "pooled": pooled.softmax(0),
        "groups": scatter(b, kind, 0, half, "sum").mean(0),
        "b": b + pooled[kind],
    }


def few(model: Called, a: Tensor, b: Tensor, *edges: Tensor) -> Rows:
    """A table of all rows read by ids, groups without a given number, and types of a concatenation."""
    source, target = edges[0]
    table = torch.ones(b.size(0), 1, dtype=b.dtype)
    whole = torch.ones(1, 1, dtype=b.dtype)
    count = torch.zeros(a.size(0), 1, dtype=b.dtype)
    # A rank that owns the only vertex reads it as its peers do.
    a = a + count.index_add(0, target, table[source]) + count.index_add(0, target, whole[source])
    types = torch.cat([a.new_zeros(a.size(0)).long(), b.new_ones(b.size(0)).long()])
    both = torch.cat([a, b]) * model.la.weight[types] - model.lb.weight[types]
    return {
        # Its statistics of each type are the same on ranks without a vertex of it.
        "a": model.norm(both, types)[: a.size(0)],
        "one": pyg.global_add_pool(b, torch.zeros(b.size(0), dtype=torch.long)),
        "mean": pyg.global_mean_pool(b, torch.zeros(b.size(0), dtype=torch.long)),
    }


def only() -> kagome.Graph:
    """A vertex set with one vertex: one rank owns all of it, the others none."""
    edges = torch.stack([torch.zeros(17).long(), torch.arange(17) % SIZE])
    return kagome.Graph(a=kagome.Vertices(SIZE), b=kagome.Vertices(1), ba=kagome.Edges("b", "a", edges))


def parity(channel: Channel | None, alone: bool) -> dict[str, Tensor]:
    """Outputs and gradients of a body on a graph."""
    torch.manual_seed(5)
    graph, body = (only(), few) if alone else (twins(), counted)
    model = Called(body).double()
    parallel = None if alone else kagome.Parallel(partitioner="coordinates")
    settings = {} if channel is None else {"parallel": parallel}
    generator = torch.Generator().manual_seed(9)
    given = {
        name: torch.randn(each.count, 4, generator=generator, dtype=torch.float64)
        for name, each in graph.vertices.items()
    }
    found: dict[str, Tensor] = {}
    with net_of(channel, model, graph, **settings) as net:
        out = net(
            *(net.place(x, name) for name, x in given.items()), *(e.index for e in graph.edges.values())
        )
        loss = torch.zeros((), dtype=torch.float64)
        for name, rows in out.items():
            if name in given:
                loss = loss + net.mean(rows**2)
            else:
                loss, found[name] = loss + (rows**2).sum(), rows.detach()
        loss.backward()
    kept = {name: each for name, each in model.named_buffers() if each.is_floating_point()}
    return grads(model) | found | kept | {"loss": loss.detach()}


def test_plain_numbers_of_rows_are_the_same_rows_on_all_ranks(ranks: Any) -> None:
    both(ranks, 2, parity, False)


@pytest.mark.parametrize("world", [2, 3])
def test_a_set_of_which_one_rank_owns_all(ranks: Any, world: int) -> None:
    both(ranks, world, parity, True)
