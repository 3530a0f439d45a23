"""Each benchmark runs on a tiny graph and writes the figures that it promises."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import warm

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SINGLE = BENCHMARKS / "single_device"


def run(program: Path, tmp_path: Path, *more: str) -> str:
    words = ["--smoke", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path), *more]
    done = warm.run(program, *words, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_one_device_against_pyg(tmp_path: Path) -> None:
    run(SINGLE / "main.py", tmp_path, "--threads", "1")
    (row,) = read(tmp_path / "results.json")["rows"]
    assert set(row["sides"]) == {"edge_index", "csr", "kagome"}
    for side in row["sides"].values():
        assert side["epoch_seconds"] > 0
        assert side["peak_memory_bytes"] > 0
        assert side["timed_epochs"] == [2]
    assert row["loss_difference"] < 1e-5  # it is the same training
    assert set(row["faster"]) == {"edge_index", "csr"}
    assert "| gcn |" in (tmp_path / "results.md").read_text()
    assert "turn 0" in run(SINGLE / "main.py", tmp_path, "--threads", "1")
    kept = sorted((tmp_path / "runs").glob("*.json"))
    assert len(kept) == 3  # resumed from its files, not run again


@pytest.mark.parametrize("name", ["tiny-web", "tiny-social"])
def test_webs_have_long_tails_and_the_web_alone_is_local(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SINGLE))
    import numpy as np
    import webs

    web = webs.WEBS[name]
    source, target = webs.edges(web)
    keys = source * web.vertices + target
    assert keys.size == np.unique(keys).size == web.edges
    assert (source != target).all()
    assert np.array_equal(webs.edges(web)[1], target)  # seeded
    assert not np.array_equal(webs.edges(replace(web, seed=1))[1], target)
    degree = np.sort(np.bincount(target, minlength=web.vertices))
    assert degree[-1] > 15 * degree.mean() > 15 * np.median(degree)
    near = np.mean(abs(source - target) < 100)
    returned = np.isin(target * web.vertices + source, keys).mean()
    begins, _ = webs.hosts(web, np.random.default_rng(web.seed))
    if name == "tiny-web":
        assert near > 0.6
        assert np.mean(begins[source] == begins[target]) > 0.85
    else:
        assert near < 0.12  # at random 2 * 100 / 2000
        assert returned > 0.3


def test_webs_are_measured_beside_dgl_where_it_is(tmp_path: Path) -> None:
    words = ("--group", "webs", "--threads", "1")
    run(SINGLE / "main.py", tmp_path, *words)
    told = read(tmp_path / "results.json")["rows"]
    assert [row["graph"] for row in told] == ["tiny-web", "tiny-social"]
    rivals = {"csr", "dgl"} if importlib.util.find_spec("dgl") else {"csr"}
    for row in told:
        assert set(row["faster"]) == rivals
        assert row["loss_difference"] < 1e-5  # it is the same training


@pytest.mark.slow
def test_growth_is_measured_and_drawn(tmp_path: Path) -> None:
    run(SINGLE / "growth.py", tmp_path, "--threads", "1")
    told = read(tmp_path / "results_growth.json")
    assert [p["size"] for p in told["vertices"]["gcn"]] == [200, 400]
    assert all(p["epoch_seconds"] > 1e3 * p["edge_seconds"] > 0 for p in told["vertices"]["gcn"])
    assert "| gcn, an edge and epoch |" in (tmp_path / "results_growth.md").read_text()
    drawn = (tmp_path / "results_growth.svg").read_text()
    assert "<svg" in drawn
    assert "hidden width" in drawn


def test_aggregation_methods_agree(tmp_path: Path) -> None:
    run(SINGLE / "aggregation.py", tmp_path, "--threads", "1")
    told = read(tmp_path / "results_aggregation.json")
    assert len(told["rows"]) == 6
    for row in told["rows"]:
        assert {"PyG", "Kagome"} <= set(row["seconds"])
        assert max(row["difference"].values()) < 1e-5
    floors = told["rows"][0]["floors"]
    assert 0 < floors["once"] < floors["gathered"]


@pytest.mark.slow
def test_profile_adds_up_to_the_epoch(tmp_path: Path) -> None:
    run(SINGLE / "epoch_profile.py", tmp_path, "--threads", "1")
    told = read(tmp_path / "results_profile.json")
    assert [t["side"] for t in told] == ["edge_index", "kagome"]
    for t in told:
        assert sum(t["groups"].values()) == pytest.approx(t["epoch_ms"], rel=1e-6)
        assert t["groups"]["aggregation"] > 0
        assert t["groups"]["dense products"] > 0
        assert t["groups"]["optimizer"] > 0


@pytest.mark.slow
def test_two_ranks_against_one(tmp_path: Path) -> None:
    run(BENCHMARKS / "graph_parallel" / "speed.py", tmp_path)
    (row,) = read(tmp_path / "results_speed.json")["rows"]
    assert row["bytes_per_epoch"] > 0
    assert row["faster"][1] <= row["faster"][0] <= row["faster"][2]
    assert all(0 <= share <= 1 for share in row["hidden_share"].values())


@pytest.mark.slow
def test_late_and_sampled_rows_beside_exact_ones(tmp_path: Path) -> None:
    program = BENCHMARKS / "graph_parallel" / "late.py"
    run(program, tmp_path)
    (row,) = read(tmp_path / "results_late.json")["rows"]
    assert row["place"] == "one host"
    ways = {"exact", "exact, no sums", "late", "sampled"}
    assert set(row["seconds"]) == set(row["peak_memory_bytes"]) == ways
    assert row["of_exact"]["exact"] == [1.0, 1.0, 1.0]
    assert row["bytes_per_epoch"]["late"] == row["bytes_per_epoch"]["exact"]
    assert row["bytes_per_epoch"]["sampled"] < row["bytes_per_epoch"]["exact"]
    assert row["said"] == {way: way in ("late", "sampled") for way in ways}
    assert "| one host | late |" in (tmp_path / "results_late.md").read_text()
    kept = sorted(path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("late-*/summary.json"))
    run(program, tmp_path)
    again = sorted(path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("late-*/summary.json"))
    assert (len(kept), again) == (4, kept)  # resumed from its folders, not run again


def test_dgl_is_imported_or_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SINGLE))
    monkeypatch.setitem(sys.modules, "dgl", None)  # as where it is not installed
    import rivals

    found, reason = rivals.import_dgl()
    assert found is None
    assert reason.startswith("no DGL: ModuleNotFoundError")


def test_outcome_of_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SINGLE))
    import trial

    slow = trial.figure([{"seconds": [s, 9, 1], "peak": 8, "absolute": 9} for s in (4.0, 6.0, 8.0)])
    fast = trial.figure([{"seconds": [s], "peak": 2, "absolute": 9} for s in (2.0, 1.0, 4.0)])
    assert slow is not None
    assert fast is not None
    assert (slow.seconds, slow.low, slow.high, slow.peak) == (6, 4, 8, 8)
    assert trial.ratio(slow, fast) == (3, 2, 6)
    assert trial.figure([{"error": "out of memory"}]) is None


def hog() -> None:
    import time

    kept = bytearray(1 << 28)
    kept[:: 1 << 12] = b"x" * len(kept[:: 1 << 12])  # every page is touched
    time.sleep(60)


def test_a_trial_is_ended_before_it_takes_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    monkeypatch.syspath_prepend(str(SINGLE))
    import trial

    monkeypatch.setattr(trial, "available", lambda: trial.HEADROOM + (1 << 27))
    process = multiprocessing.get_context("fork").Process(target=hog)
    process.start()
    reason = trial.watched(process, 30.0)
    assert reason is not None
    assert reason.startswith("out of memory")
    assert process.exitcode == -9


def test_memory_is_told_tensor_by_tensor(tmp_path: Path) -> None:
    run(BENCHMARKS / "memory" / "main.py", tmp_path, "--threads", "1")
    rows = read(tmp_path / "results.json")
    assert [row["side"] for row in rows] == ["kagome", "edge_index"]
    for row in rows:
        assert row["peak"] > row["peak_tensors"]["live"] > 0
        assert len(row["peak_tensors"]["largest"]) == 10
    assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-5)
    assert "## gcn, Kagome" in (tmp_path / "results.md").read_text()


def test_exact_dropout_is_measured_beside_pytorchs(tmp_path: Path) -> None:
    run(SINGLE / "exactness.py", tmp_path, "--threads", "1")
    (row,) = read(tmp_path / "results_exactness.json")["rows"]
    assert set(row["ms"]) == {"PyTorch", "Kagome"}
    assert "| dropout |" in (tmp_path / "results_exactness.md").read_text()


@pytest.mark.slow
def test_gpipe_on_a_graph_is_measured_and_drawn(tmp_path: Path) -> None:
    program = BENCHMARKS / "gpipe_graph" / "main.py"
    for _ in range(2):
        done = warm.run(program, "--smoke", "--out", tmp_path, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy digits" not in done.stdout  # resumed from its file, not run again
    told = read(tmp_path / "results.json")
    dropped = told["accuracy/digits/pipe1-drop2-contiguous/0"]
    assert dropped["test"] == dropped["test_plain"]  # evaluation by the pipeline is exact
    assert 0 < dropped["lost"] < 1
    assert dropped["by_chance"] == pytest.approx(0.5, abs=1e-3)
    assert all(told[f"time/digits/{name}/0"]["seconds"] > 0 for name in ("pyg", "rebuild-drop2-contiguous"))
    assert "| Kagome, 1 stage | 2 |" in (tmp_path / "results.md").read_text()
    assert len(list(tmp_path.glob("figure*.svg"))) == 4


def test_pipelines_beside_torchs_are_told_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "pipeline"))
    import made

    with pytest.raises(SystemExit, match="no side is called tpu: there are torch, torchgpipe, kagome"):
        made.main(made.Options(sides=["torch", "tpu"]))  # before it runs any
    rows = {"2x4": {"torch": [4.0, 8.0], "kagome": [2.0, 2.0], "unguarded": [1.0, 2.0]}}
    means = {"kagome": (3.0, 5.0), "unguarded": (1.0, 2.0)}
    facts = {
        f"2x4 {side} turn {turn}": {"mean": mean}
        for side, turns in means.items()
        for turn, mean in enumerate(turns)
    }
    head, _, cells = made.table(rows, facts).splitlines()
    told = dict(zip(head.strip("| ").split(" | "), cells.strip("| ").split(" | "), strict=True))
    assert told == {
        "stages x chunks": "2x4",
        "torch, edges dropped": "6,000 ms",
        "kagome, none": "2,000 ms",
        "kagome without its guard, none": "1,500 ms",
        "kagome: mean of all epochs": "4,000 ms",
        "unguarded: mean of all epochs": "1,500 ms",
        "what the guard adds to a run": "175%",
        "kagome: less time than torch": "3.00 times (2.00 to 4.00)",
        "unguarded: less time than torch": "4.00 times (4.00 to 4.00)",
    }


def test_pipelines_beside_torchs_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "pipeline"))
    import made

    asked: list[str] = []

    def measured(options: made.Options, cut: str, side: str) -> dict[str, object]:
        asked.append(side)
        if len(asked) == 4:
            raise SystemExit("broken off")
        return {"seconds": [9.0, 9.0, 9.0, len(asked), len(asked)], "mean": float(len(asked))}

    monkeypatch.setattr(made, "measured", measured)
    monkeypatch.setattr(made, "HERE", tmp_path)
    monkeypatch.setitem(sys.modules, "graphs", SimpleNamespace(load=lambda *_: None))
    options = made.Options(sides=["torch", "kagome"], turns=2)
    with pytest.raises(SystemExit, match="broken off"):
        made.main(options)
    assert not (tmp_path / "results_made.md").exists()
    made.main(options)  # the fourth once more, and no other
    assert asked == ["torch", "kagome"] * 2 + ["kagome"]
    assert "| 2x4 | 2,000 ms | 3,500 ms |" in (tmp_path / "results_made.md").read_text()
    made.main(options)
    assert len(asked) == 5
    made.main(replace(options, epochs=25))  # other settings
    assert len(asked) == 9
    made.main(replace(options, epochs=25, fresh=True))
    assert len(asked) == 13


def headline_line(table: Any, goal: Any = None) -> Any:
    rivals = {"pipe, GPipe": "torchgpipe"}
    return table.Line("pipeline", "epoch", "ms", "pipe, before", "pipe, now", rivals, goal)


def headline_runs() -> dict[str, dict[int, dict[str, Any]]]:
    seconds = {"pipe, before": (2.0, 4.0, 3.0), "pipe, now": (1.0, 3.0, 3.0), "pipe, GPipe": (2.0, 2.0, 2.0)}
    runs: dict[str, dict[int, dict[str, Any]]] = {
        job: {turn: {"epoch": value, "loss": 2.0} for turn, value in enumerate(values)}
        for job, values in seconds.items()
    }
    for one in runs["pipe, GPipe"].values():
        one["edges kept"] = 0.84
    return runs


def test_headline_figures_are_compared_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "before_after"))
    import headline_table as table

    runs = headline_runs()
    line = headline_line(table, table.Goal(1.0, "pipe, GPipe"))
    head, _, row = table.table([line], runs).splitlines()
    assert dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True)) == {
        "what": "pipeline",
        "turns": "3",
        "before": "3,000 (2,000 to 4,000) ms",
        "now": "3,000 (1,000 to 3,000) ms",
        "now over before": "0.75 (0.50 to 1.00)",  # the medians alone would say 1
        "beside": "torchgpipe: 2,000 (2,000 to 2,000) ms, 16% of the edges dropped",
        "now over that": "torchgpipe: 1.50 (0.50 to 1.50)",
        "goal": "at most 1 of torchgpipe",
        "reached": "**no**; in 1 of 3 turns",
    }
    del runs["pipe, before"][1], runs["pipe, now"][2]  # the turn that both have is the first
    assert table.cells(line, runs)[1:5:3] == ["1", "0.50 (0.50 to 0.50)"]


def test_headline_figures_tell_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "before_after"))
    import headline_table as table

    runs = headline_runs()
    runs["pipe, GPipe"] = {turn: {"error": "not installed"} for turn in range(3)}
    line = headline_line(table, table.Goal(1.0, "pipe, GPipe"))
    assert table.cells(line, runs)[5:] == [
        "torchgpipe: not installed",
        "-",
        "at most 1 of torchgpipe",
        "not measured",
    ]
    assert table.verdict(headline_line(table, table.Goal(3000.0)), runs) == "yes"
    assert table.same_training([line], runs).startswith("Last losses of before and now are at most 0.0e+00 ")
    runs["pipe, now"][1]["loss"] = 1.0  # other training
    assert "at most 5.0e-01 of the loss apart (pipe, now)" in table.same_training([line], runs)


def test_headline_runs_alternate_and_go_on_where_they_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "before_after"))
    import headline_table as table

    jobs = ["rival", "before", "now"]
    whole = [(0, "rival"), (0, "before"), (0, "now"), (1, "now"), (1, "before"), (1, "rival")]
    assert table.missing(jobs, {}, 2) == whole
    found = {job: {0: {"epoch": 1.0}} for job in jobs} | {"now": {0: {"epoch": 1.0}, 1: {"epoch": 1.0}}}
    assert table.missing(jobs, found, 2) == whole[4:]


@pytest.mark.slow
def test_steps_of_an_own_loop(tmp_path: Path) -> None:
    words = [
        "--side",
        "12",
        "--width",
        "8",
        "--layers",
        "2",
        "--steps",
        "1",
        "--turns",
        "1",
        "--out",
        str(tmp_path),
    ]
    done = warm.run(BENCHMARKS / "own_loop" / "main.py", *words, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = read(tmp_path / "results.json").values()  # of the one case
    losses = {way: each["loss"] for way, starts in told.items() for each in starts}
    assert len(losses) == 5
    del losses["half the graph, two alone"]
    assert max(losses.values()) - min(losses.values()) < 1e-5  # it is the same training
    assert "| shard, 2 ranks |" in (tmp_path / "results.md").read_text()


@pytest.mark.slow
def test_the_memory_of_a_recommender(tmp_path: Path) -> None:
    words = ["--users", "300", "--items", "200", "--interactions", "3000", "--columns", "8", "--steps", "1"]
    script = BENCHMARKS / "recommender" / "main.py"
    done = warm.run(script, *words, "--out", str(tmp_path), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    whole, held, cut = read(tmp_path / "results.json").values()
    losses = [each["loss"] for each in (*whole, *held, *cut)]
    assert max(losses) - min(losses) < 1e-5  # it is the same training
    assert [each["rows"] for each in held] == [500] * 4
    assert sum(each["rows"] for each in cut) == 500
    assert sum(each["learned"] for each in cut) == whole[0]["learned"]


@pytest.mark.slow
def test_rows_that_volume_cuts_save(tmp_path: Path) -> None:
    script = BENCHMARKS / "volume" / "main.py"
    done = warm.run(script, "--smoke", "--out", str(tmp_path), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = read(tmp_path / "results.json")
    assert 0 < row["cover"] <= row["sums"] <= row["rows"] <= row["cut"]
    assert row["rows"] / 2 <= row["rows_largest"] <= row["rows"]


def test_what_volume_cuts_save_is_counted_both_ways() -> None:
    import runpy

    import torch

    counted = runpy.run_path(str(BENCHMARKS / "volume" / "main.py"))["counted"]
    # 0 is read by 3, 4 and 5; 3 reads 0, 1 and 2, once twice: the row of 0 and the sum of 3 serve all.
    edge_index = torch.tensor([[0, 0, 0, 1, 2, 2, 5], [3, 4, 5, 3, 3, 3, 0]])
    found = counted(edge_index, torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    assert {name: found[name] for name in ("cut", "rows", "sums", "cover")} == {
        "cut": 7,
        "rows": 4,
        "sums": 4,
        "cover": 3,
    }
    assert (found["rows_largest"], found["cover_largest"]) == (3, 2)


def test_epochs_with_sums_are_told_beside_those_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = runpy.run_path(str(BENCHMARKS / "volume" / "epochs.py"))["table"]
    row = {"epoch_seconds": 2.0, "exposed_share": 0.5, "bytes_per_epoch": {"halo": 8e6, "total": 10e6}}
    sums = {"epoch_seconds": 1.6, "exposed_share": 0.4, "bytes_per_epoch": {"halo": 4e6, "total": 6e6}}
    found = table({"made/gcn/256/100/rows": row, "made/gcn/256/100/sums": sums, "made/gcn/256/200/rows": row})
    assert found.splitlines()[2:] == [
        "| made | gcn | 256 | 100 | none | 2.000 | 1.600 | 1.25x | 1.25x | 8.0 | 4.0 | -50% |"
    ]


def test_what_a_start_imports_is_counted_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = BENCHMARKS / "start" / "main.py"
    done = warm.run(program, "--imported", "import graphlib, kagome.cli.ahead", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["modules"] >= 1
    assert 0 <= sum(told["packages"].values()) <= told["seconds"] + 1e-3
    monkeypatch.syspath_prepend(str(program.parent))
    spec = importlib.util.spec_from_file_location("start_main", program)
    assert spec is not None
    assert spec.loader is not None
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    row = {"phases": {"Trainer._check": [0.5, 0.75]}, "compiled": [["a", "b", 1.5]], "loaded": []}
    found = {
        "imports": {"launcher": told},
        "ranks": {"warm": {"rank 0": row}},
        "wall": {"warm": [3.0, 2.0, 4.0]},
    }
    shown = main.tables(found)
    assert "| rank 0 | check of the model | 0.50 | 0.75 |" in shown
    assert "| rank 0 | of these: 1 functions compiled | 1.50 | |" in shown
    assert "| warm | 3.00 (2.00 to 4.00) |" in shown
