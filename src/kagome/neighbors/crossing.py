"""Crossing: how rows cross to the peers - by which codec, and in this epoch or while the next one runs.

Where it sits: before ``comm``'s channel, under ``rows``, ``tables`` and ``tape``, who know nothing of it.

::

    rows ──pick──> codec ──bytes──> peers            UnderWay: bytes ──codec──> rows
                                                     late:     the last epoch's; these are for the next
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Literal

import torch
from torch import Tensor

from kagome.comm.channel import Kind, Op
from kagome.comm.codec import Codec
from kagome.comm.trip import Trip
from kagome.config import Parallel
from kagome.neighbors.lines import Line
from kagome.neighbors.rows import Carrier, UnderWay

Mode = Literal["set", "synchronous", "exact"]
"""As the settings say; the same, but waiting; all numbers as they are, and waiting."""
MEASURED_EVERY: Final = 10
"""Epochs from one measurement of what a codec loses to the next."""
MEASURED_ROWS: Final = 64


@dataclass
class Coming:
    """A coded exchange under way."""

    bytes: UnderWay
    codec: Codec
    sizes: Sequence[int]
    counts: Sequence[int]
    rows: Tensor
    done: bool = False

    def wait(self) -> Tensor:
        """The restored rows."""
        if not self.done:
            with self.bytes.lent() as message:
                parts = zip(message.split(list(self.sizes)), self.rows.split(list(self.counts)), strict=True)
                for part, out in parts:
                    self.codec.decode(part, out)
            self.done = True
        return self.rows

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """The restored rows."""
        yield self.wait()


@dataclass
class Late:
    """Rows of the last epoch, if they may be late; these are on their way meanwhile."""

    begun: UnderWay
    line: Line
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
        errors: By site and pass: length of what the codec lost over the rows', on a sample.
    """

    plain: int = 0
    errors: dict[str, float] = field(default_factory=dict)


