"""A run whose links get one rate after another: epochs are counted to the rate that they saw alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from pipeline import speed, sweep, tables  # noqa: E402
from pipeline.bubbles import bubbles  # noqa: E402

from kagome.records.spans import Span  # noqa: E402


class Links:
    """Stands for emulated hosts: each epoch notes the rates of its links at its start and at its end."""

    def __init__(self, folder: Path, epochs: int, *, code: int = 0) -> None:
        self.folder, self.epochs, self.code = folder, epochs, code
        self.rate, self.ended, self.epoch, self.cpu_share = 0.0, False, 0, 0.5

    def shape(self, rate: float) -> None:
        self.rate = rate

    def end(self) -> None:
        self.ended = True

    def used(self) -> list[tuple[float, float]]:
        return [(0.75 * self.epoch, 0.25 * self.epoch), (self.epoch, 0.5 * self.epoch)]

    def launch(
        self, words: Sequence[str], env: Mapping[str, str], seconds: float
    ) -> list[subprocess.CompletedProcess[str]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "metrics.jsonl").open("w") as file:
            for epoch in range(1, self.epochs + 1):
                before = self.rate
                time.sleep(0.06)
                self.epoch = epoch
                file.write(json.dumps({"epoch": epoch, "rates": [before, self.rate]}) + "\n")
                file.flush()
                if self.ended:
                    break
        return [subprocess.CompletedProcess(list(words), self.code, "", "why")]


def swept(cluster: Any, folder: Path, stretches: Sequence[sweep.Stretch]) -> list[list[dict[str, Any]]]:
    return sweep.swept(cluster, ["train"], folder, stretches, env={}, seconds=9)[1]


def test_cores_are_those_in_use_while_epochs_count(tmp_path: Path) -> None:
    stretches = [sweep.Stretch(100, 8), sweep.Stretch(250, 8)]
    links: Any = Links(tmp_path, sweep.length(stretches))
    *_, cores = sweep.swept(links, ["train"], tmp_path, stretches, env={}, seconds=9)
    assert [len(hosts) for hosts in cores] == [2, 2]
    for (own, kernel), (more, _) in cores:
        assert own == pytest.approx(3 * kernel) == pytest.approx(0.75 * more)
        # A second of CPU in 0.06, or somewhat longer; an epoch may end between two looks.
        assert 0 < own + kernel < 1.25 / 0.06


def test_an_epoch_that_has_seen_two_rates_is_not_counted(tmp_path: Path) -> None:
    stretches = [sweep.Stretch(100, 3), sweep.Stretch(250, 1), sweep.Stretch(1000, 2)]
    found = swept(Links(tmp_path, sweep.length(stretches)), tmp_path, stretches)
    for stretch, lines in zip(stretches, found, strict=True):
        assert lines
        assert all(line["rates"] == [stretch.rate, stretch.rate] for line in lines)
    assert found[0][0]["epoch"] == 1 + sweep.SETTLE
    assert len({line["epoch"] for lines in found for line in lines}) == sum(map(len, found))


def test_a_run_that_ends_too_soon_leaves_later_rates_without_epochs(tmp_path: Path) -> None:
    stretches = [sweep.Stretch(100, 2), sweep.Stretch(250, 2)]
    assert list(map(len, swept(Links(tmp_path, 4), tmp_path, stretches))) == [2, 0]
    assert list(map(len, swept(Links(tmp_path, 0), tmp_path, stretches))) == [0, 0]


def test_whoever_breaks_off_ends_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(tmp_path, 1000)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "time", type("Clock", (), {"sleep": staticmethod(interrupt)}))
    with pytest.raises(KeyboardInterrupt):
        swept(links, tmp_path, [sweep.Stretch(100, 500), sweep.Stretch(250, 2)])
    assert links.ended


def test_a_failed_run_fails_at_every_rate(tmp_path: Path) -> None:
    options = speed.Options(runs=tmp_path)
    cases = [
        speed.Case("digits", "gcn", "graph", rate, 1, 4, f"digits/gcn/graph/{rate:g}") for rate in (100, 250)
    ]
    cluster: Any = Links(tmp_path / "digits-gcn-graph", 2, code=1)
    rows = speed.measure(cases, options, cluster, epochs=[1, 1])
    assert [row["error"] for row in rows.values()] == ["why", "why"]
    assert [row["rate"] for row in rows.values()] == [100, 250]


def test_figures_are_those_of_the_epochs_that_count() -> None:
    lines = [
        {"seconds": 2.0, "waited": {"halo": 0.5}, "under_way": {"halo": 1.0}},
        {"seconds": 4.0, "waited": {"halo": 1.0, "other": 0.3}, "under_way": {"halo": 2.0}},
    ]
    summary = {"bytes_per_epoch": {"total": 8.0}, "peak_memory_bytes": [1], "phases": []}
    row = speed.figures(lines, summary)
    assert row["epochs"] == 2
    assert row["epoch_seconds"] == 3.0
    assert row["spread"] == [2.0, 4.0]
    assert row["waited_per_epoch"] == {"halo": 0.75, "other": 0.15}
    assert row["hidden_share"] == {"halo": 0.5}
    assert row["exposed_share"] == pytest.approx(0.3)


def test_a_bubble_is_simulated_with_the_links_of_its_rate() -> None:
    # Two stages, a chunk: each computes for a second a way, a message of a megabyte takes half of one.
    spans = [
        [
            Span("0F0", 0.0, 1.0, 3),
            Span("0SEND_F0", 1.0, 0.0, 3),
            Span("0RECV_B0", 1.0, 3.0, 3),
            Span("0B0", 4.0, 1.0, 3),
        ],
        [
            Span("1RECV_F0", 0.0, 1.5, 3),
            Span("1F0", 1.5, 1.0, 3),
            Span("1B0", 2.5, 1.0, 3),
            Span("1SEND_B0", 3.5, 0.0, 3),
        ],
    ]
    found = bubbles(spans, [3], 16.0, 2e6)
    assert found == {"measured": pytest.approx(0.6), "simulated": pytest.approx(0.6)}
    free = bubbles(spans, [3], 16e6, 2e6)
    assert free == {"measured": pytest.approx(0.6), "simulated": pytest.approx(0.5, abs=1e-5)}
    rows = [
        {"graph": "g", "model": "m", "rate": 16.0, "mesh": "pipe", "bubble": one} for one in (found, free)
    ]
    assert tables.bubbles(rows[:1], {"pipe": "pipe=2"})[-1] == "| g | m | pipe=2 | 16 | 60% | 60% |"
    assert "10.0% at most" in "".join(tables.bubbles([rows[0], rows[1] | {"rate": 9.0}], {"pipe": "pipe"}))
    assert bubbles([], [3], 16.0, 0.0) is None
