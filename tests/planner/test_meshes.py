"""Plans of whole meshes: bytes are those of a run, what does not fit is refused, reasons are told."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN, DirGNNConv, SAGEConv, Sequential

import kagome
from kagome.autoplan import plan as planning
from kagome.autoplan.plan import chosen, here, planned
from kagome.autoplan.workload import Workload
from kagome.cli import app
from kagome.cli.app import _builder
from kagome.comm.all_reduce import ONE_ROUND_BYTES
from kagome.comm.channel import Channel
from kagome.config import Allowed, Data as Source, Model, Parallel, Report, Run, Train, plan_io
from kagome.config.commands import PlanCommand
from kagome.errors import ConfigError, PlanError
from kagome.graph.partition.partition import Partition
from kagome.model.zoo import build_model
from kagome.planner.candidates import HIDES, WORTH, Candidate, Plans, parts, ranked, slices
from kagome.planner.cluster import READY, Cluster
from kagome.planner.cost_model import ONE_ROUND, CostRates, Load, Sliced, summed
from kagome.planner.pipe_candidates import CHUNK, PipeCut, pipes
from kagome.profile.cache import opened
from kagome.profile.contention import contention
from kagome.profile.synthetic_graphs import GraphSize
from kagome.report.page.plan_page import plans_html
from kagome.train.data import from_data

pytestmark = pytest.mark.usefixtures("one_measure")
PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
SBM = "sbm:vertices=300,degree=8,features=10,classes=4,communities=4"


def model_of(name: str, data: Data, hidden: int = 8, layers: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    settings = Model(name=name, layers=layers, hidden=hidden, heads=2, dropout=0.2)
    return build_model(settings, in_channels=10, out_channels=4, num_nodes=int(data.num_nodes or 0))


def studied(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, part: Partition, graph: GraphSize
) -> Workload:
    """What tests of this session have measured is taken from the folder that they share."""
    return Workload.of(model, optimizer, part, graph, kept=opened(True))


def hosts_here(ranks: int, rate: float) -> Cluster:
    return here(ranks, rate, opened(True))


def run(
    channel: Channel, name: str, mesh: dict[str, Any], hidden: int = 8, layers: int = 3
) -> dict[str, int]:
    """Bytes by kind of an epoch after the first."""
    data = kagome.load(SBM)
    train, report = Train(epochs=3, check=False), Report(page=False, trace=False, progress=False)
    cut = Parallel(partitioner="metis", reuse=False, **mesh)
    model = model_of(name, data, hidden, layers)
    with kagome.Trainer(model, data, parallel=cut, train=train, report=report) as trainer:
        trainer.fit()
        return dict(trainer.records[-1].bytes)


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "size"), [("gcn", 2), ("gcn", 3), ("sage", 2), ("gat", 2), ("gcn2", 3)])
def test_bytes_are_those_of_a_run(ranks: Callable[..., list], name: str, size: int) -> None:
    data = kagome.load(SBM)
    model, alone = model_of(name, data), Channel(None, "cpu")
    part, _ = from_data(data, alone, method="contiguous", seed=0)
    graph = GraphSize(300, int(data.edge_index.size(1)), data)
    optimizer = torch.optim.Adam(model.parameters())
    found = studied(model, optimizer, part, graph).plans(hosts_here(size, 1e9), ("onebit", "stale"))
    # Late rows are refused on one host; their bytes are predicted all the same.
    assert all("max_age" in one.settings and "one host" in why for one, why in found.refused)
    by_name = {one.name: one for one in (*found.fitting, *(one for one, _ in found.refused))}
    cut = ranks(size, run, name, {"graph": size})[0]
    predicted = by_name[f"graph={size}"].bytes_per_epoch
    assert predicted["halo"] == cut["halo"]
    assert predicted["weights"] == cut["weights"]
    few = {"codec": "onebit", "max_age": 1}
    told = by_name[f"graph={size} codec=onebit max_age=1"]
    assert not told.exact
    coded = ranks(size, run, name, {"graph": size, "guard": False, **few})[0]
    assert told.bytes_per_epoch["halo"] == pytest.approx(coded["halo"], rel=0.03)  # 8 rows share bytes
    assert told.bytes_per_epoch["weights"] == coded["weights"]
    few["codec_weights"] = "bf16"
    told = by_name[f"graph={size} codec=onebit codec_weights=bf16 max_age=1"]
    coded = ranks(size, run, name, {"graph": size, "guard": False, **few})[0]
    noted = 64 * size  # what stays exact: the loss and counts
    assert told.bytes_per_epoch["weights"] == pytest.approx(coded["weights"], abs=noted)
    sliced = by_name.get(f"tensor={size}")
    if sliced is not None and 300 % size == 0 and name in ("gcn", "sage"):
        told = ranks(size, run, name, {"tensor": size})[0]["transpose"]
        assert sliced.bytes_per_epoch["transpose"] == pytest.approx(
            told, rel=0.02
        )  # uneven parts and columns


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_bytes_of_sliced_parts_are_those_of_a_run(ranks: Callable[..., list], name: str) -> None:
    data = kagome.load(SBM)
    model = model_of(name, data)
    part, _ = from_data(data, Channel(None, "cpu"), method="contiguous", seed=0)
    graph = GraphSize(300, int(data.edge_index.size(1)), data)
    found = studied(model, torch.optim.Adam(model.parameters()), part, graph).plans(hosts_here(4, 1e9))
    (predicted,) = (one.bytes_per_epoch for one in found.fitting if one.name == "graph=2 tensor=2")
    told = ranks(4, run, name, {"graph": 2, "tensor": 2})[0]
    assert predicted["weights"] == told["weights"]
    assert predicted["halo"] == told["halo"]
    assert predicted["transpose"] == pytest.approx(told["transpose"], rel=0.02)  # uneven parts and columns


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "mesh", [{"pipe": 2, "chunks": 1}, {"pipe": 2}, {"pipe": 2, "tensor": 2}, {"pipe": 2, "graph": 2}]
)
def test_bytes_of_stages_are_those_of_a_run(ranks: Callable[..., list], mesh: dict[str, int]) -> None:
    data = kagome.load(SBM)
    model, size = model_of("gcn", data), 2 * mesh.get("tensor", 1) * mesh.get("graph", 1)
    part, _ = from_data(data, Channel(None, "cpu"), method="contiguous", seed=0)
    graph = GraphSize(300, int(data.edge_index.size(1)), data)
    optimizer = torch.optim.Adam(model.parameters())
    found = studied(model, optimizer, part, graph).plans(hosts_here(size, 1e9), ("history",))
    name = " ".join(
        f"{key}={value}" for key, value in sorted(mesh.items(), key=lambda one: one[0] == "chunks")
    )
    (predicted,) = (one.bytes_per_epoch for one in found.fitting if one.name == name)
    told = ranks(size, run, "gcn", mesh)[0]
    assert predicted["stage"] == told["stage"]
    assert predicted["weights"] == pytest.approx(told["weights"], rel=0.1)
    assert predicted.get("transpose", 0) == pytest.approx(told.get("transpose", 0), rel=0.02)


@pytest.mark.slow
def test_few_chunks_pass_dealt_stages(ranks: Callable[..., list]) -> None:
    """On a graph where chunks cost more than rows; the usual chunks and a stage a rank stay beside it."""
    data = kagome.load(SBM)
    part, _ = from_data(data, Channel(None, "cpu"), method="contiguous", seed=0)
    graph = GraphSize(300, int(data.edge_index.size(1)), data)
    study = studied(model_of("gcn", data, layers=8), None, part, graph)
    found = {one.name: one for one in study.plans(hosts_here(2, 1e9), ("history",)).fitting}
    history = sorted(name for name, one in found.items() if "pipe" in name and not one.exact)
    assert len(history) == 2
    usual, best = history
    assert usual == "pipe=2"
    assert found[best].epoch_seconds < found[usual].epoch_seconds
    assert found[best].settings["stages_per_rank"] in (2, 3, 4)
    assert Parallel(**found[best].settings).fit(2).chunks in (3, 4)
    told = ranks(2, run, "gcn", dict(found[best].settings), 8, 8)[0]
    assert found[best].bytes_per_epoch["stage"] == told["stage"]


@pytest.mark.slow
def test_bytes_of_weights_in_many_messages(ranks: Callable[..., list]) -> None:
    """A wide model's gradients go in several: large ones in two rounds, the last small one in one."""
    data = kagome.load(SBM)
    model = model_of("gcn", data, 300)
    part, _ = from_data(data, Channel(None, "cpu"), method="contiguous", seed=0)
    graph = GraphSize(300, int(data.edge_index.size(1)), data)
    found = studied(model, None, part, graph).plans(hosts_here(4, 1e9))
    predicted = next(one for one in found.fitting if one.name == "graph=4").bytes_per_epoch
    told = ranks(4, run, "gcn", {"graph": 4}, 300)[0]
    assert predicted["weights"] == pytest.approx(told["weights"], rel=1e-4)
    assert predicted["halo"] == told["halo"]


