"""The command line on a ``HeteroData`` of a user's function or file: train, resume, predict, check."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from kagome.cli import app
from kagome.config import Data
from kagome.errors import ConfigError, DataError
from kagome.graph.datasets.load import load_data, load_graph

MINE = """
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE, to_hetero


def library():
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["paper"].x = torch.randn(60, 5, generator=generator)
    data["paper"].y = torch.randint(3, (60,), generator=generator)
    data["author"].x = torch.randn(40, 4, generator=generator)
    writes = torch.stack([torch.randint(n, (150,), generator=generator) for n in (40, 60)])
    data["author", "writes", "paper"].edge_index = writes
    data["paper", "by", "author"].edge_index = writes.flip(0)
    return data


def build(metadata, hidden, out_channels):
    return to_hetero(GraphSAGE((-1, -1), hidden, 2, out_channels), metadata)
"""
MODEL = ["--model.name", "python:mine:build", "--model.hidden", "8"]
QUIET = ["--report.no-progress", "--report.no-page", "--report.no-trace"]
FEW = [*MODEL, "--train.epochs", "3", *QUIET]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "KAGOME_DATA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def code(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        app.main(list(args))
    return int(left.value.code or 0)


def test_train_check_and_predict(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = load_graph(Data(name="python:mine:library"))
    torch.save(data, folder / "library.pt")
    given = {1: "pt:library.pt", 2: "python:mine:library"}
    losses = {}
    for ranks, name in given.items():
        out = f"run-{ranks}"
        assert code("train", "--data.name", name, *FEW, "--nproc", str(ranks), "--out", out) == 0
        rows = (folder / out / "metrics.jsonl").read_text().splitlines()
        losses[ranks] = [json.loads(row)["loss"] for row in rows]
    assert losses[2] == pytest.approx(losses[1], abs=1e-5)
    assert len(losses[1]) == 3
    assert (
        code("train", "--resume", "run-2", "--train.epochs", "4", "--nproc", "1", "--report.no-progress") == 0
    )
    assert code("predict", "--checkpoint", "run-2", "--out", "scores.npz") == 0
    assert np.load(folder / "scores.npz")["scores"].shape == (60, 3)
    capfd.readouterr()
    assert code("check", "--data.name", "python:mine:library", *MODEL) == 0
    assert "split over 3 and whole equal" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data.undirected", *MODEL], ["data.undirected", "ToUndirected"]),
        (["--model.name", "gcn"], ["one vertex type for the model gcn", "paper, author"]),
        (["--train.target-type", "book", *MODEL], ["target_type", "'book'"]),
        (["--parallel.chunks", "2", *MODEL], ["several vertex sets", "chunks=2"]),
    ],
)
def test_mistakes(folder: Path, capfd: pytest.CaptureFixture[str], args: list[str], words: list[str]) -> None:
    assert code("train", "--data.name", "python:mine:library", *args, "--nproc", "1") > 0
    told = capfd.readouterr().err
    assert all(word in told for word in words), told


def test_files_of_torch(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.project"):
        load_graph(Data(name="python:mine:library", project=3))
    with pytest.raises(DataError, match="HeteroData with 2 kinds of vertices"):
        load_data(Data(name="python:mine:library"))
    with pytest.raises(DataError, match=r"no such file"):
        load_graph(Data(name="pt:none.pt"))
    torch.save({"model": torch.nn.Linear(2, 2)}, folder / "odd.pt")
    with pytest.raises(DataError, match=r"odd\.pt to hold a Data or HeteroData"):
        load_graph(Data(name="pt:odd.pt"))


DBLP = """
import torch
from torch_geometric.nn import HeteroConv, SAGEConv


class Build(torch.nn.Module):
    def __init__(self, metadata, hidden, out_channels):
        super().__init__()
        self.table = torch.nn.Embedding(3, hidden)  # conferences have no features
        self.one, self.two = (
            HeteroConv({link: SAGEConv((-1, -1), width) for link in metadata[1]})
            for width in (hidden, out_channels)
        )

    def forward(self, x_dict, edge_index_dict):
        h = self.one({**x_dict, "conference": self.table.weight}, edge_index_dict)
        return self.two({kind: rows.relu() for kind, rows in h.items()}, edge_index_dict)["author"]
"""


def dblp(raw: Path) -> None:
    """Raw files as those of PyG's ``DBLP``: four vertex types, of which authors have labels."""
    sizes, rng = (30, 50, 20, 3), np.random.default_rng(0)
    starts = np.cumsum((0, *sizes))
    whole = np.zeros((starts[-1], starts[-1]))
    for other, degree in ((0, 3), (2, 4), (3, 1)):
        for paper in range(sizes[1]):
            ends = starts[other] + rng.choice(sizes[other], degree, replace=False)
            whole[starts[1] + paper, ends] = whole[ends, starts[1] + paper] = 1
    raw.mkdir(parents=True)
    sp.save_npz(raw / "adjM.npz", sp.csr_matrix(whole))
    for number, width in ((0, 5), (1, 7)):
        sp.save_npz(raw / f"features_{number}.npz", sp.csr_matrix(rng.random((sizes[number], width))))
    np.save(raw / "features_2.npy", rng.random((sizes[2], 4)))
    np.save(raw / "labels.npy", rng.integers(0, 4, sizes[0]))
    np.save(raw / "node_types.npy", np.repeat(np.arange(4), sizes))
    authors = np.arange(sizes[0])
    np.savez(
        raw / "train_val_test_idx", train_idx=authors[:15], val_idx=authors[15:20], test_idx=authors[20:]
    )


@pytest.mark.slow
def test_a_data_set_of_pyg_with_several_vertex_types(folder: Path) -> None:
    dblp(folder / "data" / "DBLP" / "raw")
    (folder / "mine.py").write_text(DBLP)
    data = load_graph(Data(name="pyg:DBLP", root="data"))
    assert [data[kind].num_nodes for kind in data.node_types] == [30, 50, 20, 3]
    model = ["--model.name", "python:mine:Build", "--model.hidden", "8", "--train.epochs", "3", *QUIET]
    losses = {}
    for ranks in (1, 2):
        out = f"dblp-{ranks}"
        args = ["--data.name", "pyg:DBLP", "--data.root", "data", "--nproc", str(ranks), "--out", out]
        assert code("train", *args, *model) == 0
        rows = (folder / out / "metrics.jsonl").read_text().splitlines()
        losses[ranks] = [json.loads(row)["loss"] for row in rows]
    assert losses[2] == pytest.approx(losses[1], abs=1e-5)
    assert losses[1][2] < losses[1][0]
