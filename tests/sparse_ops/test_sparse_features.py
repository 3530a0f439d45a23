"""Thin rows: products by what is not zero, alone and summed over neighbours, whichever ranks have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch_geometric.nn as pyg
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data

from convolutions import BUILDABLE, ConvCase, double_precision, sample_graph
from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions, parallelize
from kagome.graph.partition.partition import extract
from kagome.kernels.base.csr import Structure
from kagome.sparse_ops import linear as dense, sparse_features
from odd_models import MUST_BE_REFUSED, ODD_MODELS
from parity import Share, alone, assert_equal, case_build, joined, odd, one_rank, parity, random_owner, whole

ALL, NONE = 100.0, -1.0
"""Shares of entries at which rows are sparse always, and never."""


@contextmanager
def at(share: float, least: int = 0) -> Iterator[None]:
    with patch.object(sparse_features, "SHARE", share), patch.object(sparse_features, "LEAST", least):
        yield


def mostly_zeros(rows: int, columns: int, share: float, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=dtype)
    return x * (torch.rand(rows, columns, generator=generator) < share)


def product(linear: Callable[..., Tensor], weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    given = [None if t is None else t.clone().requires_grad_() for t in (weight, bias)]
    out = linear(*given)
    out.square().sum().backward()
    return out.detach(), *(t.grad for t in given if t is not None)


@settings(deadline=None)  # the first call compiles
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    width=st.integers(1, 9),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_the_product_and_its_gradients_are_those_of_all_numbers(
    rows, columns, width, share, biased, dtype, seed
):
    x = mostly_zeros(rows, columns, share, dtype, seed)
    weight = torch.randn(width, columns, dtype=dtype)
    bias = torch.randn(width, dtype=dtype) if biased else None
    with at(ALL):
        found = sparse_features.sparse_of(x)
    assert found is not None
    torch.testing.assert_close(found.to_dense(), x, rtol=0, atol=0)
    ours = product(partial(dense.linear, found), weight, bias)
    theirs = product(partial(functional.linear, x), weight, bias)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@settings(deadline=None)  # the first call compiles
@given(
    own=st.integers(1, 20),
    halo=st.integers(0, 20),
    edges=st.integers(0, 90),
    weighted=st.booleans(),
    scaled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_product_of_a_sum_is_that_of_the_rows_summed(own, halo, edges, weighted, scaled, seed):
    generator = torch.Generator().manual_seed(seed)
    x = mostly_zeros(own + halo, 17, 0.2, torch.float64, seed)
    source = torch.randint(0, own + halo, (edges,), generator=generator)
    target = torch.randint(0, own, (edges,), generator=generator)
    each = torch.rand(edges, generator=generator, dtype=torch.float64) if weighted else None
    scale = torch.rand(own, generator=generator, dtype=torch.float64) if scaled else None
    matrix = torch.zeros(own, own + halo, dtype=torch.float64)
    matrix.index_put_((target, source), torch.ones(edges).double() if each is None else each, accumulate=True)
    rows = (matrix if scale is None else scale.unsqueeze(1) * matrix) @ x
    with at(ALL):
        found = sparse_features.sparse_of(x, Structure(source, target, own, own + halo), each, scale)
    assert found is not None
    weight = torch.randn(5, 17, dtype=torch.float64)
    torch.testing.assert_close(found.to_dense(), rows, rtol=0, atol=1e-12)
    ours = product(partial(dense.linear, found), weight, None)
    torch.testing.assert_close(ours, product(partial(functional.linear, rows), weight, None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_other_types_stay_as_they_are(dtype):
    with at(ALL):
        assert sparse_features.sparse_of(torch.ones(300, 300).to(dtype)) is None
        assert sparse_features.sparse_of(torch.ones(300, 300), weight=torch.ones(4).to(dtype)) is None


def test_only_rows_with_few_numbers_are_sparse():
    x = mostly_zeros(300, 400, 0.05, torch.float32, 0)
    assert sparse_features.sparse_of(x) is not None
    assert sparse_features.sparse_of(x[:100]) is None, "too few to matter"
    assert sparse_features.sparse_of(mostly_zeros(300, 400, 0.1, torch.float32, 0)) is None
    edges = Structure(torch.arange(300), torch.arange(300), 300, 300)
    assert sparse_features.sparse_of(x, edges) is not None
    many = torch.randint(0, 300, (2, 9000))
    assert sparse_features.sparse_of(x, Structure(*many, 300, 300)) is None, "each edge is an entry"


# Models --------------------------------------------------------------------------------------------------


def unlike(
    channel: Channel,
    build: Callable[[], nn.Module],
    data: Data,
    owner: Tensor,
    epochs: int,
    tensor: int = 1,
) -> Share:
    """``parity``; features are sparse on even ranks, and on odd ones never."""
    with at(NONE if channel.rank % 2 else ALL):
        return parity(channel, build, data, owner, epochs=epochs, tensor=tensor)


class Both(nn.Module):
    """The sum of constant features is multiplied, and read as it is, in either order."""

    def __init__(self, fan_in: int, fan_out: int, *, first: bool) -> None:
        super().__init__()
        self.first, self.lin = first, nn.Linear(fan_in, fan_out)
        self.hop = pyg.SimpleConv(aggr="mean")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        def mapped() -> Tensor:
            return self.tag(x, edge_index)

        def plain() -> Tensor:
            return self.hop(x, edge_index)[:, :1]

        return mapped() + plain() if self.first else plain() + mapped()

    def tag(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.hop(x, edge_index)) + self.lin(x)


def both(*, first: bool) -> nn.Module:
    return Both(6, 4, first=first)


def label(case: ConvCase) -> str:
    return f"{case.name}-{case.variant}".replace(" ", "_")


@pytest.mark.some(16)
@pytest.mark.parametrize("case", BUILDABLE, ids=label)
def test_a_convolution_with_thin_features_on_one_of_two_ranks(ranks: Callable[..., list], case: ConvCase):
    data = sample_graph(seed=1, groups_of_four=case.needs_groups_of_four)
    data.x.requires_grad_(not list(case_build(case)().parameters()))
    build = case_build(case)
    found = joined(ranks(2, unlike, build, data, random_owner(data.num_nodes, 2, seed=2), 2), data.num_nodes)
    assert_equal(found, (one_rank if case.random else whole)(build, data, epochs=2))


@pytest.mark.some(12)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", [name for name in ODD_MODELS if name not in MUST_BE_REFUSED])
def test_a_model_with_thin_features_on_some_ranks(ranks: Callable[..., list], name: str, world: int):
    data, build = sample_graph(1), partial(odd, name)
    found = joined(ranks(world, unlike, build, data, random_owner(30, world), 2), 30)
    assert_equal(found, (one_rank if "dropout" in name else whole)(build, data, epochs=2))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("first", [False, True])
def test_a_sum_multiplied_and_read_as_it_is(ranks: Callable[..., list], first: bool, tensor: int):
    data, build = sample_graph(1), partial(both, first=first)
    found = joined(ranks(2, unlike, build, data, random_owner(30, 2), 3, tensor), 30)
    assert_equal(found, whole(build, data, epochs=3))


class ByHand(nn.Module):
    """As a tutorial writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(400, 8) / 20)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x @ self.weight + torch.mm(x, self.weight) + torch.matmul(x, self.weight)