LOADS = [Load(50, 400, 20, 20, 1e6), Load(60, 500, 30, 30, 2e6)]
RATES = CostRates(0.0, 1e-5, 1e-6, 0.0, 0.0, 1.0, 0, 64.0, 64.0, (1e4,))
SLICED = Sliced(2, (0.0, 0.6e-5, 0.6e-6), (0.0, 0.3e-5, 0.3e-6), 6, 4e4)
ONE = Cluster("test", 1, 2, 4e6, 1.0, 1e6, 1e6, 0.0)
APART = replace(ONE, hosts=2, devices=1)


def test_the_slowest_part_counts_and_its_messages() -> None:
    found = parts(2, LOADS, RATES, ONE, 0.0)
    assert found.compute_seconds == pytest.approx(60e-5 + 500e-6)
    assert found.bytes_per_epoch == {"halo": 64 * 100, "weights": 20_000}
    assert found.exposed_seconds == pytest.approx((64 * 60 + 1e4) / 1e6)
    assert found.memory_bytes == 2e6
    sliced = slices(SLICED, [Load(110, 900, 0, 0, 3e6)], RATES, ONE, decoupled=True)
    assert sliced.bytes_per_epoch == {"transpose": 40_000, "weights": 20_000}
    assert sliced.compute_seconds == pytest.approx(0.6 * (110e-5 + 900e-6))
    assert not sliced.exact
    assert sliced.name == "tensor=2 decouple=True"


