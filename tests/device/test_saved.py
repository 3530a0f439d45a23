"""Checkpoints, the check, plans and data in files on fake devices: as on the CPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from bed import without_gpus
from runs import Run, foreseen_once, trainer

SAVED, ALL = 2, 4


def epochs(run: Run, until: int, out: Path | None, resume: Path | None) -> list[float | None]:
    with foreseen_once(), trainer(run, out=out, overwrite=resume is None and out is not None) as it:
        it.fit(until, resume=resume)
        return [record.loss for record in it.records]


def interrupted(run: Run, folder: Path) -> dict[str, list[float | None]]:
    """The losses of a run in one go, and of those that stop and go on, on either device."""
    found = {"whole": epochs(run, ALL, None, None)}
    epochs(run, SAVED, folder / "there", None)
    if os.environ["RANK"] == "0":  # no rank goes on before all have met again
        shutil.copytree(folder / "there", folder / "moved")
    with without_gpus():
        epochs(run, SAVED, folder / "here", None)
    found["on the device"] = epochs(run, ALL, folder / "there", folder / "there")
    found["from the CPU"] = epochs(run, ALL, folder / "here", folder / "here")
    with without_gpus():
        found["to the CPU"] = epochs(run, ALL, folder / "moved", folder / "moved")
    return found


@pytest.mark.parametrize(
    "run",
    [
        Run(2, "GAT", {"codec": "int4", "error_feedback": True}),
        Run(2, "SAGE", {"pipe": 2, "chunks": 4}),
        Run(2, "GCN", {"max_age": 1}),
    ],
    ids=["coded", "pipe", "late"],
)
def test_a_run_that_was_stopped_goes_on_with_the_same_losses(devices, run, tmp_path):
    found = devices.run(run.ranks, interrupted, run, tmp_path)[0]
    whole = found.pop("whole")
    for way, losses in found.items():
        assert losses == pytest.approx(whole[-len(losses) :], rel=1e-10), way
        assert len(losses) in (ALL - SAVED, ALL)


def checked() -> list[str]:
    with trainer(Run(2, "GAT", train={"check": True, "epochs": 1})) as it:
        return [note for note in it.fit()["notes"] if note.startswith("check: ")]


def test_the_check_before_the_first_epoch(devices):
    for notes in devices.run(2, checked):
        assert len(notes) == 1
        assert "whole equal" in notes[0]
