"""A run that goes on with the same ranks is the run that was not stopped; with others its rows begin anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kagome import Trainer
from kagome.checkpoint.epoch_state import EpochState, RestoredState, StateLayout, said_of
from kagome.comm.channel import Channel
from kagome.config import Parallel
from kagome.errors import CheckpointError
from kagome.model.split import stages
from kagome.model.split.balance import best_cuts
from pipelines import SEED, data, model, told
from training import QUIET, settings

EPOCHS = 9
HISTORY = {"cross_chunk": "history", "history_epochs": 4}


def run(
    channel: Channel,
    kind: str,
    parallel: dict[str, Any],
    epochs: int,
    out: str | None = None,
    resume: str | None = None,
    train: dict[str, Any] | None = None,
) -> Any:
    mine = model(kind, 0.4, seed=1 if resume is None else 99)
    return told(mine, data(validated=True), epochs, parallel, out=out, resume=resume, train=train or {})


def ranks_of(parallel: dict[str, Any]) -> int:
    return int(parallel.get("pipe", 1) * parallel.get("graph", 1))


def same_curve(found: list[Any], expected: dict[str, Any]) -> None:
    for rank in found:
        assert isinstance(rank, dict), rank
        torch.testing.assert_close(rank["losses"], expected["losses"], rtol=0, atol=1e-11)
        torch.testing.assert_close(rank["weights"], expected["weights"], rtol=0, atol=1e-10)
        assert rank["metrics"] == expected["metrics"]
        assert rank["best_epoch"] == expected["best_epoch"]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "guarded": ("gcnii", {"pipe": 2, "chunks": 4, **HISTORY}),
    "frozen": ("gcn", {"pipe": 2, "chunks": 4, **HISTORY, "guard": False}),
    "stale": ("sage", {"pipe": 2, "chunks": 3, **HISTORY, "guard": False, "stale_gradients": True}),
    "sums": ("normed", {"pipe": 2, "chunks": 3, **HISTORY, "guard": False}),
    "dealt": ("gcnii", {"pipe": 2, "stages_per_rank": 2, "chunks": 3, **HISTORY}),
    "together": ("gcn", {"graph": 2, "chunks": 3, **HISTORY}),
    "hybrid": ("gcnii", {"pipe": 2, "graph": 2, "chunks": 3, **HISTORY}),
    "hybrid, coded": ("gcn", {"pipe": 2, "graph": 2, "chunks": 3, **HISTORY, "codec": "int8"}),
    "late": ("gcn", {"graph": 2, "max_age": 1}),
    "late stages": ("gcn", {"pipe": 2, "graph": 2, "chunks": 1, "max_age": 2, "guard": False}),
    "smooth": ("sage", {"graph": 3, "max_age": 1, "smoothing": 0.5, "sync_every": "auto", "guard": False}),
    "fed back": ("gcn", {"graph": 2, "codec": "int4", "error_feedback": True, "guard": False}),
    "all": ("gcn", {"graph": 2, "codec": "int8", "error_feedback": True, "max_age": 1, "sync_every": 4}),
    "skipped": ("sage", {"graph": 2, "skip_drift": 0.3, "max_age": 4, "guard": False}),
    "fitted": ("gcn", {"graph": 2, "codec": "int4", "adaptive_bits": True, "max_age": 1}),
    "sampled": ("sage", {"graph": 3, "halo_sample": 0.5, "max_age": 1}),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_run_that_was_not_stopped(ranks, tmp_path, name):
    kind, parallel = CASES[name]
    world = ranks_of(parallel)
    expected = ranks(world, run, kind, parallel, EPOCHS)[0]
    assert isinstance(expected, dict), expected
    for at in (3, 6):  # the first one goes on, and is stopped again
        folder = str(tmp_path / "run")
        ranks(world, run, kind, parallel, at, folder, folder if at > 3 else None)
    same_curve(ranks(world, run, kind, parallel, EPOCHS, folder, folder), expected)


@pytest.mark.some(1)
@pytest.mark.parametrize(("world", "eval_every"), [(1, 1), (2, 100)])
def test_sums_go_on_from_the_last_epoch_s_whether_evaluated_or_not(ranks, tmp_path, world, eval_every):
    """A resumed run evaluates, to come to all sites: sums of that are no epoch's."""
    folder, parallel = str(tmp_path / "run"), {"graph": world, "chunks": 3, **HISTORY, "guard": False}
    given, train = ("paired", parallel), {"eval_every": eval_every}
    expected = ranks(world, run, *given, 6, None, None, train)[0]
    ranks(world, run, *given, 3, folder, None, train)
    found = ranks(world, run, *given, 6, folder, folder, train)
    for rank in found:
        torch.testing.assert_close(rank["losses"], expected["losses"], rtol=0, atol=1e-11)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["frozen", "late"])
def test_it_is_another_run_where_rows_were_not_kept(ranks, tmp_path, name):
    """Without this, rows that change nothing would pass above."""
    kind, parallel = CASES[name]
    folder = str(tmp_path / "run")
    expected = ranks(2, run, kind, parallel, EPOCHS)[0]
    ranks(2, run, kind, parallel, 6, folder, None, {"save_rows": False})
    assert not list(Path(folder).glob("checkpoints/*/*carried*"))
    found = ranks(2, run, kind, parallel, EPOCHS, folder, folder)[0]
    assert found["losses"][:6] == pytest.approx(expected["losses"][:6], abs=1e-11)
    assert abs(found["losses"][6] - expected["losses"][6]) > 1e-6
    assert any("no rows of its last epoch" in note for note in found["notes"])


