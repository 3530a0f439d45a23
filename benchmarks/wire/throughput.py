"""How much faster are epochs with few bits and with late rows, on which links? On hosts emulated here.

Run: python benchmarks/wire/throughput.py    (as root; resumes where it stopped)
     python benchmarks/wire/throughput.py --hours 0    (measures nothing, writes the table again)

The bound: with rows late and r times fewer bytes an epoch is no shorter than computation, nor than what is
left of communication. Both are read off the epoch with exact rows: what ranks wait, and the rest.
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
    "fp32": "",
    "fp32 late": "--parallel.max-age 1 --parallel.no-guard",
    "onebit": "--parallel.codec onebit --parallel.no-guard",
    "onebit late": "--parallel.codec onebit --parallel.max-age 1 --parallel.no-guard",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure epochs of a 3-layer GCN on emulated hosts, with exact rows, late ones, one bit, and both."""

    graphs: list[str] = field(default_factory=lambda: ["flickr-128", "cornell5"])
    """Graphs, features projected to 128 columns (also: flickr with its 12,047, and digits, without files)."""
    hidden: list[int] = field(default_factory=lambda: [256, 512])
    """Hidden widths."""
    rates: list[float] = field(default_factory=lambda: [50.0, 100.0, 200.0, 500.0, 1000.0])
    """Mbit/s of each host's link, each way."""
    settings: list[str] = field(default_factory=lambda: list(SETTINGS))
    """fp32, fp32 late, onebit, onebit late."""
    hosts: int = 4
    """Emulated hosts, one rank each."""
    layers: int = 3
    """Layers of the model."""
    epochs: int = 6
    """Of a run; the first is not counted."""
    hours: float | None = None
    """Begin no run after so long."""
    data: Path = Path("../shared/data")
    """Folder of raw data sets."""
    out: Path = HERE
    """Folder of the results."""


def grid(options: Options) -> Iterator[tuple[str, speed.Case, speed.Options]]:
    """All runs; the settings of one graph, width and rate meet the machine in the same minutes."""
    for rate in options.rates:
        for graph in options.graphs:
            for hidden in options.hidden:
                for setting in options.settings:
                    key = f"{graph}/{hidden}/{rate:g}/{setting}"
                    settings = speed.Options(
                        hosts=options.hosts,
                        layers=options.layers,
                        hidden=hidden,
                        epochs=options.epochs,
                        more=SETTINGS[setting],
                        data=options.data,
                        runs=options.out / "runs",
                    )
                    yield key, speed.Case(graph, "gcn", "graph", rate, 1, options.hosts, key), settings


def main(options: Options) -> None:
    """Run what is missing; write ``results_throughput.json`` and its table after each run."""
    end_on_sigterm()
    file = options.out / "results_throughput.json"
    rows: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    begun = time.monotonic()
    try:
        with ExitStack() as stack:
            cluster: Cluster | None = None
            for key, case, settings in grid(options):
                if "epoch_seconds" in rows.get(key, {}):
                    continue
                if options.hours is not None and time.monotonic() - begun >= 3600 * options.hours:
                    break
                if cluster is None:
                    cluster = stack.enter_context(Cluster(options.hosts, case.rate, name="kagome-wire"))
                cluster.shape(case.rate)
                row = rows[key] = speed.measure(case, settings, cluster)
                write(options, file, rows)
                print(f"{key}: {row.get('error') or speed.said(row)}", flush=True)
    except NotPermittedError as error:
        print(f"throughput.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    write(options, file, rows)


def write(options: Options, file: Path, rows: Mapping[str, Any]) -> None:
    """Both files of results."""
    options.out.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1) + "\n")
    part.replace(file)
    (options.out / "results_throughput.md").write_text(table(rows))


def table(rows: Mapping[str, Any]) -> str:
    """Seconds an epoch by setting, what both together gain, and the bound."""
    lines = [
        "| graph | hidden | Mbit/s | fp32 s | late | one bit | both | fewer halo bytes | bound | of it | "
        "late hides |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    cases: dict[tuple[str, str, str], dict[str, Any]] = {}
    for key, row in rows.items():
        graph, hidden, rate, setting = key.split("/")
        if "epoch_seconds" in row:
            cases.setdefault((graph, hidden, rate), {})[setting] = row
    for (graph, hidden, rate), found in sorted(
        cases.items(), key=lambda e: (e[0][0], int(e[0][1]), float(e[0][2]))
    ):
        if "fp32" not in found:
            continue
        exact = found["fp32"]
        whole = exact["epoch_seconds"]
        comm = exact["exposed_share"] * whole
        comp = whole - comm

        def gain(setting: str, found: Mapping[str, Any] = found, whole: float = whole) -> str:
            return f"{whole / found[setting]['epoch_seconds']:.2f}x" if setting in found else ""

        fewer = bound = reached = hides = ""
        if "onebit late" in found:
            both = found["onebit late"]
            ratio = exact["bytes_per_epoch"]["total"] / both["bytes_per_epoch"]["total"]
            most = whole / max(comp, comm / ratio)
            halo = exact["bytes_per_epoch"]["halo"] / both["bytes_per_epoch"]["halo"]
            fewer, bound = f"{halo:.1f}", f"{most:.2f}x"
            reached = f"{whole / both['epoch_seconds'] / most:.0%}"
        if "fp32 late" in found:
            hides = f"{(whole - found['fp32 late']['epoch_seconds']) / min(comm, comp):.0%}"
        lines.append(
            f"| {graph} | {hidden} | {rate} | {whole:.3f} | {gain('fp32 late')} | {gain('onebit')} | "
            f"{gain('onebit late')} | {fewer} | {bound} | {reached} | {hides} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
