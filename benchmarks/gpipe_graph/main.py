"""What does GPipe cost a graph? Dearing and Wang's four figures again, beside pipelines that lose no edge.

Run: python benchmarks/gpipe_graph/main.py --data.root ../shared/data    (resumes where it stopped)
     python benchmarks/gpipe_graph/main.py --data.root ../shared/data --kinds time    (the times alone)
     python benchmarks/gpipe_graph/main.py --hours 0    (measures nothing, writes tables and figures again)
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import tyro
from settings import DGL, Kind, Setting, Store, for_accuracy, for_time, key

from kagome.config import Data

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train and time the model on each graph in each setting."""

    data: Data = field(default_factory=Data)
    """Only its root counts: the folder of raw data sets."""
    graphs: tuple[str, ...] = ("Cora", "CiteSeer", "PubMed")
    """Graphs; one whose files are not there is left out."""
    kinds: tuple[Kind, ...] = ("accuracy", "time")
    """What to find out."""
    only: tuple[str, ...] = ()
    """Only settings whose name has one of these in it."""
    seeds: int = 10
    """Runs a setting."""
    block: int = 2
    """Seeds that are run in all settings before the next ones."""
    epochs: int = 300
    """Of a run to the end."""
    patience: int | None = None
    """Stop a run when validation has not risen for so many epochs; runs with another value are run again."""
    timed_epochs: int = 23
    """Of a timed run; the first three are not counted."""
    turns: int = 3
    """Timed runs a setting."""
    jobs: int = 1
    """Accuracies at a time, a core each, or one a stage; times have the machine for themselves."""
    provisional: bool = False
    """Mark results as taken beside other work; a run without this takes them again."""
    hours: float | None = None
    """Begin nothing after so long."""
    smoke: bool = False
    """A graph that needs no files, a few epochs."""
    out: Path = HERE
    """Folder of the results."""


def main() -> None:
    """Run what is missing; write ``results.json``, ``results.md`` and the figures."""
    options = tyro.cli(Options, description=str(__doc__))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = "1"  # a rank is a device: one core
    store = Store(options.out / "results.json")
    if not options.smoke:
        run(options, [graph for graph in options.graphs if there(graph, options)])
    else:
        smoke(options)
    import figures
    import tables

    kept = store.read()
    (options.out / "results.md").write_text(tables.text(kept))
    for path in figures.draw(kept, options.out):
        print(path)


def smoke(options: Options) -> None:
    """Everything once, small."""
    tiny = replace(options, seeds=1, epochs=3, timed_epochs=5, turns=1)
    run(replace(tiny, kinds=("time",), only=("pyg", "rebuild-drop2-contiguous")), ["digits"])
    run(replace(tiny, kinds=("accuracy",), jobs=2, only=("pipe1-drop2-", "pipe2")), ["digits"])


def run(options: Options, graphs: list[str]) -> None:
    """All that is missing, until the hours are over."""
    until = time.monotonic() + 3600 * (math.inf if options.hours is None else options.hours)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        trained = []
        for kind, graph, setting, numbers in grid(options, graphs):
            if kind == "accuracy" and options.jobs > 1:
                trained.append(pool.submit(complete, options, until, kind, graph, setting, numbers))
            else:
                complete(options, until, kind, graph, setting, numbers)
        for each in trained:
            each.result()


def complete(
    options: Options, until: float, kind: Kind, graph: str, setting: Setting, numbers: tuple[int, ...]
) -> None:
    """Those of these runs that are missing, if there is time."""
    store = Store(options.out / "results.json")
    kept = store.read()
    missing = tuple(n for n in numbers if lacks(kept.get(key(kind, graph, setting.name, n)), kind, options))
    if missing and time.monotonic() < until:
        print(f"{time.strftime('%H:%M:%S')}  {kind} {graph} {setting.name} {missing}", flush=True)
        start(options, store, kind, graph, setting, missing)


def grid(options: Options, graphs: list[str]) -> Iterator[tuple[Kind, str, Setting, tuple[int, ...]]]:
    """Runs, in an order in which a stop leaves the same of all settings."""
    wanted = [setting for setting in for_accuracy() if chosen(setting, options)]
    timed = [setting for setting in for_time() if chosen(setting, options)]
    if "time" in options.kinds:
        for turn in range(options.turns):
            for graph in graphs:
                yield from (("time", graph, setting, (turn,)) for setting in timed)
    if "accuracy" in options.kinds:
        for first in range(0, options.seeds, options.block):
            numbers = tuple(range(first, min(first + options.block, options.seeds)))
            for graph in graphs:
                yield from (("accuracy", graph, setting, numbers) for setting in wanted)


def chosen(setting: Setting, options: Options) -> bool:
    """Whether it was asked for."""
    return not options.only or any(part in setting.name for part in options.only)


def lacks(row: dict[str, object] | None, kind: Kind, options: Options) -> bool:
    """Whether a result is missing, is of other epochs, or was taken beside other work and now is in quiet."""
    if row is None or (row.get("provisional") and not options.provisional):
        return True
    asked = (options.timed_epochs, None) if kind == "time" else (options.epochs, options.patience)
    return (row["epochs"], row.get("patience")) != asked


def start(
    options: Options,
    store: Store,
    kind: Kind,
    graph: str,
    setting: Setting,
    numbers: tuple[int, ...],
) -> None:
    """Run a worker on one rank a stage; what cannot be had is told and left out."""
    from worker import Work, work

    from kagome.errors import LaunchError
    from kagome.launch.launcher import start_local

    timed = kind == "time"
    facts: dict[str, object] = {"machine": machine()}
    if options.provisional:
        facts["provisional"] = True
    epochs, patience = (options.timed_epochs, None) if timed else (options.epochs, options.patience)
    asked = Work(graph, options.data.root, epochs, patience, numbers, timed, facts, store.path)
    try:
        start_local(setting.pipe, work, setting, asked, loaded=("kagome.train.trainer",))
    except LaunchError as error:
        if setting != DGL:
            raise
        print(f"left out: {str(error).splitlines()[-1]}", flush=True)


def machine() -> str:
    """In words."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "torch_geometric"))
    return f"{os.cpu_count()} cores, {platform.machine()}, {packages}"


def there(graph: str, options: Options) -> bool:
    """Whether a graph's raw files are there."""
    root = Path(options.data.root)
    found = any(any(root.glob(f"{above}{graph}/raw/*")) for above in ("", "*/"))
    if not found:
        print(f"left out: {graph}, no files of it under {root}", flush=True)
    return found


if __name__ == "__main__":
    main()
