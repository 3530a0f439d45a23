"""Memory knobs: the cheapest one that makes a cut fit, none where none is needed, and a run with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch_geometric.nn import GCN

import kagome
from kagome.autoplan import plan as planning
from kagome.autoplan.plan import chosen, planned
from kagome.cli.app import _builder
from kagome.comm.channel import Channel
from kagome.components import offload
from kagome.components.parallelize import PartOptions
from kagome.config import Data as Source, Model, Parallel, Report, Run, Train
from kagome.config.commands import PlanCommand
from kagome.errors import ConfigError, PlanError
from kagome.model.zoo import build_model
from kagome.planner.candidates import WORTH, Candidate, ranked
from kagome.planner.cluster import Cluster
from kagome.planner.memory_knobs import ROUNDED, eased
from training import host_apart

MEMORY, RATE = 100.0, 50.0
CLUSTER = Cluster("four", 1, 4, MEMORY, 1.0, 1e9, 1e9, to_host=RATE, host_memory=600.0)
NO_HOST = replace(CLUSTER, to_host=0.0, host_memory=0.0)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[Candidate], list[Candidate]]:
    """Some cuts, and some of them with layers that run again."""
    size = st.integers(1, 300).map(float)
    plain, again = [], []
    for number in range(draw(st.integers(1, 6))):
        ranks = draw(st.sampled_from([1, 2, 4]))
        # Slices say what the fullest rank holds, parts say it of each.
        count = draw(st.sampled_from([1, ranks]))
        held = tuple(draw(size) for _ in range(count))
        moved = tuple(draw(st.floats(0, bytes_)) for bytes_ in held)
        pipe = draw(st.booleans())
        inner = tuple(bytes_ * draw(st.floats(0, 1)) for bytes_ in moved)
        settings = {"graph": ranks, "chunks": number + 1}
        exact, seconds = draw(st.booleans()), draw(st.integers(1, 30)) / 2
        one = Candidate(settings, exact, seconds, seconds / 2, seconds / 2, {"halo": 1}, max(held))
        every = {"held": held if count == ranks else (), "moved": moved}
        plain.append(replace(one, **every, inner=inner if pipe else ()))
        if not pipe and draw(st.booleans()):
            less = tuple(draw(st.floats(0, bytes_)) for bytes_ in held)
            took = draw(st.integers(1, 40)) / 2
            twin = replace(one, epoch_seconds=took, compute_seconds=took / 2, exposed_seconds=took / 2)
            every = {"held": less if count == ranks else (), "moved": (0.0,) * count, "inner": inner}
            again.append(replace(twin, memory_bytes=max(less), **every))
    return plain, again


def every_way(plain: list[Candidate], again: list[Candidate], cluster: Cluster) -> list[tuple[float, bool]]:
    """Weighed seconds of all cuts with and without knobs, and whether they fit: the definition."""
    twins = {one.name: one for one in again}
    found = []
    for one in plain:
        twin, weight = twins.get(one.name), 1.0 if one.exact else WORTH
        found.append((one.epoch_seconds * weight, max(one.held or (one.memory_bytes,)) <= MEMORY))
        if twin is not None:
            seconds = max(one.epoch_seconds, twin.epoch_seconds)
            found.append((seconds * weight, max(twin.held or (twin.memory_bytes,)) <= MEMORY))
        back = one.inner or (twin.inner if twin else ())
        host = ROUNDED * max(one.moved) * min(one.ranks, cluster.devices) <= cluster.host_memory
        if cluster.to_host and back and host:
            each = zip(one.held or (one.memory_bytes,), one.moved, back, strict=True)
            fits = all(held - moved + inner <= MEMORY for held, moved, inner in each)
            found.append(((one.epoch_seconds + 2 * max(one.moved) / RATE) * weight, fits))
    return found


@given(cuts(), st.sampled_from([CLUSTER, NO_HOST]))
def test_the_plan_is_the_fastest_of_all_that_fit(
    made: tuple[list[Candidate], list[Candidate]], cluster: Cluster
) -> None:
    plain, again = made
    asked: list[int] = []

    def recomputed() -> list[Candidate]:
        asked.append(1)
        return again

    found = eased(plain, recomputed, cluster)
    ways = [seconds for seconds, fits in every_way(plain, again, cluster) if fits]
    assert found[: len(plain)] == plain, "cuts themselves stay as they are"
    assert len(asked) <= 1
    if not ways:
        with pytest.raises(PlanError, match="which needs least"):
            ranked(found, cluster)
        return
    best = ranked(found, cluster).fitting[0]
    assert best.lacks(cluster) is None
    assert best.epoch_seconds * (1.0 if best.exact else WORTH) == pytest.approx(min(ways), rel=1e-12)


@given(cuts())
def test_no_knob_where_none_is_needed(made: tuple[list[Candidate], list[Candidate]]) -> None:
    plain, again = made
    fitting = {one.name for one in plain if one.lacks(CLUSTER) is None}
    for one in eased(plain, lambda: again, CLUSTER)[len(plain) :]:
        alone = {name: value for name, value in one.settings.items() if name != "activations"}
        (cut,) = [each for each in plain if each.settings == alone]
        assert cut.name not in fitting
        assert one.epoch_seconds >= cut.epoch_seconds
        assert one.compute_seconds + one.exposed_seconds == pytest.approx(one.epoch_seconds)
        assert one.exact == cut.exact
        assert one.knob
    if len(fitting) == len(plain):
        eased(plain, lambda: pytest.fail("measured for nothing"), CLUSTER)


def test_a_plan_says_why_it_has_a_knob_and_what_that_costs() -> None:
    cluster = replace(CLUSTER, memory=1.9e9, to_host=1e9, host_memory=1e12)
    gb = 1e9
    cut = Candidate({"graph": 2}, True, 1.0, 0.9, 0.1, {"halo": 1}, 2.4 * gb, moved=(1.5 * gb,))
    slow = Candidate({"graph": 4}, True, 5.0, 4.9, 0.1, {"halo": 1}, 1.0 * gb)
    twin = replace(cut, epoch_seconds=1.031, memory_bytes=1.2 * gb, inner=(0.1 * gb,))
    best = ranked(eased([cut, slow], lambda: [twin], cluster), cluster)
    assert best.fitting[0].settings == {"graph": 2, "activations": "recompute"}
    said = "a rank has 1.9 GB and would need 2.4 GB without activations=recompute, which costs "
    assert best.fitting[0].reason.endswith(f"{said}31.0 ms an epoch")
    hour = [replace(one, epoch_seconds=3600 * one.epoch_seconds) for one in (cut, slow, twin)]
    apart = replace(cluster, to_host=0.0)
    longer = ranked(eased(hour[:2], lambda: hour[2:], apart), apart)
    assert longer.fitting[0].reason.endswith(f"{said}112 s an epoch")
    assert best.refused[0][0].name == "graph=2"
    # A link that copies faster than layers run again.
    found = ranked(eased([cut, slow], lambda: [twin], replace(cluster, to_host=1e12)), cluster).fitting[0]
    assert found.settings == {"graph": 2, "activations": "host"}
    assert "up to 3 GB of host memory a rank" in found.reason
    # Nothing is measured for a cut that would be slower than one that fits.
    eased([cut, replace(slow, epoch_seconds=0.5)], lambda: pytest.fail("measured"), cluster)


SBM = "sbm:vertices=300,degree=8,features=10,classes=4,communities=4"
ASKED = Run(
    data=Source(name=SBM),
    model=Model(name="deepgcn", layers=3, hidden=16),
    parallel=Parallel(plan="auto", partitioner="metis", reuse=True),
    train=Train(epochs=3, check=False),
    report=Report(page=False, trace=False, progress=False),
)


def trained(
    channel: Channel, parallel: Parallel
) -> tuple[list[float | None], list[dict[str, Any]], int | None]:
    """Losses of a run, what each of its ranks held beside the forecast, and what was moved to the host."""
    data = kagome.load(SBM)
    torch.manual_seed(0)
    made = build_model(ASKED.model, in_channels=10, out_channels=4, num_nodes=300)
    with kagome.Trainer(made, data, parallel=parallel, train=ASKED.train, report=ASKED.report) as trainer:
        summary = trainer.fit()
        moved = summary.get("activations_moved_bytes")
        return [record.loss for record in trainer.records], summary["memory"], moved


def trained_apart(
    channel: Channel, parallel: Parallel
) -> tuple[list[float | None], list[dict[str, Any]], int | None]:
    """The same as if the host's memory were not the device's; small tensors are moved too."""
    with host_apart(), mock.patch.object(offload, "LEAST", 1):
        return trained(channel, parallel)


def held(kinds: dict[str, Any]) -> int:
    """What a rank holds from one layer to the next."""
    return int(sum(size or 0 for kind, size in kinds.items() if kind not in ("other", "total")))


@pytest.mark.usefixtures("one_measure")
def test_a_run_in_memory_that_only_a_knob_leaves_free(
    ranks: Callable[..., list], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks, with a limit below what every cut holds and above what one with a knob does."""
    build = _builder(ASKED.model, ASKED.train)
    asked = PlanCommand(data=ASKED.data, model=ASKED.model, train=ASKED.train, devices=2)
    usual = planned(asked, build)
    again = planned(replace(asked, model=replace(ASKED.model, recompute=True)), build)
    least, less = (min(one.memory_bytes for one in each.fitting) for each in (usual, again))
    assert not any("activations" in one.settings for one in usual.fitting), "nothing is short of memory"
    assert less < least
    limit = (least + less) / 2
    monkeypatch.setattr(planning, "available_bytes", lambda: 2 * limit)
    settings, plans = chosen(ASKED, 2, build)
    best = plans.fitting[0]
    assert settings.parallel.activations == best.settings["activations"] == "recompute"
    assert all("activations" in one.settings for one in plans.fitting)
    assert "without activations=recompute, which costs" in capsys.readouterr().err
    # A user who leaves activations on the device has no such plan.
    kept = replace(ASKED, parallel=replace(ASKED.parallel, activations="device"))
    with pytest.raises(PlanError, match="which needs least"):
        chosen(kept, 2, build)
    size = best.ranks
    eased_run = ranks(size, trained, settings.parallel)[0]
    plain_run = ranks(size, trained, replace(settings.parallel, activations="device"))[0]
    assert eased_run[0] == pytest.approx(plain_run[0], rel=1e-6)
    for forecast, (_, memory, _), fits in ((best.memory_bytes, eased_run, True), (None, plain_run, False)):
        most = max(held(one["measured"]) for one in memory)
        assert (most <= limit) == fits
        for one in memory:
            predicted, measured = one["predicted"], one["measured"]
            assert held(predicted) == pytest.approx(held(measured), rel=0.03)
            # The layer that runs again comes on top of what is held, and counts in the plan.
            assert (predicted["other"] or 0) > 0 if fits else predicted["other"] is None
        if forecast is not None:
            whole = max(one["predicted"]["total"] for one in memory)
            assert forecast == pytest.approx(whole, rel=0.03)
    # On a GPU the planner moves what it foretells as activations.
    (parts,) = (one for one in usual.fitting if one.name == "graph=2")
    cut = Parallel(graph=2, partitioner="metis", activations="host")
    losses, _, moved = ranks(2, trained_apart, cut)[0]
    assert losses == ranks(2, trained, replace(cut, activations="device"))[0][0]
    assert moved == pytest.approx(max(parts.moved), rel=0.03)


