"""Peer group: which ranks a group has, how long to wait for them, and which rank to blame for a fault.

Where it sits: ``channel`` sends and receives on top of it; ``work`` waits through it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from kagome.comm.stats import Kind, Traffic
from kagome.comm.transport import failures
from kagome.comm.transport.device import HOST, backend_of
from kagome.comm.transport.process_group import TorchWork, Transport
from kagome.comm.transport.routes import Route
from kagome.comm.transport.shared_memory import SharedMemory
from kagome.comm.watchdog import Watchdog
from kagome.comm.work import ChannelWork
from kagome.errors import KagomeError

RouteOpener = Callable[[Sequence[Route]], Mapping[Route, dist.ProcessGroup]]
"""Makes a group for each route, and returns those that this rank is in; all ranks of the mesh call it."""


class PeerGroup:
    """One rank's view of a group.

    Args:
        group: The process group; None for a single rank.
        device: Device of this rank's tensors.
        timeout: Seconds after which a wait fails.
        watch: The watchdog, which knows what each peer is doing; without it errors do not say so.
        lane: Tag of this channel: messages with different tags never match.
        traffic: Counters to add to; new ones if None.
        shared_memory: Memory that other ranks of this host read. With gloo, large messages to them use it.
        name: This rank in the world, used if ``group`` is None.
        staged: Whether a GPU's tensors travel through the host's memory although the group has a backend for
            them.
        opener: With nccl, makes the groups of routes: see :meth:`Channel.open_routes`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        *,
        timeout: float = 300.0,
        watch: Watchdog | None = None,
        lane: Literal[0, 1] = 0,
        traffic: Traffic | None = None,
        shared_memory: SharedMemory | None = None,
        name: int = 0,
        staged: bool = False,
        opener: RouteOpener | None = None,
    ) -> None:
        self.device, self.timeout, self.watch = torch.device(device), timeout, watch
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        # Errors and the watchdog name ranks of the world; all else uses ranks of the group.
        self.names = [name] if group is None else dist.get_process_group_ranks(group)
        self.lane, self._group = lane, group
        # gloo's point-to-point operations support host memory only.
        staged = staged or (group is not None and backend_of(group, self.device) == "gloo")
        self.send_device = HOST if staged else self.device
        self._transport = None if group is None else Transport(group, lane, shared_memory, self.send_device)
        self._opener, self._opened = opener, set[Route]()  # open routes, also those of other ranks
        self._gloo = self._transport is not None and self._transport.gloo
        # nccl's waits are ordered on the device's stream, so the host's clock tells nothing about them.
        self._times = self._gloo
        self.timer: Callable[[str], AbstractContextManager[object]] | None = None
        """Called with ``exchange`` around each exchange that is not counted as weights or other, to record
        its time."""
        self.traffic = Traffic() if traffic is None else traffic

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of these ranks; None if there is a single rank."""
        return self._group

    def attach_shared_memory(self, shared_memory: SharedMemory | None) -> None:
        """Send large messages to ranks of this host through shared memory.

        All ranks call this at the same point.
        """
        if self._transport is not None:
            self._transport.shared_memory = shared_memory

    @property
    def shared_memory(self) -> SharedMemory | None:
        """Memory that other ranks of this host read; None if there is none."""
        return None if self._transport is None else self._transport.shared_memory

    @property
    def lanes(self) -> bool:
        """Whether tags keep channels apart, as gloo's do; nccl has one order of collectives for all ranks."""
        return self._gloo

    def streams(self, peer: int) -> bool:
        """Return whether data to and from a peer may be split into several messages."""
        # gloo sends segment by segment. Shared memory takes a message in one piece, and nccl takes all peers'
        # messages in one grouped call.
        return (
            self._transport is not None
            and self._gloo
            and peer != self.rank
            and not self._transport.shares_memory_with(peer)
        )

    def close(self, patience: float = 0.0) -> None:
        """Release the group and the shared memory.

        gloo closes its connections only when nothing refers to the group any more.

        Args:
            patience: Seconds that peers have to read the rest of the shared memory.
        """
        if self._transport is not None and self._transport.shared_memory is not None:
            self._transport.shared_memory.close(patience)
        self._group = self._transport = self._opener = None

    def take_traffic(self) -> Traffic:
        """Return what this rank has sent and how long it waited since the last call, by kind."""
        return self.traffic.take()

    def timed(self, kind: Kind) -> AbstractContextManager[object]:
        """Return the context in which an exchange of a kind is timed."""
        return nullcontext() if self.timer is None or kind in ("weights", "other") else self.timer("exchange")

    def _add(self, kind: Kind, count: int, messages: int = 1) -> None:
        self.traffic.bytes[kind] += count
        self.traffic.messages[kind] += messages

    def finish(self, pending: ChannelWork, most: int | None = None) -> None:
        """Wait for the remaining messages of an exchange.

        Args:
            pending: The exchange to wait for.
            most: Number of messages to wait for, from the first on; all by default.

        Raises:
            CommError: If a peer was late or its connection was lost.
            KagomeError: The error that a peer reported before it ended.
        """
        works, action, begun = pending.works, pending.action, time.monotonic()
        asked = len(works) if most is None else most
        # A collective has no peer of its own: it waits for all others.
        others = [peer for peer in range(self.size) if peer != self.rank]
        awaited = sorted({peer for peer, _ in works if peer is not None}) or others
        names = [self.names[peer] for peer in awaited]
        streams = self.watch is not None and not self._gloo and self.device.type != HOST.type
        with nullcontext() if self.watch is None else self.watch.waiting(action, names):
            for place, (peer, work) in enumerate(works[:asked]):
                try:
                    before = _marked(self.device) if streams else None
                    self._wait(work, begun, collective=peer is None)
                    if before is not None and self.watch is not None:
                        # The host goes on; the stream waits between the two.
                        self.watch.streamed(action, names, before, _marked(self.device))
                except RuntimeError as error:
                    left = [p for p, _ in works[place:] if p is not None]
                    fault = self._fault(error, left or others, action, collective=peer is None)
                    # A work object keeps its connections open. Once the references to it are gone, they close
                    # with the group, and the peers' waits fail at once instead of at their time limits.
                    works.clear()
                    del work
                    raise fault from error.with_traceback(None)
        ended = time.monotonic()
        del works[:asked]
        if not self._times:
            return
        self.traffic.waited[pending.kind] += ended - begun
        if not works:
            self.traffic.ended(pending.kind, pending.begun, ended)

    def _wait(self, work: TorchWork, begun: float, *, collective: bool) -> None:
        if not self._gloo:
            work.wait()  # with a time limit, nccl would block the host instead of the stream
            return
        # A collective ends itself at its own time limit. If it still ran, destroying the group would hang.
        limit = self.timeout + 5 if collective else self.timeout
        left = max(begun + limit - time.monotonic(), 0.01)  # 0 would mean no time limit
        work.wait(timedelta(seconds=left))

    def report_error(self, error: BaseException) -> None:
        """Report the error that ends this rank in mid-epoch, so that ranks waiting for it raise it too."""
        if self.watch is not None:
            self.watch.report_error(error)

    def _fault(self, error: RuntimeError, peers: list[int], action: str, *, collective: bool) -> KagomeError:
        """Return the error for a failed wait.

        ``peers`` are the ranks still awaited, the one that failed first.

        If a rank reported its own error, that error is returned unchanged.
        """
        # The peer that ended published its error first. It says more than the closed connection that it left.
        reported = None if self.watch is None else self.watch.reported()
        if reported is not None:
            return reported
        late = failures.is_late(error)
        if late:
            elsewhere = [peer for peer in peers if self._elsewhere(action, peer)]
            # A peer that waits in the same action is a victim of the late rank as well. A message between two
            # ranks was late because of its sender in any case.
            blamed = (elsewhere or peers) if collective else [peers[0], *elsewhere]
        else:
            dead = self._transport.dead_peers(peers) if self._transport is not None and collective else []
            blamed = (dead or peers) if collective else peers[:1]
        names = [self.names[peer] for peer in dict.fromkeys(blamed)]
        described = [f"rank {name}" if self.watch is None else self.watch.describe(name) for name in names]
        return failures.broken_wait(
            self.names[self.rank], action, described, late=self.timeout if late else None
        )

    def _elsewhere(self, action: str, peer: int) -> bool:
        return self.watch is not None and bool(self.watch.late(action, [self.names[peer]]))


def _marked(device: torch.device) -> torch.Event:
    """Return an event that occurs when the device's current stream comes to this point."""
    event = torch.Event(device)
    event.record()
    return event
