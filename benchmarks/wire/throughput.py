"""How much faster are epochs with few bits and with late rows, on which links? On hosts emulated here.

Run: python benchmarks/wire/throughput.py    (as root; resumes where it stopped)
     python benchmarks/wire/throughput.py --hours 0    (measures nothing, writes the table again)

The bound: with rows late and r times fewer bytes an epoch is no shorter than computation, nor than what is
left of communication. Both are read off the epoch with exact rows: what ranks wait on the mean, and the rest.
Beside it the same for the host that computes longest, by the clocks of the hosts' cgroups (own CPU time; the
kernel's is for sending), and how busy hosts are: coding and sending take CPU time, which neither bound has.
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
    "onebit late bf16": (
        "--parallel.codec onebit --parallel.max-age 1 --parallel.codec-weights bf16 --parallel.no-guard"
    ),
}

GAINS: Mapping[str, str] = {
    "fp32 late": "late rows",
    "onebit": "one bit",
    "onebit late": "both",
    "onebit late bf16": "both, bf16 sums",
}
"""What is set beside exact rows."""

BUSY = ("fp32", "fp32 late", "onebit late")
"""Of which the table says how busy hosts are."""


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
    """fp32, fp32 late, onebit, onebit late, onebit late bf16 (of which the last is about sums of weights)."""
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
    """Runs, each with its rates; the settings of one graph and width meet the machine in the same minutes."""
    for graph in options.graphs:
        for hidden in options.hidden:
            for setting in options.settings:
                settings = speed.Options(
                    hosts=options.hosts,
                    layers=options.layers,
                    hidden=hidden,
                    epochs=options.epochs,
                    more=SETTINGS[setting],
                    data=options.data,
                    runs=options.out / "runs",
                )
                keys = {rate: f"{graph}/{hidden}/{rate:g}/{setting}" for rate in options.rates}
                yield (
                    [
                        speed.Case(graph, "gcn", "graph", rate, 1, options.hosts, key)
                        for rate, key in keys.items()
                    ],
                    settings,
                )


def main(options: Options) -> None:
    """Run what is missing; write ``results_throughput.json`` and its table after each run."""
    end_on_sigterm()
    file = options.out / "results_throughput.json"
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
                    cluster = stack.enter_context(Cluster(options.hosts, cases[0].rate, name="kagome-wire"))
                rows |= speed.measure(cases, settings, cluster)
                write(options, file, rows)
                for case in cases:
                    row = rows[case.key]
                    print(f"{case.key}: {row.get('error') or speed.said(row)}", flush=True)
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
    draw(rows, options.out / "results_throughput.svg")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One graph, width and rate: what settings gain over exact rows; None where they were not measured."""

    graph: str
    hidden: int
    rate: float
    seconds: float
    """Of an epoch with exact rows."""
    gains: Mapping[str, float]
    """Times as fast, by setting."""
    fewer: float | None = None
    """Halo bytes of exact rows over those of one bit."""
    bound: float | None = None
    """Times as fast as one bit and late rows can be."""
    hides: float | None = None
    """Of what late rows could hide, what they do."""
    hides_idle: float | None = None
    """The same of what the busiest host's CPU leaves: computing and sending take their time, late or not."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Of its share of the CPU, what the busiest host uses, by setting: at 1 nothing more can be hidden."""
    busiest: float | None = None
    """The bound, with the computing of the host that has most of it in place of the mean."""


