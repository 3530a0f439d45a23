"""How would a graph train on 8 to 1,024 devices: seconds an epoch and memory a device, predicted from counts.

Run: python benchmarks/planner/scale.py

No such machines were at hand: these are the planner's curves, for clusters of the ready files grown node by
node; the model is measured on one core of this machine, and devices are as much faster as their memory is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from kagome.autoplan.plan import like
from kagome.autoplan.workload import Workload
from kagome.comm.channel import Channel
from kagome.config import Model
from kagome.errors import PlanError
from kagome.model.zoo import build_model
from kagome.planner.cluster import READY
from kagome.profile.synthetic_graphs import GraphSize
from kagome.train.data import from_data

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict ogbn-papers100M on many devices."""

    vertices: int = 111_059_956
    """Vertices."""
    edges: int = 1_615_685_872
    """Edges."""
    features: int = 128
    """Features a vertex."""
    classes: int = 172
    """Classes."""
    model: str = "sage"
    """Model."""
    layers: int = 3
    """Its layers."""
    hidden: int = 256
    """Its width."""
    clusters: tuple[str, ...] = ("h100x64", "a5000x16")
    """Ready clusters whose nodes are multiplied."""
    sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    """Devices."""
    out: Path = HERE
    """Folder of the results."""


def study(options: Options) -> Workload:
    """The model, measured."""
    graph = GraphSize(options.vertices, options.edges)
    data = like(graph, options.features, options.classes, 0)
    part, meta = from_data(data, Channel(None, "cpu"), method="contiguous", seed=0)
    torch.manual_seed(0)
    settings = Model(name=options.model, layers=options.layers, hidden=options.hidden)
    model = build_model(
        settings, in_channels=options.features, out_channels=options.classes, num_nodes=meta.num_nodes
    )
    return Workload.of(model, torch.optim.Adam(model.parameters()), part, graph)


def curve(found: Workload, name: str, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """The best exact plan on each number of devices, and the best with rows of an earlier epoch."""
    rows, ready = [], READY[name]
    for size in sizes:
        devices = min(size, ready.devices)
        cluster = replace(ready, name=f"{size} devices", hosts=max(1, size // devices), devices=devices)
        for history in (False, True):
            row: dict[str, Any] = {"cluster": name, "devices": size, "history": history}
            try:
                best = found.plans(cluster, ("history",) if history else ()).fitting[0]
                row |= {"plan": best.name, "epoch_seconds": best.epoch_seconds}
                row |= {"memory_bytes": best.memory_bytes, "waits": best.exposed_seconds / best.epoch_seconds}
            except PlanError as error:
                row["refused"] = str(error)
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line a point."""
    lines = [
        "| cluster | devices | old rows | plan | an epoch, s | waiting | GiB a device |",
        "|" + "---|" * 7,
    ]
    for row in rows:
        old = "yes" if row["history"] else "no"
        if "refused" in row:
            lines.append(f"| {row['cluster']} | {row['devices']} | {old} | nothing fits | | | |")
            continue
        lines.append(
            f"| {row['cluster']} | {row['devices']} | {old} | {row['plan']} | {row['epoch_seconds']:.3g} |"
            f" {row['waits']:.0%} | {row['memory_bytes'] / 2**30:.1f} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Seconds and memory against devices, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "kagome", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for axis, key, scale, label in (
        (axes[0], "epoch_seconds", 1.0, "seconds an epoch"),
        (axes[1], "memory_bytes", 2.0**30, "GiB a device"),
    ):
        for name in dict.fromkeys(row["cluster"] for row in rows):
            for history, style in ((False, "-o"), (True, "--x")):
                points = [r for r in rows if r["cluster"] == name and r["history"] is history and key in r]
                there = [r["devices"] for r in points], [r[key] / scale for r in points]
                axis.plot(*there, style, label=f"{name}, {'old rows' if history else 'exact'}", markersize=4)
        axis.set(xscale="log", yscale="log", xlabel="devices", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main(options: Options) -> None:
    """Measure once, predict all, write and draw."""
    torch.set_num_threads(1)
    found = study(options)
    rows = [row for name in options.clusters for row in curve(found, name, options.sizes)]
    (options.out / "results_scale.json").write_text(json.dumps(rows, indent=1) + "\n")
    (options.out / "results_scale.md").write_text(table(rows))
    draw(rows, options.out / "results_scale.svg")
    print(table(rows))


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
