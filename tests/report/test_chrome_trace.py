"""The trace and the Gantt chart."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kagome.errors import ConfigError
from kagome.records.spans import Span
from kagome.report.charts.timeline import gantt_svg, representative_epoch
from kagome.report.chrome_trace import read_trace, write_trace


def two_ranks() -> list[list[Span]]:
    return [
        [
            Span("load", -1.0, 1.0, None),
            *(
                span
                for epoch, length in ((1, 9.0), (2, 1.0), (3, 2.0), (4, 3.0))
                for span in (
                    Span("forward", 10.0 * epoch, length, epoch),
                    Span("exchange", 10.0 * epoch + 0.25, 0.5, epoch),
                    Span("evaluate", 10.0 * epoch + 9, 0.5, epoch),
                    Span("exchange", 10.0 * epoch + 9.1, 0.1, epoch),
                )
            ),
        ]
        for _ in range(2)
    ]


def test_the_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    found = json.loads(write_trace(tmp_path / "trace.json", two_ranks()).read_text())
    events = found["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}
    assert any(e["name"] == "thread_name" and e["ph"] == "M" for e in events)
    first = next(e for e in events if e["name"] == "forward")
    assert first == {
        "name": "forward", "cat": "compute", "ph": "X", "pid": 0, "tid": 0, "ts": 11e6, "dur": 9e6,
        "args": {"epoch": 1},
    }  # fmt: skip
    load = next(e for e in events if e["name"] == "load")
    assert load["ts"] == 0
    assert load["args"] == {}


def test_the_trace_reads_back(tmp_path: Path) -> None:
    back = read_trace(write_trace(tmp_path / "trace.json", two_ranks()))
    assert back == [[span._replace(start=span.start + 1.0) for span in spans] for spans in two_ranks()]
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ConfigError):
        read_trace(tmp_path / "bad.json")


def test_rounding_keeps_inner_spans_inside(tmp_path: Path) -> None:
    outer, inner = Span("forward", 0.1, 0.2000000004, 1), Span("exchange", 0.2000000003, 0.1000000001, 1)
    path = write_trace(tmp_path / "trace.json", [[Span("load", 0.0, 0.01, None), outer, inner]])
    a, b = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("args") == {"epoch": 1}]
    assert b["ts"] + b["dur"] <= a["ts"] + a["dur"] + 1e-6


def test_the_representative_epoch_is_the_median_without_the_first() -> None:
    assert representative_epoch(two_ranks()) == 3
    assert representative_epoch([[Span("forward", 0.0, 1.0, 7)]]) == 7
    assert representative_epoch([[Span("load", 0.0, 1.0, None)]]) is None
    assert representative_epoch([]) is None


def test_gantt_draws_training_only_and_is_well_formed() -> None:
    chart = gantt_svg(two_ranks(), 2)
    ElementTree.fromstring(f"<div>{chart}</div>")
    assert chart.count('class="ink-orange"') == 2 + 1  # one exchange a rank, and the legend
    assert "evaluate" not in chart
    assert "rank 1, forward: 1.00 s" in chart
    assert gantt_svg(two_ranks(), 99) == ""
    assert gantt_svg([]) == ""


def test_gantt_escapes_names_and_epochs() -> None:
    script = "<script>alert(1)</script>"
    chart = gantt_svg([[Span(script, 0.0, 1.0, script)]], script)  # type: ignore[arg-type]
    assert "<script" not in chart
    assert chart.count("&lt;script&gt;") == 3  # the tip, the legend and the description


def test_gantt_stays_small() -> None:
    spans = [[Span("exchange", i * 1e-3, 5e-4, 1) for i in range(1000)] for _ in range(200)]
    assert len(gantt_svg(spans)) < 400_000