def test_slices_of_parts_send_transposes_within_a_host_and_a_halo_between() -> None:
    two = Cluster("test", 2, 2, 4e6, 1.0, 1e7, 1e6, 0.0)
    found = slices(SLICED, LOADS, RATES, two, 0.5, groups=2, decoupled=False)
    assert found.name == "graph=2 tensor=2"
    assert found.exact
    assert found.uncertain == 0.5
    sums = summed(4, RATES.weights)
    assert found.bytes_per_epoch == {"halo": 6400, "transpose": 40_000, "weights": round(4 * sums)}
    assert found.compute_seconds == pytest.approx(0.6 * (60e-5 + 500e-6))
    within, between = 4e4 * 60 / 110 / 2 / 1e7, (64 * 60 / 2 + sums) / 1e6
    assert found.exposed_seconds == pytest.approx(within + between)


def test_rows_that_cross_take_time_beside_their_bytes() -> None:
    """Lists, buffers and tables of the halo: of the part that has most of all together."""
    rates = replace(RATES, exchanged=1e-5)
    assert parts(2, LOADS, rates, ONE, 0.0).compute_seconds == pytest.approx(60e-5 + 500e-6 + 60e-5)
    both = slices(SLICED, LOADS, rates, replace(ONE, devices=4), 0.5, groups=2, decoupled=False)
    assert both.compute_seconds == pytest.approx(0.6 * (60e-5 + 500e-6) + 60e-5 / 2)


def test_ranks_that_are_slow_at_different_times_wait_for_each_other() -> None:
    rates = replace(RATES, uneven=1.25)
    usual = parts(2, LOADS, RATES, ONE, 0.0).compute_seconds
    assert parts(2, LOADS, rates, ONE, 0.0).compute_seconds == pytest.approx(1.25 * usual)
    alone = [Load(110, 900, 0, 0, 1e6)]
    assert parts(1, alone, rates, ONE, 0.0) == parts(1, alone, RATES, ONE, 0.0)


def test_messages_take_their_time_each_however_small() -> None:
    far = replace(ONE, latency=1e-2)
    rates = replace(RATES, meetings=5)
    waits = parts(2, LOADS, rates, ONE, 0.0).exposed_seconds
    assert parts(2, LOADS, rates, far, 0.0).exposed_seconds == pytest.approx(waits + (5 + 2) * 1e-2)
    three = parts(3, LOADS[:1], rates, far, 0.0).exposed_seconds
    assert three - parts(3, LOADS[:1], rates, ONE, 0.0).exposed_seconds == pytest.approx(2 * (5 + 2) * 1e-2)
    alone = [Load(110, 900, 0, 0, 1e6)]
    assert parts(1, alone, rates, far, 0.0).exposed_seconds == 0.0
    both = [slices(SLICED, LOADS, rates, each, groups=2, decoupled=False) for each in (ONE, far)]
    waits = both[1].exposed_seconds - both[0].exposed_seconds
    assert waits == pytest.approx((1 * 6 + 2 * 5 + 3 * 2) * 1e-2)
    waits = slices(SLICED, alone, rates, ONE, decoupled=False).exposed_seconds
    assert slices(SLICED, alone, rates, far, decoupled=False).exposed_seconds == pytest.approx(
        waits + (6 + 2) * 1e-2
    )


def test_rows_that_travel_while_a_rank_computes_keep_nobody() -> None:
    plain = parts(2, LOADS, RATES, ONE, 0.0)
    half = parts(2, LOADS, replace(RATES, meanwhile=0.5), ONE, 0.0)
    assert plain.exposed_seconds - half.exposed_seconds == pytest.approx(HIDES * 0.5 * plain.compute_seconds)
    slow = replace(RATES, row=1.0, meanwhile=0.5)  # there is always time enough
    assert parts(2, LOADS, slow, ONE, 0.0).exposed_seconds == pytest.approx(
        (1 - HIDES) * 128 * 30 / 1e6 + 1e4 / 1e6
    )


def test_what_has_no_columns_to_cut_takes_as_long_in_any_number_of_slices() -> None:
    load = Load(100, 1000, 0, 0, 1.0)
    each = Sliced(8, (1.0, 0.0, 3e-3), (1.0, 0.0, 2e-3), 6, 0.0)  # 4 and 3 seconds: 2 and 4 over T
    assert each.computing(load) == pytest.approx(2 + 4 / 8)
    assert replace(each, count=2).computing(load) == pytest.approx(4.0)
    noise = Sliced(8, (0.0, 0.0, 2e-3), (0.0, 0.0, 3e-3), 6, 0.0)  # never longer the more there are
    assert noise.computing(load) == pytest.approx(3.0)


