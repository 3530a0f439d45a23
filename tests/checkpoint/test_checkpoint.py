"""Checkpoints: a resume on any number of ranks goes on with the curve; what is not whole is not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kagome import Trainer
from kagome.checkpoint import checkpoint
from kagome.checkpoint.files import latest
from kagome.comm.channel import Channel
from kagome.errors import CheckpointError
from kagome.records.epoch import read_records
from training import QUIET, Gcn, graph, losses, model, settings

EPOCHS, SAVED = 12, 7
TRAIN: dict[str, Any] = {"lr": 0.1, "patience": 50}


def trained(
    channel: Channel, out: str | None, epochs: int, resume: str | None = None, kind: str = "gat", **train: Any
) -> dict[str, Any]:
    mine = model(kind, 0.4, torch.float64, seed=1 if resume is None else 99)
    scheduler = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # noqa: E731
    with Trainer(
        mine,
        graph(torch.float64),
        train=settings(**{**TRAIN, **train}),
        report=QUIET,
        out=out,
        scheduler=scheduler,
    ) as trainer:
        summary = trainer.fit(epochs, resume=resume)
        return {"losses": losses(trainer), "summary": summary, "weights": dict(mine.state_dict())}


def figures(result: dict[str, Any]) -> list[Any]:
    return [result["summary"][key] for key in ("epochs", "best_epoch", "test_metric", "val_metric")]


@pytest.fixture(scope="module")
def uninterrupted(ranks) -> dict[str, Any]:
    return ranks(1, trained, None, EPOCHS)[0]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    """A run of 3 ranks that ended after 7 epochs."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    ranks(3, trained, str(folder), SAVED)
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.mark.some(2)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_resume_on_another_number_of_ranks_goes_on_with_the_same_curve(ranks, uninterrupted, run, world):
    """Weights, optimizer, scheduler, draws, best epoch and patience all survive."""
    found = ranks(world, trained, str(run), EPOCHS, str(run))
    for rank in found:
        torch.testing.assert_close(rank["losses"], uninterrupted["losses"], rtol=0, atol=1e-9)
        assert figures(rank) == figures(uninterrupted)
        torch.testing.assert_close(rank["weights"], uninterrupted["weights"], rtol=0, atol=1e-7)
    assert [r.epoch for r in read_records(run / "metrics.jsonl")] == list(range(1, EPOCHS + 1))
    assert json.loads((run / "summary.json").read_text())["epochs"] == EPOCHS


def test_the_uninterrupted_run_tells_best_from_last(uninterrupted):
    """Without this the tests here would pass with best weights, or their epoch, forgotten."""
    assert uninterrupted["summary"]["best_epoch"] not in (0, EPOCHS)


def test_best_weights_survive_a_resume_that_does_not_better_them(ranks, run, saved):
    best = trained(Channel(None, "cpu"), str(run), SAVED, str(run))
    assert best["summary"]["epochs"] == SAVED
    kept = load_file(saved / "model.safetensors")
    for key, value in best["weights"].items():
        torch.testing.assert_close(value, kept[key], rtol=0, atol=1e-9)


def test_patience_goes_on_where_it_was(run):
    """The epochs waited before the resume count."""
    place = json.loads((latest(run) / "place.json").read_text())
    found = trained(
        Channel(None, "cpu"), str(run), 500, str(run), patience=max(place["waited"], 1) + 1, lr=0.0
    )
    assert found["summary"]["epochs"] - found["summary"]["best_epoch"] == max(place["waited"], 1) + 1


def test_model_safetensors_has_the_user_s_own_names(saved):
    plain = model("gat", 0.4, torch.float64)
    weights = load_file(saved / "model.safetensors")
    assert set(weights) == set(plain.state_dict())
    plain.load_state_dict(weights)
    data = graph(torch.float64)
    import numpy as np

    with np.load(saved / "predictions.npz") as found:
        scores = plain.eval()(data.x, data.edge_index).detach().numpy()
        np.testing.assert_allclose(found["scores"], scores, rtol=1e-5, atol=1e-6)
        assert found["label"].tolist() == scores.argmax(1).tolist()
        assert found["target"].tolist() == data.y.tolist()


# What is whole ------------------------------------------------------------------------------------


def test_only_the_newest_two_stay_and_the_pointer_names_the_last(tmp_path):
    trained(Channel(None, "cpu"), str(tmp_path), 7, save_every=2)
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["epoch-000006", "epoch-000007", "latest"]
    assert latest(tmp_path).name == "epoch-000007"


