"""Edge features that a layer maps to the width of a row: mapped after the sums, and the same numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, TransformerConv
from torch_geometric.utils import softmax

from convolutions import sample_graph
from kagome.components.parallelize import PartOptions, parallelize
from kagome.deferred.edge_map import EdgeMap, EdgeTerm
from kagome.graph.partition.partition import extract
from parity import alone, assert_equal, one_rank, random_owner, split, whole

F, D, HEADS = 6, 3, 2


class Attention(MessagePassing):
    """Attention over keys with edge features, with a bias on the map, and a value that has them or not."""

    def __init__(self, how: str = "add", values: bool = True) -> None:
        super().__init__(aggr=how, node_dim=0)
        self.query, self.key = nn.Linear(F, HEADS * 4), nn.Linear(F, HEADS * 4)
        self.edge, self.values = nn.Linear(D, HEADS * 4), values

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        query, key = (map(x).view(-1, HEADS, 4) for map in (self.query, self.key))
        return self.propagate(edge_index, query=query, key=key, edge_attr=edge_attr).flatten(1)

    def message(
        self, query_i: Tensor, key_j: Tensor, edge_attr: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        edge = self.edge(edge_attr).view(-1, HEADS, 4)
        alpha = softmax((query_i * (key_j + edge)).sum(-1), index, num_nodes=size_i)
        return alpha.unsqueeze(-1) * (edge + key_j if self.values else key_j)


class Scored(MessagePassing):
    """GAT's score of an edge: the map's columns times a vector, summed by head."""

    def __init__(self) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.edge, self.att = nn.Linear(D, HEADS * 4, bias=False), nn.Parameter(torch.rand(1, HEADS, 4))
        self.map = nn.Linear(F, HEADS * 4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.map(x).view(-1, HEADS, 4), edge_attr=edge_attr).flatten(1)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        score = (self.edge(edge_attr).view(-1, HEADS, 4) * self.att).sum(dim=-1)
        return x_j * score.sigmoid().unsqueeze(-1)


class Flat(MessagePassing):
    """Rows of two axes: a mean of ``x_j + W e``, and one of it through a ReLU, which must be computed."""

    def __init__(self, relu: bool) -> None:
        super().__init__(aggr="mean")
        self.edge, self.relu = nn.Linear(D, F), relu

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        out = x_j + self.edge(edge_attr)
        return out.relu() if self.relu else out


MODELS = {
    "transformer": partial(TransformerConv, F, 4, heads=HEADS, edge_dim=D),
    "transformer, one head": partial(TransformerConv, F, 8, edge_dim=D, concat=False, beta=True),
    "attention": Attention,
    "attention, mean": partial(Attention, "mean"),
    "attention, plain values": partial(Attention, values=False),
    "scored": Scored,
    "flat": partial(Flat, relu=False),
}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors with one row per edge that were computed in this process."""
    found: list[str] = []
    for kind in (EdgeMap, EdgeTerm):
        plain = kind.compute
        monkeypatch.setattr(kind, "compute", lambda self, plain=plain: (found.append("row"), plain(self))[1])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_mapped_features_are_the_same_numbers_and_are_never_stored(name, computed):
    data = sample_graph(seed=1)
    assert data.edge_attr.size(1) == D
    assert_equal(one_rank(MODELS[name], data, epochs=2), whole(MODELS[name], data, epochs=2))
    assert not computed


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", ["transformer", "attention", "flat"])
def test_ranks_agree_with_the_whole(ranks, name, world):
    data = sample_graph(seed=1)
    owner = random_owner(data.num_nodes, world, seed=3)
    assert_equal(split(ranks, world, MODELS[name], data, owner), whole(MODELS[name], data))


def test_a_rank_without_vertices_takes_part(ranks):
    data = sample_graph(seed=1)
    owner = torch.zeros(data.num_nodes, dtype=torch.long)
    assert_equal(split(ranks, 2, MODELS["transformer"], data, owner), whole(MODELS["transformer"], data))


def test_a_nonlinear_message_is_computed(computed):
    build, data = partial(Flat, relu=True), sample_graph(seed=1)
    assert_equal(one_rank(build, data), whole(build, data))
    assert computed


def test_encoded_features_get_their_gradient():
    class Encoded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.conv = nn.Linear(D, D), TransformerConv(F, 4, heads=HEADS, edge_dim=D)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            return self.conv(x, edge_index, self.encode(edge_attr).tanh())

    data = sample_graph(seed=1)
    assert_equal(one_rank(Encoded, data), whole(Encoded, data))


def test_products_and_sums_can_be_differentiated_twice():
    from kagome.kernels.base.csr import Structure
    from kagome.sparse_ops import edge_features

    generator = torch.Generator().manual_seed(0)
    edges = Structure(*torch.randint(0, 4, (2, 9), generator=generator), 4, 4)
    own, x, weight = (
        torch.rand(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((4, 2, 3), (9, 3), (9, 2))
    )
    assert torch.autograd.gradcheck(lambda a, b: edge_features.dots(a, b, edges), (own, x))
    assert torch.autograd.gradgradcheck(lambda a, b: edge_features.dots(a, b, edges), (own, x))
    assert torch.autograd.gradcheck(lambda w, b: edge_features.sums(w, b, edges), (weight, x))
    assert torch.autograd.gradgradcheck(lambda w, b: edge_features.sums(w, b, edges), (weight, x))


class ChangesLater(MessagePassing):
    """Writes in place to what a message was made from, between the message and its sum."""

    def __init__(self, what: str) -> None:
        super().__init__(aggr="add")
        self.edge, self.map, self.what = nn.Linear(D, 16), nn.Linear(F, 16, bias=False), what

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        own, weight, features = x * 1.0, edge_attr[:, :1] * 1.0, edge_attr * 1.0
        rows = self.map(own)
        message = rows[source]
        if self.what == "weight":
            message = weight * message
        elif self.what in ("features", "weight of a map"):
            message = message + self.edge(features)
            message = message * weight if self.what == "weight of a map" else message
        changed = {"features": features, "rows before a map": own}.get(self.what, weight)
        with torch.no_grad():
            changed.mul_(2.0)
        return torch.zeros_like(rows).index_add_(0, target, message)


@pytest.mark.parametrize("what", ["weight", "features", "weight of a map", "rows before a map"])
def test_what_a_message_reads_may_not_be_changed_before_its_sum(what: str) -> None:
    data, model = sample_graph(seed=1), ChangesLater(what).double()
    part = extract(data, torch.zeros(data.num_nodes, dtype=torch.long), 0, 1)
    with torch.no_grad(), parallelize(model, part, alone(), PartOptions()) as net:
        found = net.forward(1, training=False, checked=True)
        assert net.escape
        assert "changed in place in between" in str(net.escape)
    with torch.no_grad():
        torch.testing.assert_close(found, model(data.x, data.edge_index, data.edge_attr))
