"""The benchmarks of feature slices run small, and their tables say what was measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

import warm

SLICES = Path(__file__).parents[1] / "benchmarks" / "slices"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"slices_{name}", SLICES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_accuracy_is_compared_seed_by_seed(tmp_path: Path) -> None:
    words = ["--graphs", "digits", "--models", "gcn", "--layers", "2", "--seeds", "1", "--epochs", "3"]
    done = warm.run(SLICES / "accuracy.py", *words, "--jobs", 1, "--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "results_accuracy.json").read_text())
    assert len(rows) == 2
    assert all(0 < row["test"] <= 1 for row in rows.values())
    (line,) = (tmp_path / "results_accuracy.md").read_text().splitlines()[2:]
    assert line.startswith("| digits | gcn | 2 | accuracy | 1 | ")


def row(seconds: float, size: float) -> dict[str, object]:
    return {"epoch_seconds": seconds, "bytes_per_epoch": {"total": size}, "balance": 1.25}


def test_the_table_of_speed_says_how_much_faster_each_way_is() -> None:
    speed = load("speed")
    rows = {
        "cornell5/gcn/3/1000/parts": row(2.0, 4e6),
        "cornell5/gcn/3/1000/slices": row(1.0, 2e6),
        "cornell5/gcn/3/1000/slices decoupled": row(0.5, 1e6),
        "cornell5/gcn/3/1000/sampled": {"error": "no DGL"},
        "tolokers/gcn/3/1000/slices": row(1.0, 2e6),
    }
    (line,) = speed.table(rows).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:6] == ["cornell5", "gcn", "3", "1000", "2.000", "1.000 (2.00x)"]
    assert cells[6:] == ["", "0.500 (4.00x)", "", "", "4.0 / 2.0 / 1.0", "1.25 / 1.25"]
    rows["cornell5/gcn/3/1000/sampled"] = row(1.5, 0.0)
    assert "| 1.500 (1.33x) | 3.00x | 4.0 / 2.0 / 1.0 |" in speed.table(rows)


def test_the_grid_gives_slices_the_whole_graph_and_parts_their_own() -> None:
    speed = load("speed")
    options = speed.Options(graphs=["digits"], models=["gcn"], layers=[3])
    found = {way: (case.parts, settings.more) for _, way, case, settings in speed.grid(options)}
    assert found["parts"] == (4, "")
    assert found["slices decoupled"] == (1, "--parallel.tensor 4 --parallel.decouple")
    assert found["parts decoupled"] == (4, "--parallel.decouple")
