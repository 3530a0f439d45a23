"""The benchmark of the stage planners runs small and writes the figures that it promises."""

from __future__ import annotations

import json
from pathlib import Path

import warm

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "graphpipe" / "main.py"


def test_three_planners_are_compared(tmp_path: Path) -> None:
    words = ("--smoke", "--sizes", 2, 4, "--batch", 32, "--operators", 12, "--out", tmp_path)
    done = warm.run(PROGRAM, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "results.json").read_text())["rows"]["uno/2"]
    for planner in ("graphpipe", "pipedream", "piper"):
        assert told[planner]["throughput"] > 0
        assert told[planner]["devices"] <= 2
        assert told[planner]["searches_not_ended"] == 0
    assert "| uno | 2 |" in (tmp_path / "results.md").read_text()
    assert json.loads((tmp_path / "operators_uno.json").read_text())
