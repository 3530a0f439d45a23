"""Unequal: two fast hosts and two slow ones; equal parts and parts by speed, predicted and measured.

Run as ``python benchmarks/planner/unequal.py`` by root; see README.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import tyro

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from cluster import Cluster, NotPermittedError, end_on_sigterm  # noqa: E402
from pipeline import speed  # noqa: E402
from planner.hosts import measured  # noqa: E402
from planner.settings import Setting  # noqa: E402

from kagome.autoplan.plan import studied  # noqa: E402
from kagome.cli.app import _builder, parse_train  # noqa: E402
from kagome.config.commands import PlanCommand  # noqa: E402
from kagome.planner.cluster import Cluster as Declared  # noqa: E402
from kagome.profile.cache import MeasurementCache  # noqa: E402

MEMORY = 2.0**33
"""Bytes of a host: enough for all of these."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict and measure epochs on hosts of unlike speed."""

    graph: str = "made-20k"
    """A graph, as ``pipeline/speed.py`` names it."""
    model: str = "sage"
    """A model that kagome train knows."""
    shares: tuple[float, ...] = field(default=(0.6, 0.6, 0.3, 0.3))
    """Cores of each host."""
    rate: float = 1000.0
    """Mbit/s of each host's link, each way."""
    epochs: int = 8
    """Epochs of a run that count."""
    turns: int = 3
    """Runs of each cut, one after the other in turn."""
    data: Path = Path("../shared/data")
    """Folder of raw data sets."""
    out: Path = HERE
    """Folder of the results."""


def predicted(options: Options, hosts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is predicted for parts that are alike, and for parts by the hosts' speed."""
    setting = Setting(options.graph, options.model, 3, 128, ())
    run = parse_train(setting.words(options.data))
    asked = PlanCommand(data=run.data, model=run.model, train=run.train, cluster="emulated")
    study, _ = studied(asked, _builder(asked.model, asked.train), MeasurementCache())
    link, latency = hosts["links"][f"{options.rate:g}"]
    count = len(options.shares)
    cluster = Declared("emulated", count, 1, MEMORY, tuple(hosts["paces"]), link, link, latency)
    found = {}
    for one in study.plans(cluster).fitting:
        if set(one.settings) <= {"graph", "part_weights"} and one.ranks == count:
            way = "by speed" if "part_weights" in one.settings else "alike"
            found[way] = {"seconds": one.epoch_seconds, "busy": list(one.busy), "name": one.name}
    return found


def weights(options: Options) -> tuple[float, ...]:
    """Return the work of each host relative to the slowest."""
    least = min(options.shares)
    return tuple(float(f"{share / least:.3g}") for share in options.shares)


def ran(options: Options, cluster: Cluster, way: str, turn: int) -> dict[str, Any]:
    """Return the figures of a run of one cut."""
    more = f"--parallel.part-weights {' '.join(f'{each:g}' for each in weights(options))}"
    asked = speed.Options(
        hosts=cluster.hosts,
        layers=3,
        hidden=128,
        epochs=options.epochs,
        more=more if way == "by speed" else "",
        data=options.data,
        runs=options.out / "runs",
    )
    key = f"{options.graph}/{options.model}/unequal-{way.replace(' ', '-')}-{turn}"
    case = speed.Case(options.graph, options.model, "graph", options.rate, 1, cluster.hosts, key)
    row = speed.measure([case], asked, cluster)[key]
    if "error" in row:
        raise RuntimeError(row["error"])
    return {name: row[name] for name in ("command", "epoch_seconds", "spread", "exposed_share")}


def table(found: Mapping[str, Any]) -> str:
    """Return the cuts with predicted and measured seconds."""
    lines = [
        "# Two fast hosts and two slow ones",
        "",
        f"{found['graph']}, {found['model']}, 3 layers of width 128; cores of the hosts: {found['shares']}; "
        f"links of {found['rate']:g} Mbit/s each way.",
        "",
        "| parts | predicted | measured | over predicted | alike over it, measured | waits |",
        "|---|---|---|---|---|---|",
    ]
    base = [each["epoch_seconds"] for each in found["runs"]["alike"]]
    for way, rows in found["runs"].items():
        seconds = [each["epoch_seconds"] for each in rows]
        foreseen = found["predicted"][way]["seconds"]
        ratios = [one / own for one, own in zip(base, seconds, strict=True)]
        waits = median(each["exposed_share"] for each in rows)
        lines.append(
            f"| {way} | {1e3 * foreseen:.0f} ms | {1e3 * median(seconds):.0f} ms "
            f"({1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}) | {median(seconds) / foreseen:.2f} | "
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {waits:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    """Predict, run both cuts by turns, and write ``results_unequal.json`` and its table."""
    end_on_sigterm()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results_unequal.json"
    count = len(options.shares)
    try:
        with Cluster(count, options.rate, options.shares, name="kagome-unequal") as cluster:
            hosts = measured(cluster, [options.rate])
            found: dict[str, Any] = {"graph": options.graph, "model": options.model, "hosts": hosts}
            found |= {"shares": list(options.shares), "rate": options.rate}
            found["predicted"] = predicted(options, hosts)
            found["runs"] = {"alike": [], "by speed": []}
            for turn in range(options.turns):
                for way in sorted(found["runs"], reverse=bool(turn % 2)):
                    found["runs"][way].append(ran(options, cluster, way, turn))
                    print(f"{way}: {found['runs'][way][-1]['epoch_seconds']:.3f} s", flush=True)
                file.write_text(json.dumps(found, indent=1) + "\n")
                (options.out / "results_unequal.md").write_text(table(found))
    except NotPermittedError as error:
        print(f"unequal.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(table(found))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
