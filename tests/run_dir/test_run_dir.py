"""A run's folder: one run at a time, nothing of others written over, noticed where it is taken away."""

from __future__ import annotations

import json
import os
import resource
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from kagome import Trainer
from kagome.checkpoint.files import latest
from kagome.comm.channel import Channel
from kagome.errors import CheckpointError, ConfigError, KagomeError
from kagome.records.epoch import read_records
from kagome.report.summary import headline
from kagome.run_dir.claim import LOCK, Claim
from training import QUIET, graph, losses, model, settings

ALONE = Channel(None, "cpu")


def trained(
    channel: Channel,
    out: str,
    epochs: int = 2,
    *,
    resume: str | None = None,
    overwrite: bool = False,
    data: Any = None,
    after: Any = None,
    **train: Any,
) -> list[float]:
    mine = model("gcn", 0.4, seed=1)
    given = graph() if data is None else data
    with Trainer(mine, given, train=settings(**train), report=QUIET, out=out, overwrite=overwrite) as trainer:
        trainer.fit(epochs, resume=resume)
        if after is not None:
            after(trainer)
        return losses(trainer)


def refused(channel: Channel, out: str, *given: Any, **named: Any) -> str:
    try:
        trained(channel, out, *given, **named)
    except KagomeError as error:
        return str(error)
    return "trained"


def with_named(channel: Channel, out: str, epochs: int, named: dict[str, Any]) -> str:
    return refused(channel, out, epochs, **named)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# Going on elsewhere --------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["the run", "its checkpoints"])
def test_a_run_that_goes_on_in_another_folder_counts_all_its_epochs(tmp_path, kept):
    """Its summary said "best epoch 3 of 2"."""
    trained(ALONE, str(tmp_path / "one"), 4, save_every=3)
    before = [asdict(record) for record in read_records(tmp_path / "one" / "metrics.jsonl")]
    if kept != "the run":
        (tmp_path / "one" / "metrics.jsonl").unlink()
    first = str(tmp_path / "one" / "checkpoints" / "epoch-000003")
    trained(ALONE, str(tmp_path / "two"), 5, resume=first)
    values = json.loads((tmp_path / "two" / "summary.json").read_text())
    found = [asdict(record) for record in read_records(tmp_path / "two" / "metrics.jsonl")]
    assert values["epochs"] == 5
    assert dict(headline(values))["best epoch"] == f"{values['best_epoch']} of 5"
    assert [each["epoch"] for each in found] == ([1, 2, 3, 4, 5] if kept == "the run" else [4, 5])
    assert kept != "the run" or found[:3] == before[:3]


def test_a_trainer_without_a_folder_knows_the_epochs_that_it_goes_on_from(tmp_path):
    trained(ALONE, str(tmp_path / "one"), 3)
    with Trainer(model("gcn", 0.4, seed=1), graph(), train=settings(), report=QUIET) as trainer:
        assert trainer.fit(4, resume=tmp_path / "one")["epochs"] == 4
        assert [record.epoch for record in trainer.records] == [1, 2, 3, 4]


# Another run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_is_there_is_not_written_over(ranks, tmp_path, stopped):
    trained(ALONE, str(tmp_path / "run"), 3, save_every=1)
    if stopped:
        (tmp_path / "run" / "summary.json").unlink()
    before = content(tmp_path / "run")
    for text in ranks(2, refused, str(tmp_path / "run")):
        assert f"got a run there that {'was stopped' if stopped else 'has finished'}" in text
        assert "--resume" in text
        assert "--overwrite" in text
    after = content(tmp_path / "run")
    assert {**after, LOCK: b""} == {**before, LOCK: b""}


def test_overwrite_removes_it_and_nothing_else(tmp_path):
    run = tmp_path / "run"
    trained(ALONE, str(run), 3, save_every=1)
    (run / "notes.txt").write_text("mine")
    trained(ALONE, str(run), 1, overwrite=True)
    assert (run / "notes.txt").read_text() == "mine"
    assert [path.name for path in (run / "checkpoints").glob("epoch-*")] == ["epoch-000001"]
    assert [record.epoch for record in read_records(run / "metrics.jsonl")] == [1]


def test_resume_goes_on_in_its_own_folder_and_in_no_other_run_s(tmp_path):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    trained(ALONE, one), trained(ALONE, other)
    trained(ALONE, one, 3, resume=one)
    assert "got a run there" in refused(ALONE, other, 4, resume=one)
    trained(ALONE, str(tmp_path / "third"), 4, resume=one)
    trained(ALONE, other, 4, resume=one, overwrite=True)


