"""Mesh: the ranks of a run along its axes, each axis with its channel; opened and closed as one context.

Where it sits: ``run`` opens it first of all; everything else is given its channel.

::

    world rank = stage * parts + part         part 0   part 1   part 2
                                   stage 0      0        1        2      ─ graph: the ranks of one stage
                                   stage 1      3        4        5
                                                │ pipe: the ranks of one part

It does not build on torch's ``DeviceMesh``: with two axes there is little to cut, and a DeviceMesh takes no
time limit, sets the CUDA device by itself, and needs a process group, which a single rank can do without.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from kagome.comm.channel import Channel
from kagome.comm.groups import MeshGroups
from kagome.comm.transport.rendezvous import JoinedGroup, current, given_store, join
from kagome.comm.watchdog import Watchdog
from kagome.config import Parallel
from kagome.errors import KagomeError
from kagome.launch.allocator import keep_freed_memory
from kagome.launch.environment import Ranks, environment
from kagome.launch.finalizer import close_waiting
from kagome.launch.threads import CpuShare, seat, threads

TAKEN_WITHIN = 10.0
"""Seconds that a rank stays at the end for its peers to take what lies on its shelf."""
AFTER_ERROR = 1.0
"""The same after an error: long enough for an answer that makes them raise the same."""


@dataclass(frozen=True)
class Mesh:
    """All ranks of a run, and where this one stands.

    Args:
        size: Ranks in the world.
        rank: This rank.
        axes: Ranks along each axis, ``pipe``, ``graph`` and ``tensor``; their product is ``size``.
        local_rank: This rank among those of its host.
        device: Where its tensors live.
        world: The channel of all ranks. What any channel sends counts into the traffic of all.
        graph: The channel of the ranks that hold the other parts of the graph, or the other slices of its
            vertices and features, in this rank's stage.
        weights: The same ranks on a lane of their own: sums of gradients travel while halos do.
        pipe: The channel of the ranks that hold this rank's part, in the order of their stages.
        threads: Threads of each rank for computing.
        watch: What the ranks are doing; None with one rank.
    """

    size: int
    rank: int
    axes: Mapping[str, int]
    local_rank: int
    device: torch.device
    world: Channel
    graph: Channel
    weights: Channel
    pipe: Channel
    threads: tuple[int, ...]
    watch: Watchdog | None

    @property
    def stage(self) -> int:
        """Which piece of the model is this rank's."""
        return self.pipe.rank

    @property
    def part(self) -> int:
        """Which piece of the graph is this rank's."""
        return self.graph.rank

    def doing(self, action: str) -> None:
        """Tell the others what this rank computes from now on, such as ``epoch 2: optimizer``."""
        if self.watch is not None:
            self.watch.doing(action)


@contextmanager
def open_mesh(
    parallel: Parallel | None = None,
    *,
    timeout: float = 300.0,
    say: Callable[[str], None] = print,
    always_group: bool = False,
) -> Iterator[Mesh]:
    """Join the ranks that the environment names, and leave them at the end, after an error too.

    A process group that the script has made itself is used and left as it is; one that another open mesh has
    made is shared. With one rank there is none, unless ``always_group`` asks for it. Until the end torch has
    the threads that are this rank's share of its host, unless the user chose their number: see
    :func:`kagome.launch.threads.chosen`.

    Args:
        parallel: How to split; must fit the number of ranks.
        timeout: Seconds after which a wait is given up.
        say: Called with a line when a wait grows long.
        always_group: Make a process group for a single rank too.

    Yields:
        The mesh.

    Raises:
        ConfigError: If the split needs another number of ranks.
        CommError: If the ranks do not meet.
        LaunchError: If the environment is no sense.
    """
    close_waiting()
    given = dist.is_initialized() and current() is None
    ranks = _given_ranks() if given else environment()
    fitted = (parallel or Parallel()).fit(ranks.size)
    device = _own_device(ranks)
    if given and dist.get_backend() == "gloo":
        device = torch.device("cpu")
    joined: JoinedGroup | None = None
    if not given and (ranks.size > 1 or always_group):
        joined = join(ranks, device, timeout)
    store = given_store() if given else joined
    watch: Watchdog | None = None
    channels: list[Channel] = []
    groups = MeshGroups(ranks.rank, fitted.pipe, ranks.size // fitted.pipe, device, timeout)
    patience = AFTER_ERROR
    stack = ExitStack()
    try:
        if store is not None and ranks.size > 1:
            watch = Watchdog(_of_this_mesh(store, ranks.rank), ranks.rank, ranks.size, say=say)
        world, graph, pipe = groups.open(
            channels, watch, shared_memory=fitted.shared_memory, late=fitted.max_age > 0
        )
        channels.append(weights := graph.beside())
        keep_freed_memory()
        counts = stack.enter_context(_fitting_threads(world))
        axes = {"pipe": fitted.pipe, "graph": groups.parts // fitted.tensor, "tensor": fitted.tensor}
        lanes = (world, graph, weights, pipe)
        yield Mesh(ranks.size, ranks.rank, axes, ranks.local_rank, device, *lanes, counts, watch)
        patience = TAKEN_WITHIN
    except KagomeError as error:
        if watch is not None:
            watch.tell(error)
        raise
    finally:
        stack.close()
        _leave(watch, channels, groups, joined, patience)


def _leave(
    watch: Watchdog | None,
    channels: Sequence[Channel],
    groups: MeshGroups,
    joined: JoinedGroup | None,
    patience: float,
) -> None:
    """Close what was opened, the last first; peers have some seconds to take what is theirs."""
    if watch is not None:
        watch.close()
    limit = time.monotonic() + patience
    for each in reversed(channels):
        each.close(max(0.0, limit - time.monotonic()))
    groups.close()
    if joined is not None:
        joined.leave()


@contextmanager
def _fitting_threads(channel: Channel) -> Iterator[tuple[int, ...]]:
    """Give torch, which the compiled loops follow, this rank's share of its host's cores for a while."""
    before = torch.get_num_threads()
    found: Any = channel.gather_objects(seat(before), "cores of each rank", [CpuShare])
    counts = threads(found)
    torch.set_num_threads(counts[channel.rank])
    try:
        yield counts
    finally:
        torch.set_num_threads(before)


def _own_device(ranks: Ranks) -> torch.device:
    if torch.cuda.is_available() and ranks.local_size <= torch.cuda.device_count():
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _given_ranks() -> Ranks:
    size = dist.get_world_size()
    return Ranks(
        rank=dist.get_rank(),
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(size))),
    )


def _of_this_mesh(store: Store, rank: int) -> Store:
    """A store in which no other mesh has left anything: all ranks open their meshes in one order."""
    return PrefixStore(f"kagome-mesh-{store.add(f'kagome-meshes/{rank}', 1)}", store)
