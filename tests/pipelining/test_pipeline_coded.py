"""Coded rows between stages and parts of a pipeline: their bytes, their training, and what stays exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_pipeline_program import counted
from torch import Tensor, nn

from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.comm.codec import Codec
from kagome.config import CodecName
from kagome.errors import ConfigError
from pipelines import HIDDEN, data, model, rotated, sgd, told, trained
from training import CLASSES, FEATURES, QUIET, graph, settings

HISTORY = {"cross_chunk": "history", "guard": False}
DROP = {"cross_chunk": "drop", "guard": False}
EXACT = {"cross_chunk": "exact", "guard": False}
HYBRID = {"pipe": 2, "graph": 2, "chunks": 3}
CODECS = ("onebit", "bf16", "int8", "int2", "fp16")
PIPE = [
    {"pipe": 2, "chunks": 1, "guard": False},
    {"pipe": 3, "chunks": 4, **EXACT},
    {"pipe": 2, "chunks": 5, **HISTORY},
    {"pipe": 2, "chunks": 5, **DROP},
    {**HYBRID, **HISTORY},
]


def world(mesh: dict[str, Any]) -> int:
    return int(mesh["pipe"] * mesh.get("graph", 1))


# Bytes ---------------------------------------------------------------------------------------------


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("mesh", "name"), [({"pipe": 2, "chunks": 1}, "gcn"), ({**HYBRID, **HISTORY}, "gcnii")]
)
def test_no_codec_is_what_there_was_bit_by_bit(ranks, mesh, name):
    found = [ranks(world(mesh), trained, name, {**mesh, **more}) for more in ({}, {"codec_stage": "none"})]
    for one, other in zip(*found, strict=True):
        assert one["losses"] == other["losses"]
        assert one["bytes"] == other["bytes"]
        assert all(torch.equal(one["weights"][key], value) for key, value in other["weights"].items())
        assert (one["crossing"], one["uncoded"]) == (None, [{}] * 4)


def coded_bytes(codec: CodecName, rank: dict[str, Any], chunks: list[Tensor]) -> int:
    """What all links carry in an epoch, each value there and its gradient back."""
    shapes = [shape for widths in rank["widths"] for shape in widths]
    assert all(len(shape) == 1 for shape in shapes)
    sizes = [Codec(codec).size(ids.numel(), shape[0], torch.float64) for shape in shapes for ids in chunks]
    return 2 * sum(sizes)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("mesh", "name", "codec"),
    rotated(
        PIPE,
        [("gcn", "onebit"), ("jumping", "bf16"), ("gcnii", "int8"), ("normed", "int2"), ("gat", "onebit")],
    ),
)
def test_bytes_are_those_of_the_codec(ranks, name, codec, mesh):
    found = ranks(world(mesh), counted, name, {**mesh, "codec_stage": codec})
    chunks = [ids for rank in found[: mesh.get("graph", 1)] for ids in rank["chunks"]]
    expected, plain = coded_bytes(codec, found[0], chunks), found[0]["expected"]
    assert expected < plain / 2
    # With history the first epoch is exact.
    epochs = [plain if mesh.get("cross_chunk") == "history" else expected, expected, expected]
    for rank in found:
        assert [epoch["stage"] for epoch in rank["bytes"]] == epochs
        assert [epoch["stage"] for epoch in rank["uncoded"]] == [plain] * 3
        crossing = rank["crossing"]
        assert crossing["codecs"]["stage"] == codec
        assert crossing["bytes_uncoded_per_epoch"]["stage"] == plain
        assert all(site.split()[1] == "(stage)" for site in crossing["errors"])
        assert {site.split()[-1] for site in crossing["errors"]} == {"forward", "backward"}


def test_halo_rows_of_chunks_are_coded(ranks):
    """As many rows as without a codec; one of 8 numbers has 6 bytes and 8 bits, a message some more."""
    mesh = {**HYBRID, **HISTORY}
    exact = ranks(4, trained, "gcn", mesh)[0]
    for rank in ranks(4, trained, "gcn", {**mesh, "codec": "onebit"}):
        plain = [epoch["halo"] for epoch in exact["bytes"]]
        kinds = [{kind: epoch[kind] for kind in ("halo", "stage")} for epoch in exact["bytes"]]
        assert rank["uncoded"][1:] == kinds[1:]
        assert rank["bytes"][0] == exact["bytes"][0]
        for epoch in (1, 2, 3):
            assert 7 / 64 * plain[epoch] < rank["bytes"][epoch]["halo"] < 0.3 * plain[epoch]
            assert rank["bytes"][epoch]["stage"] == exact["bytes"][epoch]["stage"]
        assert rank["losses"][0] == exact["losses"][0]
        assert rank["losses"][1:] != exact["losses"][1:]
        assert rank["crossing"]["codecs"] == {"halo": "onebit", "halo backward": "onebit", "stage": "none"}


class Heads(nn.Module):
    """Rows of two heads go from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, CLASSES)
        self.one, self.two = (nn.Linear(HIDDEN // 2, HIDDEN // 2) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).tanh().view(-1, 2, HIDDEN // 2)
        return self.last(self.two(self.one(x).tanh()).flatten(1), edge_index)


def headed(channel: Channel, parallel: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return told(Heads().double(), data(), 3, parallel)


def test_rows_of_several_axes_are_coded(ranks):
    """A layer a stage: the values between them have three axes."""
    mesh = {"pipe": 4, "chunks": 2, **EXACT}
    found = ranks(4, headed, {**mesh, "codec_stage": "int8"})
    sizes = [Codec("int8").size(ids.numel(), HIDDEN, torch.float64) for ids in found[0]["chunks"]]
    for rank in found:
        assert [epoch["stage"] for epoch in rank["bytes"]] == [3 * 2 * sum(sizes)] * 3
        assert rank["uncoded"][0]["stage"] == 3 * 2 * 120 * HIDDEN * 8
        torch.testing.assert_close(rank["losses"], ranks(1, headed, {})[0]["losses"], rtol=0, atol=0.02)


# Training ------------------------------------------------------------------------------------------


def single(channel: Channel, name: str, parallel: dict[str, Any], epochs: int) -> Any:
    """In float32, with a rate at which losses fall."""
    given = graph(torch.float32, 120)
    given.val_mask = torch.zeros_like(given.val_mask)
    return told(model(name).float(), given, epochs, parallel, train={"lr": 0.02})


def scores_of(name: str, weights: dict[str, Tensor]) -> Tensor:
    plain, given = model(name).float(), graph(torch.float32, 120)
    plain.load_state_dict(weights)
    with torch.no_grad():
        scores: Tensor = plain.eval()(given.x, given.edge_index)
    return scores


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gcnii", {"pipe": 2, "chunks": 1, "codec_stage": "int8"}),
        ("normed", {"pipe": 2, "chunks": 4, "cross_chunk": "drop", "codec_stage": "int8"}),
        ("gcn", {**HYBRID, "codec_stage": "int8", "codec": "onebit"}),
        ("sage", {**HYBRID, "cross_chunk": "exact", "codec": "int2", "codec_backward": "bf16"}),
        ("gcn", {**HYBRID, **HISTORY, "codec": "onebit", "codec_stage": "int4"}),
    ],
)
def test_losses_fall_and_evaluation_is_exact(ranks, name, mesh):
    found = ranks(world(mesh), single, name, mesh, 30)
    for rank in found:
        assert isinstance(rank, dict), rank
        assert rank["losses"] == found[0]["losses"]
        for key, value in rank["weights"].items():
            assert torch.equal(value, found[0]["weights"][key]), f"{key} drifts apart"
    assert found[0]["losses"][-1] < 0.8 * found[0]["losses"][0]
    # A codec of 8 bits loses some thousandths.
    torch.testing.assert_close(found[0]["scores"], scores_of(name, found[0]["weights"]), rtol=0, atol=3e-5)


# What is exact ---------------------------------------------------------------------------------------


@pytest.mark.some(1)
@pytest.mark.parametrize("more", [{"codec": "onebit"}, {"codec_stage": "onebit"}])
def test_exact_epochs_and_probes_of_history_are_exact(ranks, more):
    """The first epoch fills the tables, the second measures: both go by the exact gradient."""
    exact = ranks(4, trained, "normed", HYBRID, 2, 0.4, True)
    for one, other in zip(exact, ranks(4, trained, "normed", {**HYBRID, **more}, 2, 0.4, True), strict=True):
        assert one["losses"] == other["losses"]
        for key, value in one["weights"].items():
            assert torch.equal(value, other["weights"][key]), key
        probes = other["crossing"]["probes"]
        assert (probes["count"], probes["lowest_epoch"], probes["climbed"]) == (1, 2, [])
        assert -1 <= probes["last_cosine"] == probes["lowest_cosine"] < 1
        assert other["weights"]["one.num_batches_tracked"] == 2
        # What the probe sends beside is sent, but no run without codecs would send it.
        kind = "stage" if "codec_stage" in more else "halo"
        assert other["bytes"][1][kind] > other["uncoded"][1][kind]


def two_steps(channel: Channel, name: str, parallel: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The weights after one step and after two, and what the run was told."""
    mine, weights = model(name), []
    with Trainer(
        mine, data(), parallel=Parallel(**parallel), train=settings(), report=QUIET, optimizer=sgd, fast=False
    ) as trainer:
        for epoch in (1, 2):
            crossing = trainer.fit(epoch).get("crossing")
            weights.append({key: value.clone() for key, value in mine.state_dict().items()})
    return [*weights, crossing]


@pytest.mark.parametrize(
    "mesh",
    [
        {"pipe": 2, "chunks": 1, "codec_stage": "onebit"},
        {"pipe": 2, "chunks": 3, "cross_chunk": "exact", "codec_stage": "int2"},
        {"pipe": 1, "graph": 2, "chunks": 3, "cross_chunk": "exact", "codec": "onebit"},
        {"pipe": 2, "graph": 2, "chunks": 1, "codec": "onebit", "codec_stage": "int8"},
    ],
)
def test_without_history_the_precision_controller_probes_with_the_exact_gradient(ranks, mesh):
    first, second, crossing = ranks(world(mesh), two_steps, "gcn", mesh)[0]
    plain, given = model("gcn"), data()
    plain.load_state_dict(first)
    out = plain(given.x, given.edge_index)[given.train_mask]
    nn.functional.cross_entropy(out, given.y[given.train_mask]).backward()
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(first[key] - second[key], parameter.grad, rtol=0, atol=1e-9)
    assert crossing["probes"]["count"] == 2  # the first epoch's, and this one's
    assert crossing["probes"]["last_cosine"] < 1


# Late rows -------------------------------------------------------------------------------------------


@pytest.mark.some(1)
@pytest.mark.parametrize(("guard", "every"), [(True, None), (False, None), (False, "auto"), (False, 3)])
def test_late_rows_through_stages_are_late_rows(ranks, guard, every):
    """A stage's sites are as late as they are in a model that is whole."""
    late = {"graph": 2, "max_age": 1, "codec": "int8", "guard": guard, "sync_every": every}
    whole = ranks(2, trained, "gcn", late, 6, 0.0, True)[0]
    assert whole["engine"] == "GraphEngine"
    for rank in ranks(4, trained, "gcn", {**late, "pipe": 2, "chunks": 1}, 6, 0.0, True):
        assert isinstance(rank, dict), rank
        torch.testing.assert_close(rank["losses"], whole["losses"], rtol=0, atol=1e-8)
        torch.testing.assert_close(rank["weights"], whole["weights"], rtol=0, atol=1e-7)
        assert rank["max_age"] == whole["max_age"] == rank["crossing"]["oldest_age"] == 1
        assert len(rank["crossing"]["errors"]) == len(whole["crossing"]["errors"])
        count = whole["crossing"]["probes"]["count"]
        assert rank["crossing"]["probes"]["count"] == count
        assert (count > 0) is guard


def drifted(channel: Channel, parallel: dict[str, Any]) -> list[float]:
    found: list[float] = []

    class Drift:
        all_ranks = True

        def on_fit_start(self, trainer: Trainer) -> None:
            self.rows = trainer.engine.exchange.known

        def on_epoch_end(self, record: Any) -> None:
            found.append(self.rows.drifted)

    told(model("gcn"), data(), 5, parallel, plain_steps=True, callbacks=[Drift()])
    return found


def test_the_drift_of_all_stages_of_a_rank_counts_in_its_epoch(ranks):
    """That of a rank's later stages counted an epoch late."""
    late = {"graph": 2, "max_age": 1, "guard": False, "sync_every": "auto"}
    whole = ranks(2, drifted, late)[0]
    assert len({*whole}) > 3
    for rank in ranks(4, drifted, {**late, "pipe": 2, "stages_per_rank": 2, "chunks": 1}):
        assert rank == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("name", ["max_age", "error_feedback", "adaptive_bits", "halo_sample"])
def test_what_parts_alone_do_is_refused_with_chunks(name):
    value = {"max_age": 1, "halo_sample": 0.5}.get(name, True)
    codec: dict[str, Any] = {"codec": "int4", name: value}
    for chunked in ({"pipe": 2}, {"pipe": 2, "chunks": 2}, {"graph": 2, "chunks": 3}):
        with pytest.raises(ConfigError, match=rf"{name}={value}(.|\n)*chunks(.|\n)*chunks=1"):
            Parallel(**codec, **chunked).fit(2)
    assert Parallel(**codec, pipe=2, chunks=1).fit(4).graph == 2


def test_what_is_said_of_it(ranks):
    notes = ranks(4, trained, "gcn", {**HYBRID, "codec": "onebit", "codec_stage": "bf16"}, 3)[0]["notes"]
    assert notes[-1] == "crossing: halo onebit, halo backward onebit, stage bf16"
    assert notes[-2].startswith("history: 1 probes")
    notes = ranks(2, trained, "gcn", {"pipe": 2, "chunks": 1, "codec_stage": "bf16"}, 3)[0]["notes"]
    assert notes[-1].startswith("crossing: stage bf16; 2 probes, the last, epoch 2: codec bf16")


def resumed(channel: Channel, parallel: dict[str, Any], folder: str) -> list[Any]:
    """A checkpoint goes on in a trainer that has trained other weights, and in one that has not trained."""
    split, train = Parallel(**parallel), settings()
    with Trainer(model("gcn"), data(), parallel=split, train=train, report=QUIET, out=folder) as trainer:
        trainer.fit(4)
    found = []
    for before in (3, 0):
        with Trainer(model("gcn", seed=9), data(), parallel=split, train=train, report=QUIET) as trainer:
            trainer.fit(before)
            trainer.fit(6, resume=folder)
            found.append([record.loss for record in trainer.records[-2:]])
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "parallel", [{"graph": 2, "max_age": 2}, {"pipe": 2, "graph": 2, "chunks": 1, "max_age": 2}]
)
def test_a_resumed_run_reads_no_late_rows_of_what_was_before(ranks, tmp_path, parallel):
    world = 2 * parallel.get("pipe", 1)
    for one, other in ranks(world, resumed, {**parallel, "guard": False}, str(tmp_path)):
        assert len(one) == 2
        assert one == other