def test_a_run_that_had_done_nothing_stands_in_nobody_s_way(tmp_path):
    class FailsError(Exception):
        pass

    def fails(*_: Any) -> Any:
        raise FailsError

    for _ in range(2):
        with (
            pytest.raises(ConfigError, match="FailsError"),
            Trainer(
                model("gcn"), graph(), train=settings(), report=QUIET, out=tmp_path / "r", loss=fails
            ) as t,
        ):
            t.fit(1)
    trained(ALONE, str(tmp_path / "r"))


def test_a_second_run_at_once_is_refused_by_name(ranks, tmp_path):
    held = Claim(tmp_path / "run")
    for text in ranks(2, refused, str(tmp_path / "run")):
        assert f"another run that writes there (process {os.getpid()} on " in text
    held.close()
    assert ranks(2, refused, str(tmp_path / "run")) == ["trained", "trained"]


def test_the_lock_of_a_run_that_was_killed_is_none(tmp_path):
    child = os.fork()
    if child == 0:
        Claim(tmp_path / "run")
        (tmp_path / "run" / "checkpoints" / ".epoch-000004.new").mkdir(parents=True)
        (tmp_path / "run" / ".metrics.jsonl.4.tmp").write_text("half")
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    Claim(tmp_path / "run").close()
    assert sorted(content(tmp_path / "run")) == [LOCK]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


# Other files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["", ".", "../work", "link"])
def test_a_folder_with_other_files_is_refused(ranks, tmp_path, monkeypatch, out):
    work = tmp_path / "work"
    work.mkdir()
    for name in ("thesis.tex", "config.toml"):
        (work / name).write_text("mine")
    (work / "link").symlink_to(work)
    monkeypatch.chdir(work)
    before = content(work)
    assert "a folder that is not a run's and holds config.toml and 2 more" in refused(ALONE, out)
    for text in ranks(2, refused, str(work)):
        assert "a folder that is not a run's" in text
    assert content(work) == before


