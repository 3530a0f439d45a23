"""Models of knowledge graphs, fraud, regression and the weather over one set of vertices, on 1 to 4 ranks.

Each runs on parts as METIS cuts them, and on parts of which one has most vertices and others none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import WORLDS, F, N, both, grads, graph, net_of, of_first
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.utils import degree, scatter, softmax

from kagome.comm.channel import Channel
from kagome.train import data as source

E, RELATIONS, BATCH, D = 90, 4, 3, 4


def cut(channel: Channel | None, uneven: bool) -> AbstractContextManager[Any]:
    """Parts as METIS cuts them; or nearly all vertices in part 0, three in the last, none between."""
    if channel is None or not uneven:
        return nullcontext()
    owner = torch.zeros(N, dtype=torch.int64)
    owner[[1, 5, 17]] = channel.size - 1
    return patch.object(source, "owners", lambda *_, **__: (owner, None))


class NBFNetConv(pyg.MessagePassing):
    """NBFNet's layer: DistMult messages, PNA aggregation, the boundary condition as a message to itself."""

    def __init__(self) -> None:
        super().__init__(aggr=None, node_dim=-2)
        self.relation_linear = nn.Linear(D, RELATIONS * D)
        self.linear, self.norm = nn.Linear(13 * D, D), nn.LayerNorm(D)

    def forward(
        self, h: Tensor, query: Tensor, boundary: Tensor, edge_index: Tensor, edge_type: Tensor
    ) -> Tensor:
        relation = self.relation_linear(query).view(len(query), RELATIONS, D)
        update = self.propagate(
            edge_index, input=h, relation=relation, boundary=boundary, edge_type=edge_type
        )
        return self.norm(self.linear(torch.cat([h, update], dim=-1))).relu()

    def message(self, input_j: Tensor, relation: Tensor, boundary: Tensor, edge_type: Tensor) -> Tensor:
        message = input_j * relation.index_select(self.node_dim, edge_type)
        return torch.cat([message, boundary], dim=self.node_dim)

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        index = torch.cat([index, torch.arange(dim_size, device=inputs.device)])
        of = {"dim": self.node_dim, "dim_size": dim_size}
        mean, square = (
            scatter(inputs, index, reduce="mean", **of),
            scatter(inputs**2, index, reduce="mean", **of),
        )
        most, least = scatter(inputs, index, reduce="max", **of), scatter(inputs, index, reduce="min", **of)
        std = (square - mean**2).clamp(min=1e-6).sqrt()
        features = torch.cat([each.unsqueeze(-1) for each in (mean, most, least, std)], dim=-1).flatten(-2)
        scale = degree(index, dim_size, dtype=inputs.dtype).unsqueeze(0).unsqueeze(-1).log()
        scale = scale / scale.mean()
        scales = torch.cat([torch.ones_like(scale), scale, 1 / scale.clamp(min=1e-2)], dim=-1)
        return (features.unsqueeze(-1) * scales.unsqueeze(-2)).flatten(-2)


