"""Weights that are a number of the one end times the same of the other: found, or not, and used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from kagome.graph.partition.partition import extract
from kagome.intercept.interceptor import Interceptor
from kagome.kernels.base.csr import Structure
from kagome.placement.placement import Placement, PlacementKind
from kagome.sparse_ops import edge_sum
from kagome.sparse_ops.factored_weights import factors_of
from parity import alone, assert_equal, one_rank, random_owner, split, whole


def factors(edge_index: Tensor, weight: Tensor, nodes: int) -> Tensor:
    return factors_of(weight, Structure(edge_index[0], edge_index[1], nodes, nodes))


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 1000), st.sampled_from(["float32", "float64"]))
def test_factors_of_normalised_edges_give_their_weights(nodes: int, edges: int, seed: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = torch.randint(0, nodes, (2, edges), generator=generator)
    edge_index, weight = gcn_norm(given, None, nodes, dtype=getattr(torch, kind))
    found = factors(edge_index, weight, nodes)
    twice = (given[0] == given[1]).any()
    if found.numel() == 0:
        assert twice  # two self-loops of a vertex
        return
    product = found[edge_index[1]] * found[edge_index[0]]
    torch.testing.assert_close(product, weight, rtol=1e-6 if kind == "float32" else 1e-14, atol=0)


LINE = torch.tensor([[0, 1, 0, 1, 2], [1, 2, 0, 1, 2]])


@pytest.mark.parametrize(
    "weight",
    [
        [0.5, 0.5, 1.0, 1.0, 1.0],  # no product of roots
        [1.0, 1.0, -1.0, 1.0, 1.0],  # no root
        [1.0, float("nan"), 1.0, 1.0, 1.0],
    ],
)
def test_other_weights_have_none(weight: list[float]) -> None:
    assert factors(LINE, torch.tensor(weight), 3).numel() == 0


def test_factors_of_halo_rows_follow_from_the_edges_that_read_them() -> None:
    root = torch.tensor([0.5, 2.0, 3.0, 0.25])
    ends = torch.tensor([[0, 1, 2, 2, 3, 0], [0, 1, 0, 1, 1, 1]])
    weight = root[ends[0]] * root[ends[1]]
    structure = Structure(ends[0], ends[1], 2, 4)
    torch.testing.assert_close(factors_of(weight, structure), root)
    weight[3] *= 1.1
    assert factors_of(weight, structure).numel() == 0


def test_rows_without_a_loop_have_none() -> None:
    assert factors(LINE[:, :4], torch.ones(4), 3).numel() == 0
    assert factors(torch.cat([LINE, LINE[:, 2:3]], 1), torch.ones(6), 3).numel() == 0
    assert factors(LINE, torch.ones(5), 3).tolist() == [1.0, 1.0, 1.0]


def test_sums_by_factors_are_sums_by_weights_with_their_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    edge_index, weight = gcn_norm(
        torch.randint(0, 9, (2, 30), generator=generator), None, 9, dtype=torch.double
    )
    edges = Structure(edge_index[0], edge_index[1], 9, 9)
    root = edges.degree.double().rsqrt()
    x = torch.randn(9, 5, dtype=torch.double, generator=generator, requires_grad=True)
    one = edge_sum.neighbor_sum(x, edges, scale=root, factor=root)
    two = edge_sum.neighbor_sum(x, edges, weight=root[edge_index[0]] * root[edge_index[1]])
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    goal = torch.randn(9, 5, dtype=torch.double, generator=generator)
    torch.testing.assert_close(*(torch.autograd.grad((out * goal).sum(), x)[0] for out in (one, two)))
    assert torch.autograd.gradcheck(
        lambda rows: edge_sum.neighbor_sum(rows, edges, scale=root, factor=root), (x,)
    )
    assert weight.numel() == edges.edges


F, C = 6, 4


class Twice(nn.Module):
    """Two layers, weighed by an attribute of the data."""

    def __init__(self, normalize: bool) -> None:
        super().__init__()
        self.one = pyg.GCNConv(F, 8, normalize=normalize)
        self.two = pyg.GCNConv(8, C, normalize=normalize)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index, edge_weight).relu(), edge_index, edge_weight)


def normal() -> nn.Module:
    return Twice(True)


def bare() -> nn.Module:
    return Twice(False)


def data(kind: str, nodes: int = 40) -> Data:
    generator = torch.Generator().manual_seed(4)
    edge_index = torch.randint(0, nodes, (2, 200), generator=generator)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    edge_index = torch.cat([edge_index, torch.arange(nodes).repeat(2, 1)], 1)
    root = torch.rand(nodes, dtype=torch.double, generator=generator) + 0.5
    weight = root[edge_index[0]] * root[edge_index[1]]
    if kind == "one edge off":
        weight[0] *= 1.01
    x = torch.randn(nodes, F, dtype=torch.double, generator=generator, requires_grad=True)
    return Data(x=x, edge_index=edge_index, edge_weight=weight)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("build", [normal, bare])
@pytest.mark.parametrize("kind", ["factors", "one edge off"])
def test_ranks_need_not_agree_whether_their_edges_have_factors(
    ranks: Callable[..., list], world: int, build: Callable[[], nn.Module], kind: str
) -> None:
    """One edge that is no product of roots lies on one rank alone."""
    graph = data(kind)
    found = (
        one_rank(build, graph, epochs=2)
        if world == 1
        else split(ranks, world, build, graph, random_owner(40, world, seed=2), epochs=2)
    )
    assert_equal(found, whole(build, graph, epochs=2))


def test_only_weights_that_last_are_looked_at() -> None:
    whole = extract(data("factors"), torch.zeros(40, dtype=torch.long), 0, 1)
    scope = Interceptor(whole, alone())
    edges = scope.deferral.edge_set(Placement(PlacementKind.SOURCE, edges=scope.inputs["edge_index"]))
    assert edges is not None
    given = scope.inputs["edge_weight"]
    assert edges.factors(given) is not None
    assert edges.factors(given.clone()) is None
