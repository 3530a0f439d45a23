"""End: one rank's end of a group: who its peers are, how long they are waited for, who is to blame.

Where it sits: ``channel`` sends and receives on top of it; ``work`` lets it wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from kagome.comm.stats import Kind, Traffic
from kagome.comm.transport import failures
from kagome.comm.transport.process_group import TorchWork, Transport
from kagome.comm.transport.shared_memory import SharedMemory
from kagome.comm.watchdog import Watchdog
from kagome.comm.work import Work
from kagome.errors import KagomeError


class PeerGroup:
    """One rank's end of a group.

    Args:
        group: The process group; None for one rank.
        device: Where this rank's tensors live.
        timeout: Seconds after which a wait is given up.
        watch: Who knows what the peers do; None leaves that out of the errors.
        lane: Messages of one lane never meet those of another.
        traffic: Where to count; its own if None.
        shelf: Memory that ranks of this host read: with gloo, what is large goes to them by it.
        back: With nccl a second group of the same ranks: see
            :class:`kagome.comm.transport.process_group.Transport`.
        name: This rank in the world, where there is no group that knows.
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
        shelf: SharedMemory | None = None,
        back: dist.ProcessGroup | None = None,
        name: int = 0,
    ) -> None:
        self.device, self.timeout, self.watch = torch.device(device), timeout, watch
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.names = [name] if group is None else dist.get_process_group_ranks(group)
        self.lane, self._group = lane, group
        self._wire = None if group is None else Transport(group, lane, shelf, back)
        self._gloo = self._wire is not None and self._wire.gloo
        # gloo's point-to-point knows host memory only.
        self.wire = torch.device("cpu") if self._gloo else self.device
        self.timer: Callable[[str], AbstractContextManager[object]] | None = None
        """Called with ``exchange`` around each of them but sums of weights: where its time is to be noted."""
        self.traffic = Traffic() if traffic is None else traffic

    def lay_on(self, shelf: SharedMemory | None) -> None:
        """Let what is large go to ranks of this host by a shelf; all ranks do it at the same point."""
        if self._wire is not None:
            self._wire.shelf = shelf

    @property
    def shelf(self) -> SharedMemory | None:
        """Memory that ranks of this host read; None if there is none."""
        return None if self._wire is None else self._wire.shelf

    @property
    def lanes(self) -> bool:
        """Whether lanes are apart, by gloo's tags; nccl has one order of collectives for all ranks."""
        return self._gloo

    def streams(self, peer: int) -> bool:
        """Whether what goes to a peer, and comes from it, may do so in several messages."""
        return self._wire is not None and self._gloo and peer != self.rank and not self._wire.near(peer)

    def close(self, patience: float = 0.0) -> None:
        """Let go of the group and the shelf; gloo closes its connections only when nobody holds it any more.

        Args:
            patience: Seconds that peers have to take what is still theirs.
        """
        if self._wire is not None and self._wire.shelf is not None:
            self._wire.shelf.close(patience)
        self._group = self._wire = None

    def take_bytes(self) -> dict[str, int]:
        """Bytes this rank has sent since the last call, by kind."""
        return self.take_traffic().bytes

    def take_traffic(self) -> Traffic:
        """What this rank has sent and waited since the last call, by kind."""
        return self.traffic.take()

    def timed(self, kind: Kind) -> AbstractContextManager[object]:
        """The phase in which an exchange of a kind is noted."""
        return nullcontext() if self.timer is None or kind in ("weights", "other") else self.timer("exchange")

    def _add(self, kind: Kind, count: int) -> None:
        self.traffic.bytes[kind] += count

    def finish(self, pending: Work, most: int | None = None) -> None:
        """Wait for what a pending exchange still misses.

        Args:
            pending: The exchange.
            most: For so many messages, the first ones; by default for all.

        Raises:
            CommError: If a peer was late or lost.
            KagomeError: What a peer has left word of before it ended.
        """
        works, action, begun = pending.works, pending.action, time.monotonic()
        asked = len(works) if most is None else most
        others = [peer for peer in range(self.size) if peer != self.rank]
        awaited = sorted({peer for peer, _ in works if peer is not None}) or others
        names = [self.names[peer] for peer in awaited]
        with nullcontext() if self.watch is None else self.watch.waiting(action, names):
            for place, (peer, work) in enumerate(works[:asked]):
                try:
                    self._wait(work, begun, collective=peer is None)
                except RuntimeError as error:
                    left = [p for p, _ in works[place:] if p is not None]
                    fault = self._fault(error, left or others, action, collective=peer is None)
                    # A work holds its connections open. Dropped with the frames that know it, they close as
                    # soon as the group is destroyed, and the peers' waits end too, not only at their limits.
                    works.clear()
                    del work
                    raise fault from error.with_traceback(None)
        ended = time.monotonic()
        del works[:asked]
        self.traffic.waited[pending.kind] += ended - begun
        if not works:
            self.traffic.ended(pending.kind, pending.begun, ended)

    def _wait(self, work: TorchWork, begun: float, *, collective: bool) -> None:
        if not self._gloo:
            work.wait()  # with a limit, nccl would block the host instead of the stream
            return
        # A collective ends itself at its limit; were it left running, destroying the group would hang on it.
        limit = self.timeout + 5 if collective else self.timeout
        left = max(begun + limit - time.monotonic(), 0.01)  # 0 would mean no limit
        work.wait(timedelta(seconds=left))

    def tell(self, error: BaseException) -> None:
        """Leave word of what ends this rank in mid-epoch: those who wait for it raise the same."""
        if self.watch is not None:
            self.watch.tell(error)

    def _fault(self, error: RuntimeError, peers: list[int], action: str, *, collective: bool) -> KagomeError:
        """The error for a failed wait; ``peers`` are those still awaited, the one that failed first.

        What a rank has left word of is told by those who wait for it, in its own words.
        """
        told = None if self.watch is None else self.watch.told()
        if told is not None:
            return told
        late = failures.is_late(error)
        if late:
            elsewhere = [peer for peer in peers if self._elsewhere(action, peer)]
            blamed = (elsewhere or peers) if collective else [peers[0], *elsewhere]
        else:
            dead = self._wire.dead(peers) if self._wire is not None and collective else []
            blamed = (dead or peers) if collective else peers[:1]
        names = [self.names[peer] for peer in dict.fromkeys(blamed)]
        described = [f"rank {name}" if self.watch is None else self.watch.describe(name) for name in names]
        return failures.broken_wait(
            self.names[self.rank], action, described, late=self.timeout if late else None
        )

    def _elsewhere(self, action: str, peer: int) -> bool:
        return self.watch is not None and bool(self.watch.late(action, [self.names[peer]]))
