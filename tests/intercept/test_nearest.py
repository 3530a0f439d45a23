"""Edges of the nearest rows, found inside forward: run on one rank, refused by name where rows lie apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

import kagome
from edge_models import NODES, Call, P, graph, table
from kagome import Report, Train, Trainer
from kagome.comm.channel import Channel
from kagome.errors import KagomeError
from outcomes import outcome
from parity import assert_equal, random_owner, whole

K = 3


def _edges(near: Tensor, x: Tensor) -> Tensor:
    targets = torch.arange(x.size(0)).view(-1, 1).expand(-1, near.size(1))
    return torch.stack([near.reshape(-1), targets.reshape(-1)])


def _by_distance(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    return m.conv(x, _edges(torch.cdist(x, x).topk(K, largest=False).indices, x))


def _detached(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    with torch.no_grad():
        near = (-torch.cdist(x, x)).topk(K).indices
    return m.conv(x, _edges(near, x))


def _repeated(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    near = torch.cdist(x, x).topk(K, largest=False).indices
    return m.conv(x, torch.stack([near.flatten(), torch.arange(x.size(0)).repeat_interleave(K)]))


def _by_cosine(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    unit = F.normalize(x, dim=1)
    return m.conv(x, _edges((unit @ unit.t()).topk(K, dim=1).indices, x))


def _by_differences(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    far = (x[:, None] - x[None]).square().sum(-1)
    return m.conv(x, _edges(far.argsort(1)[:, 1 : 1 + K], x))


def _by_squares(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    square = x.square().sum(1, keepdim=True)
    far = square + square.t() - 2 * x @ x.t()
    return m.conv(x, _edges(far.topk(K, largest=False).indices, x))


def _within(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    return m.conv(x, (torch.cdist(x, x) < 0.5).nonzero().t().contiguous())


def _joined(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    near = torch.cdist(x, x).topk(K, largest=False).indices
    return m.conv(x, torch.cat([edge_index, _edges(near, x)], dim=1))


def _gathered(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    near = torch.cdist(x, x).topk(K, largest=False).indices
    return (x[near] - x.unsqueeze(1)).amax(1) + m.conv(x, edge_index)


def _selected(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    near = torch.cdist(x, x).topk(K, largest=False).indices
    return x.index_select(0, near.reshape(-1)).view(-1, K, 8).mean(1)


def _nearest(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    far = torch.cdist(x, x)
    far.fill_diagonal_(float("inf"))
    return x + x[far.min(dim=1).indices]


def _written(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    near = torch.cdist(x, x).topk(K, largest=False).indices
    chosen = torch.zeros(x.size(0), x.size(0), dtype=x.dtype).scatter_(1, near, 1.0)
    return chosen @ x


def _learned(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    best = (x @ x.T).topk(K, 1)
    return torch.zeros_like(x @ x.T).scatter_(1, best.indices, best.values.softmax(1)) @ x


def _pairs(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    n = x.size(0)
    both = torch.cat([x.unsqueeze(1).expand(-1, n, -1), x.unsqueeze(0).expand(n, -1, -1)], dim=-1)
    return torch.softmax(m.score(both).squeeze(-1), dim=1) @ x


def _by_numpy(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    tree = NearestNeighbors(n_neighbors=K).fit(x.detach().numpy())
    near = torch.from_numpy(tree.kneighbors(return_distance=False))
    return x + x[near].mean(1)


NEAREST: dict[str, Callable[[], nn.Module]] = {
    **{
        how.__name__.strip("_").replace("_", " "): (
            lambda how=how: Call(how, conv=pyg.SAGEConv(8, 8), score=nn.Linear(16, 1))
        )
        for how in (
            *(_by_distance, _detached, _repeated, _by_cosine, _by_differences, _by_squares, _within, _joined),
            *(_gathered, _selected, _nearest, _written, _learned, _pairs, _by_numpy),
        )
    },
    "a layer of gat": lambda: Call(_by_distance, conv=pyg.GATv2Conv(8, 8)),
    "a layer of edges": lambda: Call(_by_distance, conv=pyg.EdgeConv(nn.Linear(16, 8))),
    "a fixed layer": lambda: Call(_within, conv=pyg.GCNConv(8, 8)),
}
"""Models that look for near rows as people write it without torch_cluster."""


@pytest.mark.parametrize("name", NEAREST)
def test_nearest_rows_are_found_on_one_rank_and_refused_on_several(name: str) -> None:
    data = graph()
    found = outcome(NEAREST[name], data, random_owner(NODES, 1), 1)
    assert not isinstance(found, str), found
    assert_equal(found, whole(NEAREST[name], data))
    for world in (2, 3):
        text = outcome(NEAREST[name], data, random_owner(NODES, world, seed=world), world)
        assert isinstance(text, str)
        pairs = "which gives a value for each pair of rows" in text
        said = "a layer to read other vertices by the graph's edges" if pairs else "vertices told apart by"
        assert f"ModelError: expected {said}" in text
        assert pairs or "rows that went through cdist" not in text
        assert "or train on one rank" in text
        assert f"{__name__}.py, line" in text


def _near_points(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    near = torch.cdist(x, m.points)
    there = torch.cdist(m.points, x).softmax(0).t()
    differences = (x[:, None] - m.points[None]).square().sum(-1)
    return (
        near.softmax(1) + there + differences + m.points[near.argmin(1)] * near.topk(2).values.sum(1)[:, None]
    )


def test_points_that_are_no_rows_may_be_near() -> None:
    """Distances to learned points were refused as those between vertices are."""

    def build() -> nn.Module:
        return Call(_near_points, points=P(table(8, 8)))

    data = graph()
    for world in (1, 2, 3):
        found = outcome(build, data, random_owner(NODES, world, seed=world), world)
        assert not isinstance(found, str), found
        assert_equal(found, whole(build, data))


class Dynamic(nn.Module):
    """A DGCNN of two layers: each has the edges of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = pyg.EdgeConv(nn.Linear(16, 8)), pyg.EdgeConv(nn.Linear(16, 4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x, _edges(torch.cdist(x, x).topk(K, largest=False).indices, x)).relu()
        return self.last(h, _edges(torch.cdist(h, h).topk(K, largest=False).indices, h))


def trained(channel: Channel, check: bool) -> str:
    try:
        data = kagome.load("sbm:vertices=120,degree=6,features=8,classes=4,communities=4")
        quiet = Report(page=False, trace=False, progress=False)
        with Trainer(Dynamic(), data, train=Train(check=check, timeout=20.0), report=quiet) as trainer:
            trainer.fit(2)
            return f"{len(trainer.records)} epochs"
    except KagomeError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("check", [True, False])
def test_a_dynamic_model_is_refused_before_it_trains(ranks, check):
    assert ranks(1, trained, check) == ["2 epochs"]
    for text in ranks(2, trained, check):
        assert "rows that went through cdist" in text
        assert "make these edges before training (data.edge_index)" in text
