"""Scores of graphs without labels: from a run, a checkpoint or a file of weights, on any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome import Trainer
from kagome.checkpoint.saved_weights import columns_of, give, weights_at
from kagome.cli import app
from kagome.comm.channel import Channel
from kagome.config import Parallel
from kagome.errors import CheckpointError, DataError
from kagome.report.run_data import read_folder
from training import QUIET, Gcn, graph, model, settings

MESHES = [(1, {}), (2, {}), (2, {"pipe": 2, "chunks": 2, "cross_chunk": "exact"})]


def unlabelled() -> Data:
    data = graph(torch.float64)
    return Data(x=data.x, edge_index=data.edge_index)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A run's folder, whose best epoch is not its last; and what plain PyG makes of its best weights."""
    folder = tmp_path_factory.mktemp("run") / "run"
    mine = model("gcn", 0.3, torch.float64)
    train = settings(lr=2.0, epochs=8)
    with Trainer(mine, graph(torch.float64), train=train, report=QUIET, out=folder) as trainer:
        assert trainer.fit()["best_epoch"] < 8, "the test needs a best epoch before the last"
    data = unlabelled()
    mine.eval()
    return folder, mine(data.x, data.edge_index).detach()


def scored(channel: Channel, where: str, parallel: dict[str, Any]) -> Tensor:
    train = settings(check=True)
    with Trainer(
        Gcn().double(), unlabelled(), parallel=Parallel(**parallel), train=train, report=QUIET
    ) as trainer:
        trainer.load(where)
        return trainer.predict()


@pytest.mark.parametrize(("world", "parallel"), MESHES)
@pytest.mark.parametrize("what", [".", "checkpoints", "checkpoints/epoch-000008", "model.safetensors"])
def test_scores_are_plain_pyg_s_with_the_best_weights(ranks, run, what, world, parallel):
    folder, expected = run
    found = ranks(world, scored, str(folder / what), parallel)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)


def focal(out: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(out, y, reduction="none")


def distance(out: Tensor, y: Tensor) -> Tensor:
    return (out.argmax(1) - y).abs().double()


def built(in_channels: int) -> nn.Module:
    return Gcn().double()


def test_a_run_s_own_loss_is_named_and_not_replaced_by_the_default(tmp_path, monkeypatch, capsys):
    """Its settings said `auto`, and --resume went on with cross entropy."""
    monkeypatch.chdir(tmp_path)
    data, columns = graph(torch.float64), "python:test_predict:built"
    name = f"python:{__name__}:"
    for key, given in (("loss", {"loss": focal}), ("metric", {"metric": distance})):
        with Trainer(Gcn().double(), data, train=settings(), report=QUIET, out=key, **given) as trainer:
            trainer.fit(2)
        (function,) = given.values()
        assert f'\n{key} = "{name}{function.__name__}"\n' in Path(key, "config.toml").read_text()
        with pytest.raises(SystemExit) as ended:
            app.main(["train", "--resume", key, "--train.epochs", "3"])
        assert ended.value.code == 2
        expected = f"the function {__name__}:{function.__name__} of this run, which Python gave"
        assert expected in capsys.readouterr().err
        np.savez("graph.npz", x=data.x.numpy(), edge_index=data.edge_index.numpy())
        flags = ["--data.name", "npz:graph.npz", "--model.name", columns, "--train.no-check"]
        with pytest.raises(SystemExit) as ended:
            app.main(["predict", "--checkpoint", key, "--out", "scores.npz", *flags])
        assert ended.value.code == 0, capsys.readouterr().err
        Path(key, "summary.json").unlink()
        shown = read_folder(key).summary["metric_name"]
        assert shown == ("distance" if key == "metric" else "metric")
        with Trainer(Gcn().double(), data, train=settings(), report=QUIET, out=key, **given) as trainer:
            trainer.fit(3, resume=key)
        assert f'\n{key} = "{name}{function.__name__}"\n' in Path(key, "config.toml").read_text()


def test_without_labels_nothing_is_trained_or_evaluated():
    with Trainer(Gcn().double(), unlabelled(), train=settings(), report=QUIET) as trainer:
        for call in (trainer.fit, trainer.evaluate):
            with pytest.raises(DataError, match=r"labels \(data.y\) for .*; got data without them"):
                call()
        assert trainer.predict().shape == (200, 4)


def load(channel: Channel, where: str, width: int) -> str:
    mine = nn.Sequential(nn.Linear(8, width))

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mine

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.inner(x)

    with (
        Trainer(Rows(), graph(), train=settings(), report=QUIET) as trainer,
        pytest.raises(CheckpointError) as caught,
    ):
        trainer.load(where)
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
def test_weights_of_another_model_and_damaged_ones_are_refused(ranks, run, tmp_path, world):
    folder, _ = run
    for said in ranks(world, load, str(folder), 4):
        assert "expected weights of this model" in said
    for said in ranks(world, load, str(tmp_path / "none"), 4):
        assert "no such file or folder" in said
    (tmp_path / "bad.safetensors").write_bytes(b"no tensors")
    for said in ranks(world, load, str(tmp_path / "bad.safetensors"), 4):
        assert "cannot be read" in said
    damaged = tmp_path / "run"
    shutil.copytree(folder, damaged)
    file = max((damaged / "checkpoints").glob("*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    for said in ranks(world, load, str(damaged / "checkpoints"), 4):
        assert "got a damaged one" in said


def test_weights_shared_under_two_names_are_found_in_a_file(tmp_path):
    from safetensors.torch import save_model

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.other = self.one

    saved, other = Tied(), Tied()
    save_model(saved, str(tmp_path / "model.safetensors"))
    give(other, weights_at(tmp_path / "model.safetensors"), "here")
    assert torch.equal(other.one.weight, saved.one.weight)


@pytest.mark.parametrize("columns", [1, 2, 5, 40])
def test_columns_are_told_by_weights(columns):
    def make(count: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2 * count))

    before = torch.get_rng_state()
    assert columns_of(make(columns).state_dict(), make) == columns
    assert columns_of({}, make) is None
    assert columns_of(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3)).state_dict(), make) is None
    torch.set_rng_state(before)


