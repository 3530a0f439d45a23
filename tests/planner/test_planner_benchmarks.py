"""The benchmarks of the planners run small and write the figures that they promise."""

from __future__ import annotations

import json
from pathlib import Path

import warm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_three_planners_are_compared(tmp_path: Path) -> None:
    words = ("--smoke", "--sizes", 2, 4, "--batches", 32, "--operators", 12, "--out", tmp_path)
    done = warm.run(BENCHMARKS / "graphpipe" / "main.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "results.json").read_text())["rows"]["uno/2/32"]
    for planner in ("graphpipe", "pipedream", "piper", "bapipe"):
        assert told[planner]["throughput"] > 0
        assert told[planner]["devices"] <= 2
        assert told[planner]["searches_not_ended"] == 0
    assert "| uno | 2 | 32 |" in (tmp_path / "results.md").read_text()
    assert json.loads((tmp_path / "operators_uno.json").read_text())


def test_curves_over_devices_are_drawn(tmp_path: Path) -> None:
    counts = ("--vertices", 1000, "--edges", 5000, "--features", 8, "--classes", 4, "--hidden", 8)
    words = (*counts, "--clusters", "a5000x16", "--sizes", 2, 8, "--out", tmp_path)
    done = warm.run(BENCHMARKS / "planner" / "scale.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "results_scale.json").read_text())
    assert [(row["devices"], row["history"]) for row in rows] == [
        (d, old) for d in (2, 8) for old in (False, True)
    ]
    assert all(row["epoch_seconds"] > 0 for row in rows)
    assert "<svg" in (tmp_path / "results_scale.svg").read_text()


def test_predictions_are_set_beside_measured_runs(tmp_path: Path) -> None:
    """Runs are told by their commands: what was trained, and how it was cut."""
    run = "kagome train --data.name sbm:vertices=200,degree=6,features=8,classes=3 --model.hidden 8"
    cuts = {"parts": "--parallel.graph 4", "late": "--parallel.graph 4 --parallel.max-age 1"}
    rows = {
        f"sbm/gcn/{name}": {
            "command": f"{run} --out DIR {flags}",
            "rate": 200.0,
            "epoch_seconds": 0.5,
            "bytes_per_epoch": {"total": 1e6},
            "held_bytes": [2e6, 3e6],
        }
        for name, flags in cuts.items()
    }
    (tmp_path / "measured.json").write_text(json.dumps(rows))
    words = ("--measured", tmp_path / "measured.json", "--data", tmp_path, "--out", tmp_path)
    done = warm.run(BENCHMARKS / "planner" / "main.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "results.md").read_text()
    assert "| graph=4 |" in table
    assert "| graph=4 max_age=1 |" in table
    assert "2 runs: off by" in table
