"""The report of a pipeline whose stages form a DAG: its page, trace, summary and plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kagome
from dags import plan_of, sgd, task
from kagome.planner.stages.plan import StagePlan

ONE, TWO = "towers.0 towers.1 towers.1.0#2 towers.1.1#2", "towers.2 towers.2.0#2 towers.2.1#2"
PLAN = plan_of(8, (ONE, 1, 2), (TWO, 1, 4), ("join act layers.0 act#2 layers.1 act#3 out", 2, 8))


def reported(
    channel: Any, folder: Path, updates: int, plan: StagePlan | Path = PLAN
) -> tuple[Path | None, float | None]:
    """The page of some updates, and the last loss."""
    model, inputs, target, loss = task("uno", 8)
    pipe = kagome.pipeline(model, inputs, loss=loss, optimizer=sgd, plan=plan, channel=channel)
    last = None
    for _ in range(updates):
        last = pipe.step(inputs, target)
    pipe.predict(inputs)  # no update
    return pipe.report(folder), last


def test_the_page_shows_stages_and_an_update_over_time(ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    found = ranks(4, reported, folder, 3)
    assert [page for page, _ in found] == [folder / "report.html", None, None, None]
    page = (folder / "report.html").read_text()
    for text in ("Uno in stages", "3 stages on 4 ranks", "predicted", "rank 3, 2F0", "inputs alone", "0, 1"):
        assert text in page, text
    assert "micro-batches" in page
    assert "chunks" not in page
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["updates"] == 3
    assert summary["last_loss"] == pytest.approx(found[0][1])
    assert summary["update_seconds"] > 0
    assert (summary["schedule"], summary["why"]) == ("kfkb", "")
    assert 0 < summary["pipeline"]["bubble"] < 1
    assert 0 <= summary["pipeline"]["predicted_bubble"] < 1
    assert summary["bytes"]["stage"] > 0
    assert [stage["reads"] for stage in summary["stages"]] == [[], [], [0, 1]]
    again = StagePlan.load(folder / "plan.json")
    assert [(s.devices, s.micro_batch, s.k) for s in again.stages] == [(1, 2, 1), (1, 4, 1), (2, 8, 1)]
    ranks(4, reported, tmp_path / "again", 1, folder / "plan.json")  # what is written can be given
    assert StagePlan.load(tmp_path / "again" / "plan.json") == again
    named = {event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]}
    assert "2B0" in named


def test_before_any_update_there_is_a_page_of_the_stages(ranks: Any, tmp_path: Path) -> None:
    ranks(4, reported, tmp_path, 0)
    page = (tmp_path / "report.html").read_text()
    assert 'role="img"' not in page
    assert "inputs alone" in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["updates"], summary["last_loss"], summary["update_seconds"]) == (0, None, None)