class NBFNet(nn.Module):
    """Bellman-Ford over a knowledge graph: a state a query and vertex, from the query's head on."""

    def __init__(self, ids: bool) -> None:
        super().__init__()
        self.ids = ids
        self.query = nn.Embedding(RELATIONS, D)
        self.layers = nn.ModuleList(NBFNetConv() for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(2 * D, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(
        self, head: Tensor, relation: Tensor, edge_index: Tensor, edge_type: Tensor, num_nodes: int
    ) -> Tensor:
        query = self.query(relation)
        if self.ids:
            boundary = torch.zeros(len(head), num_nodes, D, dtype=query.dtype)
            at = head.unsqueeze(-1).expand_as(query)
            boundary.scatter_add_(1, at.unsqueeze(1), query.unsqueeze(1))
        else:
            boundary = head.unsqueeze(-1) * query.unsqueeze(1)
        h = boundary
        for layer in self.layers:
            h = layer(h, query, boundary, edge_index, edge_type) + h
        node_query = query.unsqueeze(1).expand(-1, num_nodes, -1)
        return self.mlp(torch.cat([h, node_query], dim=-1)).squeeze(-1)


def knowledge(channel: Channel | None, uneven: bool, ids: bool) -> dict[str, Tensor]:
    data = graph(E)
    generator = torch.Generator().manual_seed(7)
    data.edge_type = torch.randint(0, RELATIONS, (E,), generator=generator)
    torch.manual_seed(5)
    model = NBFNet(ids).double()
    with cut(channel, uneven), net_of(channel, model, data) as net:
        for _ in range(2):
            head = torch.randint(0, N, (BATCH,), generator=generator)
            relation = torch.randint(0, RELATIONS, (BATCH,), generator=generator)
            tails = torch.randint(0, N, (BATCH, 6), generator=generator)  # the first of each is true
            given = head if ids else functional.one_hot(head, N).double()
            scores = net(given, relation, data.edge_index, data.edge_type, N)
            # [B, T]: the scores of the queries' tails, whichever ranks own them.
            found = net.read(scores.t(), tails.flatten()).view(BATCH, 6, BATCH)
            found = found.diagonal(dim1=0, dim2=2).t()
            target = torch.zeros_like(found)
            target[:, 0] = 1
            loss = net.mean(functional.binary_cross_entropy_with_logits(found, target, reduction="none"))
            loss.backward()
        rows = net.gather(scores, axis=1)
    return grads(model) | {"loss": loss.detach(), "scores": of_first(channel, rows, (BATCH, N))}


class Fraud(nn.Module):
    """Multi-GNN's layers: messages both ways, edges that are updated, a score of two classes an edge."""

    def __init__(self, kind: str, deg: Tensor) -> None:
        super().__init__()
        self.node, self.edge = nn.Linear(F, 6), nn.Linear(2, 6)

        def conv() -> nn.Module:
            if kind == "gine":
                return pyg.GINEConv(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), edge_dim=6)
            return pyg.PNAConv(
                6,
                6,
                aggregators=["mean", "min", "max", "std"],
                scalers=["identity", "amplification", "attenuation"],
                deg=deg,
                edge_dim=6,
                towers=2,
                divide_input=False,
            )

        self.convs, self.back = (nn.ModuleList(conv() for _ in range(2)) for _ in range(2))
        self.norms = nn.ModuleList(pyg.BatchNorm(6) for _ in range(2))
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(18, 6), nn.ReLU(), nn.Linear(6, 6)) for _ in range(2)
        )
        self.out = nn.Sequential(nn.Linear(18, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        h, e = self.node(x), self.edge(edge_attr)
        for conv, back, norm, update in zip(self.convs, self.back, self.norms, self.updates, strict=True):
            both_ways = conv(h, edge_index, e) + back(h, edge_index.flip(0), e)
            h = (h + norm(both_ways).relu()) / 2
            e = e + update(torch.cat([h[source], h[target], e], dim=-1)) / 2
        # As in Multi-GNN: both ends of each edge side by side.
        ends = h[edge_index.T].reshape(-1, 12).relu()
        return self.out(torch.cat([ends, e], dim=1))


def fraud(channel: Channel | None, uneven: bool, kind: str) -> dict[str, Tensor]:
    data = graph(E)
    data.y = y = (data.edge_attr[:, 0] > 0.8).long()  # of edges
    data.train_mask = torch.arange(E) % 3 > 0
    degrees = torch.bincount(degree(data.edge_index[1], N).long())
    torch.manual_seed(5)
    model = Fraud(kind, degrees).double()
    weight = torch.tensor([1.0, 6.0], dtype=torch.float64)
    with cut(channel, uneven), net_of(channel, model, data) as net:
        seen = net.place(data.train_mask, "edges")
        own = net.place(y, "edges")[seen]
        out = net(data.x, data.edge_index, data.edge_attr)
        # cross_entropy(weight=...) divides by the sum of the weights, as net.mean does.
        each = functional.cross_entropy(out[seen], own, reduction="none")
        loss = net.mean(each, weight=weight[own])
        loss.backward()
        rows = net.gather(out, "edges")
        if channel is None:
            torch.testing.assert_close(loss, functional.cross_entropy(out[seen], own, weight=weight))
    return grads(model) | {"loss": loss.detach(), "out": of_first(channel, rows, (E, 2))}


def regression(channel: Channel | None, uneven: bool, kind: str) -> dict[str, Tensor]:
    data = graph(E)
    torch.manual_seed(5)
    net_class = {"gcn": pyg.GCN, "sage": pyg.GraphSAGE, "gat": pyg.GAT}[kind]
    model = net_class(F, 8, num_layers=2, out_channels=1, norm="batch", jk="cat").double()
    with cut(channel, uneven), net_of(channel, model, data) as net:
        y = net.place(data.y[:, 0])
        out = net(data.x, data.edge_index).squeeze(-1)
        loss = net.mean(functional.huber_loss(out, y, reduction="none"))
        loss.backward()
        rows = net.gather(out)
    return grads(model) | {"loss": loss.detach(), "out": of_first(channel, rows, (N,))}


class GraphTransformer(nn.Module):
    """Attention over edges, as anemoi's layers have it: edge features are added to keys and values."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.own = (nn.Linear(8, 8) for _ in range(4))
        self.edge, self.out = nn.Linear(2, 8), nn.Linear(8, 8)
        self.norm, self.mlp = (
            nn.LayerNorm(8),
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        h = self.norm(x)
        # [.., N, heads, width of a head]
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        e = self.edge(edge_attr).unflatten(-1, (self.heads, -1))
        rows = q.dim() - 3
        keys, values = k.index_select(rows, source) + e, v.index_select(rows, source) + e
        score = (q.index_select(rows, target) * keys).sum(-1) / keys.size(-1) ** 0.5
        share = softmax(score, target, num_nodes=x.size(rows), dim=rows)
        sums = scatter(values * share.unsqueeze(-1), target, dim=rows, dim_size=x.size(rows), reduce="sum")
        x = x + self.out(sums.flatten(-2) + self.own(h))
        return x + self.mlp(x)


class Weather(nn.Module):
    """Encoder, layers of attention over edges, decoder; by default a batch is an axis of its own."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.encoder, self.decoder = nn.Linear(F, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(GraphTransformer() for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        batch = x.size(0)
        if self.flat:
            # anemoi: "batch ensemble grid vars -> (batch ensemble grid) vars", with edges repeated.
            shift = torch.arange(batch).view(-1, 1, 1) * x.size(1)
            edge_index = (edge_index + shift).movedim(0, 1).flatten(1)
            edge_attr = edge_attr.repeat(batch, 1)
            h = self.encoder(x.flatten(0, 1))
        else:
            h = self.encoder(x)
        for layer in self.layers:
            h = layer(h, edge_index, edge_attr)
        return self.decoder(h).view(batch, -1)


def weather(channel: Channel | None, uneven: bool, how: str) -> dict[str, Tensor]:
    """One sample, a batch as an axis of its own, or a batch that is flattened into rows in forward."""
    data = graph(E)
    torch.manual_seed(5)
    model = Weather(flat=how == "flat").double()
    x = torch.randn(1 if how == "one" else BATCH, N, F, dtype=torch.float64)
    with cut(channel, uneven), net_of(channel, model, data) as net:
        y = net.place(x[..., 0] ** 2, axis=1)
        area = net.place(torch.linspace(0.5, 2, N, dtype=torch.float64))
        out = net(x, data.edge_index, data.edge_attr)
        loss = net.mean((out - y) ** 2, weight=area)
        loss.backward()
        rows = net.gather(out, axis=1)
    return grads(model) | {"loss": loss.detach(), "out": of_first(channel, rows, (x.size(0), N))}


@pytest.mark.some(2, each="scenario")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        (knowledge, False),
        (knowledge, True),
        (fraud, "gine"),
        (fraud, "pna"),
        (regression, "gcn"),
        (regression, "gat"),
        (regression, "sage"),
        (weather, "one"),
        (weather, "batch"),
        (weather, "flat"),
    ],
)
def test_shape(ranks: Any, world: int, uneven: bool, scenario: Any, kind: Any) -> None:
    both(ranks, world, scenario, uneven, kind)


def joined(channel: Channel | None, how: str) -> dict[str, Tensor]:
    """Messages of edges, then one of each vertex to itself, in a plain torch layer."""
    data = graph(E)
    torch.manual_seed(5)

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message = nn.Linear(F, F)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            index = torch.cat([target, torch.arange(x.size(0))])
            sent = self.message(x)[source]
            rows = torch.concat([sent, x], axis=0) if how == "axis" else torch.cat([sent, x])
            kept = rows.tanh() * torch.linspace(0.5, 1, F, dtype=x.dtype)
            return torch.zeros_like(x).index_add(0, index, kept)

    model = Joined().double()
    with net_of(channel, model, data) as net:
        out = net(data.x, data.edge_index)
        loss = net.mean(out**2)
        loss.backward()
        rows = net.gather(out)
    return grads(model) | {"loss": loss.detach(), "out": of_first(channel, rows, (N, F))}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["dim", "axis"])
def test_messages_of_edges_and_of_vertices_to_themselves(ranks: Any, world: int, how: str) -> None:
    both(ranks, world, joined, how)