def points(rows: Mapping[str, Any]) -> list[Point]:
    """What was measured, sorted."""
    cases: dict[tuple[str, int, float], dict[str, Any]] = {}
    for key, row in rows.items():
        graph, hidden, rate, setting = key.split("/")
        if "epoch_seconds" in row:
            cases.setdefault((graph, int(hidden), float(rate)), {})[setting] = row
    found = []
    for (graph, hidden, rate), by_setting in sorted(cases.items()):
        if "fp32" not in by_setting:
            continue
        exact = by_setting["fp32"]
        whole = exact["epoch_seconds"]
        comm = exact["exposed_share"] * whole
        comp = whole - comm
        gains = {name: whole / row["epoch_seconds"] for name, row in by_setting.items()}
        busy = {
            name: max(map(sum, row["cores"])) / row["cpu_share"]
            for name, row in by_setting.items()
            if row.get("cores")
        }
        fewer = bound = busiest = hides = hides_idle = None
        if "onebit late" in by_setting:
            sent, few = exact["bytes_per_epoch"], by_setting["onebit late"]["bytes_per_epoch"]
            bound = whole / max(comp, comm / (sent["total"] / few["total"]))
            fewer = sent["halo"] / few["halo"]
            if exact.get("cores"):
                most = max(own for own, _ in exact["cores"]) / exact["cpu_share"]  # of the epoch
                busiest = 1 / max(most, (1 - most) / (sent["total"] / few["total"]))
        if "fp32 late" in by_setting:
            saved = whole - by_setting["fp32 late"]["epoch_seconds"]
            hides = saved / min(comm, comp)
            if "fp32" in busy and busy["fp32"] < 1:
                hides_idle = saved / (whole - max(comm, busy["fp32"] * whole))
        point = Point(
            graph=graph,
            hidden=hidden,
            rate=rate,
            seconds=whole,
            gains=gains,
            fewer=fewer,
            bound=bound,
            hides=hides,
            hides_idle=hides_idle,
            busy=busy,
            busiest=busiest,
        )
        found.append(point)
    return found


def table(rows: Mapping[str, Any]) -> str:
    """Seconds an epoch by setting, what both together gain, and the bound."""
    lines = [
        "| graph | hidden | Mbit/s | fp32 s | late | one bit | both | both, bf16 sums | fewer halo bytes | "
        "bound | of it | busiest host's | of it | late hides | CPU fp32 | late | both |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in points(rows):
        gains = [f"{one.gains[name]:.2f}x" if name in one.gains else "" for name in GAINS]
        bounds = [
            " | " if bound is None else f"{bound:.2f}x | {one.gains['onebit late'] / bound:.0%}"
            for bound in (one.bound, one.busiest)
        ]
        fewer = "" if one.fewer is None else f"{one.fewer:.1f}"
        hides = "" if one.hides is None else f"{one.hides:.0%}"
        hides += "" if one.hides_idle is None else f" ({one.hides_idle:.0%})"
        busy = [f"{one.busy[name]:.0%}" if name in one.busy else "" for name in BUSY]
        lines.append(
            f"| {one.graph} | {one.hidden} | {one.rate:g} | {one.seconds:.3f} | {' | '.join(gains)} | "
            f"{fewer} | {' | '.join(bounds)} | {hides} | {' | '.join(busy)} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: Mapping[str, Any], file: Path) -> None:
    """Times as fast as exact rows against the links' rate, a panel a graph and width; dotted the bound."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "kagome", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot

    panels: dict[tuple[str, int], list[Point]] = {}
    for one in points(rows):
        panels.setdefault((one.graph, one.hidden), []).append(one)
    panels = {name: each for name, each in panels.items() if len(each) > 1}
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.2 * len(panels), 3), squeeze=False)
    for axis, ((graph, hidden), each) in zip(axes[0], panels.items(), strict=True):
        for name, label in GAINS.items():
            there = [one for one in each if name in one.gains]
            axis.plot(
                [p.rate for p in there], [p.gains[name] for p in there], "-o", label=label, markersize=4
            )
        there = [one for one in each if one.bound is not None]
        axis.plot([p.rate for p in there], [p.bound for p in there], "k:", label="bound of both")
        axis.axhline(1.0, color="0.6", linewidth=0.8)
        axis.set(title=f"{graph}, hidden {hidden}", xscale="log", xlabel="Mbit/s", ylim=(0, None))
        axis.set_xticks([p.rate for p in each], [f"{p.rate:g}" for p in each], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("times as fast as exact rows")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
