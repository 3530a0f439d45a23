"""Is the planner right: what it predicts beside what runs on emulated hosts took.

Run: python benchmarks/planner/main.py --data ../shared/data    (resumes where it stopped; --fresh plans anew)

The runs are those of benchmarks/slices, benchmarks/wire and benchmarks/pipeline: four hosts of 0.45 cores.
Predictions are made here, from the model measured on one core of this machine.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tyro

from kagome.cli import _builder, parse_train
from kagome.commands import PlanCommand, TrainCommand
from kagome.run.contention import contention
from kagome.run.planning import planned

HERE = Path(__file__).parent
MEASURED = (
    HERE.parent / "slices" / "results_speed.json",
    HERE.parent / "wire" / "results_throughput.json",
    HERE.parent / "pipeline" / "results_speed.json",
)
PAYLOAD = 1448 / 1514
"""Of a frame on the emulated links, what is not TCP's, IP's and Ethernet's."""
ALLOW = ("decoupled", "history", "onebit", "stale")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict what was measured."""

    data: str = "../shared/data"
    """Folder of raw data sets."""
    measured: tuple[Path, ...] = MEASURED
    """Measured rows."""
    hosts: int = 4
    """Emulated hosts of those rows."""
    cores: float = 0.45
    """Of each."""
    memory: float = 5e9
    """Bytes of each."""
    latency: float = 2e-4
    """Seconds of a message between them."""
    fresh: bool = False
    """Plan anew what was planned before."""
    out: Path = HERE
    """Folder of the results."""


@dataclass(frozen=True)
class Measured:
    """A run.

    Args:
        case: What was trained, on which links.
        plan: How it was cut, as a plan is called.
        run: Its settings.
        rate: Of links, in Mbit/s.
        seconds: Of an epoch.
        bytes: Of an epoch.
        held: Bytes that the fullest rank held.
    """

    case: str
    plan: str
    run: TrainCommand
    rate: float
    seconds: float
    bytes: float
    held: float


def rows_of(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a benchmark's results, by their keys."""
    told = json.loads(file.read_text())
    if "rows" in told:
        yield from ((row["key"], row) for row in told["rows"])
    else:
        yield from told.items()


def measured(options: Options) -> list[Measured]:
    """All runs of some files that a plan may be for."""
    found = []
    for file in options.measured:
        for key, row in rows_of(file):
            if "command" not in row or "epoch_seconds" not in row or not row.get("held_bytes"):
                continue  # rows of before what ranks hold was noted are of other days
            words = shlex.split(row["command"].replace("--out DIR", ""))[2:]
            run = parse_train([*words, "--data.root", options.data])
            cut, model = run.parallel, run.model
            axes = {"pipe": cut.pipe, "graph": cut.graph or 1, "tensor": cut.tensor}
            told = {axis: size for axis, size in axes.items() if size > 1}
            told |= {"decouple": True} if cut.decouple else {}
            told |= {"codec": cut.codec} if cut.codec != "none" else {}
            told |= {"max_age": cut.max_age} if cut.max_age else {}
            graph = key.partition("/")[0]
            case = f"{graph}/{model.name}/{model.layers}/{model.hidden}/{row['rate']:g}"
            name = " ".join(f"{axis}={value}" for axis, value in told.items())
            total = row["bytes_per_epoch"]["total"]
            held = max(row["held_bytes"])
            found.append(Measured(case, name, run, row["rate"], row["epoch_seconds"], total, held))
    return found


def cluster(options: Options, rate: float, folder: Path) -> Path:
    """The emulated hosts as a cluster's file."""
    file = folder / "emulated.toml"
    link = rate * 1e6 / 8 * PAYLOAD
    values = {"hosts": options.hosts, "devices": 1, "memory": options.memory, "speed": options.cores}
    values |= {"crowded": contention(os.cpu_count() or 1)}
    values |= {"inside": link, "between": link, "latency": options.latency, "copying": copying()}
    lines = ['name = "emulated hosts"', *(f"{name} = {value}" for name, value in values.items())]
    file.write_text("\n".join(lines) + "\n")
    return file