FIRST_LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "GCNConv": (partial(pyg.GCNConv, 400, 8), 1),
    "SAGEConv": (partial(pyg.SAGEConv, 400, 8), 2),  # the neighbours' mean, and own rows
    "GraphConv": (partial(pyg.GraphConv, 400, 8, aggr="add"), 2),
    "GATConv": (partial(pyg.GATConv, 400, 4, heads=2), 1),
    "TAGConv": (partial(pyg.TAGConv, 400, 8, K=1), 2),
    "a product by hand": (ByHand, 3),
    "GCN2": (partial(pyg.Sequential, "x, edge_index", [
        (nn.Linear(400, 8), "x -> h"), (pyg.GCN2Conv(8, 0.1), "h, h, edge_index -> h")
    ]), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST_LAYERS)
def test_a_first_layer_computes_no_product_of_all_numbers(name: str, monkeypatch: pytest.MonkeyPatch):
    """Nor is the sum of all numbers over neighbours there."""
    build, count = FIRST_LAYERS[name]
    edges = torch.randint(0, 300, (2, 600), generator=torch.Generator().manual_seed(0))
    data = Data(x=mostly_zeros(300, 400, 0.02, torch.float64, 1), edge_index=edges)
    expected = whole(build, data)
    seen: list[Any] = []
    do = dense.linear
    monkeypatch.setattr(dense, "linear", lambda x, *rest: (seen.append(x), do(x, *rest))[1])
    with double_precision():
        torch.manual_seed(0)
        model = build().double()
        part = extract(data, torch.zeros(300, dtype=torch.long), 0, 1)
        with parallelize(model, part, alone(), PartOptions()) as net:
            out = net.forward(1, training=True)
    torch.testing.assert_close(out.detach(), expected.out, rtol=0, atol=1e-12)
    assert sum(isinstance(x, sparse_features.SparseFeatures) for x in seen) == count
    kept = [value for value, _ in net.scope.constants.computed.values() if isinstance(value, Tensor)]
    assert not any(value.shape == (300, 400) for value in kept)
