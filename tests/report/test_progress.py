"""The plain progress lines and TensorBoard's absence."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from kagome.errors import ConfigError
from kagome.records.epoch import EpochRecord
from kagome.report.progress import Progress, TensorBoard


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(epochs: int, wanted: int, *, done: int = 0) -> list[str]:
    out, clock = io.StringIO(), Clock()
    with Progress(wanted, done=done, metric_name="accuracy", stream=out, clock=clock) as progress:
        for epoch in range(done + 1, done + epochs + 1):
            clock.now += 1.0
            progress.update(EpochRecord(epoch, 0.5, None, 0.25 if epoch % 2 else None, 1.0))
    return out.getvalue().splitlines()


def test_first_last_and_at_most_one_line_each_five_seconds() -> None:
    lines = run(12, 12)
    assert [line.split()[1] for line in lines] == ["1/12", "6/12", "11/12", "12/12"]
    assert lines[0] == "epoch 1/12  loss 0.5000  val accuracy 0.2500  11 s left"
    assert lines[-1] == "epoch 12/12  loss 0.5000  val accuracy 0.2500"


def test_an_early_stop_shows_its_last_epoch() -> None:
    assert run(3, 200)[-1].startswith("epoch 3/200")
    assert len(run(3, 200)) == 2


def test_a_resume_counts_on() -> None:
    assert run(2, 10, done=8)[-1].startswith("epoch 10/10")


def test_nothing_when_not_asked() -> None:
    out = io.StringIO()
    with Progress(3, enabled=False, stream=out) as progress:
        progress.update(EpochRecord(1, 0.5, None, None, 1.0))
    assert out.getvalue() == ""


def test_a_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    with Progress(2, metric_name="accuracy", stream=out) as progress:
        progress.update(EpochRecord(1, 0.5, None, 0.25, 1.0))
        progress.update(EpochRecord(2, 0.4, None, None, 1.0))
    assert "loss 0.4000  val accuracy 0.2500" in out.getvalue()


def test_tensorboard_asked_for_but_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match="pip install"):
        TensorBoard(tmp_path)


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, after=2)
    board.write(EpochRecord(3, 0.5, None, 0.25, 1.0, {"halo": 3}))
    board.close()
    assert any(path.name.startswith("events") for path in tmp_path.iterdir())
