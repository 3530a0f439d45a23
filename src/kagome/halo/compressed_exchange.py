"""Crossing: how rows cross to the peers - by which codec, and in this epoch or while the next one runs.

Where it sits: before ``comm``'s channel, under ``exchange``, ``historical.tables`` and ``comm_recorder``, who
know nothing of it.

::

    rows ──pick──> codec ──bytes──> peers            UnderWay: bytes ──codec──> rows
                                                     late:     the last epoch's; these are for the next
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
"""Epochs from one measurement of what a codec loses to the next."""
MEASURED_ROWS: Final = 64


@dataclass
class LateRows:
    """Rows of the last epoch, if they may be late; these are on their way meanwhile."""

    begun: UnderWay
    line: StaleRows
    epoch: int
    synchronous: bool
    rows: Tensor | None = None

    def wait(self) -> Tensor:
        """The rows."""
        if self.rows is None:
            self.rows = self.line.turn(self.begun, self.epoch, synchronous=self.synchronous)
        return self.rows

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """The rows."""
        yield self.wait()


@dataclass
class Crossed:
    """What crossed since the counts were taken.

    Args:
        plain: Bytes that uncoded rows would have had.
        sliced: The same of feature slices.
        errors: By site and pass: length of what the codec lost over the rows', on a sample.
    """

    plain: int = 0
    sliced: int = 0
    errors: dict[str, float] = field(default_factory=dict)


class CompressedExchange:
    """The way to the peers, with codecs and lateness.

    Args:
        channel: The way itself.
        late: The way of rows that are read in the next epoch; by default the same.
        settings: Codecs, age, smoothing.
        seed: Of the draws.
    """

    def __init__(
        self, channel: EncodingChoice, settings: Parallel, seed: int, *, late: EncodingChoice | None = None
    ) -> None:
        self.channel, self.settings, self.seed = channel, settings, seed
        self._late = late or channel
        self.codec = Codec(settings.codec)
        self.codec_backward = Codec(settings.codec_backward or settings.codec)
        self.waits = settings.max_age == 0
        """Whether no row is late; lines know nothing of such an epoch."""
        self.chooses = settings.halo_sample < 1 or settings.skip_drift > 0 or settings.adaptive_bits
        """Whether only some rows cross, or not all alike."""
        self.asks = False
        """Whether a probe asks what late rows give, also in an epoch that waits for them."""
        self.known = EpochRows()
        self.crossed = Crossed()
        self._measured: set[str] = set()
        self._epoch = 0

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return self.channel.rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.channel.size

    @property
    def exact(self) -> bool:
        """Whether all rows cross as they are, and none is late."""
        codecs = self.codec.exact and self.codec_backward.exact
        return self.size == 1 or (codecs and self.waits and not self.chooses)

    @property
    def late(self) -> bool:
        """Whether rows may be those of an earlier epoch."""
        return self.size > 1 and not self.waits

    @property
    def drifts(self) -> tuple[float, ...]:
        """Where all ranks want to know it, how far rows moved here, and 1; twice 0 where none could move."""
        return self.known.drifts if self.settings.sync_every == "auto" else ()

    def moved(self, drifts: Sequence[float], epoch: int) -> None:
        """The sum of all ranks' ``drifts`` of an epoch: with ``auto`` the next one may wait."""
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
        """Let rows cross otherwise for a block; all ranks do."""
        before = self.codec, self.codec_backward, self.waits, self.chooses, self.asks
        self.codec, self.codec_backward = Codec(codec), Codec(codec_backward)
        self.waits, self.chooses, self.asks = waits, chooses, asks
        try:
            yield
        finally:
            self.codec, self.codec_backward, self.waits, self.chooses, self.asks = before

    def _synchronous(self, epoch: int) -> bool:
        """Whether rows that might be late are waited for."""
        every = self.settings.sync_every
        due = isinstance(every, int) and epoch % every == 0
        return not self.asks and (due or self.known.synchronous)

    def settle(self) -> None:
        """Take what is still under way. Rows are the same before and after."""
        self.known.settle()

    def forget(self, recall: ResumedRows = NOTHING) -> None:
        """Let no epoch read what came before it: weights were changed from outside. All ranks call it.

        Args:
            recall: What the next epoch may read all the same.
        """
        self.known.forget(recall)

    def take_counts(self) -> Crossed:
        """What crossed since the last call."""
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
        """All-to-all of rows as they are, a count for each peer."""
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
        """The sum, maximum or minimum over all ranks, as it is."""
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
        """All-to-all of rows, begun: coded and late as the settings say, where ``trip`` tells of an epoch."""
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
                line.settle()  # it says which rows come
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
        """Feature slices: as many columns for each peer as it takes."""
        assert trip.blocks is not None
        self.crossed.sliced += (numbers.numel() - sends[self.rank]) * numbers.itemsize
        codec = self.codec_backward if trip.backward else self.codec
        # Other columns of a row draw for themselves, whoever sends them.
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
        """What chooses among a site's rows; None where all go alike."""
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
        """How many edges read each row that is sent: its readers know; of a gradient's row, once."""
        if trip.direction > 1:
            return torch.ones(sum(sends))
        counts = trip.reads.unsqueeze(1)
        return (
            self.channel.exchange(counts, comes, sends, action="readers of rows", kind="other")
            .squeeze(1)
            .cpu()
        )

    def _settle(self, trip: Trip) -> None:
        """Take what will not be read: a message that nobody takes holds up those that come long after it."""
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
        """Write letters, begin to send them, and to receive the peers'."""
        width, dtype = rows.size(1), rows.dtype
        key = _draws(self.seed, trip, self.rank)
        self._measure(plan.out, rows, pick, trip, key, action)
        letters = Writer(plan.out, rows, pick, trip.stamps, key, plan.notes, action)
        restored = rows.clone() if self.settings.error_feedback else None  # what does not go loses nothing

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
            # With few bits a draw may lose more than the row: added up, that would grow without end.
            keep = lost.norm(dim=1, keepdim=True) < rows.norm(dim=1, keepdim=True)
            self.known.residuals[trip.site, trip.direction] = torch.where(keep, lost, 0.0), trip.epoch
        count = sum(plan.come.counts)
        room = rows.new_zeros(count, width) if plan.ground is None else plan.ground.clone()
        told = None if selection is None else partial(selection.arrived, epoch=trip.epoch)
        return IncomingRows(begun, plan.come, room, told)

    def _measure(
        self, letters: Letters, rows: Tensor, pick: Tensor | None, trip: Trip, key: int, action: str
    ) -> None:
        """Note what codecs lose of a few rows, of each as many as it has of all."""
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
    """64 bits for an exchange: what lies on halo rows is drawn by each of their readers apart."""
    reader = rank if trip.direction > 1 else -1
    text = repr((seed, trip.epoch, trip.site, trip.direction, reader)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
