"""The rows of ``headline.py``: what each runs, in whole processes of either checkout, and its lines.

Where it sits: ``headline`` takes the jobs by turns; ``headline_table`` shows the lines. What is timed,
and how, is that of ``benchmarks/start``, ``memory``, ``pipeline/made.py`` and ``graph_parallel/late.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent
sys.path[:0] = [str(BENCHMARKS / each) for each in ("graph_parallel", "pipeline", "single_device")]

import late  # noqa: E402
import made  # noqa: E402
from headline_table import Goal, Line  # noqa: E402

SIDES = ("before", "now")
GRAPHS = made.HERE / "runs" / "graphs"
"""Where the made graph lies; both sides read the same file."""
MERGING = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""With which Kagome starts several ranks, since a commit after that of before."""
MODELS = ("gcn", "sage", "gat")
CUT = "2x4"
Result = dict[str, Any]


def main_of(folder: str) -> ModuleType:
    """Return ``main.py`` of a folder of benchmarks, of which many have one, by a name of its own."""
    spec = importlib.util.spec_from_file_location(f"{folder}_main", BENCHMARKS / folder / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(checkout: Path) -> dict[str, str]:
    """The variables of a process that runs a checkout's own code."""
    found: dict[str, str] = main_of("before_after").environment(checkout)
    return found


@dataclass(frozen=True)
class Sizes:
    """How much is run.

    Args:
        graph: The made graph of memory and pipelines.
        memory: Epochs of a run of memory. Kagome keeps freed memory from the second on.
        guarded: Epochs of a pipeline with its guard; the first three do not count.
        pipeline: Epochs of one without, and of torchgpipe.
        late: Epochs of exact, late and sampled rows; two and the last do not count.
        smoke: Whether the graph of late rows is a tiny one.
    """

    graph: str = made.GRAPH
    memory: int = 4
    guarded: int = 33
    pipeline: int = 12
    late: int = 11
    smoke: bool = False


SMOKE = Sizes("sbm:vertices=300,degree=6,features=16,classes=4", 3, 6, 5, 5, True)


@dataclass(frozen=True)
class Place:
    """Where the jobs run.

    Args:
        checkouts: Both checkouts.
        folders: A folder of each, with its caches and runs.
        data: Folder with the raw files of Cora, a copy.
        sizes: How much is run.
    """

    checkouts: Mapping[str, Path]
    folders: Mapping[str, Path]
    data: Path
    sizes: Sizes

    def env(self, side: str) -> dict[str, str]:
        """The variables of a side's processes: its own code and its own caches."""
        kept = {"KAGOME_CACHE": str(self.folders[side] / "cache")}
        kept["NUMBA_CACHE_DIR"] = str(self.folders[side] / "numba")
        return {**environment(self.checkouts[side]), **kept}


@dataclass(frozen=True)
class Job:
    """What a turn runs once.

    Args:
        run: Runs it, and returns what it found.
        needs: The package of a rival, which may be missing.
        warm: Whether it runs once before the turns, and does not count: it compiles, or fills a cache.
    """

    run: Callable[[Place], Result]
    needs: str = ""
    warm: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the issue.

    Args:
        jobs: By name, in the order of a turn.
        lines: What is shown.
        once: Seconds before the first turn, on a quiet machine of two cores.
        turn: Seconds of a turn there.
    """

    jobs: Mapping[str, Job]
    lines: Sequence[Line]
    once: float
    turn: float


# The start ---------------------------------------------------------------------------------------


def start(place: Place, side: str, *, cold: bool) -> Result:
    """Seconds from the command to the end of the first epoch."""
    options = argparse.Namespace(source=place.checkouts[side] / "src", data=place.data, graph="Cora")
    folder = place.folders[side] / "start"
    folder.mkdir(parents=True, exist_ok=True)
    return {"seconds": main_of("start").kagome_start(options, folder, cold=cold)}


def plain(place: Place) -> Result:
    """Seconds of a script of plain PyG with one epoch, imports and end of the process with it."""
    options = argparse.Namespace(source=place.checkouts["now"] / "src", data=place.data, graph="Cora")
    return {"seconds": main_of("start").plain_start(options, place.folders["now"])}


def start_row() -> Row:
    """Cora, two ranks, one epoch."""
    jobs = {"PyG": Job(plain)}
    for side in SIDES:
        jobs[f"warm, {side}"] = Job(partial(start, side=side, cold=False), warm=True)
        jobs[f"empty, {side}"] = Job(partial(start, side=side, cold=True))
    lines = [
        Line(f"start, {words}", "seconds", "s", f"{how}, before", f"{how}, now", {"PyG": "plain PyG"}, goal)
        for how, words, goal in (
            ("warm", "full caches", Goal(3.5)),
            ("empty", "empty caches", Goal(6.0)),
        )
    ]
    return Row(jobs, lines, once=25, turn=37)


# Memory ------------------------------------------------------------------------------------------


def memory(place: Place, side: str, way: str, model: str, more: Mapping[str, str] | None = None) -> Result:
    """The peak of a process that trains, above imports and graph."""
    words = [way, model, place.sizes.graph, str(place.sizes.memory), str(GRAPHS)]
    # One rank has the whole machine.
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    env = {**place.env(side), **dict.fromkeys(threads, str(os.cpu_count() or 1)), **(more or {})}
    command = [sys.executable, str(HERE / "peak.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit("\n".join(done.stderr.splitlines()[-12:]))
    found: Result = json.loads(done.stdout.splitlines()[-1])
    ran = Path(found.pop("kagome"))  # a path of this machine, which no result is to have
    if not ran.is_relative_to(place.checkouts[side]):
        raise SystemExit(f"{side} ran the code of {ran}, and not of {place.checkouts[side]}")
    return found


def memory_row() -> Row:
    """One rank, three layers."""
    jobs, lines = dict[str, Job](), list[Line]()
    for model in MODELS:
        rivals = {f"{model}, DGL": "DGL"}
        jobs[f"{model}, DGL"] = Job(partial(memory, side="now", way="dgl", model=model), needs="dgl")
        if (
            model != "gat"
        ):  # a weight an edge comes out of every forward: PyG has no product with an adjacency
            jobs[f"{model}, CSR"] = Job(partial(memory, side="now", way="csr", model=model))
            rivals[f"{model}, CSR"] = "PyG CSR"
        for side in SIDES:
            jobs[f"{model}, {side}"] = Job(partial(memory, side=side, way="kagome", model=model), warm=True)
        started = partial(memory, side="now", way="kagome", model=model, more=MERGING)
        jobs[f"{model}, merging"] = Job(started)
        goal = Goal(1.0, f"{model}, DGL")
        for job, words in (("now", ""), ("merging", ", allocator set as for several ranks")):
            what, now = f"memory, {model.upper()}{words}", f"{model}, {job}"
            lines.append(Line(what, "peak", "MB", f"{model}, before", now, rivals, goal))
    return Row(jobs, lines, once=110, turn=135)


# Pipelines ---------------------------------------------------------------------------------------


def pipeline(place: Place, way: str, side: str = "now") -> Result:
    """The median and the mean epoch of two stages by four chunks, without the first three."""
    sizes = place.sizes
    epochs = sizes.guarded if way == "kagome" else sizes.pipeline
    options = made.Options(epochs=epochs, long_epochs=epochs, graph=sizes.graph)
    found = made.measured(options, CUT, way, place.env(side))
    kept = {name: found[name] for name in ("mean", "loss", "edges kept") if name in found}
    return {"epoch": median(found["seconds"][3:]), **kept}


def pipeline_row() -> Row:
    """Eight GCN layers; torchgpipe as fast as it is."""
    jobs = {"torchgpipe": Job(partial(pipeline, way="torchgpipe"), needs="torchgpipe")}
    for side in SIDES:
        # The first three epochs, which do not count, compile.
        jobs[f"guard, {side}"] = Job(partial(pipeline, way="kagome", side=side))
        jobs[f"no guard, {side}"] = Job(partial(pipeline, way="unguarded", side=side), warm=True)
    rivals, lines = {"torchgpipe": "torchgpipe"}, list[Line]()
    for how, figure, words in (
        ("guard", "mean", "with the guard, mean epoch"),
        ("guard", "epoch", "with the guard, median epoch"),
        ("no guard", "epoch", "no guard, median epoch"),
    ):
        # torchgpipe's epochs are alike, and its mean is beside the mean.
        goal = Goal(1.0, "torchgpipe")
        line = Line(f"pipeline, {words}", figure, "ms", f"{how}, before", f"{how}, now", rivals, goal)
        lines.append(line)
    return Row(jobs, lines, once=70, turn=240)


# Late and sampled rows ---------------------------------------------------------------------------


def rows(place: Place, way: str, side: str) -> Result:
    """The median epoch of exact, late or sampled rows on two ranks, and the memory of the largest rank."""
    folder = place.folders[side] / "late"
    folder.mkdir(parents=True, exist_ok=True)
    options = argparse.Namespace(model="sage", epochs=place.sizes.late, threads=1, runs=folder, fresh=True)
    options.smoke, options.env = place.sizes.smoke, place.env(side)
    # Each checkout cuts the graph itself, once: what it keeps on disk has another form.
    found = late.run(way, late.HOST, 0, options, None)
    sent = found["bytes_per_epoch"]["total"]
    return {
        "epoch": found["seconds"],
        "memory": max(found["peak_memory_bytes"]),
        "sent": sent,
        "loss": found["loss"],
    }


def late_row() -> Row:
    """Three layers of SAGE on one host."""
    jobs, lines = dict[str, Job](), list[Line]()
    for way in ("exact", "late", "sampled"):
        for side in SIDES:
            jobs[f"{way}, {side}"] = Job(partial(rows, way=way, side=side), warm=True)
        exact = {} if way == "exact" else {"exact, now": "exact rows"}
        sides = (f"{way}, before", f"{way}, now")
        goal = Goal(1.0, "exact, now") if exact else None
        lines.append(Line(f"{way} rows, epoch", "epoch", "ms", *sides, exact, goal))
        lines.append(Line(f"{way} rows, memory of a rank", "memory", "MB", *sides, exact))
        lines.append(Line(f"{way} rows, sent an epoch", "sent", "MB", *sides, exact))
    return Row(jobs, lines, once=110, turn=80)


ROWS: Mapping[str, Callable[[], Row]] = {
    "start": start_row,
    "memory": memory_row,
    "pipeline": pipeline_row,
    "late": late_row,
}
