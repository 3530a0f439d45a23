"""Holdings: sums, words, the table of the page, the line of the terminal, the key of the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_page import check_page, make_run

from kagome.records.memory import KINDS, MemoryByKind, fullest, line, side_by_side, table
from kagome.report.page.page import write_page
from kagome.report.summary import headline, summary, write_summary

SMALL = MemoryByKind(weights=1000, features=2_000_000, tables=10, activations=3_000_000, halo=500_000)


def test_the_total_leaves_out_what_is_not_known() -> None:
    assert SMALL.total == 1000 + 2_000_000 + 10 + 3_000_000 + 500_000
    assert SMALL.known
    unknown = MemoryByKind(weights=7, activations=None, halo=None)
    assert (unknown.total, unknown.known) == (7, False)
    assert unknown.as_dict()["activations"] is None
    assert list(SMALL.as_dict()) == [*KINDS, "total"]


def test_the_rest_is_what_the_peak_has_beyond() -> None:
    assert SMALL.beside(6_000_000).other == 6_000_000 - SMALL.total
    assert SMALL.beside(6_000_000).total == 6_000_000
    assert SMALL.beside(5).other == 0
    assert SMALL.beside(5).beside(6_000_000).total == 6_000_000


def test_words_name_what_a_user_can_change_and_what_is_large() -> None:
    assert SMALL.text() == ("5.50 MB (weights 1.00 kB, features 2.00 MB, activations 3.00 MB, halo 500 kB)")
    assert "tables 4.00 MB" in MemoryByKind(tables=4_000_000).text()
    assert "activations unknown, halo unknown" in MemoryByKind(activations=None, halo=None).text()


def two_ranks() -> list[dict[str, Any]]:
    other = MemoryByKind(weights=1000, features=4_000_000, activations=1_500_000)
    return [side_by_side(SMALL, SMALL.beside(7_000_000)), side_by_side(None, other)]


def test_the_line_is_of_the_fullest_rank() -> None:
    assert line(two_ranks()) == (
        "held on the fullest rank",
        "activations 3.00 MB, features 2.00 MB, halo 500 kB, weights 1.00 kB",
    )
    assert line([]) is None
    assert fullest([SMALL, MemoryByKind()]) is SMALL


def test_the_table_has_measured_and_in_brackets_predicted() -> None:
    head, rows = table(two_ranks())
    assert head == ["", "rank 0", "rank 1"]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["activations"] == ["3.00 MB (3.00 MB)", "1.50 MB (-)"]
    assert cells["other"] == ["1.50 MB", "-"]
    assert cells["total"][0] == "7.00 MB"
    assert "gradients" not in cells
    head, rows = table([side_by_side(MemoryByKind(activations=None), MemoryByKind(activations=5))])
    assert rows[0] == ["activations", "5 B (unknown)"]


def test_summary_page_and_terminal_show_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    values = json.loads((folder / "summary.json").read_text())
    assert "memory" not in values
    values["memory"] = two_ranks()
    write_summary(folder / "summary.json", values)
    text = check_page(write_page(folder))
    assert "<td>activations</td><td>3.00 MB (3.00 MB)</td>" in text
    assert ("held on the fullest rank", line(two_ranks())[1]) in headline(values)
    kept = summary(
        records=[], test_metric=None, val_metric=None, metric_name="accuracy", best_epoch=None,
        peak_memory_bytes=[], world_size=2, parallel={}, seed=0, memory=two_ranks(),
    )  # fmt: skip
    assert kept["memory"][0]["measured"]["total"] == 7_000_000