def test_somebody_s_copy_of_a_checkpoint_stays(tmp_path):
    copies = [tmp_path / "run" / "checkpoints" / name for name in ("epoch-000001-mine", "epoch-best")]
    with Trainer(
        model("gcn", 0.0, torch.float64),
        graph(torch.float64),
        train=settings(save_every=1),
        report=QUIET,
        out=tmp_path / "run",
    ) as trainer:
        trainer.fit(1)
        for copy in copies:
            copy.mkdir()
        trainer.fit(4)
    assert all(copy.is_dir() for copy in copies)


def test_a_course_that_was_left_is_removed_with_the_next_checkpoint(run):
    """A resume of an older checkpoint: the newest by number were kept, and the new ones removed."""
    shutil.copytree(run / "checkpoints" / "epoch-000007", run / "checkpoints" / "epoch-000009")
    trained(Channel(None, "cpu"), str(run), 8, str(run))
    assert sorted(p.name for p in (run / "checkpoints").glob("epoch-*")) == ["epoch-000007", "epoch-000008"]
    assert latest(run).name == "epoch-000008"


def test_a_write_that_was_cut_off_is_passed_over(tmp_path):
    trained(Channel(None, "cpu"), str(tmp_path), 4, save_every=2)
    folder = tmp_path / "checkpoints"
    half = folder / ".epoch-000009.new"
    shutil.copytree(folder / "epoch-000004", half)
    (folder / "epoch-000004" / "place.json").unlink()  # the pointer names one that is not whole
    older = folder / "epoch-000002"
    for where in (tmp_path, folder):
        with pytest.raises(
            CheckpointError, match=rf"place.json is missing(.|\n)*--resume {older}, which is wh"
        ):
            trained(Channel(None, "cpu"), None, 9, str(where))
    assert latest(older) == older
    found = trained(Channel(None, "cpu"), str(tmp_path), 9, str(older), save_every=3)
    assert found["summary"]["epochs"] == 9
    assert not half.exists()


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("error", [Crash, OSError])
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_an_epoch_that_is_saved_again_is_never_lost(run, monkeypatch, error, renames):
    """The folder was removed before the new one had its name: `latest` named nothing until then."""
    rename, done = Path.rename, 0

    def fails(path: Path, target: Path) -> Path:
        nonlocal done
        if done == renames:
            raise error("no rename")
        done += 1
        return rename(path, target)

    def save(bias: float) -> None:
        mine = Gcn()
        mine.last.bias.data.fill_(bias)
        place = checkpoint.RunPosition(SAVED, 0, SAVED, None, 0, 1, "")
        adam = torch.optim.Adam(mine.parameters())
        checkpoint.save(run / "checkpoints", place, Channel(None, "cpu"), model=mine, optimizer=adam)

    def bias() -> float:
        return float(checkpoint.best_weights(latest(run))["last.bias"][0])

    save(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        if renames < 2:
            with pytest.raises(Crash if error is Crash else CheckpointError):
                save(2.0)
        else:
            save(2.0)
    assert bias() == (1.0 if renames < 2 else 2.0)
    save(3.0)
    assert bias() == 3.0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"epoch-{SAVED:06d}", "latest"]


def test_a_fault_while_writing_leaves_the_last_one_and_reaches_every_rank(ranks, run):
    for found in ranks(2, writes_where_it_cannot, str(run)):
        assert "No space left" in found
    assert latest(run).name == f"epoch-{SAVED:06d}"


def writes_where_it_cannot(channel: Channel, folder: str) -> str:
    import os
    from unittest import mock

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    mine = Gcn()
    optimizer = torch.optim.Adam(mine.parameters())
    place = checkpoint.RunPosition(8, 0, 8, None, 0, channel.size, "")
    with mock.patch.object(os, "mkdir", full if channel.rank == 0 else os.mkdir):
        try:
            checkpoint.save(Path(folder, "checkpoints"), place, channel, model=mine, optimizer=optimizer)
        except CheckpointError as error:
            return str(error)
    return "written"


