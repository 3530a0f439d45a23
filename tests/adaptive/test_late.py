"""Late rows: gradients are those of plain PyG with the last epoch's rows; what is to be exact is so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from kagome import Parallel, Trainer
from kagome.comm import codec
from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.transport.process_group import Transport
from kagome.errors import ModelError
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.halo.epoch_rows import DRIFTED
from kagome.train.metrics_log import EpochLoop
from late_reference import reference
from pipelines import SEED, data, model
from training import QUIET, losses, settings

RATE = 0.5
LATE = {"max_age": 1, "guard": False}


class Noted(torch.optim.SGD):
    """Weights after an epoch differ from those before by the gradient itself, which is kept."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=RATE)
        self.gradients: list[list[Tensor | None]] = []

    def step(self, closure: Any = None) -> None:
        found = [p.grad for group in self.param_groups for p in group["params"]]
        self.gradients.append([None if g is None else g.clone() for g in found])
        super().step(closure)


def told(trainer: Trainer, summary: dict[str, Any]) -> dict[str, Any]:
    """What training left, as plain values."""
    names = [name for name, _ in trainer.model.named_parameters()]
    return {
        "losses": losses(trainer),
        "gradients": [
            {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}
            for grads in trainer.optimizer.gradients
        ],
        "weights": {k: v.clone() for k, v in trainer.model.state_dict().items()},
        "own": trainer.part.own,
        "test": summary["test_metric"],
        "max_age": summary["max_age"],
        "notes": summary["notes"],
        "bytes": [dict(record.bytes) for record in trainer.records],
    }


def trained(
    channel: Channel,
    name: str,
    parallel: dict[str, Any],
    epochs: int,
    dropout: float = 0.0,
    rest: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a model of ``pipelines`` with plain SGD."""
    rest = dict(rest or {})
    resume, save_rows = rest.pop("resume", None), rest.pop("save_rows", True)
    with Trainer(
        model(name, dropout),
        data(),
        parallel=Parallel(**parallel),
        train=settings(seed=SEED, save_rows=save_rows),
        report=QUIET,
        optimizer=Noted,
        **rest,
    ) as trainer:
        return told(trainer, trainer.fit(epochs, resume=resume))


SLOWLY = {"fast": False}
"""Fast paths may sum rows before they map them."""


def part_of(found: list[dict[str, Any]]) -> Tensor:
    part = torch.full((data().num_nodes,), -1)
    for rank, each in enumerate(found):
        part[each["own"]] = rank
    assert int(part.min()) == 0
    return part


def compare(found: list[dict[str, Any]], name: str, epochs: int, dropout: float = 0.0, **rest: Any) -> None:
    """Every epoch's loss and gradients, the weights at the end; all ranks have the same bits."""
    plain = model(name, dropout)
    expected = reference(plain, data(), part_of(found), epochs, seed=SEED, rate=RATE, **rest)
    torch.testing.assert_close(found[0]["losses"], expected.losses, rtol=0, atol=1e-10)
    torch.testing.assert_close(found[0]["gradients"], expected.gradients, rtol=0, atol=1e-10)
    torch.testing.assert_close(found[0]["weights"], dict(plain.state_dict()), rtol=0, atol=1e-9)
    for rank in found:
        assert rank["losses"] == found[0]["losses"]
        for key, value in rank["weights"].items():
            assert torch.equal(value, found[0]["weights"][key]), f"{key} drifts apart"


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    for key in ("weights", "gradients"):
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)


# The gradient of late rows ------------------------------------------------------------------------------


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("world", "name"), [(2, "gcn"), (3, "sage"), (2, "gat"), (3, "gcnii"), (2, "normed"), (4, "gcn")]
)
def test_the_gradient_is_that_of_the_last_epoch_s_rows_and_gradients(ranks, world, name):
    found = ranks(world, trained, name, LATE, 5, 0.0, SLOWLY)
    compare(found, name, 5)
    assert [rank["max_age"] for rank in found] == [1] * world


@pytest.mark.parametrize(("world", "name"), [(2, "gcn"), (3, "sage")])
def test_with_dropout_each_epoch_s_rows_are_those_that_were_drawn_then(ranks, world, name):
    compare(ranks(world, trained, name, LATE, 5, 0.4, SLOWLY), name, 5, 0.4)


