"""Thread group: several ranks as threads of one process, with the interface of a channel.

Where it sits: ``verify.check`` splits a small sample in one process with it. Tests use it as the fast level
below real processes.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kagome.comm.channel import KINDS, Kind, Op
from kagome.comm.exchange import Trip
from kagome.comm.work import Sheets
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
        self.letters: dict[tuple[int, int, bool, int], Tensor] = {}
        """Point-to-point messages, by sender, receiver, pass (backward or not) and number."""

    def run(self, work: Callable[[ThreadChannel], T]) -> list[T]:
        """Run ``work`` on every rank, each in a thread. An error of any rank ends all of them and is raised.

        Python's garbage collector does not run by itself in the meantime: see :func:`_uncollected`.

        Returns:
            The results in the order of ranks.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = work(ThreadChannel(self, rank))
            except BaseException as error:
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


class Come:
    """An exchange that has already ended."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def wait(self) -> Tensor:
        """Return the rows that the other ranks sent; they arrived before this object was created."""
        return self.rows

    def lent(self) -> AbstractContextManager[Tensor]:
        """Lend the received rows for a block of code."""
        return nullcontext(self.rows)

    def parts(self, expected: Sheets) -> Iterator[tuple[int, int, Tensor]]:
        """Yield each rank's number, the number of its segment, and the rows of that segment."""
        slots = self.wait().split([sum(each) for each in expected])
        for peer, (slot, each) in enumerate(zip(slots, expected, strict=True)):
            for sheet, part in enumerate(slot.split(list(each))):
                if part.numel() or sheet == 0:
                    yield peer, sheet, part


@dataclass(frozen=True)
class _Gone:
    """A point-to-point message that has been sent."""

    def wait(self) -> None:
        """Return at once: the message has been sent."""


@dataclass
class _Letter:
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

    def lent(self) -> AbstractContextManager[Tensor]:
        """Lend the received rows for a block of code."""
        return nullcontext(self.wait())

    def _taken(self) -> Tensor:
        group, (peer, rank, *_) = self.group, self.key
        with group.arrived:
            group.arrived.wait_for(lambda: self.key in group.letters or group.barrier.broken, group.timeout)
            found = group.letters.pop(self.key, None)
        if found is None and group.barrier.broken:
            raise _EchoError(f"rank {rank} waits in {self.action!r} for rank {peer}", "another rank stopped")
        if found is None:
            raise CommError(
                f"rank {rank} waited in {self.action!r} for rank {peer}",
                f"nothing came within {group.timeout:g} s",
            )
        if found.shape != self.empty.shape or found.dtype != self.empty.dtype:
            raise CommError(
                f"rank {rank} expects {list(self.empty.shape)} {self.empty.dtype} in {self.action!r}",
                f"{list(found.shape)} {found.dtype} came from rank {peer}",
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
            self.group.slots[self.rank] = value
            self.group.barrier.wait()
            values = list(self.group.slots)
            self.group.barrier.wait()
        except threading.BrokenBarrierError:
            # BrokenBarrierError is a RuntimeError, which PyG's gather catches and blames on the edges.
            raise _EchoError("all ranks meet at a collective", "another rank stopped before it") from None
        return values

    def _agree(self, offers: Sequence[str], mine: str) -> None:
        """Raise CommError if another rank is at a different operation."""
        for peer, theirs in enumerate(offers):
            if theirs != mine:
                raise CommError(f"rank {self.rank} is at {mine}", f"rank {peer} is at {theirs}")

    def exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Exchange rows between all ranks. Headers are always compared, since it costs nothing here."""
        parts = torch.split(rows.detach(), list(send_counts))
        self.bytes[kind] += sum(part.nbytes for peer, part in enumerate(parts) if peer != self.rank)
        offers = self._share((header, action, parts))
        self._agree([f"{doing!r} {theirs}" for theirs, doing, _ in offers], f"{action!r} {header}")
        received = [offer[2][self.rank] for offer in offers]
        counts = [part.size(0) for part in received]
        if counts != list(recv_counts):
            raise CommError(f"{action!r} expects {list(recv_counts)} rows", f"{counts} came")
        # A rank that sends no rows to this one may offer rows of another width, so empty parts are dropped.
        return torch.cat([part for part in received if part.size(0)] or [rows.detach()[:0]])

    def start_exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
        pick: Tensor | None = None,
        trip: Trip | None = None,
    ) -> Come:
        """Exchange rows as :meth:`exchange` does, with the result ready at once."""
        rows = rows.detach() if pick is None else rows.detach().index_select(0, pick)
        found = self.exchange(rows, send_counts, recv_counts, action=action, kind=kind, header=header)
        return self._started(found)

    def start_bytes(
        self,
        write: Callable[[int, int, Tensor], None],
        sizes: Sheets,
        expected: Sheets,
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
    ) -> Come:
        """Exchange bytes that ``write`` produces, with the result ready at once."""
        out, come = ([sum(each) for each in some] for some in (sizes, expected))
        message = torch.empty(sum(out), dtype=torch.uint8)
        for peer, letter in enumerate(message.split(out)):
            for sheet, part in enumerate(letter.split(list(sizes[peer]))):
                if part.numel():
                    write(peer, sheet, part)
        return self.start_exchange(message, out, come, action=action, kind=kind, header=header)

    def _started(self, rows: Tensor) -> Come:
        return Come(rows)

    def start_send(
        self, rows: Tensor, peer: int, *, action: str, kind: Kind = "stage", backward: bool = False
    ) -> _Gone:
        """Send rows to one rank by leaving them in the shared state."""
        key = self._next(self.rank, peer, backward)
        if rows.numel():
            with self.group.arrived:
                self.group.letters[key] = rows.detach().clone()
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
    ) -> _Letter:
        """Begin to receive the rows that one rank leaves for this one."""
        key = self._next(peer, self.rank, backward)
        return _Letter(self.group, key, torch.empty(tuple(shape), dtype=dtype), action)

    def _next(self, sender: int, receiver: int, backward: bool) -> tuple[int, int, bool, int]:
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
        offers = self._share((action, tensor.detach()))
        self._agree([f"{doing!r} {list(v.shape)}" for doing, v in offers], f"{action!r} {list(tensor.shape)}")
        stack = torch.stack([value for _, value in offers])
        if op == "sum":
            return stack.sum(0)
        return stack.amax(0) if op == "max" else stack.amin(0)
