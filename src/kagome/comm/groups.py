"""Process groups: those along a mesh's axes, each with its channel and its shared memory.

Where it sits: ``mesh`` opens them once the ranks have met, and closes them before the ranks leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from kagome.comm.channel import Channel
from kagome.comm.transport.device import HOST, backend_of
from kagome.comm.transport.mailbox import Mailbox
from kagome.comm.transport.routes import Route
from kagome.comm.transport.shared_memory import SHARE, MemoryAllowance, SharedMemory
from kagome.comm.watchdog import Watchdog
from kagome.launch.host_memory import available_bytes


class MeshGroups:
    """The process groups of a mesh.

    Args:
        rank: This rank in the world.
        stages: Number of ranks along the pipe axis.
        parts: Number of ranks along the graph axis.
        device: Device of this rank's tensors.
        timeout: Seconds after which a wait fails.
        staged: Whether a GPU's tensors travel through the host's memory.
        world: The group of all ranks of the mesh; None for torch's default group.
    """

    def __init__(
        self,
        rank: int,
        stages: int,
        parts: int,
        device: torch.device,
        timeout: float,
        *,
        staged: bool = False,
        world: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.stages, self.parts, self._world = rank, stages, parts, world
        self._device, self._timeout, self._staged = device, timeout, staged
        self._created: list[dist.ProcessGroup] = []

    def open(
        self, channels: list[Channel], watch: Watchdog | None, *, shared_memory: bool, late: bool = False
    ) -> tuple[Channel, Channel, Channel]:
        """Create the missing groups and their channels.

        All ranks call this, and create groups in the same order.

        Args:
            channels: List that each channel is added to as soon as it exists, so that none stays open after
                an error.
            watch: The watchdog, which knows what each peer is doing.
            shared_memory: Whether ranks of one host may use shared memory.
            late: Whether rows may be used one epoch after they were sent.

        Returns:
            The channels of the world, of this rank's stage, and of its part (with its slice).
        """
        # Two stages of three ranks (here ``parts`` counts the slices too):
        #
        #     rows        [0 1 2]  [3 4 5]      one group a stage: the graph channel
        #     columns     [0 3]  [1 4]  [2 5]   one group a part and slice: the pipe channel
        everyone = self._world or (dist.group.WORLD if dist.is_initialized() else None)
        device = torch.device(self._device)
        native = everyone is not None and not self._staged and backend_of(everyone, device) != "gloo"
        stage, part = divmod(self.rank, self.parts)
        rows = [list(range(s * self.parts, (s + 1) * self.parts)) for s in range(self.stages)]
        columns = [[s * self.parts + p for s in range(self.stages)] for p in range(self.parts)]
        # With a single axis, its group is the world: a second group would only cost connections.
        split = self.stages > 1 and self.parts > 1
        in_stage = self._own(rows) if split else None
        in_part = self._own(columns) if split else None
        world: Channel | None = None

        def channel(group: dist.ProcessGroup | None, members: list[list[int]]) -> Channel:
            opened = Channel(
                group,
                self._device,
                timeout=self._timeout,
                watch=watch,
                # The first channel makes the counters, and the others add to them.
                traffic=None if world is None else world.traffic,
                name=self.rank,
                staged=self._staged,
                opener=partial(self._open_routes, members),
            )
            # Before anything that may fail, so that an error in the next lines leaves no channel open.
            channels.append(opened)
            if native and opened.size > 1:
                channels.append(opened.connect("control", self._host_group(members)))
            memory = open_shared_memory(
                opened, wanted=shared_memory, beside=None if world is None else world.shared_memory
            )
            opened.attach_shared_memory(memory)
            return opened

        world = channel(everyone, [list(range(self.stages * self.parts))])
        # An axis of a single rank has the group None: its channel is the identity.
        graph = world if self.stages == 1 else channel(in_stage, rows)
        pipe = world if self.parts == 1 and self.stages > 1 else channel(in_part, columns)
        assert (graph.rank, pipe.rank) == (part, stage)
        if late and self.parts > 1:
            channels.append(graph.connect("patient", self._own(rows)))
        return world, graph, pipe

    def close(self) -> None:
        """Destroy the groups that were created here. By then no channel may hold a reference to one."""
        while self._created:
            group = self._created.pop()
            # Already ended with the default group, since a peer left it; or torch lost the group's name on an
            # error. Either way nothing is left to end, and the error that led here is the one to be seen.
            with suppress(ValueError, AssertionError, RuntimeError, KeyError):
                dist.destroy_process_group(group)

    def _open_routes(
        self, members: list[list[int]], routes: Sequence[Route]
    ) -> dict[Route, dist.ProcessGroup]:
        """Create a group of two ranks for each route, and return those that this rank is in.

        Args:
            members: The ranks of each of several channels that all have these routes.
            routes: The routes, by ranks within a channel.
        """
        found: dict[Route, dist.ProcessGroup] = {}
        # With a device the group connects now, and not at its first message.
        device = torch.device(self._device)
        options = {} if device == HOST else {"device_id": device}
        backend = backend_of(self._world, device)
        # One order on all ranks: a new group is a step of every rank.
        for route in routes:
            for ranks in members:
                pair = [ranks[route.sender], ranks[route.receiver]]
                group = self._new(pair, backend=backend, **options)
                if self.rank in pair:
                    found[route] = group
        return found

    def _host_group(self, members: list[list[int]]) -> dist.ProcessGroup:
        """Create a gloo group of the ranks of this rank's channel."""
        (mine,) = [each for each in members if self.rank in each]
        # By its members alone: beside an nccl group with a device, torch lets the ranks that are not in a new
        # group take part in a split of that one's communicator, and gloo's members take no part.
        found: dist.ProcessGroup = self._new(mine, backend="gloo", use_local_synchronization=len(members) > 1)
        return found

    def _new(self, members: list[int], **options: Any) -> Any:
        """Create a group of some ranks; each rank calls this also for groups that it is not in."""
        group = dist.new_group(members, timeout=timedelta(seconds=self._timeout), **options)
        if self.rank in members:
            self._created.append(group)
        return group

    def _own(self, members: list[list[int]]) -> dist.ProcessGroup:
        """Create several groups, in one order on all ranks, and return the one that contains this rank."""
        for each in members:
            # torch names a group by how many were made before it, so each rank makes also those that it is
            # not in.
            self._new(each)
        return self._created[-1]