@pytest.mark.some(1)
@pytest.mark.parametrize(("world", "name"), [(3, "gcn"), (2, "sage")])
def test_the_same_with_fast_paths(ranks, world, name):
    compare(ranks(world, trained, name, LATE, 4, 0.4), name, 4, 0.4, fast=True)


@pytest.mark.parametrize(("world", "every"), [(2, 3), (3, 2)])
def test_each_so_many_epochs_are_exact(ranks, world, every):
    found = ranks(world, trained, "gcn", {**LATE, "sync_every": every}, 7, 0.0, SLOWLY)
    compare(found, "gcn", 7, sync_every=every)


def watched(channel: Channel, *given: Any) -> dict[str, Any]:
    """As ``trained``, with how far rows moved in each epoch."""
    drifts: list[float] = []
    moved = CompressedExchange.moved

    def noted(way: CompressedExchange, drift: Sequence[float], epoch: int) -> None:
        drifts.append(drift[0] / max(drift[1], 1))
        moved(way, drift, epoch)

    with mock.patch.object(CompressedExchange, "moved", noted):
        return {**trained(channel, *given), "drifts": drifts}


@pytest.mark.parametrize("world", [2, 3])
def test_an_epoch_is_exact_before_rows_have_moved_far_since_the_last_one_that_was(ranks, world):
    epochs = 10
    found = ranks(world, watched, "gcn", {**LATE, "sync_every": "auto"}, epochs, 0.0, SLOWLY)
    drifts = found[0]["drifts"]
    assert [rank["drifts"] for rank in found] == [drifts] * world
    waits, far, waited = [], 0.0, False
    for epoch, drift in enumerate(drifts[:-1], 2):
        far = drift + (0.0 if waited else far)
        waited = far > DRIFTED
        waits += [epoch] if waited else []
    assert 2 <= len(waits) <= epochs - 3, drifts  # else the next line says little
    compare(found, "gcn", epochs, sync_every=waits)


def test_smoothing_is_of_rows_and_of_gradients(ranks):
    found = ranks(2, trained, "sage", {**LATE, "smoothing": 0.6, "sync_every": 5}, 6, 0.0, SLOWLY)
    compare(found, "sage", 6, smoothing=0.6, sync_every=5)


def test_the_first_epoch_is_exact_and_later_ones_are_not(ranks):
    """Without this, rows that are never late would pass where a reference is not looked at."""
    found = ranks(2, trained, "gcn", LATE, 3, 0.0, SLOWLY)
    plain = model("gcn")
    exact = reference(plain, data(), part_of(found), 3, seed=SEED, rate=RATE, late=False)
    assert found[0]["losses"][0] == pytest.approx(exact.losses[0], abs=1e-12)
    torch.testing.assert_close(found[0]["gradients"][0], exact.gradients[0], rtol=0, atol=1e-12)
    for name, grad in exact.gradients[1].items():
        assert float((found[0]["gradients"][1][name] - grad).norm() / grad.norm()) > 1e-3, name


def test_a_layer_that_runs_again_in_backward_reads_what_it_read(ranks):
    once, again = (ranks(2, trained, "gcn", LATE, 4, 0.4, {"recompute": on}) for on in (False, True))
    torch.testing.assert_close(once[0]["gradients"], again[0]["gradients"], rtol=0, atol=1e-12)
    assert [rank["bytes"] for rank in once] == [rank["bytes"] for rank in again]


# What changes nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [LATE, {"codec": "onebit", "max_age": 1}])
def test_one_rank_trains_as_it_does_without_settings(ranks, parallel):
    one, other = (ranks(1, trained, "gcn", given, 3, 0.4)[0] for given in (parallel, {}))
    same_bits(one, other)
    assert one["max_age"] == 0


def on_segments(channel: Channel, *given: Any) -> dict[str, Any]:
    """Letters of as many segments as there may be; the most that one was sent on."""
    most, post = [0], Transport.post

    def counted(transport: Transport, sent: Sequence[Sequence[Tensor]], *rest: Any) -> Any:
        most.append(max(sum(part.numel() > 0 for part in letter) for letter in sent))
        return post(transport, sent, *rest)

    with mock.patch.object(codec, "LEAST_SEGMENT", 16), mock.patch.object(Transport, "post", counted):
        return {**trained(channel, *given), "most": max(most)}