class Crossing:
    """The way to the peers, with codecs and lateness.

    Args:
        channel: The way itself.
        settings: Codecs, age, smoothing.
        seed: Of the draws.
    """

    def __init__(self, channel: Carrier, settings: Parallel, seed: int) -> None:
        self.channel, self.settings, self.seed = channel, settings, seed
        self.mode: Mode = "set"
        self.forward_codec = Codec(settings.codec)
        self.backward_codec = Codec(settings.codec_backward or settings.codec)
        self.lines: dict[Hashable, Line] = {}
        self.crossed = Crossed()
        self._residuals: dict[Hashable, Tensor] = {}

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
        late = self.settings.max_age > 0
        return self.size == 1 or (self.forward_codec.exact and self.backward_codec.exact and not late)

    @property
    def oldest(self) -> int:
        """Age of the oldest row that was read, in epochs."""
        return max((line.oldest for line in self.lines.values()), default=0)

    @property
    def drift(self) -> float:
        """How far rows that came last moved within an epoch: the most of any site."""
        return max((line.drift for line in self.lines.values() if line.drift is not None), default=0.0)

    @contextmanager
    def using(self, mode: Mode) -> Iterator[None]:
        """Let rows cross otherwise for a block; all ranks do."""
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    def forget(self) -> None:
        """Let no epoch read what came before it: weights were changed from outside. All ranks call it."""
        for line in self.lines.values():
            line.forget()

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
        plain = trip is None or not trip.training or self.size == 1 or not rows.is_floating_point()
        codec = self._codec(trip) if trip is not None and not plain else Codec("none")
        begun: UnderWay
        if trip is None or plain or codec.exact:
            begun = self.channel.start_exchange(
                rows, send_counts, recv_counts, action=action, kind=kind, header=header, pick=pick
            )
        else:
            begun = self._coded(
                codec,
                rows,
                send_counts,
                recv_counts,
                trip,
                action=action,
                kind=kind,
                header=header,
                pick=pick,
            )
        if trip is None or plain:
            return begun
        count = rows.size(0) if pick is None else pick.numel()
        self.crossed.plain += count * rows.size(1) * rows.itemsize
        if self.settings.max_age == 0:
            return begun
        line = self._line(trip, sum(recv_counts), rows)
        return Late(begun, line, trip.epoch, self._waits(trip.epoch))

    def _codec(self, trip: Trip) -> Codec:
        if self.mode == "exact":
            return Codec("none")
        return self.backward_codec if trip.backward else self.forward_codec

    def _waits(self, epoch: int) -> bool:
        every = self.settings.sync_every
        return self.mode != "set" or (isinstance(every, int) and epoch % every == 0)

    def _line(self, trip: Trip, count: int, rows: Tensor) -> Line:
        key = trip.site, trip.direction
        found = self.lines.get(key)
        if found is not None and not found.fits(count, rows.size(1), rows):
            found.forget()
        if found is None:
            name = f"{_site_name(trip.site)}, {'backward' if trip.backward else 'forward'}"
            found = Line(name, self.settings.max_age, self.settings.smoothing)
            self.lines[key] = found
        return found

    def _coded(
        self,
        codec: Codec,
        rows: Tensor,
        sends: Sequence[int],
        comes: Sequence[int],
        trip: Trip,
        *,
        action: str,
        kind: Kind,
        header: tuple[int, ...] | None,
        pick: Tensor | None,
    ) -> UnderWay:
        width, dtype = rows.size(1), rows.dtype
        key = _draws(self.seed, trip, self.rank)
        if self.settings.error_feedback:
            rows, pick = self._with_residual(rows, pick, trip), None
        self._measure(codec, rows, pick, trip, key, action)
        out_sizes = [codec.size(count, width, dtype) for count in sends]
        message = torch.empty(sum(out_sizes), dtype=torch.uint8, device=rows.device)
        first = 0
        for part, count in zip(message.split(out_sizes), sends, strict=True):
            place = slice(first, first + count)
            if pick is None:
                codec.encode(rows[place], None, trip.stamps[place], key, part, where=action)
            else:
                codec.encode(rows, pick[place], trip.stamps[place], key, part, where=action)
            first += count
        if self.settings.error_feedback:
            self._keep_residual(codec, rows, message, out_sizes, sends, trip)
        in_sizes = [codec.size(count, width, dtype) for count in comes]
        begun = self.channel.start_exchange(
            message, out_sizes, in_sizes, action=action, kind=kind, header=header
        )
        room = torch.empty(sum(comes), width, dtype=dtype, device=rows.device)
        return Coming(begun, codec, in_sizes, comes, room)

    def _with_residual(self, rows: Tensor, pick: Tensor | None, trip: Trip) -> Tensor:
        picked = rows if pick is None else rows.index_select(0, pick)
        residual = self._residuals.get((trip.site, trip.direction))
        return picked if residual is None or residual.shape != picked.shape else picked + residual

    def _keep_residual(
        self,
        codec: Codec,
        rows: Tensor,
        message: Tensor,
        sizes: Sequence[int],
        counts: Sequence[int],
        trip: Trip,
    ) -> None:
        restored = torch.empty_like(rows)
        for part, out in zip(message.split(list(sizes)), restored.split(list(counts)), strict=True):
            codec.decode(part, out)
        self._residuals[trip.site, trip.direction] = rows - restored

    def _measure(
        self, codec: Codec, rows: Tensor, pick: Tensor | None, trip: Trip, key: int, action: str
    ) -> None:
        """Note what the codec loses of a few rows."""
        if trip.epoch % MEASURED_EVERY != 1:
            return
        count = trip.stamps.numel()
        some = torch.arange(0, count, max(count // MEASURED_ROWS, 1), device=rows.device)
        sample = rows.index_select(0, some if pick is None else pick[some])
        length = float(sample.norm())
        if length == 0:
            return
        size = codec.size(some.numel(), rows.size(1), rows.dtype)
        message = torch.empty(size, dtype=torch.uint8, device=rows.device)
        codec.encode(sample, None, trip.stamps[some], key, message, where=action)
        lost = codec.decode(message, torch.empty_like(sample)).sub_(sample)
        name = f"{_site_name(trip.site)} {'backward' if trip.backward else 'forward'}"
        self.crossed.errors[name] = float(lost.norm()) / length


def _site_name(site: Hashable) -> str:
    return str(site[0]) if isinstance(site, tuple) else str(site)


def _draws(seed: int, trip: Trip, rank: int) -> int:
    """64 bits for an exchange: what lies on halo rows is drawn by each of their readers apart."""
    reader = rank if trip.direction > 1 else -1
    text = repr((seed, trip.epoch, trip.site, trip.direction, reader)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
