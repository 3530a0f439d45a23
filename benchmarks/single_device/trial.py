"""Trial: one measured run, in a process of its own, watched for memory and time, kept in a file.

Where it sits: the grids (``main``, ``growth``) make trials and read what comes back; ``sides`` runs in the
process. A trial whose file is there is not run again.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = os.sysconf("SC_PAGE_SIZE")
HEADROOM = 1 << 30
"""Bytes of the machine's memory that a trial must leave to the others."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is run: a model on a graph by one side.

    Args:
        side: A name of ``sides.SIDES``.
        graph: A name that ``graphs.load`` knows.
        model: A name of the zoo.
        layers: Message passing layers.
        hidden: Width.
        heads: Attention heads, for models that have them.
        dropout: Share dropped in training.
        warm: Epochs before the timed ones. In the first few a process takes its memory from the system.
        epochs: Most timed epochs.
        seconds: Fewer epochs are timed, though at least two, where they would take longer than this.
        threads: Threads of the process.
    """

    side: str
    graph: str
    model: str
    layers: int = 3
    hidden: int = 128
    heads: int = 8
    dropout: float = 0.0
    warm: int = 3
    epochs: int = 5
    seconds: float = 6.0
    threads: int = os.cpu_count() or 1

    def file(self, turn: int) -> str:
        """The name of its file: readable, and another one for any other settings."""
        mark = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        words = (self.graph, self.model, str(self.layers), str(self.hidden), self.side, mark, str(turn))
        return re.sub(r"[^\w+.-]+", "-", "_".join(words)) + ".json"


Result = dict[str, Any]
"""``seconds`` (timed epochs), ``losses``, ``peak`` and ``absolute`` (bytes), ... or ``error``."""


def environment(threads: int) -> dict[str, str]:
    """The variables of a process that uses so many threads."""
    count = str(threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, count)}


def run(
    trial: Trial, turn: int, *, runs: Path, data: Path | None, fresh: bool = False, limit: float = 600.0
) -> Result:
    """A trial's result: from its file, or from a process started for it.

    Args:
        trial: What to run.
        turn: Which of several runs of the same trial.
        runs: Folder of the results and of prepared graphs.
        data: Folder of raw data sets.
        fresh: Run it even where its file is there.
        limit: Seconds after which it is ended.
    """
    kept = runs / trial.file(turn)
    if kept.exists() and not fresh:
        return dict(json.loads(kept.read_text()))
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as folder:
        out = Path(folder) / "out.json"
        error = apart("measure", (trial, out, runs, data), trial.threads, limit)
        result: Result = {"error": error} if error else json.loads(out.read_text())
    if error and not error.startswith(("out of memory", "more than")):
        return result  # a fault to mend, not a finding to keep
    kept.write_text(json.dumps({"trial": asdict(trial), **result}, indent=1) + "\n")
    return result


def warm_up(models: Sequence[str], runs: Path, threads: int) -> None:
    """Compile what Kagome compiles, in a process of its own, so that no trial's memory shows a compiler.

    Raises:
        SystemExit: If it fails.
    """
    error = apart("warm", (tuple(models), runs), threads, 600.0)
    if error:
        raise SystemExit(error)


def prepare(names: Sequence[str], runs: Path, data: Path | None, threads: int) -> None:
    """Make the graphs' files, each in a process of its own.

    Raises:
        SystemExit: If one cannot be made.
    """
    for name in dict.fromkeys(names):
        error = apart("prepare", (name, runs, data), threads, 600.0)
        if error:
            raise SystemExit(error)


def apart(function: str, given: tuple[Any, ...], threads: int, limit: float) -> str | None:
    """Call a function of ``sides`` in a process of its own, with all imports done and nothing run yet.

    A server imports PyTorch, PyG and Kagome once and forks a process a call: that saves the seconds of the
    imports, and every process starts from the same memory.

    Returns:
        None if it ended well, else what went wrong.
    """
    os.environ.update(environment(threads))
    # The server looks for what it imports first on the path of its own.
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *(p for p in path if p and p != str(HERE))])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sides"])
    with tempfile.NamedTemporaryFile("w+", errors="replace") as said:
        process = context.Process(target=_call, args=(said.name, function, given))
        process.start()
        return watched(process, limit) or _fault(process, Path(said.name))


def _call(said: str, function: str, given: tuple[Any, ...]) -> None:
    with open(said, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        import sides

        getattr(sides, function)(*given)


def watched(process: Any, limit: float) -> str | None:
    """Wait for a process; end it before it takes the machine's memory or more than ``limit`` seconds.

    Returns:
        None if it ended by itself, else why it was ended.
    """
    most = available() - HEADROOM
    begun = time.monotonic()
    while process.is_alive():
        reason = None
        if resident(process.pid) > most or available() < HEADROOM // 2:
            reason = f"out of memory: more than {most / 1e9:.1f} GB"
        elif time.monotonic() - begun > limit:
            reason = f"more than {limit:.0f} s"
        if reason is not None:
            process.kill()
            process.join()
            return reason
        process.join(0.02)
    return None


def _fault(process: Any, said: Path) -> str | None:
    if not process.exitcode:
        return None
    text = said.read_text(errors="replace").strip()
    if process.exitcode == -9 or "DefaultCPUAllocator" in text or "MemoryError" in text:
        return "out of memory"  # the kernel or the allocator was faster than the watch
    lines = text.splitlines()[-12:] or [f"code {process.exitcode}"]
    return "\n".join([f"failed: {lines[-1]}", *lines])


def resident(pid: int) -> int:
    """Resident bytes of a process; 0 where it cannot be known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError, ValueError):
        return 0


