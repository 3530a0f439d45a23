"""What epochs hand on is asked for its form when a checkpoint is read, before any row of it is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kagome.checkpoint.epoch_state import Named, checked
from kagome.checkpoint.epoch_state_checks import fault
from kagome.comm.codec import Codec
from kagome.errors import CheckpointError
from kagome.halo.epoch_rows import EpochRows
from kagome.halo.row_selection import Skip


def rows(*shape: int, dtype: str = "float32") -> Any:
    return SimpleNamespace(shape=shape, dtype=f"torch.{dtype}")


def named(file: Any) -> Named:
    return Named(file, "carried.0/0/0/rows", (4, 3), "torch.float32", accelerated=False)


LINE = {"rows": rows(4, 3), "epoch": 2, "drift": None, "oldest": 0, "mean": None, "weight": 0.0}
SKIP = {
    "sent": rows(4, 3),
    "goes": rows(4, dtype="bool"),
    "when": rows(4, dtype="int64"),
    "table": rows(5, 3),
    "comes": rows(5, dtype="bool"),
    "epochs": rows(5, dtype="int64"),
    "counts": (2, 3),
    "last": 2,
    "oldest": 1,
}
TABLE = {"rows": rows(4, 3), "due": rows(4, 3), "due_in": 3}
FIT = {"goes": rows(4, dtype="int64"), "comes": None}


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("line", LINE),
        ("line", {**LINE, "rows": None}),
        ("selection", SKIP),
        ("selection", FIT),
        ("selection", {}),
        ("table", TABLE),
        ("residual", {"rows": rows(4, 3)}),
        ("statistic", {"value": rows(dtype="int64")}),
        ("crossing", {"synchronous": True, "drifted": 0.5}),
        ("crossing", {"synchronous": False}),
        ("kept", {"value": rows(3), "state step": rows()}),
    ],
)
def test_what_runs_hand_on_fits(kind, state):
    assert fault(kind, state) == ""


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        ("residual", {"rows": rows(4)}, "rows is no tensor of 2 axes"),
        ("residual", {"rows": None}, "rows is no tensor"),
        ("residual", {"rows": rows(4, 3, dtype="int64")}, "rows is torch.int64"),
        ("residual", {}, "it holds nothing"),
        ("statistic", {"value": 3.0}, "value is no tensor"),
        ("line", {**LINE, "mean": rows(4, 2)}, "rows and mean differ in shape"),
        ("line", {**LINE, "epoch": "2"}, "epoch is '2'"),
        ("line", {**LINE, "weight": float("nan")}, "weight is 'nan'"),
        ("line", {**LINE, "more": 1}, "it holds"),
        ("selection", {**SKIP, "when": rows(3, dtype="int64")}, "differ in rows"),
        ("selection", {**SKIP, "comes": rows(4, dtype="bool")}, "differ in rows"),
        ("selection", {**SKIP, "goes": rows(4, dtype="int64")}, "goes is torch.int64"),
        ("selection", {**SKIP, "counts": (2, -3)}, "counts is"),
        ("selection", {**FIT, "goes": rows(4, 1, dtype="int64")}, "goes is no tensor of 1 axes"),
        ("table", {**TABLE, "due": rows(3, 3)}, "rows and due differ in shape"),
        ("table", {**TABLE, "due_in": 1.5}, "due_in is '1.5'"),
        ("crossing", {"synchronous": 1, "drifted": 0.5}, "synchronous is '1'"),
    ],
)
def test_what_was_altered_is_named(kind, state, words):
    assert words in fault(kind, state)


def test_it_is_asked_when_a_checkpoint_is_read():
    layout = {"stage": 0, "part": 0, "steps": (), "rest": {}}
    files = ["rank-00000.safetensors"]
    assert checked({**layout, "entries": [("table", "a", TABLE)]}, files)
    assert checked({**layout, "entries": [("residual", "a", {"rows": named(files[0])})]}, files)
    with pytest.raises(ValueError, match=r"for residual \('a', 0\) does not fit: rows is no tensor"):
        checked({**layout, "entries": [("residual", ("a", 0), {"rows": rows(4)})]}, files)
    for file in ("../rank-00000.safetensors", "/etc/passwd", 7):
        with pytest.raises(ValueError, match="no file of the checkpoint"):
            checked({**layout, "entries": [("residual", "a", {"rows": named(file)})]}, files)


def test_a_selection_among_other_rows_is_refused():
    """Each rank would have sent what no other one waits for."""
    state = {
        "sent": torch.zeros(4, 3),
        "goes": torch.ones(4) > 0,
        "when": torch.zeros(4, dtype=torch.long),
        "table": torch.zeros(5, 3),
        "comes": torch.ones(5) > 0,
        "epochs": torch.zeros(5, dtype=torch.long),
        "counts": (5,),
        "last": 2,
        "oldest": 1,
    }
    known = EpochRows()
    known.resumed_rows = SimpleNamespace(epoch=3, take=lambda kind, key, epoch: state)
    make = lambda: Skip(0.1, 2, Codec("none"))  # noqa: E731
    assert known.selection(("a", 0), 3, make, (4, 5)) is not None
    with pytest.raises(
        CheckpointError, match=r"among 6 rows of a site; got 5 rows in the checkpoint's (comes|table)"
    ):
        known.selection(("b", 0), 3, make, (4, 6))
