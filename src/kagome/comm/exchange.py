"""Exchange: the one interface that sends rows from rank to rank, its request and its handle.

Where it sits: ``channel`` and the in-process channels carry a request out. ``halo``, ``historical`` and
``profile`` have wrappers with the same interface, which encode, delay, record or replace the rows and pass
the rest on.

::

    halo, feature slices ──request──> recorder ──> codec, staleness, selection ──> channel ──> peers
                         <───work──
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kagome.comm.stats import Kind

Op = Literal["sum", "max", "min"]
Blocks = Sequence[tuple[int, int]]
"""Number of rows and columns, for each peer."""
SegmentSizes = Sequence[Sequence[int]]
"""Bytes of each segment of each peer's message."""


# [Note: directions] One number says what an exchange does and in which pass. It keeps the codecs' draws and
# the kept rows of a site's exchanges apart, and ranks compare it in headers.
#
#                                           forward   its backward
#     read halo rows                           0           3
#     send sums to their owners                2           1
#     vertex slices to feature slices          4           5
#     feature slices to vertex slices          6           7
#
# The backward of a read is a sum at the owners and the other way round, so 1 is a read and 3 a sum.
@dataclass(frozen=True, slots=True)
class SiteExchange:
    """The identity of an exchange in a model, for wrappers that encode or delay rows.

    Args:
        site: Key of the site, the same in every forward pass.
        direction: 0 and 1 send rows to the ranks that read them; 2 and 3 send values at read rows back to the
            rows' owners; 4 to 7 exchange slices. Odd directions belong to the backward pass.
        epoch: The training epoch, from 1.
        training: Whether the exchange belongs to the forward and backward pass of a training epoch.
        row_ids: A number for each sent row, the same for any number of ranks: the vertex id.
        reads: Number of local edges that read each received row; None if that is not known.
        blocks: Rows and columns of the block sent to each peer and of the block received from each. Given
            only if blocks of different widths are exchanged instead of rows of one width.
        late: Whether the rows are read in the next epoch.
        whole: Whether every row is to be sent, whatever a selection says.
    """

    site: Hashable
    direction: int
    epoch: int
    training: bool
    row_ids: Tensor
    reads: Tensor | None = None
    blocks: tuple[Blocks, Blocks] | None = None
    late: bool = False
    whole: bool = False

    @property
    def name(self) -> str:
        """Site and direction in words, with the call's number if a module is called more than once."""
        # A site's key is (module path, number of the call); tests use plain names.
        module, call = self.site if isinstance(self.site, tuple) else (self.site, 1)
        times = f", call {call}" if call != 1 else ""
        return f"{module}{times} {'backward' if self.backward else 'forward'}"

    @property
    def key(self) -> tuple[Hashable, int]:
        """Site and direction, under which wrappers keep what outlives an epoch."""
        return self.site, self.direction

    @property
    def backward(self) -> bool:
        """Whether the exchange carries gradients."""
        return self.direction % 2 == 1


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """One exchange of rows between all ranks of a group.

    Args:
        send_counts: Number of rows for each rank, the own one included.
        recv_counts: Number of rows from each rank, the own one included.
        action: Name of the operation, for error messages: ``halo forward of conv1.x, epoch 3``.
        kind: Traffic kind that its bytes are counted under.
        header: Up to five numbers (direction, epoch, site, width, gradient) that must be equal on both sides.
            They and the row counts are compared before any row is sent. Either all ranks give a header or
            none does.
        index: Indices of the rows to send, in this order; all rows if None.
        site: Which exchange of a model this is; None for an exchange outside of a model's pass.
    """

    send_counts: Sequence[int]
    recv_counts: Sequence[int]
    action: str
    kind: Kind = "halo"
    header: tuple[int, ...] | None = None
    index: Tensor | None = None
    site: SiteExchange | None = None

    def selected(self, rows: Tensor) -> Tensor:
        """Return the rows to send: a copy of those that ``index`` names, or the rows themselves."""
        return rows if self.index is None else rows.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class BytesRequest:
    """One exchange of bytes that are written segment by segment while earlier segments are in transit.

    Args:
        write: Called once for each segment, with the receiving rank (the own one included, but only ranks
            that receive any bytes), the segment's number, and the buffer for its bytes, which is on the
            model's device.
        sizes: Bytes of each segment for each rank. The number of segments is the same for all peers and on
            all ranks; empty ones come last.
        expected: Bytes of each segment from each rank.
        action: Name of the operation, for error messages.
        kind: Traffic kind that its bytes are counted under.
        header: Numbers that all ranks compare first, as in :class:`ExchangeRequest`.
    """

    write: Callable[[int, int, Tensor], None]
    sizes: SegmentSizes
    expected: SegmentSizes
    action: str
    kind: Kind = "halo"
    header: tuple[int, ...] | None = None


