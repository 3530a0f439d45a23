"""Costs: seconds and traffic of training alone, epoch by epoch.

Where it sits: ``trainer`` enters it around what belongs to training, and takes a record an epoch, or later:
where rows are late a sum of a few numbers would wait for megabytes.
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
from kagome.errors import CommError, ModelError
from kagome.records.epoch import EpochRecord


@dataclass
class Begun:
    """An epoch that has ended, while the ranks' counts are on their way.

    Args:
        record: Without what all ranks sent and waited.
        counts: Their sum: four numbers a kind.
    """

    record: EpochRecord
    counts: AllReduceWork

    def whole(self, ranks: int) -> EpochRecord:
        """The record; waits for the counts."""
        rows = self.counts.wait().view(4, -1).tolist()
        sent, waited, under_way, plain = (dict(zip(KINDS, row, strict=True)) for row in rows)
        return replace(
            self.record,
            bytes={kind: int(count) for kind, count in sent.items()},
            waited={kind: value / ranks for kind, value in waited.items() if under_way[kind]},
            under_way={kind: value / ranks for kind, value in under_way.items() if value},
            uncoded={kind: int(count) for kind, count in plain.items() if count},
        )


class EpochTimer:
    """What the current epoch has cost so far, and epochs whose counts are on their way.

    Args:
        channel: All ranks; whose traffic is counted.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._seconds, self._traffic = 0.0, Traffic()
        self._begun: deque[Begun] = deque()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count what runs inside; evaluation, checkpoints and the counting itself run outside."""
        self.channel.take_traffic()
        begun = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begun
        self._traffic.add(self.channel.take_traffic())

    def drop(self) -> None:
        """Forget what was counted: its epoch will not come."""
        self._seconds, self._traffic = 0.0, Traffic()

    def end(self, epoch: int, loss: float, uncoded: Mapping[str, int]) -> None:
        """End an epoch, not evaluated yet; what comes after counts to the next one. All ranks call it.

        Args:
            epoch: Its number.
            loss: Of all ranks.
            uncoded: Bytes that this rank would have sent without codecs, of kinds that have one.

        Cost:
            Four numbers a kind, for which nobody waits here.
        """
        spent, seconds = self._traffic, self._seconds
        self.drop()
        columns: tuple[Mapping[str, float], ...] = (spent.bytes, spent.waited, spent.under_way, uncoded)
        rows = [[column.get(kind, 0) for kind in KINDS] for column in columns]
        mine = torch.tensor(rows, dtype=torch.float64, device=self.channel.device)
        counts = self.channel.start_all_reduce(mine.view(-1), action=f"costs, epoch {epoch}", kind="other")
        self._begun.append(Begun(EpochRecord(epoch, loss, None, None, seconds, {}), counts))

    def scored(self, train: float | None, val: float | None, *, best_epoch: int) -> None:
        """Put metrics, and which epoch is the best with it, into the record of the epoch that has ended."""
        last = self._begun[-1]
        last.record = replace(last.record, train_metric=train, val_metric=val, best_epoch=best_epoch)

    @contextmanager
    def ending(self, noting: Sequence[Callable[[EpochRecord], None]]) -> Iterator[None]:
        """Around epochs: at their end, also where a model fails, those are told of that are left."""
        try:
            yield
        except ModelError:
            with suppress(CommError):  # a peer that has failed as well may be gone
                self.tell(noting)
            raise
        self.tell(noting)

    def tell(self, noting: Sequence[Callable[[EpochRecord], None]], *, keep: bool = False) -> None:
        """Tell of the epochs that have ended, in order. All ranks call it alike.

        Args:
            noting: Who is told of each.
            keep: Leave the last for the next call: its counts travel on.
        """
        while len(self._begun) > keep:
            record = self._begun.popleft().whole(self.channel.size)
            for note in noting:
                note(record)