def test_fewer_bits_and_late_rows_wait_less_and_are_not_exact() -> None:
    """Coding takes its time; late rows travel while the slowest rank computes, most of what could."""
    rates = replace(RATES, coded=(4.0, 4.0), coding=1e-9)
    plain, few, late, both = (
        parts(2, LOADS, rates, APART, 0.0, onebit=bits, late=old)
        for old, bits in ((False, False), (False, True), (True, False), (True, True))
    )
    assert [one.exact for one in (plain, few, late, both)] == [True, False, False, False]
    assert few.bytes_per_epoch == {"halo": 400, "weights": 20_000}
    assert few.compute_seconds == pytest.approx(plain.compute_seconds + 64 * 60 * 1e-9)
    hidden = HIDES * min(64 * 60 / 1e6, plain.compute_seconds)
    assert late.exposed_seconds == pytest.approx(plain.exposed_seconds - hidden)
    assert both.name == "graph=2 codec=onebit max_age=1"
    assert both.epoch_seconds < min(few.epoch_seconds, late.epoch_seconds)
    half = parts(2, LOADS, rates, APART, 0.0, onebit=True, halved=True)
    assert half.name == "graph=2 codec=onebit codec_weights=bf16"
    assert half.bytes_per_epoch == {"halo": 400, "weights": 10_000}
    assert half.epoch_seconds == pytest.approx(few.epoch_seconds - 5_000 / 1e6)


def test_each_message_of_gradients_is_summed_in_one_round_or_two() -> None:
    assert ONE_ROUND == ONE_ROUND_BYTES
    assert summed(2, (3e6, 10.0)) == 3e6 + 10
    assert summed(4, (3e6, 6e4)) == 2 * 3 / 4 * 3e6 + 3 * 6e4
    assert summed(4, (3e6, 1e5), stages=100) == 3 * (3e6 + 1e5) / 100


@pytest.mark.slow
def test_ranks_that_crowd_a_machine_are_slower() -> None:
    crowded = replace(ONE, crowded=0.5)
    assert parts(2, LOADS, RATES, crowded, 0.0).compute_seconds == pytest.approx(2 * (60e-5 + 500e-6))
    alone = [Load(110, 900, 0, 0, 1e6)]
    assert parts(1, alone, RATES, crowded, 0.0) == parts(1, alone, RATES, ONE, 0.0)
    before = torch.get_rng_state(), torch.get_num_threads()
    share, spread = contention(2)
    assert 0 < share <= 1
    assert spread >= 0
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.get_num_threads() == before[1]
    shared = hosts_here(64, 1e9)
    assert shared.pace(64) == pytest.approx(shared.pace(32) / 2)
    assert shared.pace(64) <= shared.cores / 64
    assert replace(ONE, cores=2.0).pace(2) == ONE.pace(2) == 2 * replace(ONE, cores=2.0).pace(4)


