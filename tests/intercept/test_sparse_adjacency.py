"""A graph given as a sparse matrix: its values reach what plain PyG lets them reach, or it is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data

from adjacency_models import ADJACENCIES, Adjacent, weighted
from edge_models import FAN_IN, FAN_OUT, NODES
from kagome.errors import DataError
from kagome.graph.structure.validate import validate
from kagome.verify.check import check
from outcomes import outcome
from parity import assert_equal, random_owner, whole

KEPT = "an adjacency to come with the data"
REFUSED = {
    "gcn that normalises": "sparse matrix of the edges",
    "gat with loops": "sparse matrix of the edges",
    "gat": "got __getitem__ of it",
    "gatv2": "got __getitem__ of it",
    "the largest": "with 'max'",
    "spmm of largest": "with 'max'",
    "the other way": "got t of it",
    "dense": "got to_dense of it",
    "degrees": "got sum of it",
    **dict.fromkeys(("a buffer", "a plain attribute", "a buffer in a layer"), KEPT),
}
"""What several ranks may refuse, and what they say."""
NOT_OF_COLUMNS = ("gat", "gatv2", "gat with loops", "gcn that normalises", "degrees")
"""What plain PyG does not do with a matrix that is sorted by column."""


@pytest.mark.some(20)
@pytest.mark.parametrize("name", ADJACENCIES)
def test_its_values_reach_every_layer_or_it_is_refused(name: str) -> None:
    for layout, kind, worlds in (
        ("csr", "normalised", (1, 2, 3)),
        ("csr", "simple", (1, 3)),
        ("csr", "ones", (1, 2)),
        ("coo", "normalised", (1, 2)),
        ("csc", "normalised", (1, 2)),
    ):
        if layout == "csc" and (name in NOT_OF_COLUMNS or "unfused" in name):
            continue
        theirs, ours = weighted(layout, kind)
        expected = whole(ADJACENCIES[name], theirs, epochs=2)
        for world in worlds:
            data, owner = validate(ours)[0], random_owner(NODES, world, seed=world)
            found = outcome(ADJACENCIES[name], data, owner, world, epochs=2)
            if world > 1 and isinstance(found, str):
                assert REFUSED[name] in found
                continue
            assert not isinstance(found, str), found
            assert_equal(found, expected)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_of_weights_is_refused_on_each_number_of_ranks(name: str) -> None:
    data = validate(weighted()[1])[0]
    for world in (2, 3):
        found = outcome(ADJACENCIES[name], data, random_owner(NODES, world), world)
        assert isinstance(found, str)
        assert REFUSED[name] in found


@pytest.mark.parametrize("name", ["gcn", "sage", "a product", "two hops", "gcn, of edges by name"])
def test_the_check_compares_with_the_matrix(name: str) -> None:
    data = validate(weighted()[1])[0]
    result = check(ADJACENCIES[name]().double(), data)
    assert result.first is None
    assert result.worst < 1e-10


def test_a_matrix_beside_edges_says_the_same_or_is_refused() -> None:
    data = weighted("csr", "ones")[1]
    clean = validate(data)[0]
    both = Data(x=data.x, y=data.y, edge_index=clean.edge_index.flip(1), adj_t=data.adj_t)
    assert "adj_t" not in validate(both)[0]
    for other, said in ((weighted("csr", "simple")[1].adj_t, "values"), (torch.eye(NODES), "other edges")):
        both.adj_t = other if other.layout != torch.strided else other.to_sparse_csr()
        with pytest.raises(DataError, match=said):
            validate(both)


def test_values_of_several_columns_are_refused() -> None:
    ends = torch.tensor([[0, 1, 2], [1, 2, 0]])
    matrix = torch.sparse_coo_tensor(ends, torch.ones(3, 2), (3, 3, 2))
    with pytest.raises(DataError, match="one value an edge"):
        validate(Data(x=torch.ones(3, 1), y=torch.zeros(3, dtype=torch.long), adj_t=matrix))


def hops(m: Adjacent, x: Tensor, adj_t: Tensor, ways: tuple[str, ...]) -> Tensor:
    """The matrix applied in several ways, one after the other."""
    for way in ways:
        x = {
            "@": lambda h: adj_t @ h,
            "mm": lambda h: torch.sparse.mm(adj_t, h),
            "mean": lambda h: torch.sparse.mm(adj_t, h, "mean"),
            "learned": lambda h: m.mid(adj_t @ h).tanh(),
            "column": lambda h: h * (adj_t @ h[:, 0]).view(-1, 1),
        }[way](x)
    return x


def built(ways: tuple[str, ...]) -> nn.Module:
    """A model of some hops."""
    return Adjacent(partial(hops, ways=ways), mid=nn.Linear(8, 8))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(1, 3),
    st.sampled_from(["csr", "coo"]),
    st.lists(st.sampled_from(["@", "mm", "mean", "learned", "column"]), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=20, unique=True),
    st.integers(0, 9),
)
def test_any_matrix_is_applied_as_in_plain_pyg(
    world: int, layout: str, ways: list[str], pairs: list[tuple[int, int]], seed: int
) -> None:
    if layout == "coo" and "mean" in ways:
        layout = "csr"  # torch has no means of the other
    draw = torch.Generator().manual_seed(seed)
    ends = torch.tensor(pairs).t()
    values = torch.randn(len(pairs), generator=draw, dtype=torch.float64)
    matrix = torch.sparse_coo_tensor(ends, values, (7, 7)).coalesce()
    matrix = matrix if layout == "coo" else matrix.to_sparse_csr()
    x = torch.randn(7, FAN_IN, generator=draw, dtype=torch.float64)
    ours = validate(Data(x=x, y=torch.arange(7) % FAN_OUT, adj_t=matrix))[0]
    owner = torch.randint(0, world, (7,), generator=draw)
    found = outcome(partial(built, tuple(ways)), ours, owner, world)
    assert not isinstance(found, str), found
    assert_equal(found, whole(partial(built, tuple(ways)), Data(x=x, adj_t=matrix, num_nodes=7)))
