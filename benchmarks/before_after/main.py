"""Is any way of training slower than it was at another commit? Two checkouts, an epoch each by turns.

Run as ``python benchmarks/before_after/main.py --before CHECKOUT``; see README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GRAPH = "sbm:vertices=20000,degree=20,features=128,classes=8,communities=8"
SETTLED = 5
"""Epochs of a run before those that count."""
EPOCHS = 12
"""Pairs of epochs that count, of one start of both sides."""
REAL = HERE / "runs" / "data"
"""Folder of the real graph."""
LIMIT = 300.0
"""Seconds that an epoch, or a start, may take."""
CASES: dict[str, tuple[int, str]] = {
    "gcn, 1 rank": (1, "--model.name gcn"),
    "sage, 1 rank": (1, "--model.name sage"),
    "gat, 1 rank": (1, "--model.name gat --model.heads 4"),
    "gcn, 2 parts": (2, "--model.name gcn --parallel.graph 2"),
    "sage, 2 parts": (2, "--model.name sage --parallel.graph 2"),
    "gat, 2 parts": (2, "--model.name gat --model.heads 4 --parallel.graph 2"),
    "gcn, 2 parts, one bit, late": (
        2,
        "--model.name gcn --parallel.graph 2 --parallel.codec onebit --parallel.max-age 1",
    ),
    "gcn, 2 slices": (2, "--model.name gcn --parallel.tensor 2"),
    "gcn, Cora, 2 parts": (2, "--model.name gcn --parallel.graph 2 --data.name Cora"),
    "gcn2, 2 stages, history": (
        2,
        "--model.name gcn2 --model.layers 8 --parallel.pipe 2 --parallel.chunks 4",
    ),
    "gcn2, 2 stages, history, no guard": (
        2,
        "--model.name gcn2 --model.layers 8 --parallel.pipe 2 --parallel.chunks 4 --parallel.no-guard",
    ),
    "gcn, 2 stages, exact": (
        2,
        "--model.name gcn --parallel.pipe 2 --parallel.chunks 4 --parallel.cross-chunk exact",
    ),
}


STARTS: dict[str, list[str]] = {
    "import kagome": ["-c", "import kagome"],
    "import of the trainer": ["-c", "import kagome; kagome.Trainer"],
    "kagome train --help": ["-m", "kagome", "train", "--help"],
    "2 ranks, one epoch": [
        "-m",
        "kagome",
        "train",
        "--nproc",
        "2",
        "--train.epochs",
        "1",
        "--data.name",
        "digits",
    ],
}
"""Commands by what they tell: words for Python."""


def words(case: str, epochs: int, out: Path) -> list[str]:
    """The flags of a case."""
    common = ["--data.name", GRAPH, "--model.layers", "3", "--model.hidden", "128", *CASES[case][1].split()]
    if "Cora" in case:
        common += ["--data.root", str(REAL)]
    return [*common, "--train.epochs", str(epochs), "--out", str(out)]


def real_graph() -> None:
    """Copy the raw files of Cora, where ``KAGOME_DATA`` has them: what is made of them is written beside."""
    raw = Path(os.environ["KAGOME_DATA"]) / "planetoid" / "Cora" / "raw"
    shutil.copytree(raw, REAL / "Cora" / "raw", dirs_exist_ok=True)


def environment(checkout: Path) -> dict[str, str]:
    """A checkout's own code, on one core a rank; bytecode is kept, as of an installed package."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}


