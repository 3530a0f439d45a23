"""Steady times: repeats a timing until two times agree, on a machine that others may use too.

Where it sits: ``epoch_costs`` and ``contention`` measure with it. ``cache`` stores no times that disagree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

AGREE: Final = 0.1
"""Largest relative difference of two times that agree; it is about the error of predictions from them."""
MOST: Final = 12
"""Most times that are taken, unless they sum to less than ``AT_LEAST``."""
AT_LEAST: Final = 0.5
"""Seconds that a timing may take in all before ``MOST`` ends it: short times are disturbed more."""


def clock() -> Callable[[], float]:
    """Return the clock for timings: process time, so that waits for a core do not count.

    With several threads process time would be the sum over all threads, so wall time is used.
    """
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def steady(found: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the two smallest times, and their difference as a share of the smaller one.

    The smallest times count because other work on the machine can only make a time longer.
    """
    least = sorted(found)[:2]
    if len(least) < 2 or least[0] <= 0.0:
        return least[0], 0.0 if len(least) > 1 and least[1] <= 0.0 else float(len(least) < 2)
    return sum(least) / 2, least[1] / least[0] - 1.0


def again(found: Sequence[float], turns: int) -> bool:
    """Return whether to take another time: up to ``turns`` times always, then until two agree or a limit."""
    if len(found) < turns:
        return True
    return (len(found) < MOST or sum(found) < AT_LEAST) and steady(found)[1] > AGREE
