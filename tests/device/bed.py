"""The bed: processes that are ranks of a job with a fake GPU each, kept for all tests of this folder.

Where it sits: the fixture ``devices`` makes one a session. ``run(world, function, *args)`` calls a function
on so many ranks, which find themselves as ``kagome train`` starts them; a Trainer joins them by itself.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from fake_gpu import cuda, launches, nccl
from fake_gpu.waits import Waits

from pool import LARGEST, Pool, answered, calls, calm

_mine: list[tuple[cuda.Library, Waits]] = []
"""What a worker has started."""


def bed() -> Pool:
    """Ranks that wait for calls; ``Pool.run`` calls a function without a channel."""
    return Pool(_work)


def waits() -> Waits:
    """The process's count of waits of the host, by place."""
    return _mine[0][1]


def library() -> cuda.Library:
    """The process's fake device."""
    return _mine[0][0]


@contextmanager
def without_gpus() -> Iterator[None]:
    """Let Kagome find no GPU inside the block: what it trains then, it trains on the CPU."""
    there = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = there


def _work(rank: int, port: int, connection: Connection) -> None:
    calm()
    made = cuda.start(LARGEST)
    nccl.start(made)
    launches.start()
    _mine.append((made, Waits(made)))
    gc.freeze()  # each call collects, which should not walk all that was imported
    folder = Path(tempfile.gettempdir(), f"kagome-bed-{port}")
    folder.mkdir(exist_ok=True)
    done: Counter[int] = Counter()
    for world, generation, call in calls(connection):
        done[generation] += 1  # the same on all ranks of a generation
        os.environ.update(_job(rank, world, folder / f"{generation}-{done[generation]}"))
        torch.cuda.set_device(0)  # as in a process that has just begun
        torch.manual_seed(0)
        random.seed(0)
        connection.send_bytes(answered(call, _leave))
    shutil.rmtree(folder, ignore_errors=True)


def _job(rank: int, world: int, store: Path) -> dict[str, str]:
    """What Kagome's launcher tells a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "KAGOME_STORE": str(store),
    }


def _leave() -> None:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
