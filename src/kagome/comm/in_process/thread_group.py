"""Thread group: several ranks as threads of one process, with the interface of a channel.

Where it sits: ``verify.check`` splits a small sample in one process with it. Tests use it as the fast level
below real processes.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kagome.comm.exchange import BytesRequest, ExchangeRequest, Op, SegmentSizes, Work
from kagome.comm.stats import KINDS, Kind
from kagome.errors import CommError, KagomeError

T = TypeVar("T")


class _EchoError(CommError):
    """The error of a rank that was stopped by another rank's fault."""


class ThreadGroup:
    """The state that the threads of one group share.

    Args:
        size: Number of threads.
        timeout: Seconds after which a wait fails.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size, self.timeout = size, timeout
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.arrived = threading.Condition()
        self.messages: dict[tuple[int, int, bool, int], Tensor] = {}
        """Point-to-point messages, by sender, receiver, pass (backward or not) and number."""

    def run(self, work: Callable[[ThreadChannel], T]) -> list[T]:
        """Run ``work`` on every rank, each in a thread. An error of any rank ends all of them and is raised.

        Python's garbage collector does not run by itself in the meantime: see :func:`_uncollected`.

        Returns:
            The results in the order of ranks.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        # A new thread starts on device 0, whatever the device of the thread that started it.
        place = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def body(rank: int) -> None:
            try:
                with torch.accelerator.device_index(place):
                    results[rank] = work(ThreadChannel(self, rank))
            except BaseException as error:
                # An aborted barrier ends the ranks that wait at a collective; the notice wakes those that
                # wait for a message.
                errors.insert(0, error)
                self.barrier.abort()
                with self.arrived:
                    self.arrived.notify_all()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        with _uncollected():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            # A rank's own error comes before an echo of it on other ranks, and a KagomeError before others.
            raise min(
                errors,
                key=lambda e: (
                    isinstance(e, _EchoError),
                    isinstance(e, CommError),
                    not isinstance(e, KagomeError),
                ),
            )
        return results


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from running by itself while several threads draw random numbers.

    ``torch.get_rng_state``, and so ``fork_rng`` and ``checkpoint``, creates its tensor while it holds the
    generator's lock. A collection may start at that point, and freeing objects may let another thread run. If
    that thread waits for the same lock without releasing the interpreter, the process hangs for ever.

    Cost:
        Reference cycles that the block leaves stay in memory until its end.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class EndedWork(Work):
    """An exchange that has already ended."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def wait(self) -> Tensor:
        """Return the rows that the other ranks sent; they arrived before this object was created."""
        return self.rows

    def parts(self, expected: SegmentSizes) -> Iterator[tuple[int, int, Tensor]]:
        """Yield each rank's number, the number of its segment, and the rows of that segment."""
        slots = self.wait().split([sum(each) for each in expected])
        for peer, (slot, each) in enumerate(zip(slots, expected, strict=True)):
            for segment, part in enumerate(slot.split(list(each))):
                if part.numel() or segment == 0:
                    yield peer, segment, part


@dataclass(frozen=True)
class _Gone:
    """A point-to-point message that has been sent."""

    def wait(self) -> None:
        """Return at once: the message has been sent."""