def open_shared_memory(
    channel: Channel, *, wanted: bool = True, beside: SharedMemory | None = None
) -> SharedMemory | None:
    """Find out which ranks can read each other's memory. All ranks of the group call this.

    Args:
        channel: The channel of the group.
        wanted: Whether this rank offers its memory; it takes part in the exchanges in either case.
        beside: This rank's shared memory for a larger group. Both share one allowance.

    Returns:
        The shared memory; None if no other rank can read it.
    """
    if channel.size == 1:
        return None
    # Two ranks share memory only if each can open the mailbox of the other, and both learn that:
    #
    #     a ──offer: process id, descriptor, cookie──> b tries to open it ──seen──> a
    #     b ──offer───────────────────────────────────> a tries to open it ──seen──> b
    #
    # A rank that cannot or may not share takes part in both exchanges, because they are collectives.
    mailbox: Mailbox | None = None
    if wanted and channel.lanes and channel.send_device.type == "cpu":
        with suppress(OSError):
            mailbox = Mailbox(channel.rank, channel.size, None if beside is None else beside.mailbox)
    offers: list[Any] = channel.gather_objects(
        mailbox and mailbox.offer, "show memory to the ranks of this host"
    )
    seen = [
        mailbox is not None and offer is not None and rank != channel.rank and mailbox.open(rank, offer)
        for rank, offer in enumerate(offers)
    ]
    found: list[Any] = channel.gather_objects(seen, "find the ranks of this host")
    peers = frozenset(rank for rank in range(channel.size) if seen[rank] and found[rank][channel.rank])
    if mailbox is None or not peers:
        if mailbox is not None:
            mailbox.close()
        return None
    mailbox.keep(tuple(peers))
    if beside is not None:
        return SharedMemory(mailbox, peers, beside.allowance)
    # 256 MiB where the system does not tell its free memory.
    free = available_bytes()
    return SharedMemory(
        mailbox, peers, MemoryAllowance(2**28 if free is None else int(SHARE * free / (len(peers) + 1)))
    )
