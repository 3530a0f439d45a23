"""Edges keep the user's order: tables of the edges and places among them mean what they mean in plain PyG."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv
from torch_geometric.utils import dropout_edge

import edge_models
from convolutions import BUILDABLE, ConvCase, sample_graph
from edge_models import EDGES, FAN_IN, FAN_OUT, NODES, ONE_RANK, ORDERS, TABLES, Call, graph, summed, table
from kagome.errors import ModelError
from kagome.graph.partition.partition import extract
from kagome.intercept.interceptor import Interceptor
from kagome.kernels.base.csr import Structure
from kagome.model.exact.handlers import HANDLERS
from kagome.positions.edge_tables import tables_of
from kagome.verify.check import check
from odd_models import ODD_MODELS
from outcomes import outcome
from parity import alone, assert_equal, case_build, odd, one_rank, random_owner, whole

REFUSED = {
    "ids of reverse edges": "by their numbers",
    "a partner's attributes": "by their numbers",
    "pairs of edges": "groups edges by their places in the list",
    "rolled": "roll along the list",
    "one edge": "read by its place",
    "a weight for the first": "minus 50",
    "pairs by unflatten": "groups edges by their places in the list",
    "pairs by a named shape": "groups edges by their places in the list",
    "places among some edges": "arange, which counts edges of a list made in forward",
    "places among some edges, flipped": "arange, which counts edges of a list made in forward",
    "places among edges twice": "multiple of numbers of edges",
    "some turned in place": "ids that were computed",
}
"""What no part can follow, and what the refusal says."""


@pytest.mark.parametrize("order", ORDERS)
def test_one_rank_is_given_the_edges_as_they_are(order: str) -> None:
    data = graph(order)
    scope = Interceptor(extract(data, torch.zeros(NODES, dtype=torch.long), 0, 1), alone(), handlers=HANDLERS)
    for name in ("edge_index", "edge_weight", "edge_attr", "e_id", "pair"):
        assert torch.equal(scope.inputs[name], data[name]), name


@pytest.mark.some(20)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_edges_is_plain_pyg_s_or_refused_by_name(name: str) -> None:
    for order, worlds in (("shuffled", (1, 2, 3)), ("duplicate", (1, 3)), ("by source", (1, 2))):
        data = graph(order)
        expected = whole(TABLES[name], data)
        for world in worlds:
            found = outcome(TABLES[name], data, random_owner(NODES, world, seed=world), world)
            if world > 1 and name in REFUSED:
                assert isinstance(found, str)
                assert REFUSED[name] in found
                assert "edge_models.py, line" in found
                continue
            assert not isinstance(found, str), found
            assert_equal(found, expected)


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank_runs_edges_that_forward_makes(name: str) -> None:
    data = graph()
    found = outcome(ONE_RANK[name], data, random_owner(NODES, 1), 1)
    assert not isinstance(found, str), found
    assert_equal(found, whole(ONE_RANK[name], data))


def test_one_rank_drops_edges_both_ways() -> None:
    def dropped(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
        return summed(x, dropout_edge(edge_index, 0.5, force_undirected=True)[0], x.new_ones(1))

    found = outcome(lambda: Call(dropped), graph(), random_owner(NODES, 1), 1)
    assert not isinstance(found, str), found
    assert found.out.isfinite().all()


def test_all_parts_without_an_edge_but_one() -> None:
    """A part with all edges and parts with none read a table as any other part does."""
    data = graph()
    owner = torch.ones(NODES, dtype=torch.long)
    owner[data.edge_index[1]] = 0
    for name in ("a learned weight an edge", "masked edges", "the first edges", "in message", "in a dict"):
        found = outcome(TABLES[name], data, owner, 2)
        assert not isinstance(found, str), (name, found)
        assert_equal(found, whole(TABLES[name], data))


def test_as_many_edges_as_vertices_are_refused_by_the_table_s_name() -> None:
    model = TABLES["by hand"]()
    with pytest.raises(ModelError, match=r"w of shape \[120\] in a graph with as many edges") as caught:
        tables_of(model, [EDGES], [EDGES])
    assert caught.value.where == "w"


def test_weights_of_layers_are_no_tables() -> None:
    assert tables_of(nn.Sequential(nn.Linear(8, EDGES), nn.BatchNorm1d(EDGES)), [EDGES], [NODES]) is None


def test_what_is_written_to_a_table_in_forward_is_refused() -> None:
    def counted(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
        m.seen += 1
        return summed(x, edge_index, m.seen)

    found = outcome(lambda: Call(counted, seen=table(EDGES)), graph(), random_owner(NODES, 2), 2)
    assert isinstance(found, str)
    assert "writes to seen" in found


class Attending(nn.Module):
    """Two attention layers, of which the model may look at the shares of the first."""

    def __init__(self, heads: int, dropout: float, *, looks: bool, loops: bool = True) -> None:
        super().__init__()
        self.looks = looks
        self.first = GATConv(FAN_IN, 8 // heads, heads=heads, dropout=dropout, add_self_loops=loops)
        self.second = GATConv(8, FAN_OUT, heads=1, dropout=dropout, add_self_loops=loops)
        self.per_edge = nn.Parameter(torch.linspace(0.5, 1.5, EDGES).view(-1, 1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if not self.looks:
            return self.second(self.first(x, edge_index).relu(), edge_index)
        h, (edges, shares) = self.first(x, edge_index, return_attention_weights=True)
        assert torch.equal(edges[:, :5], edge_index[:, :5])  # no layer of these has removed a loop before
        weighed = shares[:EDGES] * self.per_edge[: shares[:EDGES].size(0)]
        return self.second(h.relu(), edge_index) + weighed.sum()


@pytest.mark.parametrize("order", ["shuffled", "duplicate", "by source"])
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_kept_in_the_order_of_the_kernels_is_plain_pyg_s(order: str, heads: int) -> None:
    data = reordered(graph(), order)
    data.edge_index = data.edge_index[:, :EDGES]
    data.edge_index[1] = torch.where(
        data.edge_index[0] == data.edge_index[1], (data.edge_index[1] + 1) % NODES, data.edge_index[1]
    )
    data = Data(x=data.x, edge_index=data.edge_index)
    for looks in (False, True):
        build = partial(Attending, heads, 0.0, looks=looks)
        found = outcome(build, data, random_owner(NODES, 1), 1)
        assert not isinstance(found, str), found
        assert_equal(found, whole(build, data))
    dropped = partial(Attending, heads, 0.5, looks=False)
    one, three = (outcome(dropped, data, random_owner(NODES, world), world) for world in (1, 3))
    assert not isinstance(one, str)
    assert not isinstance(three, str)
    assert_equal(one, three)


def test_attention_where_one_part_lies_as_kernels_walk_it_and_another_does_not() -> None:
    """What a part keeps in its own order is its own affair: rows cross at the same calls on all."""
    data = graph()
    edges = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    owner = torch.arange(NODES) // (NODES // 2)
    first = owner[edges[1]] == 0
    near, far = edges[:, first], edges[:, ~first]
    near = near[:, (near[1] * NODES + near[0]).argsort()]
    data = Data(x=data.x, edge_index=torch.cat([near, far], 1))
    for part, lies in enumerate((True, False)):
        found = extract(data, owner, part, 2)
        own, halo = found.own.numel(), found.halo.numel()
        held = Structure(*found.edge_index, own, own + halo)
        assert (held.walked is held) is lies
    for heads in (1, 4):
        build = partial(Attending, heads, 0.0, looks=False, loops=False)
        split = outcome(build, data, owner, 2)
        assert not isinstance(split, str), split
        assert_equal(split, whole(build, data))


# Fast paths on one rank against plain PyG ----------------------------------------------------------


def reordered(data: Data, order: str) -> Data:
    """The same graph with its edges in another order, or with the first half of them twice."""
    count = data.num_edges
    draw = torch.Generator().manual_seed(5)
    if order == "shuffled":
        chosen = torch.randperm(count, generator=draw)
    elif order == "duplicate":
        chosen = torch.cat([torch.arange(count), torch.arange(count // 2)])
    else:
        major = int(order == "by target")
        key = data.edge_index[major] * data.num_nodes + data.edge_index[1 - major]
        chosen = key.argsort(stable=True)
    changed = data.clone()
    for name, value in data.to_dict().items():
        if isinstance(value, Tensor) and data.is_edge_attr(name):
            changed[name] = value[:, chosen] if name == "edge_index" else value[chosen]
    return changed


class Scaled(nn.Module):
    """Any model of rows and edges, with a learned weight an edge beside it."""

    def __init__(self, inner: nn.Module, edges: int) -> None:
        super().__init__()
        self.inner, self.weight = inner, nn.Parameter(table(edges))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.inner(summed(x, edge_index, self.weight), edge_index)


@pytest.mark.some(12)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", [name for name in ODD_MODELS if "dropout" not in name])
def test_odd_models_on_one_rank_are_plain_pyg(name: str, order: str) -> None:
    data = reordered(sample_graph(1), order)

    def build() -> nn.Module:
        return Scaled(odd(name), data.num_edges)

    assert_equal(one_rank(build, data, epochs=2), whole(build, data, epochs=2))


@pytest.mark.some(15)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "case", [case for case in BUILDABLE if not case.random], ids=lambda case: f"{case.name}-{case.variant}"
)
def test_convolutions_on_one_rank_are_plain_pyg(case: ConvCase, order: str) -> None:
    data = reordered(sample_graph(seed=1, groups_of_four=case.needs_groups_of_four), order)
    data.x.requires_grad_(True)
    build = case_build(case)
    assert_equal(one_rank(build, data, epochs=2), whole(build, data, epochs=2))


# Any model with a table ----------------------------------------------------------------------------

READS = {
    "all": lambda w, e: w,
    "sigmoid": lambda w, e: w.sigmoid(),
    "over its mean": lambda w, e: w - w.mean(),
    "centred by hand": lambda w, e: w - w.sum() / e.size(1),
    "in pieces": lambda w, e: torch.cat([w[:3] * 2, w[3:]]),
    "by place": lambda w, e: w * (torch.arange(e.size(1)) % 2 + 0.5),
    "of a column": lambda w, e: w.view(-1, 1).expand(-1, 2).sum(1),
}


def drawn(read: str, edges: int) -> nn.Module:
    """A model with a learned weight an edge that is read in one way."""

    def function(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
        return summed(x, edge_index, READS[read](m.w, edge_index))

    return Call(function, w=nn.Parameter(table(edges)))


@st.composite
def graphs(draw: st.DrawFn) -> Data:
    nodes = draw(st.integers(2, 8))
    ends = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    pairs = draw(st.lists(ends, min_size=4, max_size=16).filter(lambda found: len(found) != nodes))
    order = draw(st.sampled_from(["as drawn", "sorted", "twice"]))
    pairs = sorted(pairs) if order == "sorted" else [*pairs, *pairs] if order == "twice" else pairs
    if len(pairs) == nodes:
        pairs.append(pairs[0])
    x = torch.randn(
        nodes, edge_models.FAN_IN, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return Data(x=x, edge_index=torch.tensor(pairs).t().contiguous())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=graphs(), world=st.integers(1, 3), read=st.sampled_from(sorted(READS)), seed=st.integers(0, 9))
def test_any_graph_with_a_learned_weight_an_edge_is_plain_pyg_s(
    data: Data, world: int, read: str, seed: int
) -> None:
    build = partial(drawn, read, data.num_edges)
    owner = torch.randint(0, world, (data.num_nodes,), generator=torch.Generator().manual_seed(seed))
    found = outcome(build, data, owner, world)
    assert not isinstance(found, str), found
    assert_equal(found, whole(build, data))


@pytest.mark.parametrize(
    "name", ["a learned weight an edge", "in message", "attributes of gatv2", "masked edges", "in a dict"]
)
def test_the_check_runs_a_table_on_the_sample_s_edges(name: str) -> None:
    data = graph()
    result = check(TABLES[name]().double(), data, vertices=12)
    assert result.edges < EDGES
    assert result.first is None
    assert result.worst < 1e-10
