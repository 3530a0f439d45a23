"""The bed: processes that are ranks of a job with a fake GPU each, kept for all tests of this folder.

Where it sits: ``conftest`` makes one a session. ``run(world, function, *args)`` calls a function on so many ranks,
which find themselves as torchrun would have started them; a Trainer joins them by itself.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from fake_gpu import cuda, launches, nccl
from fake_gpu.waits import Waits
from pool import LARGEST, Pool, answered, calls, calm

_waits: list[Waits] = []


def bed() -> Pool:
    """Ranks that wait for calls; ``Pool.run`` calls a function without a channel."""
    return Pool(_work)


def waits() -> Waits:
    """This process's count of waits of the host."""
    return _waits[0]


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
    library = cuda.start(LARGEST)
    nccl.start(library)
    launches.start()
    _waits.append(Waits(library))
    for world, generation, call in calls(connection):
        os.environ.update(_job(rank, world, port, generation))
        torch.manual_seed(0)
        random.seed(0)
        connection.send_bytes(answered(call, _leave))


def _job(rank: int, world: int, port: int, number: int) -> dict[str, str]:
    """What torchrun tells a rank. Its agent keeps the ranks' store; here the pool does."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(number),
    }


def _leave() -> None:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
