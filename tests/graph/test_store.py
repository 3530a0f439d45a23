"""What is saved comes back; what is missing, damaged or of another cut is refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch_geometric.data import Data

from graphs import cuts
from kagome.errors import PartitionError
from kagome.graph.partition.partition import Partition, fingerprint, graph_of, split_all
from kagome.graph.partition.store import PAGE, Meta, describe, load_meta, load_part, save
from kagome.storage import sealed_files

CUTS = (("metis", 0, 2), ("random", 0, 2), ("metis", 1, 2), ("metis", 0, 3))


def written(folder: Path, seed: int = 0) -> tuple[list[Partition], Meta]:
    data = Data(
        x=torch.randn(5, 3),
        y=torch.tensor([0, 1, 2, 0, 1]),
        edge_index=torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]),
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
    assert (read.num_classes, read.labels, read.features, read.notes) == (3, meta.labels, 3, ("A note.",))
    assert read.quality.halo == (1, 1)
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
    with pytest.raises(PartitionError, match="new, empty or a partition; got other content"):
        written(tmp_path / "mine")
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PartitionError, match=r"to be written to .*; got"):
        written(tmp_path / "file" / "cut")


def test_a_rename_that_fails_leaves_the_old_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, _ = written(tmp_path / "cut")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError(errno.EIO, "the disk is gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PartitionError, match="got the disk is gone"):
        written(tmp_path / "cut", seed=1)
    assert all(same(piece, load_part(tmp_path / "cut", piece.part)) for piece in pieces)
    assert [found.name for found in tmp_path.iterdir()] == ["cut"]


def test_the_only_partition_is_kept_until_another_is_there(tmp_path: Path) -> None:
    # As a process leaves it that was killed between the two renames.
    hidden = tmp_path / ".cut.1.old"
    written(tmp_path / "cut")
    (tmp_path / "cut").rename(hidden)
    os.utime(hidden, (0, 0))

    def broken() -> Iterator[Partition]:
        raise OSError(errno.ENOSPC, "no space")
        yield

    with pytest.raises(PartitionError, match="no space"):
        save(broken(), tmp_path / "cut", load_meta(hidden))
    assert load_part(hidden, 0).part == 0
    for _ in range(2):  # the second finds a partition, so the hidden one is no longer needed
        written(tmp_path / "cut")
    assert not hidden.exists()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="kagome partition"):
        load_part(tmp_path, 0)


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    written(tmp_path / "cut")
    with pytest.raises(PartitionError, match=r"a part from 0 to 1 of the 2 parts in .*; got part 2"):
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
    facts = {**json.loads(page.read_text()), "format": 99}
    facts.pop(sealed_files.SEAL)
    sealed_files.write_page(page, facts)
    with pytest.raises(PartitionError, match=r"has format 99, and this version reads format 4"):
        load_meta(tmp_path / "cut")


def test_a_part_of_another_cut(tmp_path: Path) -> None:
    written(tmp_path / "one", seed=0)
    written(tmp_path / "other", seed=1)
    name = "part-00000.safetensors"
    (tmp_path / "one" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(PartitionError, match=r"part-00000\.safetensors has been altered"):
        load_part(tmp_path / "one", 0)
    resealed(tmp_path / "one", name)
    with pytest.raises(PartitionError, match=r"holds part 0 of 2 of the cut .* was expected"):
        load_part(tmp_path / "one", 0)


def test_the_fingerprint_names_the_graph_and_its_cut_apart(tmp_path: Path) -> None:
    pieces = [written(tmp_path / str(seed), seed)[0][0] for seed in (0, 1)]
    assert pieces[0].fingerprint != pieces[1].fingerprint
    x = torch.arange(15.0).view(5, 3)
    data = Data(x=x, edge_index=torch.tensor([[0], [1]]), num_nodes=5)
    marks = {graph_of(fingerprint(data, method, seed, parts)) for method, seed, parts in CUTS}
    assert len(marks) == 1
    data.x = x + torch.eye(5, 3) * 1e-6
    assert graph_of(fingerprint(data, *CUTS[0])) not in marks


# Altered -------------------------------------------------------------------------------------------


def resealed(folder: Path, *names: str, **facts: Any) -> None:
    """Make a page that says that all of it belongs there, as one who edits a partition on purpose would."""
    page = {**json.loads((folder / PAGE).read_text()), **facts}
    page.pop(sealed_files.SEAL)
    for name in names:
        page["files"][name] = [
            (folder / name).stat().st_size,
            f"{zlib.crc32((folder / name).read_bytes()):08x}",
        ]
    sealed_files.write_page(folder / PAGE, page)


def test_each_flipped_bit_is_noticed(tmp_path: Path) -> None:
    written(tmp_path / "cut")
    draw = random.Random(0)
    for file in sorted((tmp_path / "cut").iterdir()):
        whole = file.read_bytes()
        for _ in range(60):
            flipped = bytearray(whole)
            flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            with pytest.raises(PartitionError, match=rf"damaged files: {file.name} "):
                [load_part(tmp_path / "cut", part) for part in (0, 1)]
        file.write_bytes(whole)


def edited(
    name: str, change: Callable[[Tensor], Tensor]
) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda tensors, _: tensors.update({name: change(tensors[name])})


def told(**facts: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda _, said: said.update(facts)


def put(index: Any, value: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy[index] = value
        return copy

    return change


EDITS = {
    "own holds -3": edited("own", put(0, -3)),
    "own holds 99": edited("own", put(-1, 99)),
    "own is not ascending": edited("own", lambda ids: ids.flip(0)),
    "own has the shape .* torch.float32": edited("own", lambda ids: ids.float()),
    "halo holds -1": edited("halo", put(0, -1)),
    "is in own and in the halo": edited("halo", put(0, 2)),
    "edge_index.0. holds 40": edited("edge_index", put((0, 0), 40)),
    "edge_index.1. holds -1": edited("edge_index", put((1, 0), -1)),
    "no edge reads vertex": edited("edge_index", put((0, 0), 0)),
    "edge_index is": edited("edge_index", lambda ids: ids.t().contiguous()),
    "edge_ids is not ascending": edited("edge_ids", lambda ids: ids.flip(0)),
    "vertices, in-edges and halo rows": edited("own", lambda ids: ids[1:]),
    "send holds 7": edited("send", put(0, 7)),
    "send_counts come to": edited("send", lambda ids: torch.cat([ids, ids])),
    "send_counts is no count": told(send_counts=[1]),
    "recv_counts is no count": told(recv_counts=["a", 1]),
    "recv_counts come to": told(recv_counts=[10**12, 0]),
    "recv_counts is no count ": told(recv_counts=[2, -1]),
    "num_nodes is ": told(num_nodes=-5),
    "of a graph of 6 vertices": told(num_nodes=6),
    "num_edges is ": told(num_edges="5"),
    "last_vertex is 5": told(last_vertex=5),
    "missing|part": told(part=None),
    "y goes from 0 to 9": edited("node.y", put(0, 9)),
    "y is torch.int16": edited("node.y", lambda y: y.short()),
    "x is torch.float64": edited("node.x", lambda x: x.double()),
    "node.x is torch.float32 .2. here": edited("node.x", lambda x: x[:, :2].contiguous()),
    "x is .2, 3., where a row for each vertex of 3": edited("node.x", lambda x: x[:2]),
    "node.y is missing here": lambda tensors, _: tensors.pop("node.y"),
    "node.more is .* here, and missing": lambda tensors, _: tensors.update({"node.more": torch.zeros(3)}),
    "'send'": lambda tensors, _: tensors.pop("send"),
    "unexpected keyword": told(more=1),
}


@pytest.mark.parametrize("says", EDITS)
def test_a_part_that_does_not_hang_together_is_refused(tmp_path: Path, says: str) -> None:
    """Its checksum is right: only its structure tells."""
    written(tmp_path / "cut")
    file = tmp_path / "cut" / "part-00001.safetensors"
    tensors, text = sealed_files.read_tensors(file)
    tensors, facts = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(text)
    EDITS[says](tensors, facts)
    sealed_files.write_tensors(file, tensors, json.dumps(facts))
    resealed(tmp_path / "cut", file.name)
    with pytest.raises(PartitionError, match=rf"damaged files: (.|\n)*({says})"):
        load_part(tmp_path / "cut", 1)


@pytest.mark.parametrize(
    "facts",
    [
        {"num_nodes": 6},
        {"num_edges": 3},
        {"num_nodes": -5},
        {"num_parts": 3},
        {"num_parts": 10**12},
        {"num_classes": "3"},
        {"features": 2},
        {"task": "other"},
        {"seed": None},
        {"notes": [1]},
        {"quality": {}},
        {"files": {}},
        {"files": {"../x": [1, "a"]}},
        {"attributes": {"node.x": 1}},
        {"attributes": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_page_that_does_not_hang_together_is_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    written(tmp_path / "cut")
    resealed(tmp_path / "cut", **facts)
    with pytest.raises(PartitionError, match=r"damaged files: \S+"):
        load_meta(tmp_path / "cut")


def test_no_file_of_a_partition_can_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for name in (PAGE, "part-00000.safetensors"):
        written(tmp_path / "cut")
        (tmp_path / "cut" / name).write_bytes(pickle.dumps(Runs(mark)))
        if name != PAGE:
            resealed(tmp_path / "cut", name)
        with pytest.raises(PartitionError, match="damaged"):
            load_part(tmp_path / "cut", 0)
        assert not mark.exists()


class Runs:
    """What a pickle of it would do to the one who reads it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.mark, "it ran"))


def test_what_a_killed_writer_left_goes_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".cut.4.new"
    left.mkdir()
    os.utime(left, (1, 1))
    written(tmp_path / "cut")
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]
