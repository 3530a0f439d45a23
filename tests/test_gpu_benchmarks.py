"""The GPU's steps run on a machine without one; their results are kept, and a step runs once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu" / "main.py"


def call(folder: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--small", "--out", str(folder), *steps]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=dict(os.environ))


def test_steps_write_their_results_and_are_not_run_again(tmp_path):
    steps = ["machine", "large", "draws", "ceilings"]
    done = call(tmp_path, *steps)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["name"] == "(done)"] == steps
    checked = [row["ok"] for row in rows if row["step"] in ("large", "draws") and "ok" in row]
    assert len(checked) == 9
    assert all(checked)
    assert "| ceilings | copy | gb_s" in (tmp_path / "results.md").read_text()

    again = call(tmp_path, "machine", "large")
    assert again.returncode == 0
    assert again.stdout.count("done before") == 2
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == len(rows)


def test_a_step_of_another_name_is_refused(tmp_path):
    done = call(tmp_path, "sums")
    assert done.returncode == 2
    assert "expected steps of machine, " in done.stderr
    assert "got sums" in done.stderr
