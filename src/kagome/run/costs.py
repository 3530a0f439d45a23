"""Costs: seconds and traffic of training alone, epoch by epoch.

Where it sits: ``trainer`` enters it around what belongs to training, and takes a record an epoch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from kagome.comm.channel import Channel
from kagome.comm.traffic import KINDS, Traffic
from kagome.report.meters import EpochRecord


class Costs:
    """What the current epoch has cost so far.

    Args:
        channel: All ranks; whose traffic is counted.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._seconds, self._traffic = 0.0, Traffic()

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

    def record(self, epoch: int, loss: float, uncoded: Mapping[str, int]) -> EpochRecord:
        """The epoch's record, not evaluated yet; what comes after counts to the next one. All ranks call it.

        Args:
            epoch: Its number.
            loss: Of all ranks.
            uncoded: Bytes that this rank would have sent without codecs, of kinds that have one.

        Cost:
            Four numbers a kind.
        """
        spent, seconds = self._traffic, self._seconds
        self.drop()
        columns: tuple[Mapping[str, float], ...] = (spent.bytes, spent.waited, spent.under_way, uncoded)
        rows = [[column.get(kind, 0) for kind in KINDS] for column in columns]
        mine = torch.tensor(rows, dtype=torch.float64)
        summed = self.channel.all_reduce(mine.to(self.channel.device), action="costs", kind="other").tolist()
        sent, waited, under_way, plain = (dict(zip(KINDS, row, strict=True)) for row in summed)
        size = self.channel.size
        return EpochRecord(
            epoch,
            loss,
            None,
            None,
            seconds,
            {kind: int(count) for kind, count in sent.items()},
            {kind: value / size for kind, value in waited.items() if under_way[kind]},
            {kind: value / size for kind, value in under_way.items() if value},
            {kind: int(count) for kind, count in plain.items() if count},
        )
