"""Steady: times that are taken again until two agree, on a machine where others may compute too.

Where it sits: ``epoch_costs`` and ``contention`` measure with it; ``cache`` is told what did not agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

AGREE: Final = 0.1
"""By so much of the less two times may differ that agree: about the error of what is predicted from them."""
MOST: Final = 12
"""So often a thing is timed at most,"""
AT_LEAST: Final = 0.5
"""or for so many seconds in all: what is short is disturbed more."""


def clock() -> Callable[[], float]:
    """What tells seconds: those that this process computes, so that waits for a core do not count.

    With several threads they would be the sum of all threads': then it is the wall's.
    """
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def steady(found: Sequence[float]) -> tuple[float, float]:
    """What two times agree on, and by which share of the less they differ: the two least ones.

    Whatever else a machine does makes a time longer, and never shorter.
    """
    least = sorted(found)[:2]
    if len(least) < 2 or least[0] <= 0.0:
        return least[0], 0.0 if len(least) > 1 and least[1] <= 0.0 else float(len(least) < 2)
    return sum(least) / 2, least[1] / least[0] - 1.0


def again(found: Sequence[float], turns: int) -> bool:
    """Whether to take another time: before there are so many, and while no two agree, within limits."""
    if len(found) < turns:
        return True
    return (len(found) < MOST or sum(found) < AT_LEAST) and steady(found)[1] > AGREE
