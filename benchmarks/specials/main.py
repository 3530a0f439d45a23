"""What does each costly special give? With it and without it, some epochs each by turns, in one run.

Run as ``python benchmarks/specials/main.py --data DIR``; see README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cases import CASES, COMMON, EACH, GRAPHS, SMALL, SPECIALS, Case, Graph

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 600.0
"""Seconds that a turn, or a start, may take."""
LOOK_SECONDS = 0.001
SIDES = ("on", "off")
LEAST = 1.05
"""What a special has to give to stay: the ratio of times, or of memory, without it over with it."""
Start = dict[str, dict[str, Any]]
"""What both sides of one start took: seconds of the epochs, peak memory, uses, the last loss."""


def environment(options: argparse.Namespace, code: str = "as-is") -> dict[str, str]:
    """The checkout's code on one core a rank, with machine code in a folder of the side's own."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    path = os.pathsep.join([str(ROOT / "src"), str(HERE)])
    own = {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(options.runs / "numba" / code)}
    return {**kept, **threads, **own, "KAGOME_DATA": str(options.data)}


def cut(graph: Graph, case: Case, options: argparse.Namespace) -> Path:
    """The graph in parts, made once: no run's time or memory has the cutting in it."""
    size = "small-" if options.smoke else ""
    folder: Path = options.runs / f"parts-{size}{graph}-{case.parts}-{case.cutter}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        name = (SMALL if options.smoke else GRAPHS)[graph]
        command = [sys.executable, "-m", "kagome", "partition", "--data.name", name, "--out", str(part)]
        command += ["--data.root", str(options.runs / "data"), "--parts", str(case.parts)]
        command += ["--partitioner", case.cutter]
        subprocess.run(command, env=environment(options), cwd=HERE, check=True, stdout=subprocess.DEVNULL)
        part.rename(folder)
    return folder


def code_of(special: str, side: str) -> str:
    """The folder of machine code of a side: numba does not see what ``plain.py`` puts into a loop."""
    if side == "on" or special not in ("vector steps", "exponential"):
        return "as-is"
    mark = hashlib.sha256((HERE / "plain.py").read_bytes()).hexdigest()[:8]
    return f"without-{special.replace(' ', '-')}-{mark}"


def compiled(options: argparse.Namespace) -> int:
    """The number of loops in all folders of machine code."""
    return sum(1 for _ in (options.runs / "numba").rglob("*.nbc"))


@contextmanager
def started(
    special: str, side: str, words: list[str], ranks: int, folder: Path, options: argparse.Namespace
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks of one side, which wait for their first turn."""
    port = random.randrange(20_000, 60_000)
    folder.mkdir()
    processes = []
    for rank in range(ranks):
        env = environment(options, code_of(special, side)) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(HERE / "side.py"), "--folder", str(folder), "--special", special]
        command += ["--off"] if side == "off" else []
        command += [*words, "--out", str(folder / "out")]
        with (folder / f"log-{rank}").open("wb") as log:
            processes.append(subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def one_turn(folder: Path, number: int, processes: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Let one side do a turn: rank 0's seconds and loss, the largest peak, all ranks' uses."""
    (folder / f"go-{number}").touch()
    done = [folder / f"done-{number}-{rank}" for rank in range(len(processes))]
    looks = 0  # not the time: all processes may be stopped for a while together
    while not all(path.exists() for path in done):
        looks += 1
        if looks > LIMIT / LOOK_SECONDS or any(process.poll() is not None for process in processes):
            logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("log-*")))
            raise SystemExit(f"{folder.name}: turn {number} did not end\n{logs}")
        time.sleep(LOOK_SECONDS)
    ranks = [json.loads(path.read_text()) for path in done]
    most, uses = max(rank["peak"] for rank in ranks), sum(rank["uses"] for rank in ranks)
    return {**ranks[0], "peak": most, "uses": uses}


def by_turns(special: str, graph: Graph, case: str, start: int, options: argparse.Namespace) -> Start:
    """Start both sides, and let each do some epochs by turns; who goes first alternates.

    Both are started before the first turn, so that a slow minute of the machine is one of both. Which is
    started first alternates with the starts, because a process that is started second may be slower.
    """
    one, way, each = SPECIALS[special], CASES[case], 1 if options.smoke else EACH[graph]
    total = options.settled + options.turns
    words = ["--each", str(each), "--settled", str(options.settled), "--"]
    words += ["--data.partition", str(cut(graph, way, options)), *COMMON.split(), *way.flags.split()]
    # One epoch more than is let: the last one evaluates by itself.
    words += ["--train.epochs", str(each * total + 1)]
    words += ["--train.no-check"] if options.smoke else []
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folders = {side: Path(name) / side for side in SIDES}
        processes = {}
        for side in sorted(SIDES, reverse=bool(start % 2)):
            more = one.off.split() if side == "off" else []
            way_of_side = started(special, side, [*words, *more], way.ranks, folders[side], options)
            processes[side] = stack.enter_context(way_of_side)
        for number in range(total):
            for side in sorted(SIDES, reverse=bool(number % 2)):
                found[side].append(one_turn(folders[side], number, processes[side]))
    return {
        side: {**turns[-1], "seconds": [turn["seconds"] for turn in turns[options.settled :]]}
        for side, turns in found.items()
    }


# Tables ------------------------------------------------------------------------------------------


def times_of(starts: list[Start]) -> list[float]:
    """A ratio a start, without the special over with it: the median of the turns' ratios."""
    return [
        statistics.median(
            off / on for on, off in zip(start["on"]["seconds"], start["off"]["seconds"], strict=True)
        )
        for start in starts
    ]