def test_the_command_scores_another_graph(tmp_path, monkeypatch, capsys):
    """Trained on three classes; the other graph has no labels and more vertices."""
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    for name, count in (("old", 60), ("new", 90)):
        given = {
            "x": draws.normal(size=(count, 5)).astype(np.float32),
            "edge_index": draws.integers(0, count, (2, 4 * count)),
        }
        np.savez(f"{name}.npz", **given, **({"y": np.arange(count) % 3} if name == "old" else {}))

    def command(*words: str) -> int:
        with pytest.raises(SystemExit) as left:
            app.main(list(words))
        return int(left.value.code or 0)

    few = ("--train.epochs", "3", "--report.no-progress", "--report.no-page", "--model.hidden", "8")
    assert command("train", "--data.name", "npz:old.npz", "--out", "run", "--nproc", "1", *few) == 0
    where = ("predict", "--checkpoint", "run")
    assert command(*where, "--out", "same.npz") == 0
    trained = np.load("run/predictions.npz")["scores"]
    np.testing.assert_allclose(np.load("same.npz")["scores"], trained, atol=1e-5)
    capsys.readouterr()
    other = ("--data.name", "npz:new.npz")
    assert command(*where, *other, "--out", "one.npy") == 0
    assert "90 x 3" in capsys.readouterr().out
    weights = ("predict", "--checkpoint", "run/model.safetensors")
    assert command(*weights, *other, "--nproc", "2", "--out", "two.npz") == 0
    np.testing.assert_allclose(np.load("two.npz")["scores"], np.load("one.npy"), atol=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--checkpoint", "nowhere", "--out", "a.npz"), "got no such file or folder: nowhere"),
        (("--checkpoint", ".", "--out", "a.csv"), "--out to be a .npz or .npy file"),
        (("--checkpoint", ".", "--out", "no/such/a.npz"), "--out to be a .npz or .npy file"),
        (("--checkpoint", ".", "--out", "a.npz"), "got none that is whole"),
    ],
)
def test_a_command_that_cannot_score_says_why(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        app.main(["predict", *words])
    assert left.value.code in (1, 2)
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