def test_stages_wait_for_each_other() -> None:
    """Over 8 chunks the second stage begins an eighth later; with one chunk it waits for the first."""
    cut = PipeCut((0.5, 0.5), 8e3, (1, 1), (0.5, 0.5), ((32, 32),) * 2)
    alone = [Load(110, 900, 0, 0, 3e6)]
    rates, fast = replace(RATES, row=1e-2), replace(ONE, inside=1e12)
    history, one = (pipes(cut, 1, alone, rates, fast, 0.0, chunks=chunks) for chunks in (8, 1))
    busy = 0.5 * (110 * 1e-2 + 900e-6) + 8 * CHUNK
    assert history.compute_seconds == pytest.approx(busy)
    assert history.epoch_seconds == pytest.approx(busy * 9 / 8, rel=1e-3)
    assert (history.exact, one.exact) == (False, True)
    assert one.name == "pipe=2 chunks=1"
    assert one.epoch_seconds == pytest.approx(2 * (busy - 7 * CHUNK), rel=1e-3)
    assert one.memory_bytes < history.memory_bytes
    assert history.bytes_per_epoch == {"stage": 8_000, "halo": 0, "weights": 0, "other": 32}  # of the loss
    whole = replace(alone[0], whole=1e6)
    assert one.memory_bytes == 1.5e6
    found = pipes(cut, 1, [whole], rates, fast, 0.0, chunks=1)
    assert found.memory_bytes == 1e6 + 2e6 / 2  # data, tables and weights are in every stage
    found = pipes(cut, 1, [whole], rates, fast, 0.0, chunks=8)
    assert found.memory_bytes == 2e6 + 4 * 64 * 110 / 2  # and four rows for each of a read
    both = pipes(cut, 2, LOADS, RATES, ONE, 0.0, chunks=1)
    assert both.name == "pipe=2 graph=2 chunks=1"
    assert both.bytes_per_epoch["halo"] == 6_400
    both = pipes(cut, 2, LOADS, RATES, ONE, 0.0, chunks=8)
    assert both.name == "pipe=2 graph=2"
    assert both.bytes_per_epoch["halo"] == 50 * 64 + round(50 * 64 * 2 / 3)
    dealt = PipeCut((0.25,) * 4, 3 * 8e3, (1,) * 4, (0.5,) * 2, ((32, 32),) * 2, dealt=2)
    found = pipes(dealt, 1, [whole], rates, fast, 0.0, chunks=8)
    assert found.name == "pipe=2 stages_per_rank=2"
    # Each rank does half of everything; the second begins a sixteenth of its time later, not an eighth.
    busy = history.compute_seconds + 8 * CHUNK
    assert found.compute_seconds == pytest.approx(busy)
    assert found.epoch_seconds == pytest.approx(busy * 17 / 16, rel=1e-3)
    assert found.memory_bytes == 2e6 + 4 * 64 * 110 / 2
    thin = pipes(
        cut,
        1,
        alone,
        rates,
        fast,
        0.0,
        chunks=1,
        sliced=Sliced(2, (0.0, 6e-3, 0.0), (0.0, 3e-3, 0.0), 6, 2e4),
    )
    assert thin.name == "pipe=2 tensor=2"
    assert thin.ranks == 4
    assert thin.exact
    assert thin.bytes_per_epoch["transpose"] == 20_000
    assert thin.compute_seconds < one.compute_seconds


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    one, two = parts(1, [Load(110, 900, 0, 0, 9e6)], RATES, ONE, 0.0), parts(2, LOADS, RATES, ONE, 0.0)
    found = ranked([one, two], ONE)
    assert [each.name for each in found.fitting] == ["graph=2"]
    assert [(each.name, why) for each, why in found.refused] == [
        ("one rank", "needs 0.009 GB a rank, and a rank has 0.004 GB")
    ]
    assert "the only one that fits" in found.fitting[0].reason
    with pytest.raises(PlanError, match="graph=2, which needs least"):
        ranked([one, two], replace(ONE, memory=1e6))


def test_each_plan_has_a_reason_beside_the_next_best() -> None:
    slow = Candidate({"graph": 2}, True, 3.0, 1.0, 2.0, {"halo": 5}, 1.0)
    fast = Candidate({}, True, 2.0, 2.0, 0.0, {}, 1.0)
    found = ranked([slow, fast], ONE)
    assert [one.name for one in found.fitting] == ["one rank", "graph=2"]
    assert found.fitting[0].reason.startswith("1.50 times faster than graph=2: less waiting; ")
    assert found.fitting[1].reason.startswith("1.50 times slower than one rank: more waiting; ")
    assert json.loads(found.to_json())["plans"][0]["name"] == "one rank"


def test_an_exact_plan_stands_before_one_that_is_hardly_faster() -> None:
    """One that is not exact has to be worth it: more than the predictions' own error."""
    exact = Candidate({"graph": 2}, True, 2.0, 1.0, 1.0, {"halo": 5}, 1.0)
    hardly = Candidate({"graph": 2, "max_age": 1}, False, 1.9, 1.0, 0.9, {"halo": 5}, 1.0)
    found = ranked([hardly, exact], APART)
    assert [one.name for one in found.fitting] == ["graph=2", "graph=2 max_age=1"]
    assert found.fitting[0].reason.startswith(
        "1.05 times slower than graph=2 max_age=1, but exact: more waiting; "
    )
    assert found.fitting[1].reason.startswith("1.05 times faster than graph=2: less waiting; ")
    well = replace(hardly, epoch_seconds=1.5)
    assert ranked([exact, well], APART).fitting[0].name == "graph=2 max_age=1"


@pytest.mark.slow
def test_one_rank_has_all_threads() -> None:
    """Rates are those of a rank with its share of them; a rank alone computes faster."""
    alone, rates = [Load(110, 900, 0, 0, 1e6)], replace(RATES, alone=1.6)
    usual = parts(1, alone, RATES, ONE, 0.0).compute_seconds
    assert parts(1, alone, rates, ONE, 0.0).compute_seconds == pytest.approx(usual / 1.6)
    assert parts(2, LOADS, rates, ONE, 0.0) == parts(2, LOADS, RATES, ONE, 0.0)
    data = kagome.load(SBM)
    part, _ = from_data(data, Channel(None, "cpu"), method="contiguous", seed=0)
    graph, before = GraphSize(300, int(data.edge_index.size(1)), data), torch.get_num_threads()
    found = Workload.of(model_of("gcn", data), None, part, graph, most=before + 1)
    assert found.models[0].rates.alone >= 1.0
    assert torch.get_num_threads() == before
    assert found.models[0].rates.coded == (0.0, 0.0)  # nobody allowed it


