"""Compressed exchange: rows that are encoded, selected or late, as a rank's mode in the epoch says.

Where it sits: in front of ``comm``'s channel and below ``exchange``, ``historical.tables`` and
``comm_recorder``, which do not know about it. Each technique is a wrapper with the interface of
``comm.exchange.Exchange``:

::

                       ┌─> StaleExchange ─> EncodedExchange ─┐
    CompressedExchange ┼─> BlockExchange ────────────────────┼─> channel ─> peers
                       └─────────────────────────────────────┘
                           what belongs to no training epoch
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from kagome.comm.codec import UnreadRefusals
from kagome.comm.exchange import (
    BytesExchange,
    DeferredWork,
    ExchangeRequest,
    Op,
    SiteExchange,
    Work,
)
from kagome.comm.stats import Kind
from kagome.config import ExchangeSettings
from kagome.halo.block_exchange import BlockExchange
from kagome.halo.encoded_exchange import EncodedExchange, ErrorMeter
from kagome.halo.epoch_rows import CompressionCounts, CompressionState, EpochRows, ExchangeMode
from kagome.halo.resumed_rows import NOTHING, ResumedRows
from kagome.halo.staleness import StaleRows

# [Note: which way a request takes] The wrappers are chosen per request, not per run:
#
#     request                                     way
#     not a site's (statistics, cached, check)    channel               exact and at once
#     evaluation, or one rank, or whole numbers   channel               exact and at once
#     blocks of features                          BlockExchange         encoded, never late
#     rows of a site, in training                 StaleExchange         late if the mode of the epoch is
#         and then                                EncodedExchange       encoded, or a selection of rows
#
# A synchronous epoch sends the same messages as a late one, and differs only in which rows it reads:
#
#     epoch          1            2            3            4 (synchronous)
#     sends          r1           r2           r3           r4
#     reads          r1           r1           r2           r4       r3 is received and dropped
#
# The dropped rows must still be received, because a message that is not received blocks those sent long after
# it. ``_settle`` does this, also for a site that the model has stopped to read.


class StaleExchange:
    """An exchange whose rows are those of the last epoch, while this epoch's are in transit.

    Args:
        inner: Carries the rows.
        state: Mode and rows of earlier epochs of this rank.
    """

    def __init__(self, inner: EncodedExchange, state: CompressionState) -> None:
        self.inner, self.state = inner, state
        self._epoch = 0

    def start(self, rows: Tensor, request: ExchangeRequest) -> Work:
        """Begin an exchange of a site's rows; its wait returns the rows for this epoch."""
        site, state = request.site, self.state
        assert site is not None
        if state.mode.waits:
            self._settle(site)
            return self.inner.start(rows, request)
        stale_rows = self._stale_rows(site, sum(request.recv_counts), rows)
        self._settle(site)
        synchronous = self._synchronous(site.epoch)
        if state.mode.chooses:
            stale_rows.settle()  # the notes received with it say which rows come next
        late = replace(request, site=replace(site, late=True, whole=synchronous))
        given = self.inner.start(rows, late), site.epoch
        return DeferredWork(
            lambda: stale_rows.receive(*given, synchronous=synchronous),
            lambda: stale_rows.reading(*given, synchronous=synchronous),
        )

    def _synchronous(self, epoch: int) -> bool:
        """Return whether this epoch waits for rows that might be late."""
        every = self.state.settings.sync_every
        due = isinstance(every, int) and epoch % every == 0
        return not self.state.mode.probes and (due or self.state.rows.synchronous)

    def _stale_rows(self, site: SiteExchange, count: int, rows: Tensor) -> StaleRows:
        def make() -> StaleRows:
            return StaleRows(site.name, self.state.settings.max_age, self.state.settings.smoothing)

        found = self.state.rows.stale_rows(site.key, site.epoch, make)
        # Rows of another width or type than in the last epoch: the first epoch of the new ones waits.
        if not found.fits(count, rows.size(1), rows):
            found.forget()
        return found

    def _settle(self, site: SiteExchange) -> None:
        """Receive late rows that no epoch will read.

        A message that is not received blocks those sent long after it.
        """
        all_stale_rows = self.state.rows.all_stale_rows
        if self.state.mode.waits and site.key in all_stale_rows:
            all_stale_rows[site.key].expire(site.epoch)
        if site.epoch != self._epoch:
            self._epoch = site.epoch
            for stale_rows in all_stale_rows.values():
                # A site that this epoch reads settles its rows of the epoch before by itself, when it is
                # reached. Older rows belong to sites that the model no longer reads.
                if stale_rows.in_flight is not None and stale_rows.in_flight[1] < site.epoch - 1:
                    stale_rows.settle()


