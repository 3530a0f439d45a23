"""The command line on fake devices: train, resume on other ranks, predict, check, plan; the CPU's numbers."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bed import without_gpus

from kagome.autoplan.plan import chosen
from kagome.cli import app
from kagome.config import Data, Model, Parallel, Run, Train
from kagome.train.data import from_run
from kagome.train.trainer import Trainer

SBM = "sbm:vertices=300,degree=6,features=8,classes=4,communities=4"
QUIET = ("--train.no-check", "--report.no-progress", "--report.no-page")
SITE = Path(__file__).parent / "fake_gpu" / "site"
NEAR = 2e-5
"""Losses are float32, summed in another order by the CPU's own kernels."""


def command(*words: str) -> str:
    """Run a command on this rank, as torchrun runs it on several; return what it printed."""
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit) as left:
        app.main(list(words))
    assert not left.value.code, said.getvalue()
    return said.getvalue()


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_train_resume_on_other_ranks_and_predict(devices, tmp_path):
    run, scores = tmp_path / "run", tmp_path / "scores.npz"
    train = ("train", "--data.name", SBM, "--model.name", "sage", *QUIET)
    devices.run(2, command, *train, "--train.epochs", "2", "--out", str(run))
    devices.run(3, command, "train", "--resume", str(run), "--train.epochs", "4")
    (said,) = devices.run(1, command, "predict", "--checkpoint", str(run), "--out", str(scores))
    assert "Scores: " in said
    assert len(losses(run)) == 4

    plain, expected = tmp_path / "plain", tmp_path / "expected.npz"
    command(*train, "--train.epochs", "4", "--out", str(plain))
    command("predict", "--checkpoint", str(plain), "--out", str(expected))
    assert losses(run) == pytest.approx(losses(plain), rel=NEAR)
    with np.load(scores) as found, np.load(expected) as known:
        assert found.files == known.files
        for name in known.files:
            np.testing.assert_allclose(found[name], known[name], rtol=1e-3, atol=1e-4)


def test_check_and_plan(devices):
    (said,) = devices.run(1, command, "check", "--data.name", SBM, "--model.name", "gat")
    assert "whole equal" in said
    asked = ("plan", "--data.name", SBM, "--devices", "2", "--json")
    (said,) = devices.run(1, command, *asked)
    facts = json.loads(said)
    assert "2 GPUs of this machine" in json.dumps(facts)


def planned() -> Run:
    """Settings with ``plan="auto"`` as the launcher replaces it."""
    cut = Parallel(plan="auto")
    quiet = Train(epochs=3, check=False)
    settings = Run(data=Data(name=SBM), model=Model(name="gcn"), parallel=cut, train=quiet)
    return chosen(settings, 2, app._builder(settings.model, settings.train))[0]


def trained(settings: Run) -> tuple[str, list[float]]:
    take, build = partial(from_run, settings), app._builder(settings.model, settings.train)
    with Trainer.from_settings(settings, take, build) as it:
        it.fit()
        return str(it.mesh.device), [record.loss for record in it.records]


def both(settings: Run) -> tuple[tuple[str, list[float]], tuple[str, list[float]]]:
    there = trained(settings)
    with without_gpus():
        return there, trained(settings)


def test_a_run_that_is_planned(devices):
    (settings,) = devices.run(1, planned)
    assert settings.parallel.plan == "manual"
    for rank, ((place, there), (_, here)) in enumerate(devices.run(2, both, settings)):
        assert place == f"cuda:{rank}"
        assert there == pytest.approx(here, rel=NEAR)


@pytest.mark.slow  # three starts of Python on every rank
def test_the_launcher_starts_ranks_on_devices(devices, tmp_path):
    env = {**os.environ, "FAKE_GPUS": "2", "PYTHONPATH": f"{SITE}:{Path(__file__).parents[2] / 'src'}"}
    env |= {"OMP_NUM_THREADS": "1"}
    words = ["--data.name", SBM, "--train.epochs", "3", "--nproc", "2", "--parallel.plan", "auto", *QUIET]
    for each in (
        ["train", *words, "--out", "run"],
        ["predict", "--checkpoint", "run", "--nproc", "2", "--out", "scores.npz"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "kagome", *each],
            cwd=tmp_path,
            env=env,
            timeout=400,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "GPUs of this machine" in (tmp_path / "run" / "plan.json").read_text()
    assert len(losses(tmp_path / "run")) == 3
    assert (tmp_path / "scores.npz").is_file()
