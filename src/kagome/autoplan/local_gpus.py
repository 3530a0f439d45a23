"""Local GPUs: the GPUs that ranks of this machine would compute on, as a cluster.

Where it sits: ``plan`` asks for them where no cluster is named. Layers are measured on a core in any case; a
GPU's seconds are those of a core, divided by the ratio of their memory bandwidths, as for a named cluster.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import torch

from kagome.comm.transport.device import visible
from kagome.launch.host_memory import available_bytes
from kagome.planner.cluster import CORE, Cluster

COPIED: Final = 2**28
"""Bytes of a copy that is timed."""
STAGED: Final = 4e9
"""Rough bandwidth between ranks that share a GPU, in bytes per second: they exchange through the host."""


def local_gpus(ranks: int) -> Cluster | None:
    """Describe the GPUs that local ranks would compute on; None where torch sees none.

    Args:
        ranks: The number of local ranks.

    Cost:
        A few copies of 256 MiB on the first GPU, to it from the host, and to the second one.
    """
    kind, count = visible()
    if not count:
        return None
    used = [torch.device(kind, index) for index in range(min(ranks, count))]
    free = min(torch.accelerator.get_memory_info(device)[0] for device in used)
    # A copy reads and writes each byte; between two GPUs the link carries it once.
    own = 2 * COPIED / _seconds(used[0], used[0])
    link = COPIED / _seconds(used[0], used[1]) if len(used) > 1 else STAGED
    to_host = COPIED / _seconds(torch.device("cpu"), used[0])
    return cluster_of(ranks, count, float(free), own, link, to_host, float(available_bytes() or 0))


def cluster_of(
    ranks: int,
    count: int,
    free: float,
    bandwidth: float,
    link: float,
    to_host: float = 0.0,
    host_memory: float = 0.0,
) -> Cluster:
    """Return ranks on GPUs as a cluster.

    Args:
        ranks: The number of ranks.
        count: The number of GPUs. Several ranks share one if there are fewer than ranks.
        free: Bytes of free memory of a GPU.
        bandwidth: Bytes per second of a GPU's memory.
        link: Bytes per second from a GPU to another one.
        to_host: Bytes per second between a GPU and the host's memory.
        host_memory: Bytes of free memory of the host.

    Example:
        >>> shared = cluster_of(ranks=4, count=2, free=80e9, bandwidth=3000e9, link=200e9)
        >>> shared.name, shared.memory, shared.speed, shared.inside
        ('4 ranks on 2 GPUs of this machine', 40000000000.0, 100.0, 4000000000.0)
    """
    each = -(-ranks // count)
    name = f"{ranks} ranks on {count} GPUs of this machine" if each > 1 else f"{ranks} GPUs of this machine"
    rate = STAGED if each > 1 else link
    gpus = Cluster(name, 1, ranks, free / each, bandwidth / CORE / each, rate, rate)
    # Ranks that share a GPU share its link to the host; the host's memory is for all ranks.
    return replace(gpus, to_host=to_host / each, host_memory=host_memory)


def _seconds(source: torch.device, target: torch.device) -> float:
    """Return the seconds of a copy, of the fastest of a few."""
    # Activations wait in pinned memory, so the link is timed with it.
    rows = torch.empty(COPIED, dtype=torch.uint8, device=source, pin_memory=source.type == "cpu")
    place = torch.empty(COPIED, dtype=torch.uint8, device=target)
    found = []
    for _ in range(4):  # the first one sets up the way between two GPUs
        torch.accelerator.synchronize(target)
        begun = time.perf_counter()
        place.copy_(rows)
        for device in {source, target}:
            if device.type != "cpu":  # torch refuses to wait for the host
                torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - begun)
    return min(found)