def test_clusters(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    lines = ['name = "own"', "hosts = 2", "devices = 4", "memory = 8e9", "speed = 3", "inside = 1e10"]
    file.write_text("\n".join([*lines, "between = 1e9"]))
    own = Cluster.load(file)
    assert (own.size, own.bandwidth(4), own.bandwidth(5)) == (8, 1e10, 1e9)
    assert Cluster.load("h100x64") is READY["h100x64"]
    file.write_text("\n".join(lines))
    with pytest.raises(PlanError, match="between"):
        Cluster.load(file)
    with pytest.raises(PlanError, match="no file nowhere"):
        Cluster.load("nowhere.toml")


def test_a_graph_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The page's command, ogbn-papers100M on 64 GPUs from its counts: the same plans, and none other."""
    block = PAGE.partition("$ kagome plan")[2].partition("```")[0]
    command, _, shown = block.replace("\\\n", "").partition("\n")
    with pytest.raises(SystemExit) as left:
        app.main(["plan", *shlex.split(command), "--json"])
    assert left.value.code == 0
    told = json.loads(capsys.readouterr().out)
    rows = [line.rpartition("  yes  ")[0].strip() for line in shown.splitlines() if "  yes  " in line]
    assert sorted(rows) == sorted(one["name"] for one in told["plans"] + told["refused"])
    seconds = [one["epoch_seconds"] for one in told["plans"]]
    assert seconds == sorted(seconds)  # which comes first is measured: near ones change places
    assert all(one["exact"] for one in told["plans"])
    assert {one["settings"].get("graph", 1) for one in told["plans"] + told["refused"]} >= {1, 8, 64}
    assert told["refused"][0]["refused"].startswith("needs ")
    assert all(one["uncertain"] > 0 for one in told["plans"] if one["settings"].get("graph", 1) > 1)
    with pytest.raises(SystemExit) as left:
        app.main(["plan", "--vertices", "10"])
    assert left.value.code == 1
    assert "--edges None" in capsys.readouterr().err


def test_the_table_is_read_at_first_sight(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the page shows the same plans, with an epoch of each of the best."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        app.main(["plan", "--data.name", SBM, "--devices", "2", "--allow", "decoupled", "history"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    page = Path("runs/plan.html").read_text()
    assert page.count('role="img"') > 6
    assert "page: runs/plan.html" in out
    for word in ("pipe=2 chunks=1", "tensor=2", "1. ", "3. ", "the slowest rank computes"):
        assert word in page, word
    for word in (
        "one rank",
        "graph=2",
        "tensor=2 decouple=True",
        "pipe=2 chunks=1",
        "memory a rank",
        " +-",
        "1. ",
        "times faster than",
    ):
        assert word in out, word


def test_a_plan_s_file_is_the_mesh(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"plans": [{"settings": {"pipe": 2, "graph": 2, "cross_chunk": "exact"}}]}))
    cut = Parallel(plan=str(file))
    assert (cut.pipe, cut.graph, cut.cross_chunk, cut.plan) == (2, 2, "exact", "manual")
    assert cut.fit(4) == Parallel(pipe=2, graph=2, cross_chunk="exact").fit(4)
    with pytest.raises(ConfigError, match=r"pipe=2, as the plan in .* has it; got pipe=4"):
        Parallel(plan=str(file), pipe=4)
    file.write_text(json.dumps({"plans": [{"settings": {"graph": "two"}}]}))
    with pytest.raises(ConfigError, match="graph to be a whole number; got 'two'"):
        Parallel(plan=str(file))
    file.write_text("[]")
    with pytest.raises(ConfigError, match="kagome plan --json"):
        Parallel(plan=str(file))
    with pytest.raises(ConfigError, match="No such file"):
        Parallel(plan=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="3 ranks that have started"):
        Parallel(plan="auto").fit(3)


@pytest.mark.slow
def test_any_plan_s_file_can_be_trained_by(tmp_path: Path) -> None:
    """A file whose first plan had several stages a rank was refused."""
    data = kagome.load(SBM)
    model, file = model_of("gcn", data, layers=8), tmp_path / "plan.json"
    part, _ = from_data(data, Channel(None, "cpu"), method="contiguous", seed=0)
    graph = GraphSize(300, int(data.edge_index.size(1)), data)
    study = studied(model, torch.optim.Adam(model.parameters()), part, graph)
    found = study.plans(hosts_here(4, 1e9), get_args(Allowed))
    for each in found.fitting:
        file.write_text(replace(found, fitting=(each,)).to_json())
        cut = Parallel(plan=str(file))
        assert {name: getattr(cut, name) for name in each.settings} == each.settings
        assert cut.fit(each.ranks).pipe == each.settings.get("pipe", 1)
    # Weights of parts are for hosts of unlike speed: see test_unequal_hosts.
    assert {name for each in found.fitting for name in each.settings} == set(plan_io.KINDS) - {
        "decouple",  # not allowed for this model
        "activations",  # every plan fits
        "max_age",  # late rows gain nothing on one host
        "part_weights",
    }