def peaks_of(starts: list[Start]) -> list[float]:
    """A ratio of peaks a start, without the special over with it."""
    return [start["off"]["peak"] / start["on"]["peak"] for start in starts]


def spread(ratios: list[float]) -> str:
    """The median, the least and the most."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"


def middle(starts: list[Start], side: str, *, of: str) -> float:
    """The median over the starts of a side's median epoch, or of its peak."""
    if of == "peak":
        return statistics.median(start[side]["peak"] for start in starts)
    return statistics.median(statistics.median(start[side]["seconds"]) for start in starts)


def apart(starts: list[Start]) -> float:
    """The largest relative difference between both sides' losses: it is the same training."""
    pairs = [(start["on"]["loss"], start["off"]["loss"]) for start in starts]
    return max(abs(on - off) / max(abs(on), abs(off), 1e-30) for on, off in pairs)


def switched(special: str, starts: list[Start]) -> bool:
    """Whether the special was used with it on, and never with it off."""
    if not SPECIALS[special].judged:
        return True
    return all(start["on"]["uses"] > 0 and start["off"]["uses"] == 0 for start in starts)


def row(special: str, graph: str, case: str, starts: list[Start]) -> str:
    """One pair's line."""
    times = [f"{1e3 * middle(starts, side, of='seconds'):.1f} ms" for side in SIDES]
    peaks = [f"{middle(starts, side, of='peak') / 2**20:.0f} MiB" for side in SIDES]
    used = " / ".join(str(starts[-1][side]["uses"]) for side in SIDES)
    used += "" if switched(special, starts) else " (not switched off)"
    cells = [special, graph, case, str(len(starts)), used, *times, spread(times_of(starts))]
    return f"| {' | '.join([*cells, *peaks, spread(peaks_of(starts)), f'{apart(starts):.0e}'])} |"


def verdict(special: str, results: dict[str, list[Start]]) -> str:
    """The most that a special gives on each graph, and whether it stays."""
    one = SPECIALS[special]
    lines = sum(len((ROOT / "src" / "kagome" / file).read_text().splitlines()) for file in one.files)
    most, cells = 0.0, []
    for graph in (one.large, "Cora"):
        found = [
            (statistics.median(ratios(starts)), f"{what}, {case}")
            for case in one.cases
            if (starts := results.get(f"{special} | {graph} | {case}"))
            for what, ratios in (("time", times_of), ("memory", peaks_of))
        ]
        if not found:
            return f"| {special} | {lines} | | | not measured |"
        best, where = max(found)
        most = max(most, best)
        cells.append(f"{best:.2f} ({where})")
    says = "stays" if most >= LEAST else "goes"
    return f"| {special} | {lines} | {' | '.join(cells)} | {says} |"


def tables(results: dict[str, list[Start]]) -> str:
    """All pairs, and a verdict on each special."""
    lines = [
        "| special | graph | training | starts | uses on / off | epoch on | off | off / on | peak on | off "
        "| off / on | losses differ |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [row(*key.split(" | "), starts) for key, starts in results.items() if starts]
    lines += ["", "| special | lines | most on the large graph | on Cora | verdict |"]
    lines += ["|---|---|---|---|---|"]
    lines += [verdict(special, results) for special, one in SPECIALS.items() if one.judged]
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("KAGOME_DATA"), help="folder of raw data")
    parser.add_argument("--starts", type=int, default=4, help="starts of both sides, some turns each")
    parser.add_argument("--turns", type=int, default=12, help="turns that count, of one start")
    parser.add_argument("--settled", type=int, default=3, help="turns before those that count")
    parser.add_argument("--only", nargs="+", default=list(SPECIALS), choices=list(SPECIALS))
    parser.add_argument("--graphs", nargs="+", default=["large", "Cora"], choices=["large", "Cora"])
    parser.add_argument("--fresh", action="store_true", help="throw away what was run before")
    parser.add_argument("--smoke", action="store_true", help="1 start, 2 turns of an epoch, a small graph")
    parser.add_argument("--runs", type=Path, default=HERE / "runs", help="parts and machine code")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    options = parser.parse_args()
    if options.data is None or not options.data.is_dir():
        parser.error("--data DIR: a folder with planetoid/Cora/raw")
    if options.smoke:
        options.starts, options.turns, options.out = 1, 2, options.runs / "smoke"
    options.runs, options.data = options.runs.resolve(), options.data.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    """Run the starts that are missing and write ``results.json`` and ``results.md`` after each."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ranks are ended as after any error
    path = options.out / "results.json"
    results: dict[str, list[Start]] = {}
    if path.exists() and not options.fresh:
        results = json.loads(path.read_text(encoding="utf-8"))
    pairs = [
        (special, graph, case)
        for special in options.only
        for graph, asked in ((SPECIALS[special].large, "large"), ("Cora", "Cora"))
        if asked in options.graphs
        for case in SPECIALS[special].cases
    ]
    for special, graph, case in pairs:
        starts = results.setdefault(f"{special} | {graph} | {case}", [])
        while len(starts) < options.starts:
            before = compiled(options)
            found = by_turns(special, graph, case, len(starts), options)
            if compiled(options) > before and not options.smoke:
                continue  # a compiler's memory is in a peak, and stays in the process
            starts.append(found)
            path.write_text(json.dumps(results) + "\n", encoding="utf-8")
            (options.out / "results.md").write_text(tables(results) + "\n", encoding="utf-8")
        print(row(special, graph, case, starts), flush=True)
    print(tables(results).partition("\n\n")[2])
    wrong = [pair for pair in pairs if not switched(pair[0], results[" | ".join(pair)])]
    if wrong:
        raise SystemExit(f"not switched off: {wrong}")


if __name__ == "__main__":
    main()
