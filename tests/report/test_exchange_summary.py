"""What crossed coded or late: in the records, the summary, its table and the page."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_page import check_page, make_run
from test_summary import small

from kagome.records.epoch import EpochRecord, JsonLines, read_records
from kagome.report.exchange_summary import climbed, crossing_summary, lead, table
from kagome.report.page.page import write_page
from kagome.report.summary import headline

FACTS: dict[str, Any] = {
    "codecs": {"halo": "onebit", "halo backward": "int8", "stage": "none"},
    "errors": {"convs.0.x forward": 0.31, "convs.0.x backward": 0.003, "<b> forward": 0.5},
    "oldest_age": 1,
    "probes": {
        "count": 5, "last_cosine": 0.974, "lowest_cosine": 0.318, "lowest_epoch": 4,
        "climbed": [{"epoch": 4, "text": "codec onebit, late: gradient 1.02 times as long, cosine 0.32"}],
    },
}  # fmt: skip


def record(epoch: int, sent: int, uncoded: int, **times: dict[str, float]) -> EpochRecord:
    return EpochRecord(
        epoch, 1.0, None, None, 1.0, {"halo": sent, "weights": 8}, uncoded={"halo": uncoded}, **times
    )


RECORDS = [
    record(1, 900, 700),
    record(2, 100, 700, waited={"halo": 1.0}, under_way={"halo": 3.0}),
    record(3, 200, 800, waited={"weights": 1.0}, under_way={"weights": 1.0}),
]


def test_a_record_keeps_what_it_would_have_been(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as lines:
        for each in (*RECORDS, EpochRecord(4, 1.0, None, None, 1.0, {"halo": 5})):
            lines.write(each)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("uncoded") for row in rows] == [{"halo": 700}, {"halo": 700}, {"halo": 800}, None]
    assert read_records(tmp_path / "metrics.jsonl")[1].uncoded == {"halo": 700}


def test_bytes_without_codecs_beside_those_with_them() -> None:
    found = small(records=RECORDS, crossing=FACTS)
    assert found["bytes_per_epoch"]["total"] == 158
    crossing = found["crossing"]
    assert crossing["bytes_uncoded_per_epoch"] == {
        "halo": 750, "stage": 0, "transpose": 0, "weights": 8, "statistics": 0, "other": 0, "total": 758,
    }  # fmt: skip
    assert crossing["hidden_share"] == pytest.approx(1 - 2 / 4)
    assert {key: crossing[key] for key in FACTS} == FACTS
    assert dict(headline(found))["sent an epoch"] == "158 B (758 B uncoded)"


def test_where_all_crosses_exactly_there_is_nothing() -> None:
    assert "crossing" not in small()
    assert dict(headline(small()))["sent an epoch"] == "158 B"


def test_no_epoch_and_no_probe() -> None:
    found = crossing_summary({"codecs": {}, "errors": {}, "oldest_age": 0, "probes": {"count": 0}}, [])
    assert found["bytes_uncoded_per_epoch"]["total"] == 0
    assert found["hidden_share"] is None
    assert lead(found, 0) == ""
    assert climbed(found) == []
    assert table(found) == (["site", "forward", "backward"], [])


def test_what_a_resumed_run_did_not_count_counts_as_it_was_sent() -> None:
    old = EpochRecord(1, 1.0, None, None, 1.0, {"halo": 500})
    assert crossing_summary(FACTS, [old, RECORDS[1]])["bytes_uncoded_per_epoch"]["halo"] == 600


def test_the_page_has_a_table_by_site(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert "<h2>What crossed</h2>" not in check_page(write_page(folder))
    path = folder / "summary.json"
    values = json.loads(path.read_text())
    values["crossing"] = crossing_summary(FACTS, RECORDS[1:])
    path.write_text(json.dumps(values))
    text = check_page(write_page(folder))
    for piece in (
        "<h2>What crossed</h2>",
        "Codecs: halo onebit, halo backward int8, stage none.",
        "instead of 758 B without codecs and probes",
        "The oldest row of another part was 1 epoch old.",
        "computation hid 50 %.",
        "5 epochs computed the exact gradient too",
        "0.97 the last time, and 0.32, the lowest, in epoch 4",
        "<td>convs.0.x</td><td>31 %</td><td>&lt; 1 %</td>",
        "<td>&lt;b&gt;</td><td>50 %</td><td>-</td>",
        "<li>epoch 4, one rung up after codec onebit, late",
        "758 B uncoded<",
    ):
        assert piece in text
