"""Staleness: the rows that one site last received, their age, and the exchange that is still in transit.

Where it sits: ``epoch_rows`` keeps one for each site and direction, for ``compressed_exchange``. Rows above
the maximum age are never returned.

::

    epoch t      begin to send this epoch's rows; use those of t - 1, which were in transit meanwhile
    synchronous  use this epoch's rows; those of t - 1, still in transit, are received and dropped

One copy of a site's rows is enough: those of t - 1 are dropped once they are read, as those of t are in
transit by then. A rank of the same host does not even have that copy: it reads the rows where the sender has
packed them, and gives the memory back after that.

Source: PipeGCN's one epoch of staleness, its smoothing with a bias correction; Sylvie's bounded adaptor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
    """The rows received last; None before the first ones, and once they are read and others in transit."""
    epoch: int = 0
    in_flight: tuple[Work, int] | None = None
    drift: float | None = None
    """How far the mean of the sampled rows moved in the last epoch, over its length."""
    oldest: int = 0
    """Age of the oldest row that was read, in epochs."""
    _mean: Tensor | None = None
    _weight: float = 0.0
    _sample: Tensor | None = None
    """The mean of a sample of the rows received last, which drift is measured from."""
    _form: tuple[int, int, torch.dtype] | None = None
    _lent: ExitStack = field(default_factory=ExitStack)
    _is_lent: bool = False
    """Whether the rows are in another rank's memory until ``_lent`` is closed."""

    def settle(self) -> None:
        """Receive what is still in transit."""
        if self.in_flight is not None:
            in_flight, epoch = self.in_flight
            self.in_flight = None
            self._take(in_flight, epoch)

    def arrive(self) -> None:
        """Receive what is still in transit, encoded rows as they are: they are decoded when they are read."""
        if self.in_flight is not None and not self.in_flight[0].receive():
            self.settle()

    def keep(self) -> None:
        """Receive what is still in transit, and copy rows that are in another rank's memory."""
        self.settle()
        if self.rows is not None and self._is_lent:
            rows = self.rows.clone()
            self._drop()
            self.rows = rows

    def expire(self, epoch: int) -> None:
        """Receive what is in transit in an epoch that waits, and drop rows that no later one may read."""
        self.settle()
        if epoch + 1 - self.epoch > self.limit:
            self._drop()

    @contextmanager
    def reading(self, work: Work, epoch: int, *, synchronous: bool) -> Iterator[Tensor]:
        """Lend the rows for an epoch: the last ones received, or those of the exchange just begun.

        Args:
            work: The exchange just begun.
            epoch: The epoch.
            synchronous: Whether the epoch reads the rows of that exchange.

        Yields:
            The rows, which are neither kept nor changed.
        """
        self.settle()
        # Rows of this same epoch come from a forward pass that was restarted, which may send other rows here.
        known = self.rows is not None and 0 < epoch - self.epoch <= self.limit
        if synchronous or not known:
            self._take(work, epoch)
        else:
            self.in_flight = work, epoch
        try:
            yield self.read(epoch)
        finally:
            # The next epoch reads those in transit, whatever happens to this one.
            if self.in_flight is not None:
                self._drop()

    def receive(self, work: Work, epoch: int, *, synchronous: bool) -> Tensor:
        """Return the rows of :meth:`reading` for a caller that keeps them."""
        with self.reading(work, epoch, synchronous=synchronous) as rows:
            return rows.clone() if self._is_lent and rows is self.rows else rows

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
        self.keep()  # the state may be written after the sender has its memory back
        state = {"rows": self.rows, "epoch": self.epoch, "drift": self.drift, "oldest": self.oldest}
        return {**state, "mean": self._mean, "weight": self._weight, "sample": self._sample}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that another object saved."""
        self.rows, self.epoch, self.drift = state["rows"], state["epoch"], state["drift"]
        self.oldest, self._mean, self._weight = state["oldest"], state["mean"], state["weight"]
        if self.rows is not None:
            self._form = _form_of(self.rows)
        # Checkpoints of earlier versions lack the sample, but always have its rows.
        older = None if self.rows is None else _sampled(self.rows)
        self._sample = state.get("sample", older)

    def fits(self, count: int, width: int, like: Tensor) -> bool:
        """Return whether the rows received last have the shape and type of those to come."""
        return self._form in (None, (count, width, like.dtype))

    def forget(self) -> None:
        """Drop all rows. An exchange that is still in transit is received and dropped."""
        self.settle()
        self._drop()
        self._mean = self._sample = self._form = self.drift = None
        self._weight = 0.0

    def _drop(self) -> None:
        """Drop the rows received last, and give back the memory in which another rank lends them."""
        self.rows, self._is_lent = None, False
        self._lent.close()

    def _take(self, work: Work, epoch: int) -> None:
        self._drop()  # first, so that the rows before and those that come are never there together
        rows = self._lent.enter_context(work.borrow())
        self._is_lent, self._form = work.lent, _form_of(rows)
        # Compare means of rows: dropout moves each row far in every epoch, but their mean hardly.
        old, self._sample = self._sample, _sampled(rows)
        if old is not None and self._sample is not None:
            new = self._sample
            length, moved = torch.stack([new.norm(), (new - old).norm()]).tolist()
            self.drift = moved / length if length > 0 else 0.0
        # A moving average that begins at 0, with Adam's correction of its start; s is the smoothing:
        #
        #     mean_k = s mean_(k-1) + (1 - s) rows_k        weight_k = 1 - s^k        read: mean_k / weight_k
        if self.smoothing > 0:
            mean = rows.new_zeros(()) if self._mean is None else self._mean
            self._mean = self.smoothing * mean + (1 - self.smoothing) * rows
            self._weight = self.smoothing * self._weight + 1 - self.smoothing
        self.rows, self.epoch = rows, epoch


def _form_of(rows: Tensor) -> tuple[int, int, torch.dtype]:
    return rows.size(0), rows.size(1), rows.dtype


def _sampled(rows: Tensor) -> Tensor | None:
    """Return the mean of a sample of the rows; None if there are none."""
    return rows[:: max(rows.size(0) // SAMPLE, 1)].mean(0) if rows.numel() else None
