"""Communication recorder: what peers sent while a layer ran, so that the layer can run again without them.

Where it sits: ``intercept.interceptor`` puts a ``RecordedRows`` in front of its channel, and
``recompute.checkpoint`` says when it records and when it replays. Otherwise calls pass through.

::

    forward     layer ──rows──> peers ──halo rows, sums──> layer       each recorded, in order
                                              └──> record
    backward    layer again <── record                                 in the same order; nothing is sent
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from kagome.comm.exchange import DeferredWork, Exchange, ExchangeRequest, Op, Work
from kagome.comm.stats import Kind
from kagome.errors import ModelError

Record = list[tuple[str, Any]]
"""Recorded operations in order: the name of each and its result."""

T = TypeVar("T")


class RecordedRows:
    """A channel that can record the results of its operations, and later return them without the peers.

    Args:
        channel: The channel to the peers.
    """

    def __init__(self, channel: Exchange) -> None:
        self.channel = channel
        self._record: Record | None = None
        self._place: int | None = None
        self.records: list[Record] | None = None
        """If this is a list, every new record is added to it, so that the caller can count its memory."""
        self.reruns: list[list[Tensor]] | None = None
        """If this is a list, each layer that runs again adds what autograd saves meanwhile."""

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.channel.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.channel.size

    @property
    def runs(self) -> bool:
        """Whether results are being recorded or replayed."""
        return self._record is not None

    @property
    def exact(self) -> bool:
        """Whether all rows arrive unchanged and in the same epoch; True for a channel that does not say."""
        return bool(getattr(self.channel, "exact", True))

    @property
    def closed(self) -> bool:
        """Whether no edge leads to rows of a peer, although there are peers."""
        return bool(getattr(self.channel, "closed", False))

    # When ----------------------------------------------------------------------------------------

    @contextmanager
    def recording(self, record: Record) -> Iterator[None]:
        """Record the results of operations inside the block."""
        if self.records is not None:
            self.records.append(record)
        with self._on(record, None):
            yield

    @contextmanager
    def replaying(self, record: Record) -> Iterator[None]:
        """Replay recorded results inside the block, from the first one on."""
        with self._on(record, 0):
            yield

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Keep operations inside the block out of the record.

        Their results are cached for all forward passes: a second run finds them and must not ask for them
        again.
        """
        # In a second run the record is empty: the value must be found where it is cached, and a request for
        # it raises an error instead of reaching peers that do not run this layer.
        second = self._place is not None
        with self._on([] if second else None, 0 if second else None):
            yield

    @contextmanager
    def _on(self, record: Record | None, place: int | None) -> Iterator[None]:
        before, self._record, self._place = (self._record, self._place), record, place
        try:
            yield
        finally:
            self._record, self._place = before

    # What ----------------------------------------------------------------------------------------

    def start(self, rows: Tensor, request: ExchangeRequest) -> Work:
        """Begin an exchange of rows, or return the recorded one. Its rows must not be written to."""
        if self._record is None:
            return self.channel.start(rows, request)
        # The record holds the work, which keeps its rows after the first wait: the replay waits for the same
        # one.
        return self._once(request.action, lambda: DeferredWork(self.channel.start(rows, request).wait))

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """Return the sum, maximum or minimum over all ranks."""

        def ask() -> Tensor:
            return self.channel.all_reduce(tensor, op, action=action, kind=kind, key=key)

        found = self._once(action, ask)
        return found if self._record is None else found.clone()  # the caller may write to a statistic

    def same(self, what: str, found: bool) -> bool:
        """Return whether a cached value is available; in a replay, return what the first run recorded.

        Raises:
            ModelError: If the first run had the value and the second has not.
        """
        answer = self._once(what, lambda: found)
        # The first run skipped a request because the value was cached. The peers skip it too, so it cannot be
        # made now.
        if answer and not found:
            raise _differs(f"{what}, of which nothing is left")
        return answer

    def _once(self, what: str, ask: Callable[[], T]) -> T:
        """Perform an operation and record its result, or return the recorded one."""
        if self._record is None:
            return ask()
        if self._place is None:
            record, value = self._record, ask()
            record.append((what, value))
            return value
        # Operations are found by order. The action, which names site and epoch, shows a layer that takes
        # another way.
        then = self._record[self._place][0] if self._place < len(self._record) else "nothing"
        if then != what:
            raise _differs(f"{what}, and {then} the first time")
        self._place += 1
        return self._record[self._place - 1][1]  # type: ignore[no-any-return]


def tensors_of(record: Record) -> Iterator[Tensor]:
    """Yield the tensors that a record holds."""
    for _, value in record:
        found = value.rows if isinstance(value, DeferredWork) else value
        if isinstance(found, Tensor):
            yield found


def _differs(got: str) -> ModelError:
    return ModelError(
        "a layer that runs again in backward to do what it did in the forward pass",
        got,
        hint="leave --model.recompute out",
    )
