"""Metrics log: seconds and traffic of training, epoch by epoch, without evaluation and checkpoints.

Where it sits: ``trainer`` enters it around what belongs to training, and takes a record for each epoch. With
stale rows it takes the record later: otherwise the sum of a few numbers would wait for megabytes of rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from kagome.comm.all_reduce import AllReduceWork
from kagome.comm.channel import Channel
from kagome.comm.stats import KINDS, Traffic
from kagome.comm.transport.device import HOST, to_device
from kagome.errors import CommError, ModelError
from kagome.records.epoch import EpochRecord


@dataclass(frozen=True)
class EpochLoop:
    """The settings that stay the same over the epochs of one call of :meth:`Trainer.fit`.

    Args:
        epochs: Epochs in all.
        asked: The signals that asked this rank to stop.
        noting: Take the record of each epoch.
        delays: Whether a record may be reported an epoch later, with the sums of the next one.
    """

    epochs: int
    asked: list[int]
    noting: Sequence[Callable[[EpochRecord], None]]
    delays: bool


@dataclass
class PendingEpoch:
    """An epoch that has ended, while the sum of the ranks' counts is in flight.

    Args:
        record: The epoch's record, without what all ranks sent and waited.
        counts: The sum of the ranks' counts: four numbers a traffic kind.
    """

    record: EpochRecord
    counts: AllReduceWork

    def whole(self, ranks: int) -> EpochRecord:
        """Wait for the counts and return the complete record."""
        # [bytes, waited, under way, uncoded] x [kinds], as `end` laid them out.
        rows = self.counts.wait().view(4, -1).tolist()
        sent, waited, under_way, plain = (dict(zip(KINDS, row, strict=True)) for row in rows)
        return replace(
            self.record,
            bytes={kind: int(count) for kind, count in sent.items()},
            # Seconds are means over the ranks, bytes are sums. A kind without a message in this epoch is left
            # out.
            waited={kind: value / ranks for kind, value in waited.items() if under_way[kind]},
            under_way={kind: value / ranks for kind, value in under_way.items() if value},
            uncoded={kind: int(count) for kind, count in plain.items() if count},
        )


class EpochTimer:
    """Cost of the current epoch so far, and the ended epochs whose counts are in flight.

    Args:
        channel: All ranks; their traffic is counted.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        # Through the host's memory: a device would be waited for, to copy numbers that the host has.
        self._counts = channel.control if channel.size > 1 else Channel(None, HOST)
        self._seconds, self._traffic = 0.0, Traffic()
        self._pending: deque[PendingEpoch] = deque()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count what runs inside the block; evaluation, checkpoints and the counting itself run outside."""
        # Discards what evaluations and checkpoints have sent since the last block.
        self.channel.take_traffic()
        begun = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begun
        self._traffic.add(self.channel.take_traffic())

    def drop(self) -> None:
        """Discard what was counted for an epoch that will not be trained."""
        self._seconds, self._traffic = 0.0, Traffic()

    def end(self, epoch: int, loss: float, uncoded: Mapping[str, int]) -> None:
        """End an epoch before its evaluation; later work counts towards the next epoch. All ranks call it.

        Args:
            epoch: The epoch's number.
            loss: The mean loss over all ranks.
            uncoded: Bytes that this rank would have sent without codecs, for traffic kinds that have one.

        Cost:
            One sum of four numbers a traffic kind. No rank waits for it here.
        """
        spent, seconds = self._traffic, self._seconds
        self.drop()
        columns: tuple[Mapping[str, float], ...] = (spent.bytes, spent.waited, spent.under_way, uncoded)
        rows = [[column.get(kind, 0) for kind in KINDS] for column in columns]
        # float64 holds byte counts exactly up to 2**53; float32 would round above 16 MiB.
        mine = to_device(torch.tensor(rows, dtype=torch.float64), self._counts.device)
        counts = self._counts.start_all_reduce(mine.view(-1), action=f"costs, epoch {epoch}", kind="other")
        self._pending.append(PendingEpoch(EpochRecord(epoch, loss, None, None, seconds, {}), counts))

    def scored(self, train: float | None, val: float | None, *, best_epoch: int) -> None:
        """Add the metrics and the number of the best epoch to the record of the epoch that has just ended."""
        last = self._pending[-1]
        last.record = replace(last.record, train_metric=train, val_metric=val, best_epoch=best_epoch)

    @contextmanager
    def ending(self, noting: Sequence[Callable[[EpochRecord], None]]) -> Iterator[None]:
        """Report the remaining epochs at the end of the block, also when the model fails."""
        try:
            yield
        # All ranks raise a ModelError such as a loss that is not finite, so the counts in flight still
        # arrive. After other errors a wait for peers would only delay the end.
        except ModelError:
            with suppress(CommError):  # a peer that has failed as well may be gone
                self.flush(noting)
            raise
        self.flush(noting)

    def flush(self, noting: Sequence[Callable[[EpochRecord], None]], *, keep: bool = False) -> None:
        """Report the epochs that have ended, in order. All ranks call it with the same arguments.

        Args:
            noting: The functions that receive each record.
            keep: Leave the last epoch for the next call, while its counts are in flight.
        """
        # `keep` counts as 0 or 1.
        while len(self._pending) > keep:
            record = self._pending.popleft().whole(self.channel.size)
            for note in noting:
                note(record)
