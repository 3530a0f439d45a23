"""The page: every section, nothing from outside, and a page for whatever a run left."""

from __future__ import annotations

import json
import re
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kagome.config import Data, Run
from kagome.config.toml_io import to_toml
from kagome.errors import ConfigError
from kagome.records.epoch import EpochRecord, JsonLines
from kagome.records.peak_tensors import PeakTensor, PeakTensors
from kagome.records.spans import Span
from kagome.records.units import bytes_text
from kagome.report.chrome_trace import write_trace
from kagome.report.page.page import report, write_page
from kagome.report.summary import summary, write_summary

SECTIONS = (
    "Bottleneck", "Learning", "Time", "One epoch", "Data sent", "Memory", "Partition", "Notes", "Settings",
)  # fmt: skip


def make_run(folder: Path, *, ranks: int = 2, epochs: int = 30, name: str = "Cora") -> Path:
    records = [
        EpochRecord(
            e,
            2.0 / e,
            1 - 1 / e,
            0.8 - 1 / (e + 2),
            0.04,
            {"halo": 3_400_000, "weights": 1_000},
            {"halo": 0.0037, "weights": 0.0},
            {"halo": 0.0074, "weights": 0.001},
        )
        for e in range(1, epochs + 1)
    ]
    with closing(JsonLines(folder / "metrics.jsonl")) as lines:
        for record in records:
            lines.write(record)
    (folder / "config.toml").write_text(to_toml(Run(data=Data(name=name))))
    rows = [{"part": r, "vertices": 1354, "edges": 5278 + r, "halo": 700} for r in range(ranks)]
    values = summary(
        records=records,
        test_metric=0.8125,
        val_metric=0.77,
        metric_name="accuracy",
        best_epoch=30,
        peak_memory_bytes=[200_000_000 + r for r in range(ranks)],
        world_size=ranks,
        parallel={"graph": ranks, "partitioner": "metis"},
        seed=0,
        seconds_total=2.0,
        set_up_seconds=0.5,
        notes=[f"trained on {name}"],
        phases=[{"load": 0.5, "forward": 0.6, "backward": 0.4, "exchange": 0.2}] * ranks,
        partition={"cut": 0.25, "rows": rows, "advice": ["Use 2 parts."]},
        threads=[3] * ranks,
    )
    write_summary(folder / "summary.json", values)
    spans = [
        [Span("load", 0.0, 0.5, None), *(Span("forward", float(e), 0.04, e) for e in range(1, 31))]
        for _ in range(ranks)
    ]
    write_trace(folder / "trace.json", spans)
    return folder


