"""The benchmarks of the planners run small and write the figures that they promise."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

import warm
from hosts import need_cluster
from kagome.cli.app import parse_train

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


@pytest.mark.slow
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


@pytest.mark.slow  # three runs on two ranks
def test_knobs_are_predicted_and_run(tmp_path: Path) -> None:
    """And a second call finds all that is done."""
    graph = "sbm:vertices=300,degree=6,features=8,classes=4,communities=4"
    sizes = ("--layers", 2, "--hidden", 8, "--turns", 1, "--epochs", 2)
    words = ("--graph", graph, "--models", "deepgcn", *sizes, "--out", tmp_path)
    for first in (True, False):
        done = warm.run(BENCHMARKS / "planner" / "knobs.py", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("'held'" in done.stdout) == first
    found = json.loads((tmp_path / "results_knobs.json").read_text())
    told, runs = found["predicted"]["deepgcn"], found["runs"]
    assert set(told) == {"device", "recompute"}, "a CPU's memory is the host's"
    (plain,), (again,) = (runs[f"deepgcn/{way}"] for way in told)
    assert told["device"]["memory"] == pytest.approx(plain["held"], rel=0.03)
    # The layer that runs again counts in the prediction, and is gone when what is held is counted.
    assert again["held"] < told["recompute"]["memory"] < told["device"]["memory"]
    assert plain["loss"] == pytest.approx(again["loss"], rel=1e-5)
    assert (tmp_path / "results_knobs.md").read_text().count("| deepgcn |") == 2


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"planner_{name}", BENCHMARKS / "planner" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plan(seconds: float, *, exact: bool = True) -> dict[str, object]:
    sent = {"halo": 9_000_000, "weights": 1_000_000}
    return {"epoch_seconds": seconds, "bytes_per_epoch": sent, "memory_bytes": 3e6, "exact": exact}


def ran(seconds: float, held: float = 3e6) -> dict[str, object]:
    spread = [0.9 * seconds, 1.1 * seconds]
    size = {"total": 1e7}
    return {"epoch_seconds": seconds, "spread": spread, "bytes_per_epoch": size, "held_bytes": [2e6, held]}


def test_predictions_are_set_beside_measured_runs() -> None:
    main = load("main")
    plans = {
        "graph=4": plan(1.0),
        "tensor=4": plan(0.9),
        "graph=4 max_age=1": plan(0.5, exact=False),
        "never": plan(0.1),
    }
    one = {"hosts": {}, "rates": {"100": plans, "300": plans}}
    slow = {"hosts": {}, "rates": {"100": {name: plan(9.0) for name in plans}}}  # a slow minute
    fast = {"hosts": {}, "rates": {"100": {name: plan(0.1) for name in plans}}}
    found = {"g/gcn/3/128": [slow, fast, one]}
    runs = {
        "g/gcn/3/128/100/graph=4": ran(1.0),
        "g/gcn/3/128/100/tensor=4": ran(1.2, held=2.5e6),
        "g/gcn/3/128/100/graph=4 max_age=1": ran(0.5),
        "g/gcn/3/128/300/graph=4": ran(0.8),
        "g/gcn/3/128/300/tensor=4": {"error": "no end after 9 seconds"},
        "g/gcn/3/128/300/graph=2": ran(1.0),  # which no plan is for
    }
    text = main.table(runs, found)
    assert "| g/gcn/3/128/100 | graph=4 | 1.000 | 1.000 | +0% | 10.00 | 10.00 | 3.0 | 3.0 |" in text
    assert "| g/gcn/3/128/100 | tensor=4 | 0.900 | 1.200 | -25% |" in text
    assert "graph=2" not in text
    assert "| all | 4 | 12% | 25% | +0% | 0.00% | 3 of 4 | 20% |" in text
    assert "| parts | 2 | 12% | 22% | +12% | 0.00% | 2 of 2 | 0% |" in text
    # Of the exact ones tensor=4 would be taken, of all max_age=1.
    exact, every = text.splitlines()[-2:]
    assert exact.startswith(
        "Of exact cuts the chosen one is within 5 % of the best in 0 of 1 settings, within that"
    )
    assert exact.strip().endswith("slowest epoch in 0; at worst 1.20 times as slow.")
    assert every.strip().endswith("slowest epoch in 1; at worst 1.00 times as slow.")
    near = {**runs, "g/gcn/3/128/100/tensor=4": ran(1.09)}
    assert "slowest epoch in 1; at worst 1.09" in main.table(near, found)


def test_each_cut_is_run_as_the_planner_calls_it() -> None:
    """A plan's name and the flags of its run say the same."""
    settings = load("settings")
    for name, (parts, pipe, more) in settings.CUTS.items():
        run = parse_train(["--parallel.graph", str(parts), "--parallel.pipe", str(pipe), *more.split()])
        cut = run.parallel
        told = {"pipe": cut.pipe, "graph": cut.graph, "tensor": cut.tensor}
        told = {axis: size for axis, size in told.items() if size and size > 1}
        given = (("decouple", False), ("codec", "none"), ("max_age", 0), ("chunks", None))
        told |= {key: getattr(cut, key) for key, usual in given if getattr(cut, key) != usual}
        told |= {"cross_chunk": "exact"} if cut.cross_chunk == "exact" else {}
        assert " ".join(f"{key}={value}" for key, value in told.items()) == name


def test_epochs_take_about_as_long_at_each_rate() -> None:
    main = load("main")
    plans = {"100": {"graph=4": plan(1.0)}, "300": {"graph=4": plan(0.5)}, "1000": {"graph=4": plan(0.01)}}
    assert main.epochs(plans, "graph=4", [100.0, 300.0, 1000.0]) == [main.FEWEST, 10, main.MOST]


@pytest.mark.slow
def test_small_runs_are_predicted_and_run(tmp_path: Path) -> None:
    """Everything at once, where hosts can be emulated."""
    need_cluster()
    words = (
        "--graphs",
        "digits",
        "--models",
        "gcn",
        "--rates",
        1000,
        "--hours",
        0,
        "--passes",
        1,
        "--out",
        tmp_path,
    )
    # Ranks with a share of a core each, on a machine that may be busy.
    done = warm.run(BENCHMARKS / "planner" / "main.py", *words, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "results.json").read_text())["plans"]["digits/gcn/3/128"][0]
    assert 0 < told["hosts"]["pace"] < 1
    # 125 MB/s, and what a link carries at once after a pause: a quarter of a megabyte of each few.
    assert 1e7 < told["hosts"]["links"]["1000"][0] < 5e8
    assert {"graph=4", "tensor=4", "graph=4 decouple=True"} <= set(told["rates"]["1000"])
