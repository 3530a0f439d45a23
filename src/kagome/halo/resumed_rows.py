"""Recall: rows and gradients that an earlier run's last epoch left, one entry a site.

Where it sits: ``historical.tables`` and ``compressed_exchange`` ask for an entry where they would begin with
none; ``checkpoint.epoch_state`` reads it from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Protocol

State = Mapping[str, Any]
"""Tensors, plain values and None, by name."""
Entry = tuple[str, Hashable, State]
"""What is to be recalled: its kind, its site, its state."""


class ResumedRows(Protocol):
    """What is known of the epoch before."""

    @property
    def epoch(self) -> int:
        """The one that may read it."""

    def take(self, kind: str, key: Hashable, epoch: int) -> State | None:
        """An entry, in the epoch that may read it and in evaluations before; None where there is none."""


class Nothing:
    """A run that has just begun."""

    epoch = 1

    def take(self, kind: str, key: Hashable, epoch: int) -> State | None:
        """Nothing is known."""
        return None


NOTHING: Final = Nothing()
