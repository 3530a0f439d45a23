"""Kept partitions: found while nothing that decides them changes, never half, and never too many."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kagome import config
from kagome.graph.datasets.load import raw_files
from kagome.graph.partition import cache
from kagome.graph.partition.cache import Cache, owner_key, parts_key, shown
from kagome.graph.prepare import owners, prepare
from kagome.graph.structure.validate import validate

SBM = "sbm:vertices=60,degree=4,features=3,classes=2,communities=2"


def key(data: config.Data, **changed: Any) -> str | None:
    return parts_key(data, raw_files(data), **{"method": "metis", "seed": 0, "parts": 2, **changed})


def npz(path: Path, last: int = 2) -> config.Data:
    np.savez(path, edge_index=np.array([[0, 1, 2], [1, 2, last]]), y=np.array([0, 1, 0]))
    return config.Data(name=f"npz:{path}")


def kept(shelf: Cache, name: str, parts: int = 2) -> Path:
    with shelf.making() as fresh:
        assert fresh is not None
        prepare(config.Data(name=SBM), method="metis", seed=0, parts=parts, folder=fresh / "parts")
        entry = shelf.keep(name, fresh / "parts")
    assert entry is not None
    return entry


def test_the_key_knows_settings_method_seed_and_parts() -> None:
    plain = config.Data(name=SBM)
    found = {key(plain), key(plain, method="auto"), key(plain, seed=1), key(plain, parts=3)}
    found |= {
        key(config.Data(name=SBM, **more)) for more in ({"undirected": True}, {"split": 1}, {"project": 2})
    }
    assert len(found) == 7
    assert None not in found
    assert key(plain) == key(config.Data(name=SBM, root="elsewhere"))


def test_the_key_knows_size_and_time_of_a_raw_file(tmp_path: Path) -> None:
    data = npz(tmp_path / "g.npz")
    file = tmp_path / "g.npz"
    first = key(data)
    assert first == key(data)
    facts = file.stat()
    npz(file, last=1)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert file.stat().st_size == facts.st_size
    assert key(data) != first
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert key(data) == first
    file.write_bytes(file.read_bytes() + b"x")
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert key(data) != first


def test_the_key_knows_the_raw_files_of_pyg(tmp_path: Path) -> None:
    file = tmp_path / "heterophilous" / "minesweeper" / "raw" / "minesweeper.npz"
    data = config.Data(name="Minesweeper", root=str(tmp_path))
    file.parent.mkdir(parents=True)
    file.write_bytes(b"1")
    first = key(data)
    file.write_bytes(b"22")
    assert None not in (first, key(data))
    assert key(data) != first


def test_what_only_loading_can_tell_has_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAGOME_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("python:module:function", "npz:nowhere.npz", "Cora", "ogb:ogbn-none", "pyg:KarateClub"):
        assert key(config.Data(name=name, root=str(tmp_path))) is None


def test_the_key_knows_kagome_s_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = key(config.Data(name=SBM)), owner_key("f")
    (tmp_path / "kernels.py").write_text("other")
    monkeypatch.setattr(cache, "_CODE", tmp_path)
    assert key(config.Data(name=SBM)) != before[0]
    assert owner_key("f") != before[1]


def test_parts_are_found_again(tmp_path: Path) -> None:
    shelf = Cache(tmp_path / "deep" / "cache")
    assert shelf.parts("a") is None
    entry = kept(shelf, "a")
    found = shelf.parts("a")
    assert found is not None
    assert (found[0], found[1].num_parts, found[1].method) == (entry, 2, "metis")
    assert [file.name for file in shelf.folder.iterdir()] == ["a"]  # nothing half-made is left


@pytest.mark.parametrize("damage", ["cut", "lost", "page", "other"])
def test_a_damaged_entry_is_thrown_away(tmp_path: Path, damage: str) -> None:
    shelf = Cache(tmp_path)
    part = kept(shelf, "a") / "part-00001.safetensors"
    if damage == "cut":
        part.write_bytes(part.read_bytes()[:-9])
    elif damage == "lost":
        part.unlink()
    elif damage == "page":
        (part.parent / "partition.json").write_text("{")
    else:
        part.write_bytes((kept(shelf, "b", 3) / part.name).read_bytes())
    assert shelf.parts("a") is None
    assert not part.parent.exists()
    kept(shelf, "a")
    assert shelf.parts("a") is not None


def test_two_makers_of_one_entry(tmp_path: Path) -> None:
    shelf = Cache(tmp_path)
    together = threading.Barrier(2)
    entries: list[Path | None] = []

    def make() -> None:
        with shelf.making() as fresh:
            assert fresh is not None
            prepare(config.Data(name=SBM), method="metis", seed=0, parts=2, folder=fresh / "parts")
            together.wait(30)
            entries.append(shelf.keep("a", fresh / "parts"))

    makers = [threading.Thread(target=make) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert entries == [tmp_path / "a"] * 2
    assert shelf.parts("a") is not None
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_reader_keeps_what_is_thrown_away(tmp_path: Path) -> None:
    from kagome.graph.partition.store import load_part

    shelf = Cache(tmp_path)
    part = load_part(kept(shelf, "a"), 0)
    shelf.drop(tmp_path / "a")
    assert shelf.parts("a") is None
    assert int(part.edge_index.sum()) >= 0
    assert part.nodes["x"].isfinite().all()


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    shelf = Cache(tmp_path, limit_entries=2)
    for age, name in ((30, "a"), (20, "b"), (10, "c")):
        entry = kept(shelf, name)
        os.utime(entry, (time.time() - age, time.time() - age))
    assert shelf.parts("a") is not None  # used just now
    shelf.sweep()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "c"]
    Cache(tmp_path, limit_bytes=cache.size(tmp_path / "a")).sweep()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    Cache(tmp_path, limit_bytes=0).sweep()
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_process_left_goes_at_the_next_start(tmp_path: Path) -> None:
    """Not what a process is at work on, however old, and not what was made this moment."""
    with Cache(tmp_path).making() as alive:
        assert alive is not None
        for name, age in ((".making-old", 100), (".gone-x-1", 100), (".making-new", 0), (alive.name, 10**6)):
            (tmp_path / name).mkdir(exist_ok=True)
            os.utime(tmp_path / name, (time.time() - age, time.time() - age))
        with Cache(tmp_path).making() as fresh:
            assert fresh is not None
            left = {entry.name for entry in tmp_path.iterdir()}
            assert left == {".making-new", alive.name, fresh.name}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shelf = Cache(tmp_path / "file" / "cache")
    with shelf.making() as fresh:
        assert fresh is None
    shelf.keep_owner("a", torch.tensor([0, 1]))
    shelf.sweep()
    assert shelf.parts("a") is None
    assert shelf.owner("a", 2, 2) is None


def test_owners_are_found_again_if_they_fit(tmp_path: Path) -> None:
    shelf = Cache(tmp_path)
    owner = torch.tensor([0, 2, 1, 0])
    shelf.keep_owner("a", owner)
    found = shelf.owner("a", 4, 3)
    assert found is not None
    assert (found.tolist(), found.dtype) == (owner.tolist(), torch.int64)
    for count, parts in ((5, 3), (4, 2)):
        shelf.keep_owner("b", owner)
        assert shelf.owner("b", count, parts) is None
        assert not (tmp_path / "b").exists()
    (tmp_path / "a" / cache.OWNERS).write_bytes(b"\x93NUMPY")
    assert shelf.owner("a", 4, 3) is None


def test_owners_of_a_graph_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kagome.graph import prepare as module
    from kagome.graph.datasets.builtin import sbm

    data = validate(sbm(SBM))[0]
    shelf = Cache(tmp_path)
    made, nowhere = owners(data, "mark", method="metis", seed=0, parts=3, kept=shelf)
    assert nowhere is None
    monkeypatch.setattr(module, "assign", None)
    again, entry = owners(data, "mark", method="metis", seed=0, parts=3, kept=shelf)
    assert torch.equal(made, again)
    assert entry == tmp_path / owner_key("mark")
    for mark, method, where in (
        ("other", "metis", shelf),
        ("mark", "random", shelf),
        ("mark", "metis", None),
    ):
        with pytest.raises(TypeError):  # there is nothing to take: it would be cut
            owners(data, mark, method=method, seed=0, parts=3, kept=where)


def test_a_path_is_shown_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert shown(tmp_path / "cache" / f"parts-{'ab' * 16}") == "~/cache/parts-abababab"
    assert shown(Path("/else/parts-0123456789")) == "/else/parts-01234567"
