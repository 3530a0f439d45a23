"""Floor: the bytes that an aggregation must move over the bandwidth that this machine reaches.

Where it sits: ``aggregation`` sets its times beside these.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

LARGE = 1 << 29
"""Bytes of an array far larger than any cache."""
IN_L3 = 12 << 20
"""Bytes of an array that lies in the last cache, not in the ones before."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second: read from memory, copied in memory (read and written), read from the last cache."""

    threads: int
    read: float
    copy: float
    cache: float


def bandwidth(threads: int, *, large: int = LARGE, in_cache: int = IN_L3, turns: int = 7) -> Bandwidth:
    """Measure it. A copy counts each byte twice: read and written."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, y = torch.ones(large // 4), torch.ones(large // 4)
        small = torch.ones(in_cache // 4)
        read = _best(lambda: x.sum(), turns)
        copy = _best(lambda: y.copy_(x), turns)
        cached = _best(lambda: [small.sum() for _ in range(20)], turns) / 20
    finally:
        torch.set_num_threads(before)
    return Bandwidth(threads, large / read, 2 * large / copy, in_cache / cached)


def _best(do: object, turns: int) -> float:
    assert callable(do)
    do()
    taken = []
    for _ in range(turns):
        begun = time.perf_counter()
        do()
        taken.append(time.perf_counter() - begun)
    return min(taken)


@dataclass(frozen=True)
class Floors:
    """Seconds below which an aggregation cannot be.

    Args:
        gathered: Every edge's row comes from memory: no row is in a cache when it is read again.
        cached: Every edge's row comes from the last cache, at the cache's bandwidth.
        once: Every row comes from memory once, and is in a cache whenever it is read again.
    """

    gathered: float
    cached: float
    once: float


def floors(vertices: int, edges: int, width: int, weights: int, wide: Bandwidth) -> Floors:
    """The floors of one aggregation forward.

    Args:
        vertices: Rows read and rows written.
        edges: Rows gathered.
        width: Columns, float32.
        weights: Weights an edge: 0, 1 or the number of heads.
        wide: What the machine reaches.
    """
    row, tables = 4 * width, 4 * edges * (1 + weights) + 8 * vertices
    result = vertices * row
    return Floors(
        gathered=(edges * row + tables + result) / wide.read,
        cached=edges * row / wide.cache + (tables + result) / wide.read,
        once=(2 * result + tables) / wide.read,
    )


def caches() -> dict[str, str]:
    """Sizes of the caches of the first core, as the kernel tells them: ``{"L2": "1024K", ...}``."""
    found: dict[str, str] = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size, shared = (
                (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
        except OSError:
            continue
        if kind != "Instruction":
            found[f"L{level}"] = f"{size}, cores {shared}"
    return found or {"caches": f"unknown, {os.cpu_count()} cores"}


def spread(seconds: list[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return median(seconds), min(seconds), max(seconds)
