"""Are feature slices faster than parts of the graph, and than sampled batches? On hosts emulated here.

Run: python benchmarks/slices/speed.py    (as root; resumes where it stopped)
     python benchmarks/slices/speed.py --hours 0    (measures nothing, writes the table again)
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

WAYS = ("parts", "slices", "parts decoupled", "slices decoupled", "sampled")
"""The graph in parts; features in slices; both of the decoupled model; batches of sampled neighbours."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure epochs of parts, slices, decoupled slices and sampled batches on emulated hosts."""

    graphs: list[str] = field(
        default_factory=lambda: ["cornell5", "flickr-128", "squirrel-128", "slashdot", "tolokers"]
    )
    """Graphs; wide features are projected to 128 columns (also: digits, without files)."""
    models: list[str] = field(default_factory=lambda: ["gcn", "gat"])
    """Models, by the names that kagome train knows."""
    layers: list[int] = field(default_factory=lambda: [2, 3, 4])
    """Layers."""
    ways: list[str] = field(default_factory=lambda: list(WAYS))
    """parts, slices, parts decoupled, slices decoupled, sampled."""
    rate: float = 1000.0
    """Mbit/s of each host's link, each way."""
    hosts: int = 4
    """Emulated hosts, one rank each."""
    hidden: int = 128
    """Hidden width."""
    epochs: int = 6
    """Of a run that count."""
    hours: float | None = None
    """Begin no run after so long."""
    data: Path = Path("../shared/data")
    """Folder of raw data sets."""
    out: Path = HERE
    """Folder of the results."""


def grid(options: Options) -> Iterator[tuple[str, str, speed.Case, speed.Options]]:
    """All runs; the ways of one graph, model and depth meet the machine in the same minutes."""
    for graph in options.graphs:
        for model in options.models:
            for layers in options.layers:
                for way in options.ways:
                    key = f"{graph}/{model}/{layers}/{options.rate:g}/{way}"
                    slices = way.startswith("slices")
                    flags = [f"--parallel.tensor {options.hosts}"] if slices else []
                    flags += ["--parallel.decouple"] if way.endswith("decoupled") else []
                    settings = speed.Options(
                        hosts=options.hosts,
                        layers=layers,
                        hidden=options.hidden,
                        epochs=options.epochs,
                        more=" ".join(flags),
                        data=options.data,
                        runs=options.out / "runs",
                    )
                    parts = 1 if slices else options.hosts
                    case = speed.Case(graph, model, "graph", options.rate, 1, parts, key)
                    yield key, way, case, settings


def sampled(case: speed.Case, options: speed.Options, cluster: Cluster) -> dict[str, Any]:
    """One row of batches of sampled neighbours: see ``sampled.py``."""
    folder = options.runs / case.key.replace("/", "-").replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(HERE / "sampled.py"), "--model", case.model, "--layers", str(options.layers)]
    words += [
        "--hidden",
        str(options.hidden),
        "--out",
        str(folder / "sampled.json"),
        "--root",
        str(options.data),
    ]
    words += [word.format(data=options.data) for word in speed.GRAPHS[case.graph]]
    done = cluster.launch(words, env=speed.THREADS, seconds=options.limit)
    failed = sorted((one for one in done if one.returncode), key=lambda one: one.returncode < 0)
    if failed:
        return {
            "key": case.key,
            "error": "\n".join((failed[0].stderr or failed[0].stdout).splitlines()[-20:]),
        }
    return {"key": case.key, **json.loads((folder / "sampled.json").read_text())}


def main(options: Options) -> None:
    """Run what is missing; write ``results_speed.json`` and its table after each run."""
    end_on_sigterm()
    file = options.out / "results_speed.json"
    rows: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    begun = time.monotonic()
    try:
        with ExitStack() as stack:
            cluster: Cluster | None = None
            for key, way, case, settings in grid(options):
                if "epoch_seconds" in rows.get(key, {}):
                    continue
                if options.hours is not None and time.monotonic() - begun >= 3600 * options.hours:
                    break
                if cluster is None:
                    cluster = stack.enter_context(Cluster(options.hosts, case.rate, name="kagome-slices"))
                if way == "sampled":
                    rows[key] = sampled(case, settings, cluster)
                else:
                    rows |= speed.measure([case], settings, cluster)
                row = rows[key]
                write(options, file, rows)
                print(f"{key}: {row.get('error') or row['epoch_seconds']}", flush=True)
    except NotPermittedError as error:
        print(f"speed.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    write(options, file, rows)


def write(options: Options, file: Path, rows: Mapping[str, Any]) -> None:
    """Both files of results."""
    options.out.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1) + "\n")
    part.replace(file)
    (options.out / "results_speed.md").write_text(table(rows))


def table(rows: Mapping[str, Any]) -> str:
    """Seconds an epoch by way, and how much faster slices are."""
    lines = [
        "| graph | model | layers | Mbit/s | parts, s | slices | parts, decoupled | slices, decoupled | "
        "sampled, s | decoupled in slices over sampled | MB an epoch: parts / slices / decoupled | "
        "slowest over mean rank: parts / slices |",
        "|" + "---|" * 12,
    ]
    cases: dict[tuple[str, ...], dict[str, Any]] = {}
    for key, row in rows.items():
        *case, way = key.split("/")
        if "epoch_seconds" in row:
            cases.setdefault(tuple(case), {})[way] = row
    for case, found in cases.items():
        if "parts" not in found:
            continue
        whole = found["parts"]["epoch_seconds"]

        def seconds(way: str, found: Mapping[str, Any] = found, whole: float = whole) -> str:
            if way not in found:
                return ""
            took = found[way]["epoch_seconds"]
            return f"{took:.3f} ({whole / took:.2f}x)"

        sizes = [found[way]["bytes_per_epoch"]["total"] / 1e6 if way in found else None for way in WAYS[:2]]
        last = found.get("slices decoupled")
        sizes.append(None if last is None else last["bytes_per_epoch"]["total"] / 1e6)
        balance = [found[way].get("balance") if way in found else None for way in WAYS[:2]]
        cells = [*case, f"{whole:.3f}", seconds("slices"), seconds("parts decoupled")]
        cells += [seconds("slices decoupled"), seconds("sampled")]
        both = [found[way]["epoch_seconds"] for way in ("sampled", "slices decoupled") if way in found]
        cells.append(f"{both[0] / both[1]:.2f}x" if len(both) == 2 else "")
        cells.append(" / ".join("-" if size is None else f"{size:,.1f}" for size in sizes))
        cells.append(" / ".join("-" if each is None else f"{each:.2f}" for each in balance))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
