"""Names, files and functions become graphs; what cannot be had ends in an error that says what to do."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.datasets
from torch_geometric.data import Data, HeteroData, InMemoryDataset

from kagome import config
from kagome.errors import ConfigError, DataError
from kagome.graph.datasets import catalog, download, raw_files
from kagome.graph.datasets.load import load_data
from kagome.graph.datasets.npz import read_npz


@pytest.fixture(autouse=True)
def no_shared_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data set but what a test makes; a cache of its own; a network that refuses at once."""
    monkeypatch.delenv("KAGOME_DATA", raising=False)
    monkeypatch.delenv("KAGOME_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(name: str, root: Path | str = "nowhere", **flags: Any) -> Data:
    return load_data(config.Data(name=name, root=str(root), **flags))


def bipartite(path: Path, **more: Any) -> str:
    np.savez(path, **{"edge_index": np.array([[0, 1, 2], [1, 2, 2]], np.int32), **more})
    return f"npz:{path}"


def minesweeper(folder: Path) -> Path:
    """Raw files of a data set of PyG, tiny."""
    file = folder / "heterophilous" / "minesweeper" / "raw" / "minesweeper.npz"
    file.parent.mkdir(parents=True)
    split = np.zeros((10, 6), bool)
    train, val, test = split.copy(), split.copy(), split.copy()
    train[:, :3], val[:, 3], test[:, 4:] = True, True, True
    np.savez(
        file,
        node_features=np.ones((6, 7), np.float32),
        node_labels=np.array([0, 1, 0, 1, 0, 1]),
        edges=np.array([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]),
        train_masks=train,
        val_masks=val,
        test_masks=test,
    )
    return file


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class of PyG whose raw file says what it does."""

    class Invented(InMemoryDataset):  # type: ignore[misc]
        raw_file_names = "graph.txt"
        processed_file_names = "data.pt"

        def __init__(self, root: str) -> None:
            super().__init__(root)
            self.load(self.processed_paths[0], data_cls=HeteroData if self.word == "hetero" else Data)

        @property
        def word(self) -> str:
            return Path(self.raw_paths[0]).read_text().split()[0]

        def download(self) -> None:
            Path(self.raw_paths[0]).write_text("graphs 1")

        def process(self) -> None:
            if self.word == "import":
                raise ImportError("No module named 'odd'", name="odd")
            self.save(
                [HeteroData(a={"x": torch.ones(2, 1)})]
                if self.word == "hetero"
                else [Data(x=torch.ones(2, 1))] * 2,
                self.processed_paths[0],
            )

    monkeypatch.setattr(torch_geometric.datasets, "Invented", Invented, raising=False)
    return Invented


class TestBuiltin:
    def test_digits_is_the_default(self) -> None:
        data = load_data(config.Data())
        assert (data.num_nodes, tuple(data.notes)) == (1797, ())

    def test_sbm(self) -> None:
        assert load("sbm:vertices=50,degree=4,features=3,communities=4").num_nodes == 50

    def test_an_unknown_name_lists_the_ways(self) -> None:
        with pytest.raises(DataError, match=r"digits, sbm:.*Cora.*npz:FILE.*got 'Coraa'"):
            load("Coraa")


class TestFlags:
    def test_undirected(self, tmp_path: Path) -> None:
        weight = np.array([1.0, 2.0, 3.0])
        data = load(bipartite(tmp_path / "g.npz", edge_weight=weight), undirected=True)
        assert data.edge_index.tolist() == [[0, 1, 2, 1, 2], [1, 2, 2, 0, 1]]
        assert data.edge_weight.tolist() == [1, 2, 3, 1, 2]
        assert not any("directed" in note for note in data.notes)

    def test_self_loops(self, tmp_path: Path) -> None:
        data = load(bipartite(tmp_path / "g.npz", edge_attr=np.full((3, 2), 5.0)), self_loops=True)
        assert data.edge_index.tolist() == [[0, 1, 2, 0, 1], [1, 2, 2, 0, 1]]
        assert data.edge_attr[:, 0].tolist() == [5, 5, 5, 1, 1]

    @pytest.mark.parametrize("kind", ["dense", "coo", "csr"])
    def test_project(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        x = torch.randn(30, 200)
        given = {"dense": x, "coo": x.to_sparse_coo(), "csr": x.to_sparse_csr()}[kind]
        data = Data(
            x=given, y=torch.zeros(30, dtype=torch.long), edge_index=torch.empty(2, 0, dtype=torch.long)
        )
        serve(monkeypatch, lambda: data)
        small = load("python:served:make", project=100)
        assert small.x.shape == (30, 100)
        # Lengths are kept, up to about 1 / sqrt(100).
        assert float((small.x.norm(dim=1) / x.norm(dim=1) - 1).abs().max()) < 0.4
        assert torch.allclose(small.x, load("python:served:make", project=100).x)
        assert any("from 200 to 100 columns" in note for note in small.notes)
        assert data.x is given

    def test_project_to_nothing(self) -> None:
        with pytest.raises(ConfigError, match="to be 1 or more; got 0"):
            load("digits", project=0)

    def test_split(self, tmp_path: Path) -> None:
        masks = {
            f"{name}_mask": np.eye(3, dtype=bool)[:, [i, (i + 1) % 3]]
            for i, name in enumerate(("train", "val"))
        }
        name = bipartite(tmp_path / "g.npz", y=np.array([0, 1, 0]), **masks)
        assert load(name, split=0).train_mask.tolist() == [True, False, False]
        assert load(name, split=1).train_mask.tolist() == [False, True, False]
        with pytest.raises(DataError, match="less than the number of splits, 2; got 2"):
            load(name, split=2)

    def test_flags_on_a_faulty_graph(self, tmp_path: Path) -> None:
        name = bipartite(tmp_path / "g.npz", num_nodes=2)
        with pytest.raises(DataError, match=r"edge_index\[0, 2\] = 2"):
            load(name, undirected=True, self_loops=True)


class TestNpz:
    def test_what_it_has_not_is_made_and_said(self, tmp_path: Path) -> None:
        data = load(bipartite(tmp_path / "g.npz", num_nodes=40))
        assert data.x.shape == (40, 128)
        assert 0 <= int(data.y.min()) <= int(data.y.max()) < 16
        assert [words in " ".join(data.notes) for words in ("128 normal", "16 classes", "60/20/20")] == [
            True
        ] * 3
        assert torch.equal(data.x, load(f"npz:{tmp_path / 'g.npz'}").x)

    def test_what_it_has_is_kept(self, tmp_path: Path) -> None:
        data = load(
            bipartite(tmp_path / "g.npz", x=np.ones((3, 2)), y=np.array([0, 1, 0]), edge_weight=np.ones(3))
        )
        assert data.x.tolist() == [[1, 1]] * 3
        assert "edge_weight" in data

    def test_csr(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "g.npz", indptr=np.array([0, 2, 2, 3]), indices=np.array([1, 2, 0]))
        data = load("npz:g.npz", tmp_path)
        assert data.edge_index.tolist() == [[0, 0, 2], [1, 2, 0]]
        assert data.num_nodes == 3

    @pytest.mark.parametrize("indptr", [[], [1, 3], [0, 2], [0, 3, 1, 3]])
    def test_bad_csr(self, tmp_path: Path, indptr: list[int]) -> None:
        np.savez(tmp_path / "g.npz", indptr=np.array(indptr, np.int64), indices=np.array([0, 0, 0]))
        with pytest.raises(DataError, match="rise from 0 to the number of indices"):
            load(f"npz:{tmp_path / 'g.npz'}")

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 0.95])
    def test_truncated(self, tmp_path: Path, share: float) -> None:
        name = bipartite(tmp_path / "g.npz", x=np.random.rand(3, 500))
        file = tmp_path / "g.npz"
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
        with pytest.raises(DataError, match=r"whole \.npz file"):
            load(name)

    def test_other_files(self, tmp_path: Path) -> None:
        (tmp_path / "text.npz").write_text("0 1\n1 2\n")
        np.save(tmp_path / "array.npy", np.ones(3))
        np.savez(tmp_path / "objects.npz", edge_index=np.array([{}], dtype=object))
        for file in ("text.npz", "array.npy", "objects.npz"):
            with pytest.raises(DataError, match=r"whole \.npz file|got Python objects"):
                load(f"npz:{file}", tmp_path)

    def test_an_array_whose_name_was_altered_is_not_left_out(self, tmp_path: Path) -> None:
        """One bit of the archive's directory, and the labels were gone without a word."""
        file = tmp_path / "g.npz"
        name = bipartite(file, y=np.array([0, 1, 0]))
        held = file.read_bytes()
        at = held.rindex(b"y.npy") + 1
        file.write_bytes(held[:at] + b"," + held[at + 1 :])
        with pytest.raises(DataError, match=r"whole \.npz file.*File name in directory 'y,npy'"):
            load(name)

    def test_what_else_is_in_an_archive_is_told_of(self, tmp_path: Path) -> None:
        bipartite(tmp_path / "g.npz")
        with zipfile.ZipFile(tmp_path / "g.npz", "a") as archive:
            archive.writestr("README", "by hand")
        found, said = read_npz(tmp_path / "g.npz")
        assert list(found) == ["edge_index"]
        assert said == ["the file 'README' in g.npz is not read: it is no array (.npy)."]

    def test_missing_file_and_missing_edges(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"g\.npz; got no such file in"):
            load("npz:g.npz", tmp_path)
        np.savez(tmp_path / "g.npz", edges=np.ones((2, 3)))
        with pytest.raises(DataError, match="indptr and indices; got edges"):
            load("npz:g.npz", tmp_path)


def serve(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    module = types.ModuleType("served")
    module.make = make  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "served", module)


class TestFunction:
    def test_a_module_in_the_current_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "my_graph_of_tests.py").write_text(
            "from kagome.graph.datasets.builtin import sbm\n"
            "def make(): return sbm('vertices=20,degree=2,features=2')\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        assert load("python:my_graph_of_tests:make").num_nodes == 20

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("python:served", "package.module:function"),
            ("python:no_such_module_here:f", "no module no_such_module_here"),
            ("python:served:other", "a function other; got none"),
            ("python:served:number", "a function number; got a int"),
        ],
    )
    def test_no_function(self, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
        serve(monkeypatch, Data)
        with pytest.raises(DataError, match=said):
            load(name)

    def test_it_must_return_a_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        serve(monkeypatch, lambda: [1])
        with pytest.raises(DataError, match="got a list"):
            load("python:served:make")

    def test_its_own_faults_are_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        serve(monkeypatch, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load("python:served:make")


class TestOgb:
    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ogb", None)
        monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
        with pytest.raises(DataError, match="pip install ogb"):
            load("ogb:ogbn-arxiv")

    def test_its_split_becomes_masks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = Data(
            x=torch.ones(4, 2), y=torch.tensor([[0], [1], [0], [1]]), edge_index=torch.tensor([[0], [1]])
        )

        class Fake(list):  # type: ignore[type-arg]
            def __init__(self, name: str, root: str) -> None:
                if name == "ogbn-none":
                    raise EOFError("This will download 2 GB. Will you proceed?")
                super().__init__([data])

            def get_idx_split(self) -> dict[str, torch.Tensor]:
                return {"train": torch.tensor([0, 3]), "valid": torch.tensor([1]), "test": torch.tensor([2])}

        module = types.ModuleType("ogb.nodeproppred")
        module.PygNodePropPredDataset = Fake  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
        monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
        loaded = load("ogb:ogbn-tiny")
        assert loaded.train_mask.tolist() == [True, False, False, True]
        assert loaded.y.tolist() == [[0], [1], [0], [1]]
        with pytest.raises(DataError, match="ogbn_none, and a download that failed"):
            load("ogb:ogbn-none")


class TestPyg:
    def test_a_class_without_files(self) -> None:
        assert load("pyg:KarateClub").num_nodes == 34

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("pyg:NoSuchClass", "got 'NoSuchClass'"),
            ("pyg:WebKB", "a name for pyg:WebKB; got none"),
            ("pyg:WebKB:nowhere", "a name that WebKB knows; got 'nowhere'"),
            ("pyg:Actor:x", "without a name; got 'x'"),
            ("pyg:SuiteSparseMatrixCollection:x", "but root and name; got group"),
        ],
    )
    def test_a_name_that_cannot_be(self, name: str, said: str, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=said):
            load(name, tmp_path)

    @pytest.mark.parametrize("short", catalog.names())
    def test_every_short_name_knows_its_raw_files(self, short: str) -> None:
        entry = catalog.find(short)
        assert catalog.find(short.upper()) == entry
        assert catalog.raw_files(catalog.class_of(entry), entry)

    @pytest.mark.parametrize("inside", [True, False])
    def test_raw_files_under_root(
        self, tmp_path: Path, inside: bool, capfd: pytest.CaptureFixture[str]
    ) -> None:
        minesweeper(tmp_path)
        data = load("Minesweeper", tmp_path / "heterophilous" if inside else tmp_path)
        assert data.edge_index.size(1) == 10
        assert (tmp_path / "heterophilous" / "minesweeper" / "processed").is_dir()
        assert capfd.readouterr() == ("", "")

    def test_shared_raw_files_are_linked_and_not_written_to(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = minesweeper(tmp_path / "shared")
        monkeypatch.setenv("KAGOME_DATA", str(tmp_path / "shared"))
        before = sorted((tmp_path / "shared").rglob("*"))
        assert load("minesweeper", tmp_path / "mine").num_nodes == 6
        assert sorted((tmp_path / "shared").rglob("*")) == before
        link = tmp_path / "mine" / "heterophilous" / "minesweeper" / "raw" / "minesweeper.npz"
        assert link.resolve() == file.resolve()
        assert load("Minesweeper", tmp_path / "shared").num_nodes == 6, "root is the shared folder itself"
        assert sorted((tmp_path / "shared").rglob("*")) == before

    def test_a_read_only_root_is_not_written_to(self, tmp_path: Path) -> None:
        minesweeper(tmp_path / "data")
        folders = [tmp_path / "data", *(f for f in (tmp_path / "data").rglob("*") if f.is_dir())]
        before = sorted((tmp_path / "data").rglob("*"))
        for folder in folders:
            folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        try:
            assert load("Minesweeper", tmp_path / "data").num_nodes == 6
            assert sorted((tmp_path / "data").rglob("*")) == before
        finally:
            for folder in folders:
                folder.chmod(0o755)
        assert (tmp_path / "cache" / "kagome" / "heterophilous").is_dir()

    def test_a_broken_cache_is_made_again(self, tmp_path: Path) -> None:
        minesweeper(tmp_path)
        load("Minesweeper", tmp_path)
        cache = tmp_path / "heterophilous" / "minesweeper" / "processed" / "data.pt"
        cache.write_bytes(cache.read_bytes()[:100])
        assert load("Minesweeper", tmp_path).num_nodes == 6

    def test_a_broken_raw_file(self, tmp_path: Path) -> None:
        file = minesweeper(tmp_path)
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(DataError, match=r"cannot be read.*\n.*truncated"):
            load("Minesweeper", tmp_path)

    def test_what_cannot_be_had_says_which_files_go_where(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(download, "_watched", lambda command, folder: (1, "no network"))
        with pytest.raises(DataError) as caught:
            load("PubMed", tmp_path)
        for words in ("no network", "PubMed/raw/ind.pubmed.x", str(tmp_path / "planetoid"), "KAGOME_DATA"):
            assert words in str(caught.value)
        assert not list((tmp_path / "planetoid").glob(".download*"))

    def test_a_silent_server_is_given_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(download, "SILENCE_SECONDS", 0.3)
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        assert download._watched(sleep, tmp_path) == (1, "nothing arrived for 0.3 s")

    def test_a_file_that_goes_while_it_is_weighed_weighs_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "there").write_bytes(b"12345")
        (tmp_path / "going").symlink_to(tmp_path / "gone")  # is_file said yes a moment ago
        monkeypatch.setattr(Path, "is_file", lambda self: True)
        assert download._bytes_in(tmp_path) == 5

    def test_a_download_arrives_whole_or_not_at_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = minesweeper(tmp_path / "server")

        def bring(command: list[str], folder: Path) -> tuple[int, str]:
            target = folder / "minesweeper" / "raw" / "minesweeper.npz"
            target.parent.mkdir(parents=True)
            target.write_bytes(file.read_bytes()[:100])
            return 1, "cut off"

        monkeypatch.setattr(download, "_watched", bring)
        with pytest.raises(DataError, match="cut off"):
            load("Minesweeper", tmp_path / "mine")
        assert not list((tmp_path / "mine").rglob("*.npz"))

    def test_a_download_is_moved_into_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = minesweeper(tmp_path / "server")

        def bring(command: list[str], folder: Path) -> tuple[int, str]:
            target = folder / "minesweeper" / "raw" / "minesweeper.npz"
            target.parent.mkdir(parents=True)
            target.write_bytes(file.read_bytes())
            return 0, ""

        monkeypatch.setattr(download, "_watched", bring)
        assert load("Minesweeper", tmp_path / "mine").num_nodes == 6
        monkeypatch.setattr(download, "_watched", lambda command, folder: pytest.fail("asked again"))
        assert load("Minesweeper", tmp_path / "mine").num_nodes == 6

    def test_a_download_fetches_and_does_not_process(self, tmp_path: Path, invented: type) -> None:
        download.fetch("Invented", None, str(tmp_path))
        assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["graph.txt"]

    def test_a_download_that_fails_says_its_last_words(self, tmp_path: Path) -> None:
        fail = [sys.executable, "-c", "raise OSError('no route')"]
        assert download._watched(fail, tmp_path) == (1, "OSError: no route")
        assert download._watched([sys.executable, "-c", ""], tmp_path)[0] == 0

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("graphs 2", "with 2 graphs"),
            ("import", "a package for Invented"),
            ("hetero", "HeteroData"),
        ],
    )
    def test_what_a_class_may_hold(self, tmp_path: Path, invented: type, text: str, said: str) -> None:
        (tmp_path / "raw").mkdir()
        (tmp_path / "raw" / "graph.txt").write_text(text)
        with pytest.raises(DataError, match=said):
            load("pyg:Invented", tmp_path)

    @pytest.mark.slow
    def test_several_processes_at_once(self, tmp_path: Path) -> None:
        minesweeper(tmp_path / "shared")
        call = (
            "from kagome.config import Data; from kagome.graph.datasets.load import load_data; "
            f"print(load_data(Data(name='Minesweeper', root={str(tmp_path / 'mine')!r})).num_nodes)"
        )
        settings = {**os.environ, "KAGOME_DATA": str(tmp_path / "shared"), "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([sys.executable, "-c", call], env=settings, stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        assert [process.communicate(timeout=120)[0] for process in started] == ["6\n"] * 3

    def test_a_folder_that_stays_locked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(raw_files, "LOCK_SECONDS", 0)
        with (
            raw_files._locked(tmp_path),
            pytest.raises(DataError, match="another process"),
            raw_files._locked(tmp_path),
        ):
            pass

    def test_no_folder_to_work_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
        with pytest.raises(DataError, match="cannot be written"):
            load("Cora", tmp_path / "file" / "root")


class TestNpzArrays:
    @pytest.mark.parametrize("kind", [">f4", ">f8", "<f2", "<f8", "u1", "?", ">i8", "u2", "u4"])
    def test_numbers_arrive_as_they_are_in_any_byte_order(self, tmp_path: Path, kind: str) -> None:
        x = (np.arange(6).reshape(3, 2) % 2).astype(kind)
        found = load(bipartite(tmp_path / "g.npz", x=x)).x
        assert np.array_equal(found.numpy(), x)
        assert found.is_floating_point() == (np.dtype(kind).kind == "f")

    @pytest.mark.parametrize(
        ("arrays", "words"),
        [
            ({"x": np.ones((3, 2), "g")}, "x to hold numbers(.|\n)*float64"),
            ({"x": np.ones((3, 2), complex)}, "real"),
            ({"x": np.float32(1)}, "x to have a row a vertex"),
            ({"y": np.array(["a", "b", "c"])}, "y to hold numbers; got str"),
            ({"y": np.zeros(3, "i4,f4")}, "y to hold numbers; got records"),
            ({"train_mask": np.array(["a"] * 3)}, "train_mask to hold numbers"),
            ({"y": np.array([2**63, 0, 0], "u8")}, "end at 2"),
            ({"edge_weight": np.ones(3) > 0}, "one number an edge"),
            ({"edge_weight": np.array("text")}, "edge_weight to be a tensor of numbers"),
            ({"edge_weight": np.ones((3, 2))}, "edge_attr"),
            ({"num_nodes": np.array([3, 3])}, "one whole number"),
            ({"num_nodes": np.float64("nan")}, "one whole number"),
            ({"num_nodes": np.float64("inf")}, "one whole number"),
            ({"num_nodes": 10**12}, "at most"),
            ({"num_nodes": 2 * 10**9}, "to make features for"),
        ],
    )
    def test_arrays_that_are_refused(self, tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
        with pytest.raises(DataError, match=words):
            load(bipartite(tmp_path / "g.npz", **arrays))

    @pytest.mark.parametrize("name", ["indptr", "indices"])
    @pytest.mark.parametrize("odd", [np.array([0.0, 1.5]), np.array([[0, 1]]), np.array(3)])
    def test_lists_of_neighbours_are_whole_numbers(self, tmp_path: Path, name: str, odd: Any) -> None:
        arrays = {"indptr": np.array([0, 1, 1]), "indices": np.array([1]), name: odd}
        np.savez(tmp_path / "g.npz", **arrays)
        with pytest.raises(DataError, match=f"{name} to be a list of whole numbers"):
            load(f"npz:{tmp_path / 'g.npz'}")

    def test_other_arrays_are_attributes_or_named(self, tmp_path: Path) -> None:
        more = {
            "notes": np.ones(7),
            "keys": np.ones(3),
            "words": np.array(["a", "b"]),
            "title": np.array("T"),
        }
        data = load(bipartite(tmp_path / "g.npz", **more))
        assert data.title == "T"
        said = " ".join(data.notes)
        assert "'keys' of g.npz is not read" in said
        assert "'words' of g.npz is not read: it holds str" in said

    def test_a_header_that_claims_terabytes(self, tmp_path: Path) -> None:
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 5), }"
        with zipfile.ZipFile(tmp_path / "g.npz", "w") as archive:
            archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
        with pytest.raises(DataError, match=r"got 0 bytes of .* 20,000,000,000,000 bytes"):
            load(f"npz:{tmp_path / 'g.npz'}")

    def test_an_archive_that_unpacks_to_more_than_there_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kagome.graph.datasets.npz.available_bytes", lambda: 1000)
        with pytest.raises(DataError, match="free memory to unpack"):
            load(bipartite(tmp_path / "g.npz", x=np.zeros((3, 1000))))
