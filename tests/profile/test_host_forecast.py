"""A run with late or sampled rows on one host goes on, and says once what exact rows would take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.planner.cluster import LOCAL
from kagome.profile import host_forecast
from kagome.records.units import bytes_text, seconds_text
from pipelines import SEED, data, model
from training import QUIET, settings

SAID = "exact rows are forecast to be faster here"


def trained(channel: Channel, parallel: dict[str, Any]) -> dict[str, Any]:
    cut = Parallel(guard=False, **parallel)
    with Trainer(model("sage"), data(), parallel=cut, train=settings(seed=SEED), report=QUIET) as trainer:
        summary = trainer.fit(3)
        again = trainer.fit(4)
        return {
            "notes": [note for note in summary["notes"] if SAID in note],
            "again": [note for note in again["notes"] if SAID in note],
            "epochs": len(trainer.records),
            "halo": trainer.records[-1].bytes["halo"],
            "sent": sum(trainer.part.send_counts),
            "halo_rows": trainer.part.halo.numel(),
        }


def expected_bytes(found: list[dict[str, Any]]) -> float:
    """What the busiest rank exchanges in an exact epoch; all ranks' bytes are one number a row."""
    most = max(max(rank["sent"], rank["halo_rows"]) for rank in found)
    return found[0]["halo"] * most / sum(rank["sent"] for rank in found)


@pytest.mark.parametrize(
    ("world", "parallel", "what", "times"),
    [
        (2, {"max_age": 1}, "late rows: ", 1.5),
        (3, {"halo_sample": 0.5}, "sampled rows: ", 2.25),
        (2, {"max_age": 1, "halo_sample": 0.2}, "late rows and sampled rows: ", 2.0),
    ],
)
def test_it_is_said_once_with_both_numbers_and_the_run_goes_on(
    ranks: Callable[..., list], world: int, parallel: dict[str, Any], what: str, times: float
) -> None:
    exact = expected_bytes(ranks(world, trained, {}))
    for rank in ranks(world, trained, parallel):
        (note,) = rank["notes"]
        assert rank["again"] == [note]
        assert rank["epochs"] == 4
        assert note.startswith(what)
        assert f": {seconds_text(exact / LOCAL)} an epoch for {bytes_text(exact)} of rows, " in note
        assert f", {seconds_text(times * exact / LOCAL)} as asked for" in note


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {}),
        (2, {"max_age": 1, "shared_memory": False}),
        (2, {"max_age": 1, "codec": "onebit"}),
        (1, {"max_age": 1}),
    ],
    ids=["exact", "by sockets", "coded", "one rank"],
)
def test_nothing_is_said_of_other_runs(
    ranks: Callable[..., list], world: int, parallel: dict[str, Any]
) -> None:
    assert [rank["notes"] for rank in ranks(world, trained, parallel)] == [[]] * world


def unforeseen(channel: Channel) -> dict[str, Any]:
    with mock.patch.object(host_forecast, "halo_bytes", side_effect=RuntimeError("a model that fails")):
        return trained(channel, {"max_age": 1})


def test_a_forecast_that_fails_ends_no_run(ranks: Callable[..., list]) -> None:
    for rank in ranks(2, unforeseen):
        assert rank["notes"] == []
        assert rank["epochs"] == 4


def large(channel: Channel) -> dict[str, Any]:
    with (
        mock.patch.object(host_forecast, "LARGEST", 100),
        mock.patch.object(host_forecast, "model_copy") as copied,
    ):
        return {**trained(channel, {"max_age": 1}), "copies": copied.call_count}


def test_a_large_model_is_not_copied_for_a_note(ranks: Callable[..., list]) -> None:
    for rank in ranks(2, large):
        assert rank["notes"] == []
        assert rank["copies"] == 0