class Work(ABC):
    """Rows that were requested and will be waited for, as torch's ``Work``."""

    lent: bool = False
    """Whether :meth:`borrow` has lent rows in another rank's memory, which end with the block."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Wait for the rows and return them. A second call returns at once."""

    def receive(self) -> bool:
        """Receive messages that take less memory than the rows, as bytes; return whether these are such."""
        return False

    @contextmanager
    def borrow(self) -> Iterator[Tensor]:
        """Wait for the rows and lend them for a block of code, which neither keeps nor changes them.

        A work that can read them where they lie, without a copy, does so.
        """
        yield self.wait()


class DeferredWork(Work):
    """Rows that a function returns when they are first waited for.

    Args:
        compute: The function, called once.
        lend: Lends the rows for a block of code in its place; by default they are those of ``compute``.
    """

    def __init__(
        self,
        compute: Callable[[], Tensor],
        lend: Callable[[], AbstractContextManager[Tensor]] | None = None,
    ) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._lend = lend
        self.rows: Tensor | None = None
        """The rows; None before the first wait."""

    def wait(self) -> Tensor:
        """Return the rows; the first call computes them."""
        if self._compute is not None:
            # The function is dropped because it may hold what was sent: a message, a table, a clone of the
            # rows.
            self.rows, self._compute, self._lend = self._compute(), None, None
        assert self.rows is not None
        return self.rows

    @contextmanager
    def borrow(self) -> Iterator[Tensor]:
        """Lend the rows for a block of code, once, or yield those that were waited for."""
        if self._lend is None:
            yield self.wait()
            return
        lend, self._compute, self._lend = self._lend, None, None
        with lend() as rows:
            yield rows


class BytesWork(Protocol):
    """Bytes in transit that arrive segment by segment."""

    def wait(self) -> Tensor:
        """Wait until all have arrived; :meth:`parts` yields them after that, too."""

    def parts(self, expected: SegmentSizes) -> Iterator[tuple[int, int, Tensor]]:
        """Yield a rank, the number of its segment and the segment's bytes, each as soon as it has arrived."""


class Exchange(Protocol):
    """An object that exchanges rows between the ranks of a group: a channel, or a wrapper around one."""

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def start(self, rows: Tensor, request: ExchangeRequest) -> Work:
        """Begin to send rows for rank 0, then for rank 1, and so on, and to receive the peers' rows.

        It is not differentiable. The rows must not change before the wait ends.

        Shapes:
            rows ``[sum(send_counts), ...]``, or ``[*, ...]`` with an index -> ``[sum(recv_counts), ...]``.
        """

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """Return the sum, maximum or minimum over all ranks.

        ``key`` names the operation, the same in every epoch.
        """


class BytesExchange(Exchange, Protocol):
    """An exchange that also sends bytes as soon as they are written."""

    def start_bytes(self, request: BytesRequest) -> BytesWork:
        """Begin to send each peer bytes that are written just before that, and receive the peers' bytes."""


def swap_counts(exchange: Exchange, counts: Sequence[int], action: str) -> list[int]:
    """Tell each rank a number, and return the number that each rank tells this one."""
    # One row of one column for each pair of ranks.
    ones = [1] * exchange.size
    counted = torch.tensor(counts, dtype=torch.int64).unsqueeze(1)
    control: Exchange = getattr(exchange, "control", exchange)  # a channel may have one for such messages
    return control.start(counted, ExchangeRequest(ones, ones, action, "other")).wait().view(-1).tolist()
