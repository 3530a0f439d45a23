"""Contention: the speed of a core while the others are busy, relative to its speed alone.

Where it sits: ``autoplan.plan`` asks before it plans for the machine at hand, whose cores share caches and
memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from kagome.profile.cache import MeasurementCache
from kagome.profile.steady_times import again, steady

ROWS, WIDTH, EDGES = 20_000, 128, 100_000
"""Size of the timed work, a product and a sum over neighbours: larger than a core's own cache."""
SECONDS = 0.3
"""Duration of one measurement."""


def crowding(cores: int, kept: MeasurementCache) -> float:
    """Return the contention of a number of cores, from the cache if it has been measured before."""
    return float(kept.value("contention", cores, lambda: list(contention(cores)), lambda found: found[1])[0])


def work_done(seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the rate, in rounds per second, of a product and a sum over neighbours.

    Args:
        seconds: How long to measure.
        clock: The clock that counts these seconds.
    """
    draws = torch.Generator().manual_seed(0)  # its own, so that no other random numbers change
    rows, weight = (torch.rand(count, WIDTH, generator=draws) for count in (ROWS, WIDTH))
    whence, where = torch.randint(0, ROWS, (2, EDGES), generator=draws)
    # Allocate before timing: how long an allocation takes depends on what the process did before.
    product, sums, read = torch.empty_like(rows), torch.empty_like(rows), torch.empty(EDGES, WIDTH)
    turns, begun = 0, clock()
    while (spent := clock() - begun) < seconds:
        torch.mm(rows, weight, out=product)
        torch.index_select(product, 0, whence, out=read)
        sums.zero_().index_add_(0, where, read)
        turns += 1
    return turns / spent


def contention(cores: int, turns: int = 3) -> tuple[float, float]:
    """Measure the work of one of several busy cores, as a share of the work of one core alone; at most 1.

    Args:
        cores: The number of cores that are busy together.
        turns: The number of measurements alone and together, in alternation. More are taken until two of each
            agree, and those count.

    Returns:
        The share, and its relative uncertainty.

    Cost:
        About two seconds; up to eight if others use the machine.
    """
    if cores < 2:
        return 1.0, 0.0

    def done(together: int) -> float:
        found = [0.0] * together

        def work(number: int) -> None:
            torch.set_num_threads(1)
            # Thread time, because waiting for a core does not make the core slow.
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
    torch.set_num_threads(before)  # the number that a thread sets also holds for later threads
    (alone, apart), (crowded, also) = steady(one), steady(many)
    return min(1.0, alone / crowded), max(apart, also)