@pytest.mark.some(2)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "parallel",
    [
        {"codec": "onebit", "max_age": 1},
        {"codec": "int4", "codec_backward": "bf16", "error_feedback": True},
        {"codec": "int4", "adaptive_bits": True},
        {"codec": "int2", "tensor": 2},
    ],
    ids=lambda parallel: " ".join(map(str, parallel.values())),
)
def test_segments_change_no_bit(ranks, parallel, shared):
    """Neither to ranks of this host, which read in memory, nor to others."""
    given = {**parallel, "guard": False, "shared_memory": shared}
    few, many = (ranks(2, run, "sage", given, 4) for run in (trained, on_segments))
    for one, other in zip(few, many, strict=True):
        same_bits(one, other)
        assert one["bytes"] == other["bytes"]
        assert other["most"] == (1 if shared else codec.SEGMENTS)


@contextmanager
def nothing_between() -> Iterator[None]:
    """All that crosses goes to the channel as if there were no crossing."""

    def start(way: CompressedExchange, rows: Tensor, request: ExchangeRequest) -> Any:
        return way.channel.start(rows, request)

    with mock.patch.object(CompressedExchange, "start", start):
        yield


def by_the_channel(channel: Channel, *given: Any) -> dict[str, Any]:
    with nothing_between():
        return trained(channel, *given)


@pytest.mark.some(1)
@pytest.mark.parametrize("world", [2, 3])
def test_without_codec_and_age_it_is_the_channel_to_the_bit(ranks, world):
    parallel = {"codec": "none", "max_age": 0}
    found, plain = ranks(world, trained, "gat", parallel, 3), ranks(world, by_the_channel, "gat", {}, 3)
    for one, other in zip(found, plain, strict=True):
        same_bits(one, other)
        assert one["bytes"] == other["bytes"]
        assert one["max_age"] == 0


# Coded and late -----------------------------------------------------------------------------------------


@pytest.mark.some(1)
@pytest.mark.parametrize("world", [2, 3])
def test_onebit_and_late_trains_evaluates_exactly_and_repeats(ranks, world):
    parallel = {"codec": "onebit", "max_age": 1}
    found = ranks(world, trained, "sage", parallel, 30, 0.2)
    again = ranks(world, trained, "sage", parallel, 30, 0.2)
    for one, other in zip(found, again, strict=True):
        same_bits(one, other)
    first, last = found[0]["losses"][:5], found[0]["losses"][-5:]
    assert sum(last) < 0.8 * sum(first)
    given, plain = data(), model("sage")
    plain.load_state_dict(found[0]["weights"])
    with torch.no_grad():
        scores = plain.eval()(given.x, given.edge_index)
    right = (scores.argmax(1) == given.y)[given.test_mask].double().mean()
    for rank in found:
        assert rank["test"] == pytest.approx(float(right), abs=1e-12)
        assert rank["max_age"] == 1


def test_few_bits_are_few_bytes(ranks):
    coded, plain = (ranks(2, trained, "gcn", {**LATE, "codec": c}, 3)[0]["bytes"] for c in ("int4", "none"))
    # float64 rows of 8 and 4 columns: 64 and 32 bytes become 6 + 4 and 6 + 2; the features cross as they are.
    assert plain[2]["halo"] > 5 * coded[2]["halo"] > 0


# Going on -----------------------------------------------------------------------------------------------


def test_a_resumed_run_without_rows_begins_with_its_own(ranks, tmp_path):
    run = str(tmp_path / "run")
    before = ranks(2, trained, "gcn", LATE, 4, 0.0, {**SLOWLY, "out": run, "save_rows": False})
    exact = ranks(2, trained, "gcn", {}, 5, 0.0, {**SLOWLY, "resume": run})
    found = ranks(2, trained, "gcn", LATE, 7, 0.0, {**SLOWLY, "resume": run})
    same_bits({**exact[0], "weights": {}}, {**cut(found[0], 1), "weights": {}, "losses": exact[0]["losses"]})
    plain = model("gcn")
    plain.load_state_dict(before[0]["weights"])
    expected = reference(plain, data(), part_of(found), 3, seed=SEED, rate=RATE)
    torch.testing.assert_close(found[0]["gradients"], expected.gradients, rtol=0, atol=1e-10)
    torch.testing.assert_close(found[0]["losses"][-3:], expected.losses, rtol=0, atol=1e-10)


def cut(found: dict[str, Any], epochs: int) -> dict[str, Any]:
    return {**found, "gradients": found["gradients"][:epochs]}