@contextmanager
def started(checkout: Path, case: str, epochs: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks of one side, which wait for their first epoch."""
    ranks, port = CASES[case][0], random.randrange(20_000, 60_000)
    folder.mkdir()
    processes = []
    for rank in range(ranks):
        env = environment(checkout) | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        env |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(HERE / "side.py"), str(folder), *words(case, epochs, folder / "out")]
        with (folder / f"log-{rank}").open("wb") as log:
            processes.append(subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def one_epoch(folder: Path, number: int, processes: list[subprocess.Popen[bytes]]) -> float:
    """Let one side do an epoch; rank 0's seconds, when all its ranks have done it."""
    (folder / f"go-{number}").touch()
    done, until = (
        [folder / f"done-{number}-{rank}" for rank in range(len(processes))],
        time.monotonic() + LIMIT,
    )
    while not all(path.exists() for path in done):
        if time.monotonic() > until or any(process.poll() for process in processes):
            raise SystemExit(f"{folder.name}: epoch {number} did not end\n{(folder / 'log-0').read_text()}")
        time.sleep(0.001)
    return float(done[0].read_text())


def by_turns(before: Path, case: str, start: int) -> dict[str, list[float]]:
    """Seconds of the epochs of both sides, an epoch of each by turns; who goes first alternates.

    Both are started before the first epoch, so that a slow minute of the machine is one of both. Which is
    started first alternates with the starts: the second was up to 3 % slower, of one commit too.
    """
    total, found = SETTLED + EPOCHS, dict[str, list[float]](before=[], now=[])
    with tempfile.TemporaryDirectory() as name:
        folders = {side: Path(name) / side for side in found}
        checkouts = {"before": before, "now": ROOT}
        with ExitStack() as stack:
            processes = {
                side: stack.enter_context(started(checkouts[side], case, total, folders[side]))
                for side in sorted(found, reverse=bool(start % 2))
            }
            for number in range(total):
                for side in sorted(found, reverse=bool(number % 2)):
                    found[side].append(one_epoch(folders[side], number, processes[side]))
    return {side: seconds[SETTLED:] for side, seconds in found.items()}


def commands(before: Path, given: list[str], turns: int) -> dict[str, list[float]]:
    """Seconds of a whole command of both sides, by turns; the first of each compiles and does not count."""
    found = dict[str, list[float]](before=[], now=[])
    for turn in range(-1, turns):
        for side in sorted(found, reverse=bool(turn % 2)):
            with tempfile.TemporaryDirectory() as name:
                command = [sys.executable, *given]
                env, begin = environment(before if side == "before" else ROOT), time.perf_counter()
                subprocess.run(
                    command,
                    env=env,
                    cwd=name,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                if turn >= 0:
                    found[side].append(time.perf_counter() - begin)
    return found


def whole_run(case: str) -> list[str]:
    """The words for Python of ten epochs of a case; the run's files go to the folder it is started in."""
    return ["-m", "kagome", "train", "--nproc", str(CASES[case][0]), *words(case, 10, Path("out"))]


def cells(pairs: list[tuple[float, float]]) -> list[str]:
    """Both medians, and the ratios of the pairs: their median, the least and the most."""
    ratios = [late / early for early, late in pairs]
    return [
        f"{statistics.median(early for early, _ in pairs):.3f} s",
        f"{statistics.median(late for _, late in pairs):.3f} s",
        f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})",
    ]


def of_starts(starts: list[dict[str, list[float]]]) -> list[tuple[float, float]]:
    """A pair a start: the median epoch, and that times the median of the epochs' ratios."""
    pairs = []
    for start in starts:
        old, new = start["before"], start["now"]
        ratio = statistics.median(late / early for early, late in zip(old, new, strict=True))
        pairs.append((statistics.median(old), statistics.median(old) * ratio))
    return pairs


def row(found: dict[str, Any]) -> list[str]:
    """The cells of a case."""
    whole = list(zip(found["command"]["before"], found["command"]["now"], strict=True))
    return [*cells(of_starts(found["epoch"])), *cells(whole)]


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row a case."""
    lines = [
        "| case | starts | epoch before | now | ratio | command before | now | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES.keys() & results.keys():
        found = results[case]
        lines.append(f"| {' | '.join([case, str(len(found['epoch'])), *row(found)])} |")
    lines[2:] = sorted(lines[2:])
    lines += ["", "| start | pairs | before | now | ratio |", "|---|---|---|---|---|"]
    for name in (name for name in STARTS if name in results):
        pairs = list(zip(results[name]["before"], results[name]["now"], strict=True))
        lines.append(f"| {' | '.join([name, str(len(pairs)), *cells(pairs)])} |")
    return "\n".join(lines)


def main() -> None:
    """Run the cases that are missing and write ``results.json`` and ``results.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--starts", type=int, default=6, help="starts of both sides, a few epochs each")
    parser.add_argument("--commands", type=int, default=3, help="pairs of whole commands")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--fresh", action="store_true", help="throw away what was run before")
    arguments = parser.parse_args()
    path = HERE / "results.json"
    results: dict[str, Any] = {}
    if path.exists() and not arguments.fresh:
        results = json.loads(path.read_text(encoding="utf-8"))
    if any("Cora" in case for case in arguments.only):
        real_graph()
    for case in arguments.only:
        if case in results:
            continue
        results[case] = {
            "epoch": [by_turns(arguments.before.resolve(), case, start) for start in range(arguments.starts)],
            "command": commands(arguments.before.resolve(), whole_run(case), arguments.commands),
        }
        path.write_text(json.dumps(results) + "\n", encoding="utf-8")
        (HERE / "results.md").write_text(table(results) + "\n", encoding="utf-8")
        print(f"{case}: {'  '.join(row(results[case]))}", flush=True)
    for name, given in STARTS.items():
        if name not in results:
            results[name] = commands(arguments.before.resolve(), given, 2 * arguments.commands)
            path.write_text(json.dumps(results) + "\n", encoding="utf-8")
            (HERE / "results.md").write_text(table(results) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