def damage(folder: Path, how: str) -> None:
    last = latest(folder)
    if how == "place":
        (last / "place.json").write_text('{"epoch": 7')
    elif how == "data":
        for path in last.glob("rank-*.safetensors"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    elif how == "lost":
        for path in last.glob("rank-*.safetensors"):
            path.unlink()
    elif how == "rest":
        (last / checkpoint.REST).write_bytes(b"nothing")


@pytest.mark.parametrize("how", ["place", "data", "lost", "rest"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_damaged_checkpoint_is_named(ranks, run, how, world):
    damage(run, how)
    with pytest.raises(CheckpointError, match=r"epoch-000007; got a damaged one: \S+"):
        ranks(world, trained, str(run), EPOCHS, str(run))


def test_a_checkpoint_of_another_model(run):
    with pytest.raises(CheckpointError, match=r"a checkpoint of this model(.|\n)*--model settings"):
        trained(Channel(None, "cpu"), None, EPOCHS, str(run), kind="gcn")


def test_a_checkpoint_of_another_seed(run):
    with pytest.raises(CheckpointError, match=r"a checkpoint with seed 5, for this run to go on; got seed 0"):
        trained(Channel(None, "cpu"), None, EPOCHS, str(run), seed=5)


def test_a_refused_checkpoint_leaves_the_model_as_it_was(run):
    mine = model("gat", 0.4, torch.float64, seed=99)
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    with pytest.raises(CheckpointError):
        checkpoint.load(
            latest(run),
            Channel(None, "cpu"),
            model=mine,
            optimizer=torch.optim.Adam(mine.parameters()),
            seed=5,
        )
    torch.testing.assert_close(dict(mine.state_dict()), before, rtol=0, atol=0)


class Unwritable:
    """A scheduler with a state that is no plain data."""

    def state_dict(self) -> dict[str, Any]:
        return {"rules": [lambda epoch: epoch]}


def writes_what_cannot_be(channel: Channel, folder: str) -> str:
    mine = Gcn()
    place = checkpoint.RunPosition(8, 0, 8, None, 0, channel.size, "")
    try:
        checkpoint.save(
            Path(folder, "checkpoints"),
            place,
            channel,
            model=mine,
            optimizer=torch.optim.Adam(mine.parameters()),
            scheduler=Unwritable(),
        )
    except CheckpointError as error:
        return str(error)
    return "written"


def test_a_state_that_cannot_be_written_ends_all_ranks(ranks, run):
    for found in ranks(2, writes_what_cannot_be, str(run)):
        assert "a builtins.function instead of plain data; the last whole one is" in found
    assert latest(run).name == f"epoch-{SAVED:06d}"


def test_a_run_saved_between_evaluations_ends_with_its_best_epoch_s_weights(tmp_path):
    """The resume has no epoch left: only the checkpoint says that the last one is not the best."""
    often = trained(Channel(None, "cpu"), None, 4, eval_every=4)
    trained(Channel(None, "cpu"), str(tmp_path), 6, eval_every=4, save_every=5)
    between = latest(tmp_path / "checkpoints" / "epoch-000005")
    found = trained(Channel(None, "cpu"), None, 5, str(between), eval_every=4)
    assert found["summary"]["best_epoch"] == 4
    torch.testing.assert_close(found["weights"], often["weights"])


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match="got none that is whole"):
        trained(Channel(None, "cpu"), None, EPOCHS, str(tmp_path))


# Models and optimizers -----------------------------------------------------------------------------


def partly_frozen() -> nn.Module:
    torch.manual_seed(1)
    mine = Gcn(0.3)
    mine.unused = nn.Linear(2, 2)
    mine.norm.requires_grad_(False)
    return mine


@pytest.mark.parametrize("kind", ["adam", "sgd", "momentum", "adamw"])
def test_unused_and_frozen_parameters_and_any_optimizer_resume(tmp_path, kind):
    make = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1, momentum=0.9),
    }[kind]

    def go(epochs: int, **given: Any) -> tuple[list, dict]:
        mine, out = partly_frozen(), given.pop("out", None)
        with Trainer(mine, graph(), train=settings(), report=QUIET, optimizer=make, out=out) as trainer:
            trainer.fit(epochs, **given)
            return losses(trainer), mine.state_dict()

    whole, weights = go(6)
    go(3, out=tmp_path)
    found, again = go(6, out=tmp_path, resume=tmp_path)
    assert found == whole
    assert all(torch.equal(again[key], value) for key, value in weights.items())
    assert torch.equal(again["unused.weight"], partly_frozen().unused.weight)


def test_a_resume_learns_with_the_rates_it_is_given(tmp_path):
    """--resume RUN --train.lr X: the optimizer's saved groups used to win, without a word."""
    for epochs, rate, resume in ((2, 0.1, None), (3, 0.001, tmp_path / "run")):
        train = settings(lr=rate, weight_decay=rate / 2)
        with Trainer(model("gcn"), graph(), train=train, report=QUIET, out=tmp_path / "run") as trainer:
            trainer.fit(epochs, resume=resume)
            assert [g["lr"] for g in trainer.optimizer.param_groups] == [rate]
            assert [g["weight_decay"] for g in trainer.optimizer.param_groups] == [rate / 2]
