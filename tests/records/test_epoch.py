"""Records of epochs and their file; memory."""

from __future__ import annotations

import json
import mmap
import sys
from contextlib import closing
from pathlib import Path

import pytest

import warm
from kagome.errors import ConfigError
from kagome.records.epoch import EpochRecord, JsonLines, Memory, by_kind, hidden_shares, read_records


def record(epoch: int, loss: float = 0.5) -> EpochRecord:
    return EpochRecord(epoch, loss, None, 0.75, 0.25, {"halo": 100, "weights": 20})


def test_a_line_holds_exactly_the_documented_keys(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as lines:
        lines.write(record(1))
        # Flushed: it is there while the file is open.
        text = (tmp_path / "metrics.jsonl").read_text()
    kinds = {
        "halo": 100,
        "stage": 0,
        "transpose": 0,
        "weights": 20,
        "statistics": 0,
        "other": 0,
        "total": 120,
    }
    assert text.endswith("\n")
    assert json.loads(text) == {
        "epoch": 1, "loss": 0.5, "train_metric": None, "val_metric": 0.75, "seconds": 0.25, "bytes": kinds,
    }  # fmt: skip


def test_times_of_exchanges_are_there_where_there_were_any(tmp_path: Path) -> None:
    waited, under_way = {"halo": 0.25, "weights": 0.0}, {"halo": 1.0, "weights": 0.5}
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as lines:
        lines.write(EpochRecord(1, 0.5, None, None, 1.0, {}, waited, under_way))
        lines.write(record(2))
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["waited"], first["under_way"]) == (waited, under_way)
    assert not {"waited", "under_way"} & set(second)
    assert read_records(tmp_path / "metrics.jsonl")[0].waited == waited


def test_the_share_hidden_is_that_of_all_epochs_together() -> None:
    first = EpochRecord(
        1, 0.5, None, None, 1.0, {}, {"halo": 1.0, "weights": 0.0}, {"halo": 1.0, "weights": 0.2}
    )
    second = EpochRecord(2, 0.5, None, None, 1.0, {}, {"halo": 0.5}, {"halo": 3.0})
    assert hidden_shares([]) == {}
    assert hidden_shares([first]) == {"halo": 0.0, "weights": 1.0}
    assert hidden_shares([first, second]) == {"halo": 0.625, "weights": 1.0}
    # Two clocks' rounding is no share below nothing.
    assert hidden_shares([EpochRecord(1, 0.5, None, None, 1.0, {}, {"halo": 1.1}, {"halo": 1.0})]) == {
        "halo": 0.0
    }


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as lines:
        lines.write(record(1, float("nan")))
        lines.write(record(2, float("inf")))
    assert [r.loss for r in read_records(tmp_path / "metrics.jsonl")] == [None, None]


def test_epochs_before_a_resume_stay_and_what_came_later_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(JsonLines(path)) as lines:
        for epoch in range(1, 8):
            lines.write(record(epoch))
    with path.open("a") as file:
        file.write('{"epoch": 8, "lo')  # died while it wrote
    with closing(JsonLines(path, before=read_records(path)[:5])) as lines:
        lines.write(record(6, 0.1))
    found = read_records(path)
    assert [r.epoch for r in found] == [1, 2, 3, 4, 5, 6]
    assert found[-1].loss == 0.1
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_run_starts_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with closing(JsonLines(path)) as lines:
        lines.write(record(1))
    JsonLines(path).close()
    assert read_records(path) == []


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('nonsense\n{"epoch": 1}\n')
    with pytest.raises(ConfigError, match="line 1"):
        read_records(path)


def test_unknown_kinds_count_as_other_and_the_total_is_made_anew() -> None:
    counts = by_kind({"halo": 1, "gossip": 2, "other": 3, "total": 99})
    assert counts["other"] == 5
    assert counts["total"] == 6


def test_memory_sees_what_was_needed_for_a_moment() -> None:
    memory = Memory()
    # Fresh pages, each touched: what the allocator has kept from earlier tests would not be seen.
    with mmap.mmap(-1, 64 << 20) as block:
        block.write(b"1" * (64 << 20))
    if memory.exact:
        assert 60 << 20 <= memory.peak() <= 192 << 20
    assert memory.peak() >= 0


FORKED = """
import numpy as np
from kagome.train.trainer import AFTER_IMPORTS
block = np.ones(64 << 17)
print(AFTER_IMPORTS.peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_a_rank_that_was_forked_counts_what_it_took_itself(tmp_path: Path) -> None:
    """Its imports are those of the process that it was forked of, library pages that it never touched too."""
    script = tmp_path / "block.py"
    script.write_text(FORKED)
    done = warm.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 60 << 20 < int(done.stdout) < 100 << 20
