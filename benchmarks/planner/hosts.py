"""Hosts: how fast emulated hosts compute, and what messages between them take, all four at once.

Where it sits: ``main.py`` asks before it predicts; the same file is what it runs on the hosts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from cluster import Cluster  # noqa: E402
from pipeline.speed import THREADS  # noqa: E402

from kagome.comm.channel import Channel  # noqa: E402
from kagome.comm.exchange import ExchangeRequest  # noqa: E402
from kagome.profile.contention import work_done  # noqa: E402

SIZES = 1 << 12, 1 << 16, 1 << 20
"""Bytes to each peer."""
ROWS, WIDTH = 500, 128
"""Of the work between two exchanges, about a small model's: a host that computes has no share of its core to
spare for messages."""
MEETINGS, TURNS = 4, 3
"""Exchanges in a turn, and turns, of which the median counts."""
SECONDS, WORKS = 1.0, 2
"""Of the work by which hosts are compared with this machine, and how often."""


def measured(cluster: Cluster, rates: Sequence[float]) -> dict[str, Any]:
    """Hosts' pace beside one core of this machine that is busy alone; links' bytes a second and latency.

    This process computes with one thread from then on, as a host does.

    Args:
        cluster: The hosts.
        rates: Mbit/s that links are given, one after another.

    Returns:
        ``paces`` of the hosts, and their median, ``pace``; ``links``, by rate: bytes a second that a host
        sends to all others at once, while they do the same, and seconds of an empty message to one of them,
        as between pieces of work.

    Raises:
        RuntimeError: If a host fails.
    """
    torch.set_num_threads(1)  # one for each core where OMP_NUM_THREADS is not set
    alone = [work_done(SECONDS) for _ in range(WORKS)]
    with TemporaryDirectory() as name, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        words = [sys.executable, __file__, name, str(len(rates))]
        running = pool.submit(cluster.launch, words, env=THREADS)
        try:
            for turn, rate in enumerate(rates):
                while not (folder / f"ready-{turn}").exists() and not running.done():
                    time.sleep(0.02)
                cluster.shape(rate)
                (folder / f"go-{turn}").touch()
            done = running.result()
        except BaseException:
            cluster.end()
            raise
    failed = [one for one in done if one.returncode]
    if failed:
        raise RuntimeError(failed[0].stderr)
    said = [json.loads(one.stdout.splitlines()[-1]) for one in done]
    links = {}
    for turn, rate in enumerate(rates):
        took = [max(1e-6, median(one["seconds"][turn][size] for one in said)) for size in range(len(SIZES))]
        # Each size counts by its share, not by its seconds.
        others = cluster.hosts - 1
        units = [[others / each, size * others / each] for size, each in zip(SIZES, took, strict=True)]
        (latency, byte), _ = nnls(np.array(units) * [1, 1e-6], np.ones(len(SIZES)))
        links[f"{rate:g}"] = [1e6 / float(byte), float(latency)]
    alone += [work_done(SECONDS) for _ in range(WORKS)]
    paces = [one["work"] / median(alone) for one in said]
    return {"pace": median(paces), "paces": paces, "links": links}


def exchanged(channel: Channel, size: int | None) -> float:
    """Seconds of some work and an exchange of so many bytes with each peer; or of the work alone."""
    draws = torch.Generator().manual_seed(0)
    rows, weight = (torch.rand(count, WIDTH, generator=draws) for count in (ROWS, WIDTH))
    whence, where = torch.randint(0, ROWS, (2, 5 * ROWS), generator=draws)
    message = torch.zeros(channel.size * (size or 0) // 4, 1)
    counts, seconds = [(size or 0) // 4] * channel.size, []
    for turn in range(TURNS):
        channel.barrier(f"turns {turn}")
        begun = time.perf_counter()
        for _ in range(MEETINGS):
            torch.zeros_like(rows).index_add_(0, where, (rows @ weight).index_select(0, whence))
            if size is not None:
                channel.start(message, ExchangeRequest(counts, counts, f"turn {turn}")).wait()
        seconds.append((time.perf_counter() - begun) / MEETINGS)
    return median(seconds)


def main(folder: Path, rates: int) -> None:
    """What one host does; at each rate, once it has been told that links have it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    channel = Channel(dist.group.WORLD, torch.device("cpu"))
    seconds = []
    for turn in range(rates):
        channel.barrier(f"rate {turn}")
        (folder / f"ready-{turn}").touch()
        while not (folder / f"go-{turn}").exists():
            time.sleep(0.02)
        work = exchanged(channel, None)
        seconds.append([max(0.0, exchanged(channel, size) - work) for size in SIZES])
    channel.barrier("work")
    work = median(work_done(SECONDS) for _ in range(WORKS))
    channel.barrier("end")
    print(json.dumps({"seconds": seconds, "work": work}), flush=True)
    os._exit(0)  # gloo may end a process otherwise that leaves while another does


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