def available() -> int:
    """Bytes of memory that a new process may take; a great many where it cannot be known."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 1 << 62
    return int(re.findall(r"MemAvailable:\s+(\d+)", text)[0]) * 1024


def interleaved(
    trials: Sequence[Trial], turns: int, do: Callable[[Trial, int], Result], say: Callable[[str], None]
) -> list[list[Result]]:
    """Run all trials once, then all again: what drifts meets every side alike.

    Returns:
        For each trial its results, one a turn; a trial that failed is not tried again.
    """
    found: list[list[Result]] = [[] for _ in trials]
    for turn in range(turns):
        for trial, results in zip(trials, found, strict=True):
            if any("error" in r for r in results):
                continue
            results.append(do(trial, turn))
            say(f"{trial.graph:>12} {trial.model:>12} {trial.side:>16} turn {turn}: {brief(results[-1])}")
    return found


def brief(result: Result) -> str:
    """A result in a few words."""
    if "error" in result:
        return str(result["error"])
    return f"{median(result) * 1e3:,.0f} ms, {result['peak'] / 1e6:,.0f} MB"


def median(result: Result) -> float:
    """Seconds of the median epoch."""
    return statistics.median(result["seconds"])


@dataclass(frozen=True)
class Figure:
    """A trial's turns put together: the median of their median epochs, its spread, the median peak."""

    seconds: float
    low: float
    high: float
    peak: float
    absolute: float
    turns: tuple[float, ...]


def figure(results: Sequence[Result]) -> Figure | None:
    """What several turns of a trial say; None where it failed."""
    if not results or any("error" in r for r in results):
        return None
    each = tuple(median(r) for r in results)
    peaks = [statistics.median(r[key] for r in results) for key in ("peak", "absolute")]
    return Figure(statistics.median(each), min(each), max(each), *peaks, each)


def ratio(slow: Figure, fast: Figure) -> tuple[float, float, float]:
    """How many times faster: of the medians; least and most of the turns, each with its own neighbour."""
    pairs = [a / b for a, b in zip(slow.turns, fast.turns, strict=False)]
    return slow.seconds / fast.seconds, min(pairs), max(pairs)
