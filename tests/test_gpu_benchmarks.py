"""The GPU's steps run on a machine without one; their results are kept, and a step runs once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu" / "main.py"


FAKE = ROOT / "tests" / "device" / "fake_gpu"


def call(folder: Path, *steps: str, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--small", "--out", str(folder), *steps]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **env})


def on_a_fake_device(folder: Path, *steps: str) -> list[dict[str, object]]:
    """The results of steps of a machine with one fake GPU (see docs/gpu.md)."""
    built = subprocess.run(
        [sys.executable, "-m", "fake_gpu.build"], cwd=FAKE.parent, capture_output=True, text=True
    )
    if "CannotBuildError" in built.stderr:
        pytest.skip(built.stderr.splitlines()[-1])
    assert built.returncode == 0, built.stderr
    limit = ["--budget", "3000"]
    done = call(folder, *limit, *steps, timeout=3000, FAKE_GPUS="1", PYTHONPATH=str(FAKE / "site"))
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_steps_run_on_a_fake_device(tmp_path):
    rows = on_a_fake_device(tmp_path, "machine", "draws")
    assert [row["of"] for row in rows if row["name"] == "device"] == ["Fake GPU"]
    assert all(row["ok"] for row in rows if row["step"] == "draws" and "ok" in row)


@pytest.mark.slow  # minutes
def test_all_steps_run_on_a_fake_device(tmp_path):
    rows = on_a_fake_device(tmp_path)
    steps = list(dict.fromkeys(row["step"] for row in rows))
    assert [row["step"] for row in rows if row["name"] == "(done)"] == steps
    assert len(steps) == 15
    assert not [row for row in rows if row.get("ok") is False]
    waits = {row["name"]: row["count"] for row in rows if row["step"] == "waits" and "count" in row}
    assert all(waits[name] <= 1 for name in ("GCN", "chunks, exact", "decoupled"))
    skipped = {row["step"]: row["why"] for row in rows if row["name"] == "(skipped)"}
    assert list(skipped) == ["compiled_epochs"]


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
