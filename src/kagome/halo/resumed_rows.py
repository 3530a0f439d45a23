"""Resumed rows: rows and gradients from the last epoch of an earlier run, one entry for each site.

Where it sits: ``historical.tables``, ``epoch_rows`` and ``adaptive.rollback`` ask for an entry where they
would otherwise begin without one. ``checkpoint.epoch_state`` reads the entries from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Protocol

State = Mapping[str, Any]
"""Tensors, plain values and None, by name."""
Entry = tuple[str, Hashable, State]
"""An entry to restore: its kind, its site, its state."""


class ResumedRows(Protocol):
    """The state of the epoch before the first one of this run."""

    @property
    def epoch(self) -> int:
        """The epoch that may read the entries."""

    def take(self, kind: str, key: Hashable, epoch: int) -> State | None:
        """Return an entry, or None if there is none.

        Only one epoch, and evaluations before it, may read entries.
        """


class Nothing:
    """The resumed rows of a run that has just begun, which has no earlier epoch."""

    epoch = 1

    def take(self, kind: str, key: Hashable, epoch: int) -> State | None:
        """Return None: there are no entries."""
        return None


NOTHING: Final = Nothing()