class Balance(HTMLParser):
    """Fails where a tag is closed that is not open."""

    void = frozenset(("meta", "line", "path", "polyline", "br"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "action", "onload", "onerror"} & {name for name, _ in attrs}
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag


def check_page(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    balance = Balance()
    balance.feed(text)
    assert balance.open == []
    assert not re.search(r"url\(|@import|<script|<link|https?:", text.replace("http://evil", ""))
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.S).lower().split()
    assert len(text) < 500_000
    return text


def test_a_whole_run_has_every_section(tmp_path: Path) -> None:
    text = check_page(write_page(make_run(tmp_path)))
    for title in SECTIONS:
        assert f"<h2>{title}</h2>" in text
    for piece in (
        "gcn with 2 layers on Cora",
        "0.8125",
        "40.0 ms",
        "3.40 MB",
        "prefers-color-scheme",
        "Use 2 parts.",
        "<td>halo</td><td>3.70 ms</td><td>50 %</td>",
        "<td>weights</td><td>0 s</td><td>100 %</td>",
        "threads a rank</dt><dd>3<",
    ):
        assert piece in text
    assert "Attention" not in text


def test_the_peak_of_the_fullest_rank_is_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    file = folder / "summary.json"
    values = json.loads(file.read_text())
    held = [
        PeakTensor(size, (3, size), "float32", f"convs.{size}", "aten.relu", "in flight") for size in (8, 9)
    ]
    ranks = [PeakTensors.of(held[:1], None), PeakTensors.of(held, 5000)]
    values["memory"] = [{"predicted": None, "measured": {}, "peak_tensors": r.as_dict()} for r in ranks]
    file.write_text(json.dumps(values))
    text = check_page(write_page(folder))
    told = f"tensors took {bytes_text(17)} at their peak; the allocator kept at most {bytes_text(5000)}"
    assert f"Rank 1: {told}" in text
    assert text.index("convs.9") < text.index("convs.8")


def test_many_ranks_and_epochs_stay_small(tmp_path: Path) -> None:
    check_page(write_page(make_run(tmp_path, ranks=128, epochs=5000)))


def test_names_are_escaped(tmp_path: Path) -> None:
    text = check_page(write_page(make_run(tmp_path, name='<img src="http://evil" onerror=x>&')))
    assert "<img" not in text


@pytest.mark.parametrize("missing", ["summary.json", "metrics.jsonl", "trace.json", "config.toml"])
def test_a_missing_piece_is_left_out(tmp_path: Path, missing: str) -> None:
    (make_run(tmp_path) / missing).unlink()
    text = check_page(write_page(tmp_path))
    gone = {
        "summary.json": ("Memory", "Partition"),
        "metrics.jsonl": ("Learning",),
        "trace.json": ("One epoch",),
        "config.toml": ("Settings",),
    }[missing]
    for title in gone:
        assert f"<h2>{title}</h2>" not in text
    assert ("it did not end" in text) == (missing == "summary.json")


@pytest.mark.parametrize("broken", ["summary.json", "metrics.jsonl", "trace.json", "config.toml"])
def test_a_broken_piece_is_said(tmp_path: Path, broken: str) -> None:
    (make_run(tmp_path) / broken).write_text("= nonsense\n[\n")
    text = check_page(write_page(tmp_path))
    assert "Attention" in text
    assert broken in text


def test_a_run_that_died_midway(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as lines:
        lines.write(EpochRecord(1, float("nan"), None, None, 0.1, {}))
    text = check_page(write_page(tmp_path))
    assert "What follows is from 1 epochs" in text
    assert "not finite from epoch 1" in text


def test_a_run_that_died_before_its_first_epoch(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert "it did not end" in check_page(write_page(tmp_path))


def test_a_run_of_no_epochs(tmp_path: Path) -> None:
    make_run(tmp_path, epochs=0)
    values = json.loads((tmp_path / "summary.json").read_text())
    assert values["epoch_seconds"] is None
    check_page(write_page(tmp_path))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl or summary\.json; got a folder with neither"):
        write_page(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        write_page(tmp_path / "nowhere")


SCRIPT = {"pid": 0, "ph": "X", "name": "forward", "ts": 0, "dur": 1}
SCRIPT["args"] = {"epoch": "<script>alert(1)</script>"}


@pytest.mark.parametrize(
    ("file", "altered"),
    [
        ("summary.json", {"test_metric": "<script>alert(1)</script>", "peak_memory_bytes": "text"}),
        ("summary.json", {"bytes_per_epoch": {"halo": "much"}, "parallel": [1], "memory": [{"kept": {}}]}),
        ("summary.json", {"partition": {"rows": [["a"]], "advice": 7}, "pipeline": {"bubble": []}}),
        ("summary.json", {"notes": [{}], "phases": [7], "world_size": "<script>", "seed": {}}),
        ("trace.json", {"traceEvents": [SCRIPT]}),
        ("trace.json", {"traceEvents": [{"pid": "x"}, 7]}),
        ("metrics.jsonl", {"epoch": "<script>", "loss": "low"}),
    ],
)  # fmt: skip
def test_altered_files_cost_their_section_and_are_told_of(tmp_path, file, altered):
    """Each ended in a traceback, and a script in an epoch reached the page as it was."""
    run = make_run(tmp_path)
    path = run / file
    if file.endswith("l"):
        path.write_text(json.dumps(altered) + "\n" + path.read_text())
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **altered}))
    found, page = report(run)
    text = check_page(page)
    assert "<script" not in text
    assert any(file in fault or "the page leaves" in fault for fault in found.faults)
