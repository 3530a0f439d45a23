"""Times on the GPU: medians of CUDA events; on a CPU, of the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], repeats: int = 7, warm: int = 2) -> float:
    """The median of several runs."""
    for _ in range(warm):
        work()
    synchronize()
    found = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
    return median(found)


def copy_rate(numbers: int) -> float:
    """Bytes per second of a copy on the device, those read and those written."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = torch.randn(numbers, device=device), torch.empty(numbers, device=device)
    return 8 * numbers / seconds(lambda: y.copy_(x))