HEARD = {**LATE, "smoothing": 0.5, "codec": "int8", "error_feedback": True}
"""All that an epoch may have of those before it."""


def went_back(channel: Channel, out: str) -> list[dict[str, Tensor]]:
    """Train on, go back to the checkpoint before, and train on."""
    with Trainer(
        model("gcn"),
        data(),
        parallel=Parallel(**HEARD),
        train=settings(seed=SEED, save_every=3),
        report=QUIET,
        optimizer=Noted,
        out=out,
    ) as trainer:
        trainer.fit(5)
        summary = trainer.fit(5, resume=Path(out) / "checkpoints" / "epoch-000003")
        return told(trainer, summary)["gradients"]


def test_a_trainer_that_goes_back_reads_nothing_of_what_is_undone(ranks, tmp_path):
    found = ranks(2, went_back, str(tmp_path))[0]
    assert len(found) == 7
    resume = {"resume": str(tmp_path / "checkpoints" / "epoch-000003")}
    expected = ranks(2, trained, "gcn", HEARD, 5, 0.0, resume)[0]["gradients"]
    torch.testing.assert_close(found[5:], expected, rtol=0, atol=0)
    torch.testing.assert_close(found[3:5], expected, rtol=0, atol=0)  # what was undone is done again


def noted(channel: Channel, out: Path) -> tuple[list[int], list[int], list[int], list[int]]:
    """Epochs in the records, in the file, and in the file at each checkpoint and as each epoch begins."""
    del channel
    saved: list[int] = []
    begun: list[int] = []
    train, cut = settings(epochs=5, save_every=2), Parallel(graph=2, **LATE)
    with Trainer(model("gcn"), data(), parallel=cut, train=train, report=QUIET, out=out) as trainer:
        save, one_epoch, file = trainer._save, trainer._one_epoch, out / "metrics.jsonl"

        def count(into: list[int]) -> None:
            into.append(len(file.read_text().splitlines()) if file.exists() else 0)

        def counting() -> None:
            count(saved)
            save()

        def beginning(loop: EpochLoop) -> bool:
            count(begun)
            return one_epoch(loop)

        with (
            mock.patch.object(trainer, "_save", counting),
            mock.patch.object(trainer, "_one_epoch", beginning),
        ):
            trainer.fit()
        apart = trainer.channel.patient
        assert apart is not trainer.channel
        assert apart._transport is not None
        assert apart._transport._count >= 5, "late rows go there"
        lines = [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert all(record.bytes["halo"] > 0 for record in trainer.records)
        return [record.epoch for record in trainer.records], lines, saved, begun


def test_counts_travel_with_the_next_epoch_and_none_is_lost(ranks: Any, tmp_path: Path) -> None:
    """A record is written an epoch late, but before a checkpoint and at the end."""
    epochs, lines, saved, begun = ranks(2, noted, tmp_path / "run")[0]
    assert epochs == lines == [1, 2, 3, 4, 5]
    assert saved == [2, 4, 5]
    assert begun == [0, 0, 2, 2, 4], "the last record is still on its way"


def failing(channel: Channel, out: Path) -> tuple[list[int], str]:
    """Epochs in the records of a run whose weights are spoilt after its third epoch, and what is said."""
    del channel
    cut = Parallel(graph=2, **LATE)
    with Trainer(model("gcn"), data(), parallel=cut, train=settings(), report=QUIET, out=out) as trainer:
        one_epoch = trainer._one_epoch

        def spoilt(loop: EpochLoop) -> bool:
            ended = one_epoch(loop)
            if trainer.epoch == 3:
                with torch.no_grad():
                    next(trainer.model.parameters()).fill_(float("inf"))
            return ended

        with mock.patch.object(trainer, "_one_epoch", spoilt), pytest.raises(ModelError) as caught:
            trainer.fit(5)
        return [record.epoch for record in trainer.records], str(caught.value)


def test_a_run_that_fails_tells_of_all_epochs_that_ended(ranks: Any, tmp_path: Path) -> None:
    """The record of the epoch before was on its way, and was lost."""
    told = ranks(2, failing, tmp_path / "run")
    lines = [
        json.loads(line)["epoch"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    for epochs, said in told:
        assert epochs == lines
        assert len(epochs) >= 3
        assert f"got nan (epoch {len(epochs) + 1})" in said
