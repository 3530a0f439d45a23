"""Staleness: the rows that one site last received, their age, and the exchange that is still in transit.

Where it sits: ``epoch_rows`` keeps one for each site and direction, for ``compressed_exchange``. Rows above
the maximum age are never returned.

::

    epoch t      begin to send this epoch's rows; use those of t - 1, which were in transit meanwhile
    synchronous  use this epoch's rows; those of t - 1, still in transit, are received and dropped

Source: PipeGCN's one epoch of staleness, its smoothing with a bias correction; Sylvie's bounded adaptor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kagome.comm.exchange import Work
from kagome.errors import CommError
from kagome.halo.resumed_rows import State

SAMPLE = 512
"""Number of rows in the sample that measures drift."""


@dataclass
class StaleRows:
    """The stale rows of one site in one direction.

    Args:
        name: Name of the site, for error messages.
        limit: Maximum age in epochs of a row when it is read.
        smoothing: Weight of the average of earlier epochs in the rows that are read; 0 for no smoothing.
    """

    name: str
    limit: int
    smoothing: float = 0.0
    rows: Tensor | None = None
    epoch: int = 0
    in_flight: tuple[Work, int] | None = None
    drift: float | None = None
    """How far the mean of the sampled rows moved in the last epoch, over its length."""
    oldest: int = 0
    """Age of the oldest row that was read, in epochs."""
    _mean: Tensor | None = None
    _weight: float = 0.0

    def settle(self) -> None:
        """Receive what is still in transit."""
        if self.in_flight is not None:
            in_flight, epoch = self.in_flight
            self.in_flight = None
            self._take(in_flight.wait(), epoch)

    def receive(self, work: Work, epoch: int, *, synchronous: bool) -> Tensor:
        """Return the rows for an epoch: the last ones received, or those of the exchange just begun."""
        self.settle()
        # Rows of this same epoch come from a forward pass that was restarted, which may send other rows here.
        known = self.rows is not None and 0 < epoch - self.epoch <= self.limit
        if synchronous or not known:
            self._take(work.wait(), epoch)
        else:
            self.in_flight = work, epoch
        return self.read(epoch)

    def read(self, epoch: int) -> Tensor:
        """Return the rows received last, smoothed if set so.

        Raises:
            CommError: If they exceed the maximum age.
        """
        age = epoch - self.epoch
        if self.rows is None or age > self.limit:
            raise CommError(
                f"rows at most {self.limit} epochs old when they are read",
                "no rows yet" if self.rows is None else f"rows {age} epochs old",
                where=f"{self.name}, epoch {epoch}",
                hint="this is a fault in Kagome: please report it with the run's config.toml",
            )
        self.oldest = max(self.oldest, age)
        # A synchronous epoch reads the rows themselves.
        if self._mean is None or age == 0:
            return self.rows
        return self._mean / self._weight

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, after receiving what is still in transit."""
        self.settle()
        state = {"rows": self.rows, "epoch": self.epoch, "drift": self.drift, "oldest": self.oldest}
        return {**state, "mean": self._mean, "weight": self._weight}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that another object saved."""
        self.rows, self.epoch, self.drift = state["rows"], state["epoch"], state["drift"]
        self.oldest, self._mean, self._weight = state["oldest"], state["mean"], state["weight"]

    def fits(self, count: int, width: int, like: Tensor) -> bool:
        """Return whether the rows received last have the shape and type of those to come."""
        return self.rows is None or (
            tuple(self.rows.shape) == (count, width) and self.rows.dtype == like.dtype
        )

    def forget(self) -> None:
        """Drop all rows. An exchange that is still in transit is received and dropped."""
        self.settle()
        self.rows = self._mean = self.drift = None
        self._weight = 0.0

    def _take(self, rows: Tensor, epoch: int) -> None:
        if self.rows is not None and rows.numel():
            step = max(rows.size(0) // SAMPLE, 1)
            # Compare means of rows: dropout moves each row far in every epoch, but their mean hardly.
            new, old = rows[::step].mean(0), self.rows[::step].mean(0)
            length, moved = torch.stack([new.norm(), (new - old).norm()]).tolist()
            self.drift = moved / length if length > 0 else 0.0
        # A moving average that begins at 0, with Adam's correction of its start; s is the smoothing:
        #
        #     mean_k = s mean_(k-1) + (1 - s) rows_k        weight_k = 1 - s^k        read: mean_k / weight_k
        if self.smoothing > 0:
            old = rows.new_zeros(()) if self._mean is None else self._mean
            self._mean = self.smoothing * old + (1 - self.smoothing) * rows
            self._weight = self.smoothing * self._weight + 1 - self.smoothing
        self.rows, self.epoch = rows, epoch
