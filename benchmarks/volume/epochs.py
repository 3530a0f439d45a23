"""How much faster are epochs with partial sums, and on which links? On hosts emulated here.

Run: python benchmarks/volume/epochs.py    (as root, on a quiet machine; resumes where it stopped)
     python benchmarks/volume/epochs.py --hours 0    (measures nothing, writes the table again)

Rows and sums of one graph, model and width meet the machine in the same minutes. The bound is what the fewer
bytes would save if nothing else changed: what ranks wait with rows, in proportion to the bytes of an epoch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from cluster import Cluster, NotPermittedError, end_on_sigterm  # noqa: E402
from pipeline import speed  # noqa: E402

SETTINGS: Mapping[str, str] = {
    "rows": "--parallel.partial-sums off",
    "sums": "--parallel.partial-sums on",
    "rows onebit": "--parallel.partial-sums off --parallel.codec onebit --parallel.no-guard",
    "sums onebit": "--parallel.partial-sums on --parallel.codec onebit --parallel.no-guard",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure epochs of a 3-layer model on emulated hosts, with rows of other parts and with partial sums."""

    graphs: list[str] = field(default_factory=lambda: ["flickr-128", "slashdot", "squirrel-128", "cornell5"])
    """Graphs, by the names of benchmarks/pipeline/speed.py (also: digits, without files)."""
    models: list[str] = field(default_factory=lambda: ["gcn", "sage"])
    """Models, by the names that kagome train knows."""
    hidden: int = 256
    """Hidden width."""
    rates: list[float] = field(default_factory=lambda: [100.0, 200.0, 500.0, 1000.0])
    """Mbit/s of each host's link, each way."""
    settings: list[str] = field(default_factory=lambda: ["rows", "sums"])
    """rows, sums, rows onebit, sums onebit."""
    hosts: int = 4
    """Emulated hosts, one rank each."""
    layers: int = 3
    """Layers of the model."""
    epochs: int = 6
    """At each rate."""
    hours: float | None = None
    """Begin no run after so long."""
    data: Path = Path("../shared/data")
    """Folder of raw data sets."""
    out: Path = HERE
    """Folder of the results."""


def grid(options: Options) -> Iterator[tuple[list[speed.Case], speed.Options]]:
    """Runs, each with its rates."""
    for graph in options.graphs:
        for model in options.models:
            for setting in options.settings:
                settings = speed.Options(
                    hosts=options.hosts,
                    layers=options.layers,
                    hidden=options.hidden,
                    epochs=options.epochs,
                    more=SETTINGS[setting],
                    data=options.data,
                    runs=options.out / "runs",
                )
                cases = []
                for rate in options.rates:
                    key = f"{graph}/{model}/{options.hidden}/{rate:g}/{setting}"
                    cases.append(speed.Case(graph, model, "graph", rate, 1, options.hosts, key))
                yield cases, settings


def main(options: Options) -> None:
    """Run what is missing; write ``results_epochs.json`` and its table after each run."""
    end_on_sigterm()
    file = options.out / "results_epochs.json"
    rows: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    begun = time.monotonic()
    try:
        with ExitStack() as stack:
            cluster: Cluster | None = None
            for asked, settings in grid(options):
                cases = [case for case in asked if "epoch_seconds" not in rows.get(case.key, {})]
                if not cases:
                    continue
                if options.hours is not None and time.monotonic() - begun >= 3600 * options.hours:
                    break
                if cluster is None:
                    cluster = stack.enter_context(Cluster(options.hosts, cases[0].rate, name="kagome-sums"))
                rows |= speed.measure(cases, settings, cluster)
                write(options, file, rows)
                for case in cases:
                    row = rows[case.key]
                    print(f"{case.key}: {row.get('error') or speed.said(row)}", flush=True)
    except NotPermittedError as error:
        print(f"epochs.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    write(options, file, rows)


def write(options: Options, file: Path, rows: Mapping[str, Any]) -> None:
    """Both files of results; the first whole or not at all, as a later call goes on from it."""
    options.out.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1) + "\n")
    part.replace(file)
    (options.out / "results_epochs.md").write_text(table(rows))


def table(rows: Mapping[str, Any]) -> str:
    """Seconds and halo bytes of an epoch with rows and with sums, a line a graph, model, width and rate."""
    lines = [
        "| graph | model | hidden | Mbit/s | codec | rows: s | sums: s | times as fast | bound | "
        "halo MB: rows | sums | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    measured = {tuple(key.split("/")): row for key, row in rows.items() if "epoch_seconds" in row}
    for (*case, setting), plain in measured.items():
        sums = measured.get((*case, setting.replace("rows", "sums")))
        if not setting.startswith("rows") or sums is None:
            continue
        before, after = plain["epoch_seconds"], sums["epoch_seconds"]
        sent, fewer = (each["bytes_per_epoch"] for each in (plain, sums))
        waited = plain["exposed_share"] * before
        bound = before / (before - waited * (1 - fewer["total"] / sent["total"]))
        halo, less = sent["halo"] / 1e6, fewer["halo"] / 1e6
        codec = setting.removeprefix("rows").strip() or "none"
        lines.append(
            f"| {' | '.join(case)} | {codec} | {before:.3f} | {after:.3f} | {before / after:.2f}x | "
            f"{bound:.2f}x | {halo:.1f} | {less:.1f} | {(less - halo) / halo:+.0%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
