"""The summary's keys and means, its table, and what bounds the speed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from kagome.records.epoch import EpochRecord
from kagome.records.units import bytes_text, seconds_text, share_text
from kagome.report.diagnosis import diagnose
from kagome.report.summary import headline, print_summary, summary, write_summary


def small(**more: Any) -> dict[str, Any]:
    records = [
        EpochRecord(1, 1.0, 0.5, 0.5, 9.0, {"halo": 500, "weights": 8}),
        EpochRecord(2, 0.5, 0.6, 0.7, 1.0, {"halo": 100, "weights": 8}),
        EpochRecord(3, 0.4, 0.7, 0.6, 2.0, {"halo": 200, "weights": 8}),
    ]
    values: dict[str, Any] = {
        "records": records, "test_metric": 0.65, "val_metric": 0.7, "metric_name": "accuracy",
        "best_epoch": 2,
        "peak_memory_bytes": [10_000_000, 12_000_000], "world_size": 2, "parallel": {"graph": 2}, "seed": 0,
    }  # fmt: skip
    return summary(**(values | more))


def test_the_keys_are_those_of_the_design() -> None:
    assert list(small()) == [
        "test_metric", "val_metric", "metric_name", "best_epoch", "epochs", "epoch_seconds",
        "bytes_per_epoch",
        "peak_memory_bytes", "predicted", "max_age", "world_size", "parallel", "seed",
    ]  # fmt: skip


def test_median_of_seconds_and_mean_of_bytes_after_the_first(tmp_path: Path) -> None:
    found = json.loads(write_summary(tmp_path / "summary.json", small()).read_text())
    assert found["epoch_seconds"] == 2.0
    assert found["bytes_per_epoch"] == {
        "halo": 150, "stage": 0, "transpose": 0, "weights": 8, "statistics": 0, "other": 0, "total": 158,
    }  # fmt: skip
    assert found["predicted"] is None
    assert found["max_age"] == 0
    assert found["epochs"] == 3


def test_no_epoch_and_one_epoch_have_a_summary_too() -> None:
    assert small(records=[])["epoch_seconds"] is None
    assert small(records=[])["bytes_per_epoch"]["total"] == 0
    assert small(records=[EpochRecord(1, 1.0, None, None, 1.0, {"halo": 7})])["bytes_per_epoch"]["halo"] == 7


def test_extra_keys_come_only_where_they_say_something() -> None:
    found = small(seconds_total=3.0, notes=["a note"], phases=[{"forward": 1.0}], set_up_seconds=0.0)
    assert found["notes"] == ["a note"]
    assert found["set_up_seconds"] == 0.0
    assert "partition" not in found


def test_waiting_what_was_hidden_and_threads() -> None:
    records = [
        EpochRecord(1, 1.0, None, None, 9.0, {}, {"halo": 5.0}, {"halo": 5.0}),
        EpochRecord(
            2, 1.0, None, None, 1.0, {}, {"halo": 0.25, "statistics": 0.25}, {"halo": 1.0, "statistics": 0.25}
        ),
        EpochRecord(
            3, 1.0, None, None, 1.0, {}, {"halo": 0.75, "weights": 0.0}, {"halo": 3.0, "weights": 0.5}
        ),
    ]
    found = small(records=records, threads=[2, 2])
    assert found["waited_per_epoch"] == {"halo": 0.5, "statistics": 0.125, "weights": 0.0}
    assert found["hidden_share"] == {"halo": 0.75, "weights": 1.0, "statistics": 0.0}
    rows = dict(headline(found))
    assert rows["waited an epoch"] == "625 ms"
    assert rows["hidden by computation"] == "halo 75 %, weights 100 %"
    assert rows["threads a rank"] == "2"
    assert dict(headline(small(threads=[4, 1])))["threads a rank"] == "1 to 4"
    assert not {"waited_per_epoch", "hidden_share", "threads"} & set(small())


def test_the_table_fits_a_narrow_log_and_the_path_stays_whole() -> None:
    out = io.StringIO()
    page = "/a/long/folder/[bold]/" + "x" * 60 + "/report.html"
    print_summary(small(), page, console=Console(file=out, width=60))
    text = out.getvalue()
    assert page in text
    for piece in ("0.6500", "2 of 3", "2.00 s", "158 B", "10.0 MB to 12.0 MB"):
        assert piece in text


def test_the_bottleneck_is_named() -> None:
    def kind(phases: list[dict[str, float]], set_up: float = 0.0) -> str:
        return diagnose({"phases": phases, "set_up_seconds": set_up}).kind

    assert kind([]) == "unknown"
    assert kind([{"load": 3.0}]) == "unknown"
    assert kind([{"forward": 8.0, "exchange": 2.0}, {"forward": 8.0, "exchange": 2.0}]) == "compute"
    assert kind([{"forward": 2.0, "exchange": 8.0}, {"forward": 2.0, "weights": 8.0}]) == "exchange"
    assert kind([{"forward": 10.0}, {"exchange": 10.0}, {"exchange": 10.0}]) == "waiting"
    assert kind([{"forward": 1.0}], set_up=5.0) == "set-up"
    slow = diagnose({"phases": [{"exchange": 9.0}, {"forward": 9.0}, {"exchange": 9.0}]})
    assert "rank 1 computes 3.00 times the mean" in slow.sentence
    assert abs(sum(share for _, share in slow.shares) - 1) < 1e-12


def test_units() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 3_210_000, 999_999)] == [
        "0 B", "999 B", "1.00 kB", "3.21 MB", "1.00 MB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0, 3.4e-4, 0.0412, 3.05, 250, 3599.6, 7500)] == [
        "0 s", "340 µs", "41.2 ms", "3.05 s", "4 min 10 s", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip
    assert [share_text(s) for s in (0, 0.001, 0.374, 1)] == ["0 %", "< 1 %", "37 %", "100 %"]
