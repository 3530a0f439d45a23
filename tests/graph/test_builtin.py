"""Built-in data sets: the same everywhere, shaped as asked for."""

from __future__ import annotations

import pytest
import torch

from kagome.errors import DataError
from kagome.graph.datasets.builtin import digits, parse_sbm, sbm
from kagome.graph.structure.labels import labels_of
from kagome.graph.structure.validate import validate


def test_digits() -> None:
    data = digits()
    assert data.x.shape == (1797, 64)
    assert (float(data.x.min()), float(data.x.max())) == (0.0, 1.0)
    assert data.is_undirected()
    assert not data.has_self_loops()
    assert int(torch.bincount(data.edge_index[1]).min()) >= 8
    clean, notes = validate(data)
    assert notes == []
    assert labels_of(clean.y).outputs == 10
    assert [int(clean[f"{name}_mask"].sum()) for name in ("train", "val", "test")] == [1078, 359, 360]
    assert torch.equal(digits().train_mask, data.train_mask)


def test_neighbours_look_alike() -> None:
    data = digits()
    source, target = data.edge_index
    assert float((data.y[source] == data.y[target]).float().mean()) > 0.9


def test_sbm_is_as_asked_for() -> None:
    data = sbm("sbm:vertices=3000,degree=12,communities=6,features=5,classes=3,seed=7")
    assert data.x.shape == (3000, 5)
    assert data.edge_index.shape == (2, 36000)
    assert data.is_undirected()
    assert not data.has_self_loops()
    assert data.is_coalesced()
    assert sorted(data.y.unique().tolist()) == [0, 1, 2]
    assert validate(data)[0].num_nodes == 3000


def test_sbm_degrees_have_a_long_tail() -> None:
    degree = torch.bincount(sbm("vertices=20000,features=1").edge_index[1])
    assert int(degree.max()) > 20 * float(degree.float().mean())


def test_sbm_mixing_is_the_share_of_edges_between_communities() -> None:
    shares = []
    for mixing in (0.0, 0.5):
        data = sbm(f"vertices=2000,degree=10,communities=4,classes=4,features=1,mixing={mixing}")
        source, target = data.edge_index
        shares.append(float((data.y[source] != data.y[target]).float().mean()))
    assert shares[0] == 0
    assert 0.3 < shares[1] < 0.5


def test_sbm_features_are_centroids_without_noise() -> None:
    data = sbm("vertices=50,degree=4,communities=4,classes=4,features=6,noise=0")
    assert torch.unique(data.x, dim=0).size(0) == 4


def test_sbm_is_seeded() -> None:
    spec = "vertices=200,degree=6,communities=4,features=3,seed="
    one, again, other = sbm(spec + "1"), sbm(spec + "1"), sbm(spec + "2")
    assert torch.equal(one.edge_index, again.edge_index)
    assert torch.equal(one.x, again.x)
    assert not torch.equal(one.edge_index, other.edge_index)


@pytest.mark.parametrize(
    "spec", ["vertices=1,degree=0,communities=1", "vertices=9,degree=0", "vertices=5,degree=4,communities=1"]
)
def test_sbm_at_its_ends(spec: str) -> None:
    asked = parse_sbm(spec + ("" if "communities" in spec else ",communities=3"))
    data = sbm(spec + ("" if "communities" in spec else ",communities=3"))
    assert data.num_nodes == asked.vertices
    assert data.edge_index.size(1) == asked.vertices * asked.degree


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("sbm:nodes=10", "vertices, degree, communities, features, classes, seed, power, mixing, noise"),
        ("sbm:vertices", "whole number"),
        ("sbm:vertices=ten", "'ten'"),
        ("sbm:vertices=1.5", "whole number"),
        ("sbm:vertices=0", "from 1"),
        ("sbm:vertices=10,degree=20", "from 0 to 9; got 20"),
        ("sbm:mixing=1.5", "from 0 to 1; got 1.5"),
        ("sbm:mixing=nan", "nan"),
        ("sbm:power=1", "power"),
        ("sbm:communities=0", "communities"),
        ("sbm:seed=-1", "seed"),
    ],
)
def test_a_bad_spec(spec: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        parse_sbm(spec)


def test_a_made_graph_with_more_communities_than_vertices_is_refused_with_what_would_do() -> None:
    with pytest.raises(DataError, match="communities to be a number from 1 to 7; got 16") as caught:
        parse_sbm("sbm:vertices=7,degree=2")
    assert caught.value.hint == "sbm:...,communities=7"
