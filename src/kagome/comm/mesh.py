"""Mesh: the ranks of a run arranged along three axes, with their channels, opened and closed as a context.

Where it sits: a run opens the mesh first. All other code receives its channels.

::

    rank = (stage * graph + part) * tensor + slice    part 0    part 1
                                           stage 0    0   1     2   3     ─ graph: the ranks of one stage
                                           stage 1    4   5     6   7
                                                      │ pipe: the ranks of one part and slice

It does not build on torch's ``DeviceMesh``: ranks are grouped along two axes only (``tensor`` shares the
channel of ``graph``), which leaves little to slice. A DeviceMesh also accepts no time limit, sets the CUDA
device by itself, and needs a process group.
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
from kagome.comm.transport.device import HOST, Agreement, agree, backend_of, own_device
from kagome.comm.transport.rendezvous import JoinedGroup, current, given_store, join
from kagome.comm.watchdog import Watchdog
from kagome.config import Parallel
from kagome.errors import KagomeError, LaunchError
from kagome.launch.environment import Ranks, environment
from kagome.launch.finalizer import close_waiting
from kagome.launch.threads import CpuShare, seat, threads, while_waiting

TAKEN_WITHIN = 10.0
"""Seconds that a rank waits at the end for its peers to read the rest of its shared memory."""
AFTER_ERROR = 1.0
"""The same wait after an error, long enough to send the answer that makes peers raise the same error."""


@dataclass(frozen=True)
class Mesh:
    """All ranks of a run, and the place of this rank among them.

    Args:
        size: Number of ranks in the world.
        rank: This rank in the world.
        axes: Number of ranks along each axis, ``pipe``, ``graph`` and ``tensor``; their product is ``size``.
        local_rank: This rank among the ranks of its host.
        device: Device of this rank's tensors.
        world: The channel of all ranks. Its counters include the traffic of all other channels.
        graph: The channel of the ranks in this rank's stage that hold the other parts of the graph, or the
            other slices of its vertices and features.
        weights: A channel of the same ranks with its own tags, so that gradients are summed while halos are
            exchanged.
        pipe: The channel of the ranks that hold this rank's part, in the order of their stages.
        threads: Number of compute threads of each rank.
        threads_alone: Number of this rank's while the other stages of its part wait for it.
        watch: The watchdog, which knows what each rank is doing; None with one rank.
        notes: Texts that tell the user about the ranks' devices.
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
    threads_alone: int
    watch: Watchdog | None
    notes: tuple[str, ...] = ()

    @property
    def stage(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.pipe.rank

    @property
    def part(self) -> int:
        """Index of this rank's part of the graph."""
        return self.graph.rank

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute with the threads of the other stages of this part too, which wait inside the block.

        All ranks of the part enter it. It does nothing on a GPU, between hosts, or where the user chose the
        number of threads, before or since the mesh was opened.
        """
        before = torch.get_num_threads()
        if self.device.type != "cpu" or before != self.threads[self.rank]:
            yield
            return
        torch.set_num_threads(self.threads_alone)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def doing(self, action: str) -> None:
        """Publish what this rank computes from now on, such as ``epoch 2: optimizer``."""
        if self.watch is not None:
            self.watch.doing(action)


@contextmanager
def open_mesh(
    parallel: Parallel | None = None,
    *,
    timeout: float = 300.0,
    log: Callable[[str], None] = print,
    always_group: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Iterator[Mesh]:
    """Join the ranks that the environment describes, and leave them at the end, also after an error.

    A process group that the script created itself is used and left open; one that another open mesh created
    is shared. With one rank no group is created, unless ``always_group`` asks for one. While the mesh is open
    torch uses this rank's share of its host's threads, unless the user chose their number: see
    :func:`kagome.launch.threads.chosen`.

    Args:
        parallel: The axes to split along; they must fit the number of ranks.
        timeout: Seconds after which a wait fails.
        log: Called with one line when a wait takes long.
        always_group: Create a process group for a single rank too.
        group: The ranks, if they are not all of the script's: those of one axis of its ``DeviceMesh``.

    Yields:
        The mesh.

    Raises:
        ConfigError: If the axes need another number of ranks.
        CommError: If the ranks do not meet.
        LaunchError: If the environment is invalid, or some ranks have a GPU and some have none.
    """
    close_waiting()
    # A default group that no open mesh has created is the user's own.
    given = group is not None or (dist.is_initialized() and current() is None)
    ranks = _given_ranks(group) if given else environment()
    fitted = (parallel or Parallel()).fit(ranks.size)
    device, joined, store, devices = _met(ranks, given, timeout, always_group, group)
    watch: Watchdog | None = None
    channels: list[Channel] = []
    stages, parts = fitted.pipe, ranks.size // fitted.pipe
    groups = MeshGroups(ranks.rank, stages, parts, device, timeout, staged=devices.staged, world=group)
    patience = AFTER_ERROR
    stack = ExitStack()
    try:
        if store is not None and ranks.size > 1:
            # Before the channels, whose first exchanges may already wait for a late rank.
            # Told before the time limit: nccl's own watchdog then ends the process, and names no rank.
            tells = min(10.0, timeout / 4)
            watch = Watchdog(
                _of_this_mesh(store, ranks.rank), ranks.rank, ranks.size, log=log, warn_after=tells
            )
        world, graph, pipe = groups.open(
            channels, watch, shared_memory=fitted.shared_memory, late=fitted.max_age > 0
        )
        # Closed like the others, although it shares the group and the memory of ``graph``: closing twice is
        # harmless.
        channels.append(weights := graph.beside())
        shares = stack.enter_context(_fitting_threads(world, parts))
        axes = {"pipe": fitted.pipe, "graph": groups.parts // fitted.tensor, "tensor": fitted.tensor}
        lanes = (world, graph, weights, pipe)
        notes = devices.notes
        yield Mesh(ranks.size, ranks.rank, axes, ranks.local_rank, device, *lanes, *shares, watch, notes)
        # Only without an error will the peers read the rest of what was sent.
        patience = TAKEN_WITHIN
    except KagomeError as error:
        # Peers that wait for this rank then raise the same error, not one about a closed connection.
        if watch is not None:
            watch.report_error(error)
        raise
    finally:
        stack.close()
        _leave(watch, channels, groups, joined, patience)


def _met(
    ranks: Ranks, given: bool, timeout: float, always_group: bool, group: dist.ProcessGroup | None
) -> tuple[torch.device, JoinedGroup | None, Store | None, Agreement]:
    """Return this rank's device, the joined group, the store, and the ranks' agreement on their devices."""
    device = own_device(ranks, _bound() if given else None)
    if given:
        if backend_of(dist.group.WORLD, device) == "gloo":
            device = HOST  # the script chose gloo for all its tensors
        store = given_store()
        if store is not None and group is not None:
            # Ranks are counted within the group: other groups of the same script have the same numbers.
            store = PrefixStore(f"kagome-group-{group.group_name}", store)
        return device, None, store, _given_agreement(store, ranks, device)
    if ranks.size == 1 and not always_group:
        return device, None, None, Agreement()
    joined = join(ranks, device, timeout)
    return device, joined, joined, joined.agreement


def _leave(
    watch: Watchdog | None,
    channels: Sequence[Channel],
    groups: MeshGroups,
    joined: JoinedGroup | None,
    patience: float,
) -> None:
    """Close the watchdog, then the channels in reverse order, then the groups.

    Peers have some seconds to read the rest of the shared memory.
    """
    # First, because its thread uses the store. Its last record shows the peers where this rank stopped.
    if watch is not None:
        watch.close()
    limit = time.monotonic() + patience
    for each in reversed(channels):
        each.close(max(0.0, limit - time.monotonic()))
    groups.close()
    if joined is not None:
        joined.leave()


@contextmanager
def _fitting_threads(channel: Channel, parts: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Set torch's thread count to this rank's share of the cores inside the block.

    The compiled kernels use the same count.

    Yields:
        The threads of each rank, and those of this rank while the other stages of its part wait.
    """
    before, rank = torch.get_num_threads(), channel.rank
    # Ranks of a host may share cores, which no rank can find out by itself.
    found: Any = channel.gather_objects(seat(before), "cores of each rank", [CpuShare])
    counts, stages = threads(found), range(rank % parts, channel.size, parts)
    torch.set_num_threads(counts[rank])
    try:
        yield counts, while_waiting(rank, [other for other in stages if other != rank], found)
    finally:
        torch.set_num_threads(before)


def _bound() -> int | None:
    """Return the GPU of a script that created its process group itself; None if LOCAL_RANK decides."""
    # The device of ``init_process_group(device_id=...)``.
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        return int(bound.index)
    if "LOCAL_RANK" in os.environ or not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_device_index()


def _given_agreement(store: Store | None, ranks: Ranks, device: torch.device) -> Agreement:
    """Compare the devices of ranks whose script created the process group.

    Raises:
        LaunchError: If some ranks have a GPU and some have none, or if ranks share a GPU and the group has no
            backend for the host's memory.
    """
    if store is None or ranks.size == 1:
        return Agreement(backend_of(dist.group.WORLD, device))
    # The store outlives a mesh. With the number, a mesh does not read the keys of an earlier one.
    number = store.add(f"kagome-given/{ranks.rank}", 1)
    found = agree(store, f"kagome-given-devices/{number}", ranks, device)
    if found.staged and backend_of(dist.group.WORLD, HOST) != "gloo":
        raise LaunchError(
            f"a GPU for each rank, since the script's process group has {dist.get_backend_config()} alone",
            "; ".join(found.notes),
            hint="init_process_group() without a backend, which makes gloo too, or one rank a GPU",
        )
    return found


def _given_ranks(group: dist.ProcessGroup | None) -> Ranks:
    size = dist.get_world_size(group)
    return Ranks(
        rank=dist.get_rank(group),
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(size))),
    )


def _of_this_mesh(store: Store, rank: int) -> Store:
    """Return a store whose keys belong to this mesh alone.

    It relies on all ranks opening their meshes in one order.
    """
    return PrefixStore(f"kagome-mesh-{store.add(f'kagome-meshes/{rank}', 1)}", store)
