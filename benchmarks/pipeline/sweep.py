"""Sweep: one run of ranks on emulated hosts, whose links get one rate after another.

Where it sits: ``speed.py`` makes a row of each rate's epochs; starting ranks takes longer than most epochs.

::

    metrics.jsonl   1 2 | 3 4 5 6 7 8 | 9 10 | 11 12 ...
    links           100 Mbit/s ───────▲ 250 Mbit/s ─────      set as soon as the last line is there
    counted               3 to 8              11 to ...       epochs that have seen two rates are not
    cores               │◄──────►│          │◄──              what hosts use between these lines
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster import Cluster

SETTLE = 2
"""Epochs after a change that are not counted: one has seen both rates, and where rows are late its line comes
an epoch later. The first ones of a run build what the others use."""
LOOK = 0.02
"""Seconds between looks at the run's lines."""


Cores = list[tuple[float, float]]
"""In use by each host, or so many seconds of them: its own, its kernel's."""


@dataclass(frozen=True)
class Stretch:
    """Some epochs on links of one rate.

    Args:
        rate: Mbit/s of each host's link, each way.
        epochs: That are counted.
    """

    rate: float
    epochs: int


def length(stretches: Sequence[Stretch]) -> int:
    """Epochs of a run that has all of them."""
    return sum(stretch.epochs + SETTLE for stretch in stretches)


def swept(
    cluster: Cluster,
    words: Sequence[str],
    folder: Path,
    stretches: Sequence[Stretch],
    *,
    env: Mapping[str, str],
    seconds: float,
) -> tuple[list[subprocess.CompletedProcess[str]], list[list[dict[str, Any]]], list[Cores]]:
    """Run a command on all hosts, with one rate after another.

    Args:
        cluster: The hosts.
        words: The command; it trains for :func:`length` epochs.
        folder: Where it writes ``metrics.jsonl``.
        stretches: Rates, in order.
        env: Variables beside this process's own.
        seconds: Time limit of all.

    Returns:
        What each rank said; for each stretch the lines of the epochs that count (none if it was not reached);
        and cores that each host had in use meanwhile (none where CPU time is not counted).

    Raises:
        subprocess.TimeoutExpired: After the time limit.
    """
    file, ends, cores = folder / "metrics.jsonl", [0], list[Cores]()
    cluster.shape(stretches[0].rate)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cluster.launch, words, env=env, seconds=seconds)

        def come(goal: int) -> tuple[float, Cores]:
            """Time, and CPU time so far, once there are so many lines."""
            while not running.done() and _lines(file) < goal:
                time.sleep(LOOK)
            return time.monotonic(), cluster.used()

        try:
            for stretch, after in zip(stretches, [*stretches[1:], None], strict=True):
                begun, before = come(ends[-1] + SETTLE)
                ended, used = come(ends[-1] + SETTLE + stretch.epochs)
                ends.append(_lines(file))
                if after is not None:
                    cluster.shape(after.rate)
                cores.append(_in_use(before, used, ended - begun))
            done = running.result()
        except BaseException:
            cluster.end()
            raise
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return done, [lines[begin + SETTLE : end] for begin, end in pairwise(ends)], cores


def _in_use(before: Cores, after: Cores, seconds: float) -> Cores:
    return [
        ((own - a) / seconds, (kernel - b) / seconds)
        for (a, b), (own, kernel) in zip(before, after, strict=True)
    ]


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0