def test_recomputation_by_either_setting_is_the_same(tmp_path: Path) -> None:
    """``--model.recompute``, and the setting of ``Parallel`` that a plan holds."""
    cut = Parallel(activations="recompute")
    assert Run(model=Model(recompute=True)).recomputes
    assert Run(parallel=cut).recomputes
    assert not Run(parallel=Parallel(activations="host")).recomputes
    assert PartOptions.of(Train(), parallel=cut, fast=True).recompute
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"plans": [{"settings": {"graph": 2, "activations": "recompute"}}]}))
    assert Parallel(plan=str(file)) == replace(cut, graph=2)
    with pytest.raises(ConfigError, match="activations='recompute', as the plan"):
        Parallel(plan=str(file), activations="host")


def test_layers_that_have_gone_on_do_not_run_again() -> None:
    data = kagome.load(SBM)
    made = GCN(10, 8, 2, 4)
    cut = Parallel(chunks=2, activations="recompute")
    with pytest.raises(ConfigError, match="chunks=2, where they have gone on by then"):
        kagome.Trainer(made, data, parallel=cut, train=ASKED.train, report=ASKED.report)
    with pytest.raises(ConfigError, match="recompute=True, where a layer's rows have gone on"):
        kagome.shard(made, data, parallel=cut)
    with kagome.shard(made, data, parallel=Parallel(activations="recompute"), log=str) as net:
        out = net(data.x, data.edge_index)
        net.mean(out.square().sum(-1)).backward()
    found = [parameter.grad.clone() for parameter in made.parameters() if parameter.grad is not None]
    made.zero_grad()
    made(data.x, data.edge_index).square().sum(-1).mean().backward()
    for mine, other in zip(found, made.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(mine, other.grad)
