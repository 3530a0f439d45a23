"""Checkpoints, the check, plans and data in files on fake devices: as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bed import without_gpus
from runs import Run, trainer

SAVED, ALL = 2, 4


def epochs(run: Run, until: int, out: Path | None, resume: Path | None) -> list[float | None]:
    with trainer(run, out=out, overwrite=resume is None and out is not None) as it:
        it.fit(until, resume=resume)
        return [record.loss for record in it.records]


def interrupted(run: Run, folder: Path) -> dict[str, list[float | None]]:
    """The losses of a run in one go, and of those that stop and go on, on either device."""
    found = {"whole": epochs(run, ALL, None, None)}
    epochs(run, SAVED, folder / "there", None)
    with without_gpus():
        epochs(run, SAVED, folder / "here", None)
    found["on the device"] = epochs(run, ALL, folder / "there", folder / "there")
    found["from the CPU"] = epochs(run, ALL, folder / "here", folder / "here")
    epochs(run, SAVED, folder / "there", None)
    with without_gpus():
        found["to the CPU"] = epochs(run, ALL, folder / "there", folder / "there")
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


def checked() -> tuple[str, ...]:
    run = Run(2, "GAT", train={"check": True, "epochs": 1})
    with trainer(run) as it:
        it.fit()
        return tuple(it.summary["notes"]) if hasattr(it, "summary") else ()


def test_the_check_before_the_first_epoch(devices):
    devices.run(2, checked)


def planned() -> dict[str, Any]:
    run = Run(2, "GCN", {"plan": "auto"}, train={"epochs": 2})
    with trainer(run) as it:
        it.fit()
        return {"device": str(it.mesh.device), "losses": [record.loss for record in it.records]}


def test_a_plan_is_measured_on_the_device_and_trained(devices):
    there = devices.run(2, planned)
    assert [each["device"] for each in there] == ["cuda:0", "cuda:1"]
    assert there[0]["losses"] == there[1]["losses"]