@dataclass
class _Message(Work):
    """A point-to-point message that is still to be received."""

    group: ThreadGroup
    key: tuple[int, int, bool, int]
    empty: Tensor
    action: str
    found: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the rows and return them."""
        if not self.empty.numel():
            return self.empty
        if self.found is None:
            self.found = self._taken()
        return self.found

    def _taken(self) -> Tensor:
        group, (peer, rank, *_) = self.group, self.key
        with group.arrived:
            group.arrived.wait_for(lambda: self.key in group.messages or group.barrier.broken, group.timeout)
            found = group.messages.pop(self.key, None)
        if found is None and group.barrier.broken:
            raise _EchoError(
                f"rank {rank} to be answered in {self.action!r} by rank {peer}", "a stopped rank"
            )
        if found is None:
            raise CommError(
                f"rank {rank} to be answered in {self.action!r} by rank {peer}",
                f"nothing within {group.timeout:g} s",
            )
        if found.shape != self.empty.shape or found.dtype != self.empty.dtype:
            raise CommError(
                f"{list(self.empty.shape)} {self.empty.dtype} for rank {rank} in {self.action!r}",
                f"{list(found.shape)} {found.dtype} from rank {peer}",
            )
        return found


class ThreadChannel:
    """One thread's interface to a :class:`ThreadGroup`, with the methods of ``comm.channel.Channel``."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.device = torch.device("cpu")
        self.bytes: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._counts: Counter[tuple[int, int, bool]] = Counter()

    def _share(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank."""
        try:
            # Two barriers for each meeting:
            #
            #     write own slot ──barrier──> read all slots ──barrier──> the next meeting may write
            #
            # Without the second one a fast rank would overwrite its slot before a slow rank has read it.
            self.group.slots[self.rank] = value
            self.group.barrier.wait()
            values = list(self.group.slots)
            self.group.barrier.wait()
        except threading.BrokenBarrierError:
            # BrokenBarrierError is a RuntimeError, which PyG's gather catches and blames on the edges.
            raise _EchoError("all ranks to meet at a collective", "a rank that stopped before it") from None
        return values

    def _agree(self, offers: Sequence[str], mine: str) -> None:
        """Raise CommError if another rank is at a different operation."""
        for peer, theirs in enumerate(offers):
            if theirs != mine:
                raise CommError(f"all ranks at {mine}, as rank {self.rank} is", f"rank {peer} at {theirs}")

    def start(self, rows: Tensor, request: ExchangeRequest) -> EndedWork:
        """Exchange rows between all ranks; they have arrived when this returns.

        Headers are always compared, since it costs nothing here.
        """
        # A copy: the peers read it after this returns, when the caller may change its rows.
        rows = rows.detach().clone() if request.index is None else request.selected(rows.detach())
        parts = torch.split(rows, list(request.send_counts))
        self.bytes[request.kind] += sum(part.nbytes for peer, part in enumerate(parts) if peer != self.rank)
        # The action is compared as well, so ranks at different sites are found even without headers.
        header, action = request.header, request.action
        offers = self._share((header, action, parts))
        self._agree([f"{doing!r} {theirs}" for theirs, doing, _ in offers], f"{action!r} {header}")
        received = [offer[2][self.rank] for offer in offers]
        counts = [part.size(0) for part in received]
        if counts != list(request.recv_counts):
            raise CommError(f"{list(request.recv_counts)} rows in {action!r}", f"{counts}")
        # A rank that sends no rows to this one may offer rows of another width, so empty parts are dropped.
        return self._ended(torch.cat([part for part in received if part.size(0)] or [rows[:0]]))

    def start_bytes(self, request: BytesRequest) -> EndedWork:
        """Exchange bytes as :class:`BytesRequest` describes; they have arrived when this returns."""
        out, come = ([sum(each) for each in some] for some in (request.sizes, request.expected))
        message = torch.empty(sum(out), dtype=torch.uint8)
        for peer, part in enumerate(message.split(out)):
            for number, segment in enumerate(part.split(list(request.sizes[peer]))):
                if segment.numel():
                    request.write(peer, number, segment)
        rows = ExchangeRequest(out, come, request.action, request.kind, request.header)
        return self.start(message, rows)

    def _ended(self, rows: Tensor) -> EndedWork:
        return EndedWork(rows)

    def start_send(
        self, rows: Tensor, peer: int, *, action: str, kind: Kind = "stage", backward: bool = False
    ) -> _Gone:
        """Send rows to one rank by leaving them in the shared state."""
        key = self._next(self.rank, peer, backward)
        if rows.numel():
            with self.group.arrived:
                # A copy, since the sender may change its rows as soon as this returns.
                self.group.messages[key] = rows.detach().clone()
                self.group.arrived.notify_all()
        return _Gone()

    def start_receive(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        peer: int,
        *,
        action: str,
        kind: Kind = "stage",
        backward: bool = False,
    ) -> _Message:
        """Begin to receive the rows that one rank leaves for this one."""
        key = self._next(peer, self.rank, backward)
        return _Message(self.group, key, torch.empty(tuple(shape), dtype=dtype), action)

    def _next(self, sender: int, receiver: int, backward: bool) -> tuple[int, int, bool, int]:
        # The peer is the one of the two that is not this rank: sender + receiver - rank.
        if sender == receiver or not 0 <= sender + receiver - self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size} has no peer {sender + receiver - self.rank}")
        self._counts[sender, receiver, backward] += 1
        return sender, receiver, backward, self._counts[sender, receiver, backward]

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """Return the sum, maximum or minimum over the threads."""
        offers = self._share((action, tensor.detach().clone()))  # a copy, as in ``start``
        self._agree([f"{doing!r} {list(v.shape)}" for doing, v in offers], f"{action!r} {list(tensor.shape)}")
        # Stacked in rank order, so every thread adds in one order and gets the same bits.
        stack = torch.stack([value for _, value in offers])
        if op == "sum":
            return stack.sum(0)
        return stack.amax(0) if op == "max" else stack.amin(0)
