"""Contention: how fast a core computes while the others do too, beside how fast it does alone.

Where it sits: ``autoplan.plan`` asks before it plans for the machine at hand: cores share caches and memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from kagome.profile.cache import MeasurementCache
from kagome.profile.steady_times import again, steady

ROWS, WIDTH, EDGES = 20_000, 128, 100_000
"""Of the work that is timed: a product and a sum over neighbours, larger than a core's own cache."""
SECONDS = 0.3
"""Of one measurement."""


def crowding(cores: int, kept: MeasurementCache) -> float:
    """The contention of so many cores; measured once where it is kept."""
    return float(kept.value("contention", cores, lambda: list(contention(cores)), lambda found: found[1])[0])


def work_done(seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Turns a second of a product and a sum over neighbours, for so long by a clock."""
    draws = torch.Generator().manual_seed(0)  # nobody else's numbers change
    rows, weight = (torch.rand(count, WIDTH, generator=draws) for count in (ROWS, WIDTH))
    whence, where = torch.randint(0, ROWS, (2, EDGES), generator=draws)
    # No memory is asked for on the way: how long that takes depends on what a process did before.
    product, sums, read = torch.empty_like(rows), torch.empty_like(rows), torch.empty(EDGES, WIDTH)
    turns, begun = 0, clock()
    while (spent := clock() - begun) < seconds:
        torch.mm(rows, weight, out=product)
        torch.index_select(product, 0, whence, out=read)
        sums.zero_().index_add_(0, where, read)
        turns += 1
    return turns / spent


def contention(cores: int, turns: int = 3) -> tuple[float, float]:
    """Work that one of so many busy cores does, as a share of what one alone does; at most 1.

    Args:
        cores: At work together.
        turns: Of each kind, one after the other, or more until two of each agree; those count.

    Returns:
        The share, and by which share of itself it may be off.

    Cost:
        About two seconds; up to eight where others compute.
    """
    if cores < 2:
        return 1.0, 0.0

    def done(together: int) -> float:
        found = [0.0] * together

        def work(number: int) -> None:
            torch.set_num_threads(1)
            # Its own seconds: a core that a thread has to wait for is not a slow one.
            found[number] = work_done(SECONDS, time.thread_time)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(together)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(found) / together

    before = torch.get_num_threads()
    one, many = list[float](), list[float]()
    while again(one, turns) or again(many, turns):
        one.append(1 / done(1))
        many.append(1 / done(cores))
    torch.set_num_threads(before)  # what a thread sets, later threads begin with
    (alone, apart), (crowded, also) = steady(one), steady(many)
    return min(1.0, alone / crowded), max(apart, also)
