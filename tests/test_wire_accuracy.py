"""What coded and late rows cost: tables pair each run with the exact one of its seed and sources."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from wire import accuracy  # noqa: E402


def row(test: float, source: str) -> dict[str, Any]:
    return {"test": test, "halo_bytes": 10, "climbed": [], "epochs": 200, "source": source}


KEPT = {
    "cora/gcn/none waits/0@new": row(0.80, "new"),
    "cora/gcn/none waits/0@old": row(0.70, "old"),
    "cora/gcn/none waits/1@new": row(0.82, "new"),
    "cora/gcn/onebit waits/0": row(0.71, "old"),
    "cora/gcn/onebit waits/1": row(0.81, "new"),
    "cora/gcn/int8 waits/2": row(0.10, "new"),  # no exact run of this seed
    "cora/sage/none waits/0@new": row(0.60, "new"),
    "cora/sage/onebit waits/0": row(0.62, "new"),
    "flickr/gat4/none waits/0@new": row(0.10, "new"),
    "flickr/gat4/onebit waits/0": row(0.20, "new"),
}


def test_runs_are_set_beside_exact_ones_of_their_sources() -> None:
    told = accuracy.table(KEPT).splitlines()
    one = next(line for line in told if "| cora | gcn | onebit waits" in line)
    # One point above the exact run of the old sources, one below that of the new.
    assert one == (
        "| cora | gcn | onebit waits | 200 | 2 | 76.00 | +0.00 (-12.71 to +12.71) | 100.0% |  | new, old |"
    )
    assert not any("int8" in line for line in told)


def test_over_all_graphs_each_counts_once_where_exact_rows_learn() -> None:
    lines = accuracy.overall(KEPT).splitlines()
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| onebit waits", "2", accuracy.interval([0.0, 2.0])]
    ]
    assert "+0.00 | +1.00 | +2.00 |" in lines[2]


def test_only_what_lies_below_half_a_point_as_a_whole_is_bold() -> None:
    assert accuracy.interval([-1.0, -1.1, -0.9]).startswith("**-1.00 (")
    assert accuracy.interval([-1.0, -3.0]).startswith("-2.00 (")
    assert accuracy.interval([-2.0]) == "-2.00"  # one seed has no interval
    assert accuracy.interval([]) == ""


def test_runs_of_fewer_epochs_or_none_are_missing(tmp_path: Path) -> None:
    options = accuracy.Options(graphs=("cornell5",), models=("gcn",), seeds=1, out=tmp_path)
    cases = list(accuracy.cases(options, "new"))
    assert {case.epochs for case in cases} == {accuracy.EPOCHS["cornell5"]}
    assert len(cases) == len({case.key for case in cases}) == 17
    assert [case.key for case in cases if case.exact] == ["cornell5/gcn/none waits/0@new"]
    for case in cases:
        accuracy.put(tmp_path / "kept.json", case.key, row(0.5, "new"))
    assert set(accuracy.read(tmp_path / "kept.json")) == {case.key for case in cases}


@pytest.mark.parametrize("name", sorted(accuracy.NOT_LEARNT))
def test_what_is_left_out_is_of_the_grid(name: str) -> None:
    graph, model = name.split("/")
    assert graph in accuracy.GRAPHS
    assert model in accuracy.MODELS