def test_an_empty_folder_and_one_with_a_plan_are_taken(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.html").write_text("")
    trained(ALONE, str(tmp_path / "run"), 1)


@pytest.mark.parametrize("text", ['{"plans": []}', "[]", "nonsense", '{"plans": [{"bytes_per_epoch": 1}]}'])
def test_a_plan_that_was_altered_costs_no_summary(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    trained(Channel(None, "cpu"), str(tmp_path), 1)
    assert json.loads((tmp_path / "summary.json").read_text())["predicted"] is None


def plan_of(**mesh: object) -> str:
    first = {"settings": mesh, "epoch_seconds": 2.5, "bytes_per_epoch": {"halo": 8}, "memory_bytes": 64}
    return json.dumps({"plans": [first]})


def predicted(run: Path) -> Any:
    found = json.loads((run / "summary.json").read_text())["predicted"]
    return found and found["epoch_seconds"]


def test_a_plan_goes_with_the_run_that_it_was_made_for(tmp_path):
    """A later run's summary had what was predicted of the one before."""
    run, plan = tmp_path / "run", tmp_path / "run" / "plan.json"
    run.mkdir()
    plan.write_text(plan_of(graph=1))
    trained(ALONE, str(run), 1)
    assert predicted(run) == 2.5
    trained(ALONE, str(run), 1, overwrite=True)
    assert not plan.exists()
    assert predicted(run) is None
    plan.write_text(plan_of(graph=1, decouple=False))
    trained(ALONE, str(run), 1, overwrite=True)
    assert predicted(run) == 2.5
    plan.write_text(plan_of(graph=2))  # of another cut: one that a run had before it went on
    trained(ALONE, str(run), 2, resume=str(run))
    assert predicted(run) is None


def test_a_folder_that_cannot_be_made_is_told_by_all(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    for text in ranks(2, refused, str(tmp_path / "file" / "run")):
        assert "got Not a directory" in text


# Taken away in mid-run ------------------------------------------------------------------------------


class Deletes(torch.optim.lr_scheduler.LambdaLR):
    """Deletes a folder after some epoch; where it is taken, another run has it at once."""

    def __init__(self, optimizer: Any, folder: Path, epoch: int, taken: bool) -> None:
        self.left: Any = (folder, epoch, taken)
        super().__init__(optimizer, lambda _: 1.0)

    def step(self, *given: Any) -> None:
        super().step(*given)
        folder, epoch, taken = self.left
        if self.last_epoch == epoch:
            shutil.rmtree(folder)
            self.left = Claim(folder) if taken else None, 0, False

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "left"}


def loses_its_folder(out: str, taken: bool) -> tuple[list[float], list[str], str]:
    with Trainer(
        model("gcn", 0.4, seed=1),
        graph(),
        train=settings(),
        report=QUIET,
        out=out,
        scheduler=lambda optimizer: Deletes(optimizer, Path(out), 3, taken),
    ) as trainer:
        text = ""
        try:
            trainer.fit(5)
        except KagomeError as error:
            text = str(error)
        if taken:
            trainer.scheduler.left[0].close()
        return losses(trainer), trainer.notes, text


def test_a_folder_that_was_deleted_is_made_again_and_said(tmp_path):
    out = str(tmp_path / "run")
    expected = trained(ALONE, str(tmp_path / "other"), 5)
    found, notes, text = loses_its_folder(out, taken=False)
    assert (found, text) == (expected, "")
    assert [note for note in notes if "was deleted after epoch 2: it is made again" in note]
    assert [record.epoch for record in read_records(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert latest(out).name == "epoch-000005"
    assert (tmp_path / "run" / "config.toml").exists()
    trained(ALONE, out, 6, resume=out)


def test_a_folder_that_was_deleted_between_two_calls_too(tmp_path):
    out = str(tmp_path / "run")
    with Trainer(model("gcn"), graph(), train=settings(), report=QUIET, out=out) as trainer:
        trainer.fit(2)
        shutil.rmtree(out)
        trainer.fit(4)
        assert [note for note in trainer.notes if "was deleted after epoch 2" in note]
    assert [record.epoch for record in read_records(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_folder_that_another_run_took_is_left_to_it(tmp_path):
    out = str(tmp_path / "run")
    assert "another run that writes there" in loses_its_folder(out, taken=True)[2]
    assert sorted(content(tmp_path / "run")) == [LOCK]


def test_a_metrics_file_that_cannot_grow_is_one_sentence(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Trainer(model("gcn"), graph(), train=settings(), report=QUIET, out=tmp_path / "run") as trainer:
        trainer.fit(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(ConfigError, match=r"got File too large"):
                trainer.fit(3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# The data -------------------------------------------------------------------------------------------


def changed(what: str) -> Any:
    data = graph()
    if what == "edges":
        data.edge_index = data.edge_index.flip(1)
    elif what == "features":
        data.x = data.x.clone()
        data.x[3, 0] += 1e-3
    elif what == "labels":
        data.y = data.y.roll(1)
    else:
        data.train_mask = data.train_mask.clone()
        data.train_mask[data.train_mask.nonzero()[0]] = False
    return data


@pytest.mark.parametrize("what", ["edges", "features", "labels", "masks"])
def test_another_graph_of_the_same_shape_is_refused(ranks, tmp_path, what):
    out = str(tmp_path / "run")
    trained(ALONE, out, 2)
    for text in ranks(2, with_named, out, 4, {"resume": out, "data": changed(what)}):
        assert "with other edges, features, labels or masks" in text
        assert "Try: " in text
    assert json.loads((latest(out) / "place.json").read_text())["epoch"] == 2


def test_the_same_graph_cut_otherwise_goes_on(ranks, tmp_path):
    """By another number of parts, by another partitioner, and as a saved partition."""
    from kagome.graph.partition.partition import fingerprint, split_all
    from kagome.graph.partition.store import describe, save
    from kagome.graph.structure.validate import validate

    out = str(tmp_path / "run")
    ranks(2, trained, out, 2)
    assert ranks(3, with_named, out, 3, {"resume": out}) == ["trained"] * 3
    clean, _ = validate(graph())
    owner = torch.arange(int(clean.num_nodes)) % 2
    pieces = split_all(clean, owner, 2, fingerprint=fingerprint(clean, "by hand", 3, 2))
    save(pieces, tmp_path / "cut", describe(clean, owner, pieces, method="by hand", seed=3))
    named = {"resume": out, "data": str(tmp_path / "cut")}
    assert ranks(2, with_named, out, 4, named) == ["trained"] * 2
    with pytest.raises(CheckpointError, match="with other edges, features, labels or masks"):
        trained(ALONE, out, 5, resume=out, data=changed("labels"))