def test_a_script_gets_what_the_command_prints(tmp_path: Path) -> None:
    data, model = kagome.load(SBM), GCN(-1, 8, 3, 4)
    threads = torch.get_num_threads()
    found = kagome.plan(model, data, devices=2, allow=("history",))
    assert torch.get_num_threads() == threads
    assert any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in model.parameters()), "a copy"
    asked = PlanCommand(data=Source(name=SBM), devices=2, allow=("history",))
    told = planned(asked, lambda part, meta, channel: GCN(-1, 8, 3, 4))
    assert {each.name for each in found.fitting} == {each.name for each in told.fitting}
    file = tmp_path / "plan.json"
    file.write_text(found.to_json())
    Parallel(plan=str(file)).fit(found.fitting[0].ranks)


def test_auto_takes_the_first_plan(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Run(data=Source(name=SBM), parallel=Parallel(plan="auto", allow=("decoupled",)))
    found, told = chosen(settings, 2, _builder(settings.model, settings.train))
    assert found.parallel.plan == "manual"
    cut = found.parallel.fit(told.fitting[0].ranks)
    assert cut.pipe * (cut.graph or 1) * cut.tensor == told.fitting[0].ranks
    first, *others = told.fitting
    handicap = {True: 1.0, False: WORTH}  # what is not exact stands first only where it is worth it
    least = min(one.epoch_seconds * handicap[one.exact] for one in others)
    assert first.epoch_seconds * handicap[first.exact] <= least
    assert "kagome: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "memory", "taken", "said"),
    [
        (
            {1: 3.0, 2: 1.0, 4: 1.02},
            {},
            2,
            "2 of 4 ranks are started: with all of them graph=4 would take 1.0",
        ),
        ({1: 3.0, 2: 1.0, 4: 0.9}, {}, 4, ""),
        ({1: 3.0, 2: 1.0, 4: 0.9}, {4: 1e18}, 2, "2 of 4 ranks are started: no cut over all of them fits"),
        (
            {1: 0.5, 2: 1.0, 4: 0.9},
            {},
            1,
            "1 of 4 ranks are started: with all of them graph=4 would take 1.8",
        ),
    ],
)
def test_auto_takes_fewer_ranks_where_more_are_slower(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[int, float],
    memory: dict[int, float],
    taken: int,
    said: str,
) -> None:
    """It took the best of all ranks, which it called slower than another."""

    def made_up(*_: object, **__: object) -> Plans:
        found = []
        for ranks, took in seconds.items():
            mesh: dict[str, int | bool | str] = {"graph": ranks} if ranks > 1 else {}
            found.append(Candidate(mesh, True, took, took, 0.0, {}, memory.get(ranks, 1.0)))
        return ranked(found, replace(ONE, devices=4))

    monkeypatch.setattr(planning, "planned", made_up)
    settings = Run(data=Source(name=SBM), parallel=Parallel(plan="auto"))
    found, told = chosen(settings, 4, _builder(settings.model, settings.train))
    assert (told.fitting[0].ranks, found.parallel.graph or 1) == (taken, taken)
    assert "slower than" not in told.fitting[0].reason
    err = capsys.readouterr().err
    assert said in err
    assert bool(said) == ("are started" in err)


def test_a_run_by_the_planner_says_what_was_predicted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--nproc", "2", "--parallel.plan", "auto", "--train.epochs", "3", "--out", str(out))
    with pytest.raises(SystemExit) as left:
        app.main(["train", "--data.name", SBM, "--report.no-progress", *words])
    assert left.value.code == 0
    summary, plan = (json.loads((out / name).read_text()) for name in ("summary.json", "plan.json"))
    assert summary["predicted"]["epoch_seconds"] == plan["plans"][0]["epoch_seconds"] > 0
    for kind in ("halo", "weights"):
        if kind in summary["predicted"]["bytes_per_epoch"]:
            assert summary["predicted"]["bytes_per_epoch"][kind] == summary["bytes_per_epoch"][kind]
    assert 'plan = "manual"' in (out / "config.toml").read_text()


@pytest.mark.parametrize("mesh", [{"graph": 2}, {"pipe": 2}, {"decouple": True}, {"cross_chunk": "exact"}])
def test_auto_and_a_cut_of_one_s_own_clash(mesh: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="to choose the cut"):
        Parallel(plan="auto", **mesh)
    with pytest.raises(ConfigError, match="may take"):
        Parallel(allow=("history",), **mesh)