def test_rows_that_cannot_be_read_end_the_run_with_words(ranks, tmp_path):
    """A file that was cut short once the weights had been read."""
    kind, parallel = CASES["late"]
    folder = tmp_path / "run"
    ranks(2, run, kind, parallel, 3, str(folder))

    with pytest.raises(CheckpointError, match=r"rows of epoch 3(.|\n)*cannot be read(.|\n)*an earlier"):
        ranks(2, without_rows, kind, parallel, str(folder))


def without_rows(channel: Channel, kind: str, parallel: dict[str, Any], folder: str) -> None:
    with Trainer(
        model(kind, 0.4),
        data(validated=True),
        parallel=Parallel(**parallel),
        train=settings(seed=SEED),
        report=QUIET,
    ) as trainer:
        resumed = trainer.engine.resumed

        def spoiled(*given: Any) -> str:
            said = resumed(*given)
            for file in Path(folder).glob("checkpoints/*/rank-*.safetensors"):
                file.write_bytes(b"")
            return said

        with mock.patch.object(trainer.engine, "resumed", spoiled):
            trainer.fit(5, resume=folder)


# Stages that are cut otherwise ---------------------------------------------------------------------------


def cut_late(channel: Channel, *given: Any) -> Any:
    """A machine on which the first steps take longer."""

    def cuts(passes: Sequence[Sequence[float]], *rest: Any) -> Any:
        return best_cuts([[*(9 * each for each in seconds[:2]), *seconds[2:]] for seconds in passes], *rest)

    with mock.patch.object(stages, "best_cuts", cuts):
        return run(channel, *given)


@pytest.mark.slow
def test_stages_that_are_cut_otherwise_read_the_same_rows(ranks, tmp_path):
    parallel = CASES["frozen"][1]
    folder = str(tmp_path / "run")
    expected = ranks(2, run, "gcnii", parallel, EPOCHS)
    ranks(2, run, "gcnii", parallel, 6, folder)
    found = ranks(2, cut_late, "gcnii", parallel, EPOCHS, folder, folder)
    cuts = [next(note for note in rank[0]["notes"] if "pipeline" in note) for rank in (expected, found)]
    assert cuts[0] != cuts[1]
    same_curve(found, expected[0])


def layout(stage: int = 0, steps: tuple[str, ...] = ("one",), **settings: Any) -> StateLayout:
    return StateLayout.of(Parallel(**settings), "graph", torch.arange(5), part=0, stage=stage, steps=steps)


def told_by(*stages: tuple[StateLayout, list[tuple[str, Any, dict[str, Any]]]]) -> RestoredState:
    ranks = [EpochState.of(each, {}, entries).plain("rank-00000.safetensors") for each, entries in stages]
    return RestoredState(Path(), 3, {}, ranks)


def table(name: str, number: int = 1) -> tuple[str, Any, dict[str, Any]]:
    return "table", (name, number), {"rows": torch.ones(5, 2), "due": None, "due_in": -1}


def known(told: RestoredState, mine: StateLayout) -> set[Any] | None:
    found = told.resume_rows(mine, Channel(None, torch.device("cpu")), torch.device("cpu"))
    return None if found is None else {key for _, key in found.entries}


def test_a_rank_takes_its_own_rows_and_those_of_steps_that_came_to_it():
    alone = told_by((layout(), [table("one"), table("one", 2)]))
    assert known(alone, layout()) == {("one", 1), ("one", 2)}
    assert known(alone, layout(chunks=2)) is None
    assert known(alone, replace(layout(), part=1)) is None
    assert known(alone, layout(steps=("one", "two"))) is None, "which of two is which depends on the cut"
    assert known(RestoredState(Path(), 3, {}, []), layout()) is None


def test_ranks_with_other_steps_find_them_by_name():
    first, second = layout(0, ("one",)), layout(1, ("two", "three"))
    told = told_by((first, [table("one")]), (second, [table("two"), table("three")]))
    assert known(told, layout(0, ("one", "two"))) is None, "there are fewer ranks now"
    entries = told.entries(layout(0, ("one", "two")))
    assert entries is not None
    assert {key for _, key in entries} == {("one", 1), ("two", 1), ("three", 1)}
    assert {key for _, key in told.entries(second) or {}} == {("two", 1), ("three", 1)}
    both = told_by((first, [table("one")]), (second, [table("one")]))
    assert both.entries(layout(1, ("two",))) is None, "both stages have a site of this name"


def test_what_is_said_of_it():
    assert said_of(None, late=False) == ""
    assert "waits for its rows" in said_of(None, late=True)
    assert "computes all rows" in said_of(None, late=True, history=True)


def test_one_rank_that_has_no_late_rows_says_nothing_of_them(ranks, tmp_path):
    folder = str(tmp_path / "run")
    ranks(2, run, "gcn", {"graph": 2, "max_age": 1}, 2, folder)
    notes = ranks(1, run, "gcn", {"max_age": 1}, 3, folder, folder)[0]["notes"]
    assert next(note for note in notes if note.startswith("resumed")).endswith("epoch-000002")
