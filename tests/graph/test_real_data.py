"""Real graphs have the sizes that their papers give; cuts of them are even. Needs the folder KAGOME_DATA."""

from __future__ import annotations

from pathlib import Path

import pytest

from kagome import config
from kagome.graph.datasets.load import load_data
from kagome.graph.partition.partitioners import assign
from kagome.graph.partition.quality import quality
from kagome.graph.structure.labels import labels_of

#: name: vertices, edges, features, classes, whether masks are given, vertices without label
TABLE = {
    "Cora": (2708, 10556, 1433, 7, True, 0),
    "CiteSeer": (3327, 9104, 3703, 6, True, 0),
    "Tolokers": (11758, 1038000, 10, 2, True, 0),
    "Minesweeper": (10000, 78804, 7, 2, True, 0),
    "squirrel": (5201, 217073, 2089, 5, True, 0),
    "chameleon": (2277, 36101, 2325, 5, True, 0),
    "actor": (7600, 30019, 932, 5, True, 0),
    "flickr-attributed": (7575, 479476, 12047, 9, False, 0),
    "blogcatalog-attributed": (5196, 343486, 8189, 6, False, 0),
    "cornell5": (18660, 1581554, 4735, 2, False, 1838),
    "johnshopkins55": (5180, 373172, 2406, 2, False, 418),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, data_folder: Path) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.some(6)
@pytest.mark.parametrize("name", TABLE)
def test_sizes(name: str, root: Path) -> None:
    vertices, edges, features, classes, masks, unlabelled = TABLE[name]
    data = load_data(config.Data(name=name, root=str(root)))
    assert (data.num_nodes, data.edge_index.size(1), data.x.size(1)) == (vertices, edges, features)
    assert (labels_of(data.y).outputs, labels_of(data.y).task) == (classes, "multiclass")
    assert int((data.y == -1).sum()) == unlabelled
    assert any("No masks given" in note for note in data.notes) != masks


def test_squirrel_as_gnnpipe_has_it(root: Path) -> None:
    data = load_data(config.Data(name="squirrel", root=str(root), undirected=True, self_loops=True))
    loops = int((data.edge_index[0] == data.edge_index[1]).sum())
    assert (data.edge_index.size(1) - loops, loops) == (396706, 5201)


def test_sparse_features_are_projected(root: Path) -> None:
    data = load_data(config.Data(name="flickr-attributed", root=str(root), project=64))
    assert data.x.shape == (7575, 64)
    assert not any("dense" in note for note in data.notes)


@pytest.mark.parametrize("file", ["ego-twitter", "soc-slashdot0902", "cit-hepph"])
def test_topology_alone(file: str, root: Path) -> None:
    data = load_data(config.Data(name=f"npz:snap/{file}.npz", root=str(root)))
    assert data.x.shape == (data.num_nodes, 128)
    assert labels_of(data.y).outputs == 16


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("name", ["squirrel", "Tolokers", "cornell5"])
def test_metis_evens_out_vertices_and_edges(name: str, parts: int, root: Path) -> None:
    data = load_data(config.Data(name=name, root=str(root)))
    found = quality(data.edge_index, assign("metis", data.edge_index, data.num_nodes, parts), parts)
    assert found.vertex_balance <= 1.26
    assert found.edge_balance <= 1.26


def test_no_part_of_flickr_has_most_of_either(root: Path) -> None:
    # One had 1.25 times the mean vertices, then (by the sum of both) 1.22: all others waited for its host.
    data = load_data(config.Data(name="flickr-attributed", root=str(root), project=16, undirected=True))
    found = quality(data.edge_index, assign("metis", data.edge_index, data.num_nodes, 4), 4)
    assert found.vertex_balance <= 1.03
    assert found.edge_balance <= 1.03
