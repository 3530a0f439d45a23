"""Hosts of unlike speed and memory: clusters, plans that cut in proportion, and runs with such parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import kagome
from kagome.cli.app import _ranks, main
from kagome.comm.channel import Channel
from kagome.config import Run
from kagome.errors import ConfigError, PartitionError, PlanError
from kagome.graph.partition.store import load_meta
from kagome.planner.candidates import Candidate, parts, ranked
from kagome.planner.cluster import Cluster
from kagome.planner.cost_model import CostRates, Load
from kagome.profile.synthetic_graphs import GraphSize
from kagome.train.data import refuse_other_weights
from training import QUIET, graph, losses, model, settings

MIXED = Cluster("fast and slow", 2, 2, (8e9, 4e9), (2, 1), (1e10, 1e8), (1e9, 1e7), 0.0)
RATES = CostRates(0.0, 1e-5, 1e-6, 0.0, 0.0, 1.0, 0, 64.0, 64.0, (1e4,))
GRAPH = "sbm:vertices=900,degree=8,features=6,classes=3,communities=3"


def test_each_rank_has_the_numbers_of_its_host() -> None:
    assert MIXED.memories(3) == (8e9, 8e9, 4e9)
    assert MIXED.paces(4) == (2, 2, 1, 1)
    assert MIXED.pace(2) == 2
    assert MIXED.pace(4) == 1
    assert (MIXED.weights(2), MIXED.weights(4)) == ((), (2.0, 2.0, 1.0, 1.0))
    # A plan of one host knows nothing of the other's links; one of both waits for the slower.
    assert (MIXED.bandwidth(2), MIXED.bandwidth(4)) == (1e10, 1e7)


@given(st.integers(1, 4), st.integers(1, 3), st.floats(0.1, 10))
def test_a_list_of_equal_numbers_is_one_number(hosts: int, devices: int, speed: float) -> None:
    one = Cluster("one", hosts, devices, 1e9, speed, 1e9, 1e8)
    each = replace(one, memory=(1e9,) * hosts, speed=(speed,) * hosts, between=(1e8,) * hosts)
    for ranks in range(1, one.size + 1):
        for asked in ("memories", "paces", "pace", "weights", "bandwidth"):
            assert getattr(one, asked)(ranks) == getattr(each, asked)(ranks)
    assert one.weights(one.size) == ()


def test_a_file_gives_a_number_for_each_host(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    lines = ['name = "two"', "hosts = 2", "devices = 1", "memory = [8e9, 4e9]", "speed = [3.0, 1.0]"]
    file.write_text("\n".join([*lines, "inside = 1e9", "between = 1e8"]))
    assert Cluster.load(file).weights(2) == (3.0, 1.0)
    rest = ["memory = 8e9", "inside = 1e9", "between = 1e8"]
    file.write_text("\n".join([*lines[:3], "speed = [3.0]", *rest]))
    with pytest.raises(PlanError, match="one for each of 2 hosts; got 1 numbers"):
        Cluster.load(file)
    file.write_text(
        "\n".join([*lines[:3], "memory = 8e9", "speed = [3, 0]", "inside = 1e9", "between = 1e8"])
    )
    with pytest.raises(PlanError, match="a cluster's speed to be from 1e-09"):
        Cluster.load(file)


def test_each_part_is_timed_on_its_rank() -> None:
    alike = [Load(50, 400, 0, 0, 1e6)]
    even = parts(4, alike, RATES, MIXED, 0.0)
    one = 50e-5 + 400e-6
    assert even.busy == pytest.approx((one / 2, one / 2, one, one))
    assert even.compute_seconds == pytest.approx(one)
    sizes = [Load(200 / 6 * w, 1600 / 6 * w, 0, 0, 1e6) for w in (2, 2, 1, 1)]
    fair = parts(4, sizes, RATES, MIXED, 0.0, weights=(2.0, 2.0, 1.0, 1.0))
    assert fair.compute_seconds == pytest.approx(one * 2 / 3)
    assert fair.settings["part_weights"] == (2.0, 2.0, 1.0, 1.0)
    assert fair.exact


def test_each_rank_needs_the_memory_of_its_own_host() -> None:
    def made(*held: float) -> Candidate:
        return Candidate({"graph": 4}, True, 1.0, 1.0, 0.0, {}, max(held), held=held)

    assert made(7e9, 7e9, 3e9, 3e9).lacks(MIXED) is None
    assert made(7e9, 7e9, 3e9, 5e9).lacks(MIXED) == (5e9, 4e9)
    stages = Candidate({"pipe": 4}, True, 1.0, 1.0, 0.0, {}, 5e9)  # any rank may hold as much
    assert stages.lacks(MIXED) == (5e9, 4e9)
    with pytest.raises(PlanError, match=r"4 devices of 4 GB; got graph=4, which needs least, at 5 GB"):
        ranked([made(7e9, 7e9, 3e9, 5e9)], MIXED)


@given(st.integers(1, 40), st.integers(1, 300), st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_sizes_without_a_graph_add_up(vertices: int, edges: int, weights: list[int]) -> None:
    found, _ = GraphSize(vertices * 100, edges * 100).counts(len(weights), 0, tuple(map(float, weights)))
    rows = [each.rows for each in found]
    assert 0 <= sum(rows) - vertices * 100 < len(weights)
    asked = [vertices * 100 * weight / sum(weights) for weight in weights]
    assert all(abs(one - other) <= 1 for one, other in zip(rows, asked, strict=True))
    one, _ = GraphSize(vertices * 100, edges * 100).counts(len(weights), 0)
    each, _ = GraphSize(vertices * 100, edges * 100).counts(len(weights), 0, (1.0,) * len(weights))
    assert each == one * len(weights)


def run(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0


def test_a_plan_cuts_in_proportion_and_a_run_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "cluster.toml"
    file.write_text(
        'name = "two"\nhosts = 2\ndevices = 1\nmemory = 8e9\nspeed = [3.0, 1.0]\n'
        "inside = 1e12\nbetween = 1e12\nlatency = 0.0\n"
    )
    size = ["--vertices", "30000", "--edges", "60000", "--features", "16", "--classes", "3"]
    run(["plan", *size, "--cluster", str(file), "--json"])
    told = json.loads(capsys.readouterr().out)
    names = [each["name"] for each in told["plans"]]
    fair = "graph=2 part_weights=(3.0, 1.0)"
    assert names.index(fair) < names.index("graph=2")
    (tmp_path / "plan.json").write_text(
        json.dumps({"plans": [each for each in told["plans"] if each["name"] == fair]})
    )
    cut = kagome.Parallel(plan=str(tmp_path / "plan.json"))
    assert (cut.graph, cut.part_weights) == (2, (3.0, 1.0))


def trained(channel: Channel, parallel: dict[str, Any]) -> dict[str, Any]:
    """Losses, scores and the number of own vertices of a rank."""
    given = {"parallel": kagome.Parallel(**parallel)} if parallel else {}
    mine, data = model("gcn", 0.5, torch.float64), graph(torch.float64)
    with kagome.Trainer(mine, data, train=settings(epochs=4), report=QUIET, **given) as trainer:
        trainer.fit()
        return {"losses": losses(trainer), "scores": trainer.predict(), "own": trainer.part.own.numel()}


@pytest.mark.parametrize(
    "parallel",
    [{"part_weights": (2.0, 1.0)}, {"part_weights": (5.0, 1.0), "tensor": 2, "partitioner": "random"}],
)
def test_a_run_with_parts_of_other_sizes_is_the_same(
    ranks: Callable[..., list], parallel: dict[str, Any]
) -> None:
    slices = parallel.get("tensor", 1)
    whole = trained(Channel(None, "cpu"), {})
    every = ranks(2 * slices, trained, parallel)
    for each in every:
        assert each["losses"] == pytest.approx(whole["losses"], abs=1e-10)
    torch.testing.assert_close(every[0]["scores"], whole["scores"], rtol=0, atol=1e-8)
    share = sum(each["own"] for each in every[:slices]) / whole["own"]
    first, second = parallel["part_weights"]
    assert share == pytest.approx(first / (first + second), abs=0.1)


def test_weights_say_how_many_ranks_start() -> None:
    for parallel, ranks in (({}, None), ({"pipe": 2}, 4), ({"tensor": 3}, 6)):
        weights = {"part_weights": (2.0, 1.0)}
        assert _ranks(Run(parallel=kagome.Parallel(**parallel, **weights))) == (ranks or 2)
    assert _ranks(Run()) is None


def test_what_weights_do_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        kagome.Parallel(part_weights=(1.0, 0.0))
    with pytest.raises(
        ConfigError, match=r"a weight for each of 3 parts \(graph=3\); got part_weights=\[2.0, 1.0\]"
    ):
        kagome.Parallel(part_weights=(2.0, 1.0)).fit(3)
    with pytest.raises(ConfigError, match="plan='auto' to choose the cut"):
        kagome.Parallel(plan="auto", part_weights=(2.0, 1.0))


def test_a_saved_partition_keeps_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, data = tmp_path / "parts", ["--data.name", GRAPH]
    words = ["--parts", "2", "--part-weights", "3", "1", "--out", str(folder)]
    run(["partition", *data, *words])
    assert "fullest part over what its weight asks for" in capsys.readouterr().out
    meta = load_meta(folder)
    assert meta.quality.vertices[0] > 2 * meta.quality.vertices[1]
    refuse_other_weights(folder, meta, "metis@3:1")  # as it was cut
    refuse_other_weights(folder, meta, "metis")  # nothing asked
    wrong = r"cut by part_weights=\[2.0, 1.0\] .*; got part_weights=\[3.0, 1.0\]"
    with pytest.raises(PartitionError, match=wrong):
        refuse_other_weights(folder, meta, "metis@2:1")
