"""What a run tells of what crossed: codecs, bytes without them, what they lost, probes, age."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kagome import Parallel, Trainer
from kagome.adaptive import precision
from kagome.comm.channel import Channel
from training import QUIET, graph, losses, model, settings


def run(channel: Channel, parallel: dict[str, Any], epochs: int = 12, out: str | None = None) -> Any:
    """A run's summary, its bytes and notes."""
    with Trainer(
        model("gcn"), graph(), parallel=Parallel(**parallel), train=settings(), report=QUIET, out=out
    ) as trainer:
        summary = trainer.fit(epochs)
        return {
            "summary": summary,
            "bytes": [dict(record.bytes) for record in trainer.records],
            "uncoded": [dict(record.uncoded) for record in trainer.records],
            "losses": losses(trainer),
            "notes": trainer.notes,
            "weights": {key: value.numpy().tobytes() for key, value in trainer.model.state_dict().items()},
        }


@pytest.mark.parametrize("parallel", [{}, {"codec": "none", "codec_backward": "none"}])
def test_where_all_crosses_exactly_nothing_is_told(ranks, parallel):
    for rank in ranks(2, run, parallel, 3):
        assert "crossing" not in rank["summary"]
        assert rank["summary"]["max_age"] == 0
        assert rank["uncoded"] == [{}] * 3
        assert not [note for note in rank["notes"] if note.startswith("crossing")]


def test_one_rank_has_nothing_to_code(ranks):
    (found,) = ranks(1, run, {"codec": "onebit", "max_age": 1}, 3)
    assert "crossing" not in found["summary"]


def test_codecs_bytes_errors_and_probes(ranks):
    exact = ranks(2, run, {})[0]
    for rank in ranks(2, run, {"codec": "onebit", "codec_backward": "bf16"}):
        crossing = rank["summary"]["crossing"]
        assert crossing["codecs"] == {"halo": "onebit", "halo backward": "bf16"}
        # The first epoch sends what no later one does: rows that do not change.
        assert rank["uncoded"][1:] == [{"halo": epoch["halo"]} for epoch in exact["bytes"][1:]]
        plain, total = crossing["bytes_uncoded_per_epoch"], rank["summary"]["bytes_per_epoch"]
        assert plain["halo"] == exact["summary"]["bytes_per_epoch"]["halo"]
        assert plain["total"] - plain["halo"] == pytest.approx(total["total"] - total["halo"])
        assert total["halo"] < plain["halo"]
        assert set(crossing["errors"]) == {"last.x forward", "last.x backward"}
        for site, error in crossing["errors"].items():
            assert 0.1 < error < 2 if site.endswith("forward") else 0 < error < 0.01
        probes = crossing["probes"]
        assert probes["count"] >= 2
        assert probes["lowest_cosine"] <= probes["last_cosine"] <= 1
        assert 0 <= crossing["hidden_share"] <= 1
        assert crossing["oldest_age"] == rank["summary"]["max_age"] == 0
        (said,) = [note for note in rank["notes"] if note.startswith("crossing")]
        assert said.startswith(
            f"crossing: halo onebit, halo backward bf16; {probes['count']} probes, the last"
        )
        assert f"lowest cosine {probes['lowest_cosine']:.2f} in epoch {probes['lowest_epoch']}" in said


@pytest.mark.some(1)
@pytest.mark.parametrize("more", [{}, {"codec": "onebit"}, {"pipe": 2, "graph": 2, "chunks": 1}])
def test_sums_of_gradients_cross_in_fewer_bytes(ranks, more):
    """float32 gradients as bf16: counts, losses and notes stay, weights are the same on all ranks."""
    exact, found = (ranks(4, run, {**more, **codec}) for codec in ({}, {"codec_weights": "bf16"}))
    for rank in found:
        told = rank["summary"]["crossing"]
        assert told["codecs"]["weights"] == "bf16"
        sent, uncoded = (rank["summary"]["bytes_per_epoch"], told["bytes_uncoded_per_epoch"])
        before = exact[0]["summary"]["bytes_per_epoch"]["weights"]
        assert sent["weights"] < 0.6 * before
        assert uncoded["weights"] <= before
        if not more:
            # No epoch was a probe: exactly what was sent before.
            assert uncoded["weights"] == before
            assert rank["notes"][-1] == "crossing: halo none, halo backward none, weights bf16"
            assert rank["losses"] == pytest.approx(exact[0]["losses"], rel=0.02)
        assert rank["weights"] == found[0]["weights"] or more.get("pipe")


def test_one_rank_sums_nothing(ranks):
    (found,) = ranks(1, run, {"codec_weights": "bf16"}, 3)
    assert "crossing" not in found["summary"]


def test_unwatched_late_rows(ranks):
    for rank in ranks(3, run, {"max_age": 1, "guard": False, "smoothing": 0.5}):
        crossing = rank["summary"]["crossing"]
        assert crossing["oldest_age"] == rank["summary"]["max_age"] == 1
        assert crossing["probes"] == {"count": 0, "climbed": []}
        assert crossing["errors"] == {}
        assert rank["uncoded"][1]["halo"] == rank["bytes"][1]["halo"]
        said = "crossing: halo none, halo backward none, max_age=1, smoothing=0.5; no probe compared its "
        assert rank["notes"][-1] == f"{said}gradient with the exact one"


def test_a_level_that_was_climbed_is_told(ranks):
    """A forced one: no cosine is good enough."""
    for rank in ranks(2, climbing):
        (step, *_) = rank["summary"]["crossing"]["probes"]["climbed"]
        assert step["epoch"] == 1
        assert step["text"].startswith("codec onebit, none late: gradient")
        assert "times a rung up, at the end codec" in rank["notes"][-1]


def climbing(channel: Channel) -> Any:
    with mock.patch.object(precision, "CODED_FAIR", 2.0):
        return run(channel, {"codec": "onebit"}, 5)


def test_the_file_has_it(ranks, tmp_path: Path):
    found = ranks(2, run, {"codec": "int8"}, 3, str(tmp_path))[0]
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["crossing"] == found["summary"]["crossing"]
    (records,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [line["uncoded"] for line in lines] == found["uncoded"]