class CompressedExchange:
    """An exchange with the peers that encodes rows and may delay them by an epoch.

    Args:
        channel: The underlying channel.
        settings: Settings of codecs, maximum age and smoothing.
        seed: Seed of the codecs' random draws.
        late: The channel for rows that are read in the next epoch; by default the same channel.
    """

    def __init__(
        self,
        channel: BytesExchange,
        settings: ExchangeSettings,
        seed: int,
        *,
        late: BytesExchange | None = None,
    ) -> None:
        self.channel = channel
        self.state = state = CompressionState(settings, seed, ExchangeMode.of(settings))
        meter = ErrorMeter(state)
        self._rows = StaleExchange(EncodedExchange(channel, late or channel, state, meter), state)
        self._blocks = BlockExchange(channel, state, meter)

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.channel.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.channel.size

    @property
    def mode(self) -> ExchangeMode:
        """How rows are exchanged at present."""
        return self.state.mode

    @property
    def known(self) -> EpochRows:
        """Rows of earlier epochs, by site and direction."""
        return self.state.rows

    @property
    def exact(self) -> bool:
        """Whether all rows are sent unchanged and none is late."""
        return self.size == 1 or self.mode.exact

    @property
    def late(self) -> bool:
        """Whether rows may be those of an earlier epoch."""
        return self.size > 1 and not self.mode.waits

    @property
    def drifts(self) -> tuple[float, ...]:
        """How far rows moved on this rank, and 1; zeros if no row could move.

        Empty unless ``sync_every`` is ``auto``.
        """
        return self.known.drifts if self.state.settings.sync_every == "auto" else ()

    def moved(self, drifts: Sequence[float], epoch: int) -> None:
        """Note the drift of an epoch, given the sum of all ranks' ``drifts``.

        With ``auto`` it decides whether the next epoch waits.
        """
        drift, ranks = drifts or (0.0, 0.0)
        self.known.moved(drift / max(ranks, 1.0), epoch)

    @contextmanager
    def using(self, mode: ExchangeMode) -> Iterator[None]:
        """Exchange rows in another mode inside the block, a pass; all ranks enter it.

        Raises:
            ModelError: At the end of the block, if a device has found numbers that a codec refuses.
        """
        before, self.state.mode = self.state.mode, mode
        self.state.refusals = refusals = UnreadRefusals()
        try:
            yield
            refusals.check()
        finally:
            self.state.mode, self.state.refusals = before, None

    def settle(self) -> None:
        """Receive what is still in transit. The rows that are read do not change."""
        self.known.settle()

    def keep(self) -> None:
        """Settle, and borrow no memory of other ranks any more: at their end they wait until it is free."""
        self.known.keep()

    def forget(self, resumed_rows: ResumedRows = NOTHING) -> None:
        """Drop all rows of earlier epochs, because weights were changed from outside. All ranks call it.

        Args:
            resumed_rows: Rows that the next epoch may read all the same.
        """
        self.known.forget(resumed_rows)

    def take_counts(self) -> CompressionCounts:
        """Return the counts since the last call and reset them."""
        taken, self.state.counts = self.state.counts, CompressionCounts()
        return taken

    def start(self, rows: Tensor, request: ExchangeRequest) -> Work:
        """Begin an exchange of rows.

        They are encoded and delayed as the mode says if they are a site's in a training epoch.
        """
        site = request.site
        if site is None or not site.training or self.size == 1 or not rows.is_floating_point():
            return self.channel.start(rows, request)
        return (self._rows if site.blocks is None else self._blocks).start(rows, request)

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """Return the sum, maximum or minimum over all ranks, without encoding."""
        return self.channel.all_reduce(tensor, op, action=action, kind=kind, key=key)
