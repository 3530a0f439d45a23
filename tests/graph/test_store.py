"""What is saved comes back; what is missing, damaged or of another cut is refused."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
import torch
from graphs import cuts
from hypothesis import given, settings
from torch import Tensor
from torch_geometric.data import Data

from kagome.errors import PartitionError
from kagome.graph.partition import Partition, fingerprint, split_all
from kagome.graph.store import PAGE, Meta, describe, load_meta, load_part, save


def written(folder: Path, seed: int = 0) -> tuple[list[Partition], Meta]:
    data = Data(
        x=torch.randn(5, 3),
        y=torch.tensor([0, 1, 2, 0, 1]),
        edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]),
        num_nodes=5,
    )
    owner = torch.tensor([0, 0, 1, 1, 1])
    pieces = split_all(data, owner, 2, fingerprint=fingerprint(data, "metis", seed, 2))
    meta = describe(data, owner, pieces, method="metis", seed=seed, notes=["A note."])
    save(pieces, folder, meta)
    return pieces, meta


def same(one: Partition, other: Partition) -> bool:
    for field in dataclasses.fields(Partition):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, Tensor):
            equal = a.dtype == b.dtype and torch.equal(a, b)
        elif isinstance(a, dict):
            equal = a.keys() == b.keys() and all(
                torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a
            )
        else:
            equal = a == b and type(a) is type(b)
        if not equal:
            return False
    return True


@settings(max_examples=25, deadline=None)
@given(cuts())
def test_round_trip(cut: tuple[Data, Tensor, int]) -> None:
    data, owner, parts = cut
    pieces = split_all(data, owner, parts, fingerprint="f")
    with tempfile.TemporaryDirectory() as folder:
        save(pieces, folder, describe(data, owner, pieces, method="random", seed=3))
        assert all(same(piece, load_part(folder, piece.part)) for piece in pieces)


def test_the_page_says_all_that_a_rank_needs(tmp_path: Path) -> None:
    _, meta = written(tmp_path / "cut")
    read = load_meta(tmp_path / "cut")
    assert read == meta
    assert (read.num_classes, read.task, read.features, read.notes) == (3, "multiclass", 3, ("A note.",))
    assert read.quality.halo == (0, 1)
    assert sorted(file.name for file in (tmp_path / "cut").iterdir()) == [
        "part-00000.safetensors",
        "part-00001.safetensors",
        PAGE,
    ]


def test_a_partition_replaces_a_partition_and_nothing_else(tmp_path: Path) -> None:
    written(tmp_path / "cut", seed=0)
    _, meta = written(tmp_path / "cut", seed=1)
    assert load_meta(tmp_path / "cut") == meta
    assert [file.name for file in tmp_path.iterdir()] == ["cut"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with pytest.raises(PartitionError, match="something else is there"):
        written(tmp_path / "mine")
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PartitionError, match="cannot be"):
        written(tmp_path / "file" / "cut")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="kagome partition"):
        load_part(tmp_path, 0)


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    written(tmp_path / "cut")
    with pytest.raises(PartitionError, match=r"part 2 was asked for, but .* holds 2 parts"):
        load_part(tmp_path / "cut", 2)
    (tmp_path / "cut" / "part-00001.safetensors").unlink()
    with pytest.raises(PartitionError, match=r"part-00001\.safetensors is missing"):
        load_part(tmp_path / "cut", 1)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_part(tmp_path: Path, share: float) -> None:
    written(tmp_path / "cut")
    file = tmp_path / "cut" / "part-00000.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(PartitionError, match="damaged"):
        load_part(tmp_path / "cut", 0)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1, "quality": {}}', "\udcff"])
def test_a_damaged_page(tmp_path: Path, text: str) -> None:
    written(tmp_path / "cut")
    (tmp_path / "cut" / PAGE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PartitionError, match="damaged"):
        load_meta(tmp_path / "cut")


def test_a_page_of_another_format(tmp_path: Path) -> None:
    written(tmp_path / "cut")
    page = tmp_path / "cut" / PAGE
    page.write_text(json.dumps({**json.loads(page.read_text()), "format": 99}))
    with pytest.raises(PartitionError, match=r"format 1, but .* has format 99"):
        load_meta(tmp_path / "cut")


def test_a_part_of_another_cut(tmp_path: Path) -> None:
    written(tmp_path / "one", seed=0)
    written(tmp_path / "other", seed=1)
    name = "part-00000.safetensors"
    (tmp_path / "one" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(PartitionError, match="was expected, but the file holds"):
        load_part(tmp_path / "one", 0)
