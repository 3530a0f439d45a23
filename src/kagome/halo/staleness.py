"""Lines: what one site last heard from the peers, how old it is, and what is still under way.

Where it sits: ``compressed_exchange`` keeps one a site and a direction. A row older than it may be is never
given out.

::

    epoch t      begin to send this epoch's rows;  take those of t - 1, which travelled meanwhile
    synchronous  take this epoch's rows; those of t - 1, still under way, are taken and thrown away

Source: PipeGCN's one epoch of staleness, its smoothing with a bias correction; Sylvie's bounded adaptor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kagome.errors import CommError
from kagome.halo.exchange import UnderWay
from kagome.halo.resumed_rows import State

SAMPLE = 512
"""Rows by which a line's drift is measured."""


@dataclass
class StaleRows:
    """One site in one direction.

    Args:
        name: For errors.
        limit: Epochs that a row may be old when it is read.
        smoothing: Share of the average of earlier epochs in what is read; 0: none.
    """

    name: str
    limit: int
    smoothing: float = 0.0
    rows: Tensor | None = None
    epoch: int = 0
    coming: tuple[UnderWay, int] | None = None
    drift: float | None = None
    """How far the mean of a sample of rows moved in the last epoch, over its length."""
    oldest: int = 0
    """Age of the oldest row that was read, in epochs."""
    _mean: Tensor | None = None
    _weight: float = 0.0

    def settle(self) -> None:
        """Take what is still under way."""
        if self.coming is not None:
            coming, epoch = self.coming
            self.coming = None
            self._take(coming.wait(), epoch)

    def turn(self, begun: UnderWay, epoch: int, *, synchronous: bool) -> Tensor:
        """Rows for an epoch: the last ones known, or those that were begun."""
        self.settle()
        # Rows of this very epoch are those of a forward that began again: it may send others by this site.
        known = self.rows is not None and 0 < epoch - self.epoch <= self.limit
        if synchronous or not known:
            self._take(begun.wait(), epoch)
        else:
            self.coming = begun, epoch
        return self.read(epoch)

    def read(self, epoch: int) -> Tensor:
        """What is known.

        Raises:
            CommError: If it is older than it may be.
        """
        age = epoch - self.epoch
        if self.rows is None or age > self.limit:
            raise CommError(
                f"rows are at most {self.limit} epochs old when they are read",
                "none have come yet" if self.rows is None else f"these are {age} epochs old",
                where=f"{self.name}, epoch {epoch}",
                hint="this is a fault in Kagome: please report it with the run's config.toml",
            )
        self.oldest = max(self.oldest, age)
        if self._mean is None or age == 0:
            return self.rows
        return self._mean / self._weight

    def state_dict(self) -> dict[str, Any]:
        """What is known; what is under way has been taken."""
        self.settle()
        state = {"rows": self.rows, "epoch": self.epoch, "drift": self.drift, "oldest": self.oldest}
        return {**state, "mean": self._mean, "weight": self._weight}

    def load_state_dict(self, state: State) -> None:
        """Know what another one knew."""
        self.rows, self.epoch, self.drift = state["rows"], state["epoch"], state["drift"]
        self.oldest, self._mean, self._weight = state["oldest"], state["mean"], state["weight"]

    def fits(self, count: int, width: int, like: Tensor) -> bool:
        """Whether what is known has the shape of what is to come."""
        return self.rows is None or (
            tuple(self.rows.shape) == (count, width) and self.rows.dtype == like.dtype
        )

    def forget(self) -> None:
        """Nothing is known any more; what is under way is taken and thrown away."""
        self.settle()
        self.rows = self._mean = self.drift = None
        self._weight = 0.0

    def _take(self, rows: Tensor, epoch: int) -> None:
        if self.rows is not None and rows.numel():
            step = max(rows.size(0) // SAMPLE, 1)
            # The mean of rows: dropout moves each of them far in every epoch, and their mean hardly.
            new, old = rows[::step].mean(0), self.rows[::step].mean(0)
            length = float(new.norm())
            self.drift = float((new - old).norm()) / length if length > 0 else 0.0
        if self.smoothing > 0:
            old = rows.new_zeros(()) if self._mean is None else self._mean
            self._mean = self.smoothing * old + (1 - self.smoothing) * rows
            self._weight = self.smoothing * self._weight + 1 - self.smoothing
        self.rows, self.epoch = rows, epoch
