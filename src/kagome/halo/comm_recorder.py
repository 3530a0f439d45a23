"""Tape: what came from the peers while a layer ran, so that it can run again without asking them.

Where it sits: ``intercept.interceptor`` puts a ``RecordedRows`` before its channel; ``recompute.checkpoint``
says when it writes a tape and when it reads one. Otherwise all passes through.

::

    forward     layer ──rows──> peers ──halo rows, sums──> layer       each noted, in order
                                              └──> tape
    backward    layer again <── tape                                   in the same order; nothing is sent
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

from kagome.comm.channel import Kind, Op
from kagome.comm.exchange import Trip
from kagome.errors import ModelError
from kagome.halo.exchange import Carrier, UnderWay

Tape = list[tuple[str, Any]]
"""What was asked for, and what came."""

T = TypeVar("T")


class RecordedRows:
    """A channel that can note what comes over it, and give it once more instead of asking the peers.

    Args:
        channel: The way to the peers.
    """

    def __init__(self, channel: Carrier) -> None:
        self.channel = channel
        self._tape: Tape | None = None
        self._place: int | None = None
        self.tapes: list[Tape] | None = None
        """A list here is given every tape that is written: somebody counts what they hold."""

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return self.channel.rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.channel.size

    @property
    def runs(self) -> bool:
        """Whether a tape is being written or read."""
        return self._tape is not None

    @property
    def exact(self) -> bool:
        """Whether all arrives as it is, in the same epoch; a channel that says nothing of it sends it so."""
        return bool(getattr(self.channel, "exact", True))

    @property
    def closed(self) -> bool:
        """Whether no edge leads to rows of a peer, though there are some."""
        return bool(getattr(self.channel, "closed", False))

    # When ----------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, tape: Tape) -> Iterator[None]:
        """Note what comes."""
        if self.tapes is not None:
            self.tapes.append(tape)
        with self._on(tape, None):
            yield

    @contextmanager
    def reading(self, tape: Tape) -> Iterator[None]:
        """Give what came then, from the beginning."""
        with self._on(tape, 0):
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around what is kept for all forwards: a second pass finds it, and must not ask for it again."""
        second = self._place is not None
        with self._on([] if second else None, 0 if second else None):
            yield

    @contextmanager
    def _on(self, tape: Tape | None, place: int | None) -> Iterator[None]:
        before, self._tape, self._place = (self._tape, self._place), tape, place
        try:
            yield
        finally:
            self._tape, self._place = before

    # What ----------------------------------------------------------------------------------------

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
        """All-to-all of rows, a count for each peer; what comes is not to be written to."""

        def ask() -> Tensor:
            return self.channel.exchange(
                rows, send_counts, recv_counts, action=action, kind=kind, header=header
            )

        return self._once(action, ask)

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
    ) -> UnderWay:
        """The same, begun; its wait gives the rows."""

        def ask() -> UnderWay:
            begun = self.channel.start_exchange(
                rows,
                send_counts,
                recv_counts,
                action=action,
                kind=kind,
                header=header,
                pick=pick,
                trip=trip,
            )
            return begun if self._tape is None else _Rows(begun)

        return self._once(action, ask)

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """The sum, maximum or minimum over all ranks."""

        def ask() -> Tensor:
            return self.channel.all_reduce(tensor, op, action=action, kind=kind, key=key)

        found = self._once(action, ask)
        return found if self._tape is None else found.clone()  # a statistic may be written to

    def same(self, what: str, found: bool) -> bool:
        """Whether something kept is there to be used; in a second pass what the first one said.

        Raises:
            ModelError: If the first pass had it and the second has not.
        """
        answer = self._once(what, lambda: found)
        if answer and not found:
            raise _differs(what, "what was kept is gone")
        return answer

    def _once(self, what: str, ask: Callable[[], T]) -> T:
        """What came, noted or from the tape."""
        if self._tape is None:
            return ask()
        if self._place is None:
            tape, value = self._tape, ask()
            tape.append((what, value))
            return value
        then = self._tape[self._place][0] if self._place < len(self._tape) else "nothing"
        if then != what:
            raise _differs(what, f"the first time it came to {then}")
        self._place += 1
        return self._tape[self._place - 1][1]  # type: ignore[no-any-return]


class _Rows:
    """Rows under way that are kept once they have come."""

    def __init__(self, begun: UnderWay) -> None:
        self._begun: UnderWay | None = begun
        self._rows: Tensor | None = None

    @property
    def rows(self) -> Tensor | None:
        """What has come."""
        return self._rows

    def wait(self) -> Tensor:
        """The rows, once they have come."""
        if self._begun is not None:
            self._rows, self._begun = self._begun.wait(), None
        assert self._rows is not None
        return self._rows

    def lent(self) -> AbstractContextManager[Tensor]:
        """The same."""
        return nullcontext(self.wait())


def tensors_of(tape: Tape) -> Iterator[Tensor]:
    """The tensors that a tape holds."""
    for _, value in tape:
        found = value.rows if isinstance(value, _Rows) else value
        if isinstance(found, Tensor):
            yield found


def _differs(what: str, then: str) -> ModelError:
    return ModelError(
        "a layer that runs again in backward does what it did in the forward pass",
        f"it comes to {what}, but {then}",
        hint="leave --model.recompute out",
    )
