"""Compressed exchange: which codec encodes rows, and whether they are used in this epoch or the next.

Where it sits: in front of ``comm``'s channel and below ``exchange``, ``historical.tables`` and
``comm_recorder``, which do not know about it.

::

    rows ──pick──> codec ──bytes──> peers            UnderWay: bytes ──codec──> rows
                                                     late:     last epoch's rows; these are for the next
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from kagome.comm.channel import Kind, Op
from kagome.comm.codec import Codec, lost_squares
from kagome.comm.exchange import Trip
from kagome.config import CodecName, Parallel
from kagome.halo import block_exchange
from kagome.halo.encoded_message import EncodingChoice, IncomingRows, Letters, Writer, plain, read
from kagome.halo.epoch_rows import EpochRows
from kagome.halo.exchange import UnderWay
from kagome.halo.resumed_rows import NOTHING, ResumedRows
from kagome.halo.row_selection import Fit, SampledRows, Selection, SelectionPlan, Skip
from kagome.halo.staleness import StaleRows

MEASURED_EVERY: Final = 10
"""Number of epochs between two measurements of a codec's error."""
MEASURED_ROWS: Final = 64


@dataclass
class LateRows:
    """Rows of the last epoch, if they may be late, while this epoch's rows are in transit."""

    begun: UnderWay
    line: StaleRows
    epoch: int
    synchronous: bool
    rows: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the rows for this epoch."""
        if self.rows is None:
            self.rows = self.line.turn(self.begun, self.epoch, synchronous=self.synchronous)
        return self.rows

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """Lend the rows for a block of code."""
        yield self.wait()


@dataclass
class Crossed:
    """Counts of what was exchanged since they were last taken.

    Args:
        plain: Bytes that the rows would have had without encoding.
        sliced: The same count for feature slices.
        errors: For each site and pass, the norm of the codec's error over the norm of the rows, on a sample.
    """

    plain: int = 0
    sliced: int = 0
    errors: dict[str, float] = field(default_factory=dict)


class CompressedExchange:
    """A channel to the peers that encodes rows and may delay them by an epoch.

    Args:
        channel: The underlying channel.
        late: The channel for rows that are read in the next epoch; by default the same channel.
        settings: Settings of codecs, maximum age and smoothing.
        seed: Seed of the codecs' random draws.
    """

    def __init__(
        self, channel: EncodingChoice, settings: Parallel, seed: int, *, late: EncodingChoice | None = None
    ) -> None:
        self.channel, self.settings, self.seed = channel, settings, seed
        self._late = late or channel
        self.codec = Codec(settings.codec)
        self.codec_backward = Codec(settings.codec_backward or settings.codec)
        self.waits = settings.max_age == 0
        """Whether no row is late; such an epoch does not use the stale rows at all."""
        self.chooses = settings.halo_sample < 1 or settings.skip_drift > 0 or settings.adaptive_bits
        """Whether only some rows are sent, or rows get different numbers of bits."""
        self.asks = False
        """Whether a probe measures the effect of late rows. Rows are then late even in an epoch that would
        wait for them."""
        self.known = EpochRows()
        self.crossed = Crossed()
        self._measured: set[str] = set()
        self._epoch = 0

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.channel.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.channel.size

    @property
    def exact(self) -> bool:
        """Whether all rows are sent unchanged and none is late."""
        codecs = self.codec.exact and self.codec_backward.exact
        return self.size == 1 or (codecs and self.waits and not self.chooses)

    @property
    def late(self) -> bool:
        """Whether rows may be those of an earlier epoch."""
        return self.size > 1 and not self.waits

    @property
    def drifts(self) -> tuple[float, ...]:
        """How far rows moved on this rank, and 1; zeros if no row could move.

        Empty unless ``sync_every`` is ``auto``.
        """
        return self.known.drifts if self.settings.sync_every == "auto" else ()

    def moved(self, drifts: Sequence[float], epoch: int) -> None:
        """Take the sum of all ranks' ``drifts`` of an epoch.

        With ``auto`` it decides whether the next epoch waits.
        """
        drift, ranks = drifts or (0.0, 0.0)
        self.known.moved(drift / max(ranks, 1.0), epoch)

    @contextmanager
    def using(
        self,
        codec: CodecName,
        codec_backward: CodecName,
        *,
        waits: bool,
        chooses: bool = False,
        asks: bool = False,
    ) -> Iterator[None]:
        """Exchange rows in another way inside the block; all ranks enter it."""
        before = self.codec, self.codec_backward, self.waits, self.chooses, self.asks
        self.codec, self.codec_backward = Codec(codec), Codec(codec_backward)
        self.waits, self.chooses, self.asks = waits, chooses, asks
        try:
            yield
        finally:
            self.codec, self.codec_backward, self.waits, self.chooses, self.asks = before

    def _synchronous(self, epoch: int) -> bool:
        """Return whether this epoch waits for rows that might be late."""
        every = self.settings.sync_every
        due = isinstance(every, int) and epoch % every == 0
        return not self.asks and (due or self.known.synchronous)

    def settle(self) -> None:
        """Receive what is still in transit. The rows that are read do not change."""
        self.known.settle()

    def forget(self, recall: ResumedRows = NOTHING) -> None:
        """Drop all rows of earlier epochs, because weights were changed from outside. All ranks call it.

        Args:
            recall: Rows that the next epoch may read all the same.
        """
        self.known.forget(recall)

    def take_counts(self) -> Crossed:
        """Return the counts since the last call and reset them."""
        taken, self.crossed = self.crossed, Crossed()
        return taken

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
        """Exchange rows between all ranks without encoding, with a count for each peer."""
        return self.channel.exchange(rows, send_counts, recv_counts, action=action, kind=kind, header=header)

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
        """Begin an exchange of rows.

        They are encoded and delayed as the settings say if ``trip`` belongs to a training epoch.
        """
        if trip is None or not trip.training or self.size == 1 or not rows.is_floating_point():
            return self.channel.start_exchange(
                rows, send_counts, recv_counts, action=action, kind=kind, header=header, pick=pick
            )
        if trip.blocks is not None:
            return self._in_blocks(
                rows, send_counts, recv_counts, trip, action=action, kind=kind, header=header
            )
        count = rows.size(0) if pick is None else pick.numel()
        self.crossed.plain += count * rows.size(1) * rows.itemsize
        codec = self.codec_backward if trip.backward else self.codec
        if not codec.shortens(rows.size(1), rows.dtype):
            codec = Codec("none")
        line = None if self.waits else self._line(trip, sum(recv_counts), rows)
        self._settle(trip)
        synchronous = self._synchronous(trip.epoch)
        selection = self._selection(trip, codec, send_counts, recv_counts)
        way = self.channel if line is None else self._late
        begun: UnderWay
        if codec.exact and selection is None:
            begun = way.start_exchange(
                rows, send_counts, recv_counts, action=action, kind=kind, header=header, pick=pick
            )
        else:
            if selection is not None and line is not None:
                line.settle()  # the notes received with it say which rows come next
            if selection is not None or self.settings.error_feedback:
                rows, pick = rows if pick is None else rows.index_select(0, pick), None
            if self.settings.error_feedback:
                residual = self.known.residual((trip.site, trip.direction), trip.epoch)
                if residual is not None and residual.shape == rows.shape:
                    rows = rows + residual
            plan = SelectionPlan(plain(codec, send_counts), plain(codec, recv_counts))
            if selection is not None:
                whole = synchronous and line is not None
                plan = selection.plan(trip, rows, send_counts, recv_counts, whole=whole)
            begun = self._sent(
                way, plan, rows, trip, selection, action=action, kind=kind, header=header, pick=pick
            )
        return begun if line is None else LateRows(begun, line, trip.epoch, synchronous)

    def _in_blocks(
        self,
        numbers: Tensor,
        sends: Sequence[int],
        comes: Sequence[int],
        trip: Trip,
        *,
        action: str,
        kind: Kind,
        header: tuple[int, ...] | None,
    ) -> UnderWay:
        """Begin an exchange of feature slices, in which each peer gets as many columns as it holds."""
        assert trip.blocks is not None
        self.crossed.sliced += (numbers.numel() - sends[self.rank]) * numbers.itemsize
        codec = self.codec_backward if trip.backward else self.codec
        # Each pair of ranks has its own draws, since every peer gets other columns of a row.
        keys = [_draws(self.seed, trip, self.rank * self.size + peer) for peer in range(self.size)]
        sample = block_exchange.sample_of(codec, numbers, trip, self.rank)
        if sample is not None:
            rows, stamps, peer = sample
            some = plain(codec, [stamps.numel()])
            self._measure(some, rows, None, replace(trip, stamps=stamps), keys[peer], action)
        return block_exchange.start(
            self.channel, codec, numbers, sends, comes, trip, keys, action=action, kind=kind, header=header
        )

    def _selection(
        self, trip: Trip, codec: Codec, sends: Sequence[int], comes: Sequence[int]
    ) -> Selection | None:
        """Return the selection among a site's rows; None if all rows are sent alike."""
        settings = self.settings

        def make() -> Selection | None:
            if settings.halo_sample < 1:
                return SampledRows(settings.halo_sample, self.seed, self.rank, codec)
            if settings.skip_drift > 0 and not trip.backward:
                return Skip(settings.skip_drift, settings.max_age, codec)
            if settings.adaptive_bits and codec.bits is not None:
                return Fit(codec, self._reads(trip, sends, comes))
            return None

        key = trip.site, trip.direction
        rows = sum(sends), sum(comes)
        return self.known.selection(key, trip.epoch, make, rows) if self.chooses else None

    def _reads(self, trip: Trip, sends: Sequence[int], comes: Sequence[int]) -> Tensor:
        """Return how many edges read each row that is sent; the ranks that read it report that.

        A gradient's row counts 1.
        """
        if trip.direction > 1:
            return torch.ones(sum(sends))
        counts = trip.reads.unsqueeze(1)
        return (
            self.channel.exchange(counts, comes, sends, action="readers of rows", kind="other")
            .squeeze(1)
            .cpu()
        )

    def _settle(self, trip: Trip) -> None:
        """Receive late rows that no epoch will read.

        A message that is not received blocks those sent long after it.
        """
        if self.waits:
            line = self.known.lines.get((trip.site, trip.direction))
            if line is not None:
                line.settle()
        if trip.epoch != self._epoch:
            self._epoch = trip.epoch
            for line in self.known.lines.values():
                if line.coming is not None and line.coming[1] < trip.epoch - 1:
                    line.settle()

    def _line(self, trip: Trip, count: int, rows: Tensor) -> StaleRows:
        def make() -> StaleRows:
            return StaleRows(trip.name, self.settings.max_age, self.settings.smoothing)

        found = self.known.line((trip.site, trip.direction), trip.epoch, make)
        if not found.fits(count, rows.size(1), rows):
            found.forget()
        return found

    def _sent(
        self,
        way: EncodingChoice,
        plan: SelectionPlan,
        rows: Tensor,
        trip: Trip,
        selection: Selection | None,
        *,
        action: str,
        kind: Kind,
        header: tuple[int, ...] | None,
        pick: Tensor | None,
    ) -> UnderWay:
        """Write encoded messages and begin to send them, and to receive the peers' messages."""
        width, dtype = rows.size(1), rows.dtype
        key = _draws(self.seed, trip, self.rank)
        self._measure(plan.out, rows, pick, trip, key, action)
        letters = Writer(plan.out, rows, pick, trip.stamps, key, plan.notes, action)
        restored = rows.clone() if self.settings.error_feedback else None  # rows not sent have no error

        def write(peer: int, sheet: int, message: Tensor) -> None:
            letters.write(peer, sheet, message)
            if restored is not None:
                read(plan.out, peer, sheet, message, restored)

        begun = way.start_bytes(
            write,
            plan.out.sheets(width, dtype),
            plan.come.sheets(width, dtype),
            action=action,
            kind=kind,
            header=header,
        )
        if restored is not None:
            lost = rows - restored
            # With few bits the error of a draw may exceed the row itself; accumulated, it would diverge.
            keep = lost.norm(dim=1, keepdim=True) < rows.norm(dim=1, keepdim=True)
            self.known.residuals[trip.site, trip.direction] = torch.where(keep, lost, 0.0), trip.epoch
        count = sum(plan.come.counts)
        room = rows.new_zeros(count, width) if plan.ground is None else plan.ground.clone()
        told = None if selection is None else partial(selection.arrived, epoch=trip.epoch)
        return IncomingRows(begun, plan.come, room, told)

    def _measure(
        self, letters: Letters, rows: Tensor, pick: Tensor | None, trip: Trip, key: int, action: str
    ) -> None:
        """Record the codecs' error on a sample of rows, in which each codec has its share of all rows."""
        name = trip.name
        if trip.epoch % MEASURED_EVERY != 1 and name in self._measured:
            return
        self._measured.add(name)
        step, lost, whole = max(trip.stamps.numel() // MEASURED_ROWS, 1), 0.0, 0.0
        for codec, places in letters.coded().items():
            some = places[::step].to(rows.device)
            sample = rows.index_select(0, some if pick is None else pick[some])
            less, all_ = lost_squares(codec, sample, trip.stamps[some], key, action)
            lost, whole = lost + less, whole + all_
        if whole > 0:
            self.crossed.errors[name] = math.sqrt(lost / whole)


def _draws(seed: int, trip: Trip, rank: int) -> int:
    """Return a 64-bit seed of an exchange's draws. For values at halo rows it differs between readers."""
    reader = rank if trip.direction > 1 else -1
    text = repr((seed, trip.epoch, trip.site, trip.direction, reader)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
