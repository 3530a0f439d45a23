"""Checkpoints do not know the mesh: what stages and chunks wrote any mesh reads, and the other way round."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kagome.comm.channel import Channel
from kagome.records.epoch import read_records
from pipelines import data, model, rotated, told

EPOCHS, SAVED = 7, 3
MESHES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "parts": {"graph": 2},
    "stages": {"pipe": 2, "chunks": 1},
    "exact": {"pipe": 2, "chunks": 3, "cross_chunk": "exact"},
    "three": {"pipe": 3, "chunks": 2, "cross_chunk": "exact"},
    "hybrid": {"pipe": 2, "graph": 2, "chunks": 3, "cross_chunk": "exact"},
}


def world(name: str) -> int:
    mesh = MESHES[name]
    return mesh.get("pipe", 1) * mesh.get("graph", 1)


def saved(
    channel: Channel,
    parallel: dict[str, Any],
    epochs: int,
    out: str | None = None,
    resume: str | None = None,
    kind: str = "gcnii",
) -> Any:
    mine = model(kind, 0.4, seed=1 if resume is None else 99)
    train = {"lr": 0.05, "patience": 50}
    return told(mine, data(validated=True), epochs, parallel, out=out, resume=resume, train=train)


@pytest.fixture(scope="module", params=["gcnii", "normed"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def uninterrupted(ranks, kind) -> dict[str, Any]:
    return ranks(1, saved, {}, EPOCHS, None, None, kind)[0]


@pytest.fixture(scope="module")
def runs(ranks, kind, tmp_path_factory) -> Any:
    """Runs that ended early, each written once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("runs") / "run"
            ranks(world(name), saved, MESHES[name], SAVED, str(made[name]), None, kind)
        return made[name]

    return get


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("kind", "wrote", "reads"),
    rotated(
        ["gcnii", "normed"],
        [
            ("exact", "parts"),
            ("exact", "one rank"),
            ("stages", "three"),
            ("exact", "exact"),
            ("one rank", "exact"),
            ("hybrid", "stages"),
            ("stages", "one rank"),
            ("one rank", "hybrid"),
            ("parts", "stages"),
        ],
    ),
    indirect=["kind"],
)
def test_a_resume_on_another_mesh_goes_on_with_the_same_curve(
    ranks, runs, uninterrupted, kind, tmp_path, wrote, reads
):
    """Adam's state of every weight survives, whichever stage had it."""
    folder = shutil.copytree(runs(wrote), tmp_path / "run")
    found = ranks(world(reads), saved, MESHES[reads], EPOCHS, str(folder), str(folder), kind)
    for rank in found:
        assert isinstance(rank, dict), rank
        torch.testing.assert_close(rank["losses"], uninterrupted["losses"], rtol=0, atol=1e-9)
        torch.testing.assert_close(rank["metrics"], uninterrupted["metrics"], rtol=0, atol=1e-12)
        torch.testing.assert_close(rank["weights"], uninterrupted["weights"], rtol=0, atol=1e-7)
        assert rank["best_epoch"] == uninterrupted["best_epoch"]
        for key, value in rank["weights"].items():
            assert torch.equal(value, found[0]["weights"][key]), f"{key} drifts apart"
    assert [record.epoch for record in read_records(folder / "metrics.jsonl")] == list(range(1, EPOCHS + 1))


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["stages", "three", "hybrid"])
def test_every_rank_ends_with_the_best_weights_and_rank_0_with_all_scores(ranks, name, tmp_path):
    found = ranks(world(name), saved, MESHES[name], EPOCHS, str(tmp_path / "run"))
    kept = load_file(tmp_path / "run" / "model.safetensors")
    given, plain = data(validated=True), model("gcnii", 0.4, seed=5)
    plain.load_state_dict(found[0]["weights"])
    with torch.no_grad():
        scores = plain.eval()(given.x, given.edge_index)
    for rank in found:
        assert rank["best_epoch"] == found[0]["best_epoch"]
        for key, value in rank["weights"].items():
            assert torch.equal(value, kept[key]), key
        expected = scores if rank is found[0] else scores[rank["own"]]
        torch.testing.assert_close(rank["scores"], expected, rtol=0, atol=1e-10)


def test_the_best_epoch_is_not_the_last(uninterrupted):
    """Without this best weights that are forgotten would pass."""
    assert uninterrupted["best_epoch"] not in (0, EPOCHS)


@pytest.mark.some(1)
@pytest.mark.parametrize("reads", [{"pipe": 2, "chunks": 3}, {"pipe": 2, "graph": 2, "chunks": 2}])
def test_a_run_with_history_goes_on_with_other_chunks_by_an_exact_epoch(ranks, tmp_path, reads):
    """Tables are of chunks that there are no more: the first epoch fills new ones."""
    history = {"cross_chunk": "history", "guard": False}
    folder = tmp_path / "run"
    ranks(2, saved, {"pipe": 2, "chunks": 4, **history}, SAVED, str(folder))
    alone = ranks(1, saved, {}, SAVED + 1, None, str(folder))[0]
    many = reads["pipe"] * reads.get("graph", 1)
    for rank in ranks(many, saved, {**reads, **history}, SAVED + 3, str(folder), str(folder)):
        assert rank["losses"][SAVED] == pytest.approx(alone["losses"][-1], abs=1e-9)
        assert len(rank["losses"]) == SAVED + 3