@pytest.mark.slow
def test_how_a_model_is_run_counts(tmp_path: Path) -> None:
    """Layers that run again keep less; without fast paths there are no slices; what cannot be is told."""
    asked = PlanCommand(data=Source(name=SBM), model=Model(name="gin", layers=6), allow=("decoupled",))
    usual = planned(asked, _builder(asked.model, asked.train))
    assert any("not decoupled" in note for note in usual.facts["notes"])
    again = planned(
        replace(asked, model=replace(asked.model, recompute=True)), _builder(asked.model, asked.train)
    )
    plain = planned(
        replace(asked, model=replace(asked.model, fast=False)), _builder(asked.model, asked.train)
    )
    held = [
        next(one for one in found.fitting if one.name == "graph=2").memory_bytes for found in (usual, again)
    ]
    assert held[1] < held[0]
    names = [{one.name for one in found.fitting} for found in (usual, again, plain)]
    assert "tensor=2" in names[0]
    assert "tensor=2" not in names[2]
    assert not any("pipe" in name for name in names[1])


@pytest.mark.slow
def test_attributes_of_edges_come_along() -> None:
    """A layer that asks for them is measured with them."""
    data = kagome.load(SBM)
    data.edge_weight = torch.rand(data.edge_index.size(1))
    part, _ = from_data(data, Channel(None, "cpu"), method="contiguous", seed=0)
    model = GCN(10, 8, 2, 4)
    found = Workload.of(model, torch.optim.Adam(model.parameters()), part, GraphSize(300, 1200, data)).plans(
        hosts_here(2, 1e9)
    )
    assert {"one rank", "graph=2", "tensor=2"} <= {one.name for one in found.fitting}


@pytest.mark.slow
def test_a_layer_that_chunks_cannot_serve_leaves_pipelines_of_one_chunk() -> None:
    data = kagome.load(SBM)
    part, _ = from_data(data, Channel(None, "cpu"), method="contiguous", seed=0)
    torch.manual_seed(0)
    model = Sequential(
        "x, edge_index",
        [
            (SAGEConv(10, 8), "x, edge_index -> x"),
            (DirGNNConv(SAGEConv(8, 8)), "x, edge_index -> x"),
            (SAGEConv(8, 4), "x, edge_index -> x"),
        ],
    )
    found = studied(model, None, part, GraphSize(300, 1200, data)).plans(
        hosts_here(2, 1e9), allow=("history",)
    )
    pipes_of = [one.name for one in found.fitting if "pipe" in one.name]
    assert pipes_of == ["pipe=2 chunks=1"]


@pytest.mark.parametrize(("chunks", "meets"), [(1, 3), (8, 8 * 3 / 2)])
def test_parts_of_a_stage_wait_for_each_messages_latency_and_for_the_slowest(chunks, meets) -> None:
    """Only messages between stages had a latency."""
    cut = PipeCut((0.5, 0.5), 0.0, (1, 1), (0.5, 0.5), ((32, 32),) * 2)
    rates, load = replace(RATES, meetings=3, weights=(1e4, 1e4, 1e4)), LOADS[:1]

    def found(number: int, latency: float, uneven: float = 1.0) -> Candidate:
        cluster, told = replace(ONE, latency=latency), replace(rates, uneven=uneven)
        return pipes(cut, number, load, told, cluster, 0.0, chunks=chunks)

    slower = [found(number, 1.0).epoch_seconds - found(number, 0.0).epoch_seconds for number in (1, 2, 3)]
    sums = 2 * 2  # two rounds for each of two messages: three messages over two ranks
    assert slower[1] - slower[0] == pytest.approx(meets + sums, abs=1e-6)
    assert slower[2] - slower[0] == pytest.approx(2 * (meets + sums), abs=1e-6)
    fixed = chunks * CHUNK
    even, uneven = (found(2, 0.0, factor).compute_seconds - fixed for factor in (1.0, 1.5))
    assert uneven == pytest.approx(1.5 * even)
    assert found(1, 0.0, 1.5).compute_seconds == found(1, 0.0).compute_seconds


def test_the_page_draws_stages_over_time() -> None:
    """Of a pipeline the programs in the simulator, of parts each rank's computing and waiting."""
    load = Load(rows=1e5, edges=1e6, sent=1e4, halo=1e4, memory=1e9)
    uneven = [load, replace(load, edges=3e6)]
    rates = CostRates(
        0.0,
        row=1e-6,
        edge=1e-7,
        exchanged=0.0,
        meanwhile=0.0,
        uneven=1.0,
        meetings=0,
        forward=512.0,
        backward=512.0,
        weights=(1e5,),
    )
    cluster = Cluster("two", 1, 2, 2e9, 1.0, 1e9, 1e9, 1e-5)
    cut = PipeCut((0.5, 0.5), 1e7, (1, 1), (0.5, 0.5), ((0, 0),) * 2)
    candidates = [
        parts(2, uneven, rates, cluster, 0.0),
        pipes(cut, 1, [load], rates, cluster, 0.0, chunks=8),
    ]
    found = ranked(candidates, cluster, {"cluster": "two", "ranks": 2, "vertices": 10, "edges": 20})
    assert {one.name: one.run is None for one in found.fitting} == {"graph=2": True, "pipe=2": False}
    page = plans_html(found)
    assert page.count("waiting for the slowest: ") == 1  # the part with fewer edges
    assert "stage 1, 1F0" in page
    assert "run" not in json.loads(found.to_json())["plans"][0]