@cache
def copying(size: int = 1 << 28) -> float:
    """Seconds that this machine computes to send or to receive a byte through a socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    chunk = memoryview(bytearray(1 << 20))

    def send() -> None:
        for _ in range(size // len(chunk)):
            one.sendall(chunk)

    with one, other:
        sender, begun, left = threading.Thread(target=send), time.process_time(), size
        sender.start()
        into = bytearray(len(chunk))
        while left:
            left -= other.recv_into(into)
        sender.join()
        return (time.process_time() - begun) / size / 2


def predictions(options: Options, run: TrainCommand, rate: float) -> dict[str, Any]:
    """All plans for what a measured run trained, by name."""
    asked = PlanCommand(
        data=run.data,
        model=run.model,
        train=run.train,
        allow=ALLOW,
    )
    begun = time.perf_counter()
    with TemporaryDirectory() as folder:
        asked = replace(asked, cluster=str(cluster(options, rate, Path(folder))))
        found = planned(asked, _builder(asked.model))
    seconds = time.perf_counter() - begun
    plans = [*found.fitting, *(one for one, _ in found.refused)]
    return {"plan_seconds": seconds, "plans": {one.name: one.record() for one in plans}}


def table(runs: list[Measured], found: Mapping[str, Any]) -> str:
    """Each run beside its prediction, then how far off they are and how good the choices."""
    lines = [
        "| what, Mbit/s | cut | an epoch, s: predicted | measured | off by | MB sent: predicted | measured |"
        " MB held by the fullest rank: predicted | measured |",
        "|" + "---|" * 9,
    ]
    errors, bytes_off, held_off = [], [], []
    seen: dict[str, dict[str, tuple[float, float, bool]]] = {}
    for one in runs:
        plan = found.get(one.case, {"plans": {}})["plans"].get(one.plan)
        if plan is None:
            continue
        guess, size = plan["epoch_seconds"], sum(plan["bytes_per_epoch"].values())
        errors.append(guess / one.seconds - 1)
        bytes_off.append(abs(size / one.bytes - 1))
        seen.setdefault(one.case, {})[one.plan] = guess, one.seconds, plan["exact"]
        lines.append(
            f"| {one.case} | {one.plan} | {guess:.3f} | {one.seconds:.3f} | {errors[-1]:+.0%} |"
            f" {size / 1e6:,.2f} | {one.bytes / 1e6:,.2f} | {plan['memory_bytes'] / 1e6:,.1f} |"
            f" {one.held / 1e6:,.1f} |"
        )
        held_off.append(abs(plan["memory_bytes"] / one.held - 1))
    if len(errors) > 1:
        off = [abs(error) for error in errors]
        lines += [
            "",
            f"{len(off)} runs: off by {median(off):.0%} (median), {quantiles(off, n=10)[-1]:.0%} (90th"
            f" percentile), {median(errors):+.0%} in the middle; bytes by {max(bytes_off):.2%} at most.",
        ]
    if held_off:
        good = sum(off <= 0.1 for off in held_off)
        lines.append(
            f"What a rank holds is within 10 % in {good} of {len(held_off)} runs; off by"
            f" {median(held_off):.0%} (median), {max(held_off):.0%} at most."
        )
    for name, only in (("exact cuts", True), ("all cuts", False)):
        ratios = [
            ratio
            for each in seen.values()
            if (ratio := _choice([r for r in each.values() if r[2] or not only]))
        ]
        if ratios:
            good = sum(ratio <= 1.05 for ratio in ratios)
            lines.append(
                f"Of {name} the chosen one is within 5 % of the best in {good} of {len(ratios)};"
                f" at worst {max(ratios):.2f} times as slow."
            )
    return "\n".join(lines) + "\n"


def _choice(rows: list[tuple[float, float, bool]]) -> float | None:
    """How many times as slow as the best measured run the best predicted one was."""
    if len(rows) < 2:
        return None
    return min(rows)[1] / min(took for _, took, _ in rows)


def main(options: Options) -> None:
    """Predict what is missing, write the table."""
    torch.set_num_threads(1)
    runs = measured(options)
    file = options.out / "results.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() and not options.fresh else {}
    for one in runs:
        if one.case not in found:
            found[one.case] = predictions(options, one.run, one.rate)
            file.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{one.case}: planned in {found[one.case]['plan_seconds']:.1f} s", flush=True)
    (options.out / "results.md").write_text(table(runs, found))
    print(table(runs, found))


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
