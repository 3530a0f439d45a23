"""Traffic: what one rank has sent and how long its exchanges took, by kind.

Where it sits: each ``channel`` counts into one; ``run`` takes it epoch by epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["halo", "stage", "transpose", "weights", "statistics", "other"]
KINDS: tuple[Kind, ...] = ("halo", "stage", "transpose", "weights", "statistics", "other")


def _counts() -> dict[str, int]:
    return dict.fromkeys(KINDS, 0)


def _seconds() -> dict[str, float]:
    return dict.fromkeys(KINDS, 0.0)


@dataclass
class Traffic:
    """Counters by kind, all kinds always there and in one order.

    Of the time that an exchange is under way, what was not spent waiting was spent computing: that share,
    ``1 - waited / under_way``, is hidden. On nccl, whose waits are ordered on the device's stream, both are
    the host's times.
    """

    bytes: dict[str, int] = field(default_factory=_counts)
    """Bytes sent."""
    waited: dict[str, float] = field(default_factory=_seconds)
    """Seconds blocked until what peers sent had come."""
    under_way: dict[str, float] = field(default_factory=_seconds)
    """Seconds in which an exchange was between its begin and the end of its wait, however many were."""
    _until: dict[str, float] = field(default_factory=_seconds, compare=False, repr=False)
    """By kind, up to when ``under_way`` counts."""

    def add(self, other: Traffic) -> None:
        """Add another's counts to these."""
        for kind in KINDS:
            self.bytes[kind] += other.bytes[kind]
            self.waited[kind] += other.waited[kind]
            self.under_way[kind] += other.under_way[kind]

    def ended(self, kind: Kind, begun: float, ended: float) -> None:
        """An exchange has ended; exchanges end in the order in which this is called.

        Those that share the wire are not counted twice: late rows of all layers are under way at once, an
        epoch long, and what an epoch of computing hides is at most the epoch.
        """
        self.under_way[kind] += max(ended - max(begun, self._until[kind]), 0.0)
        self._until[kind] = ended

    def take(self) -> Traffic:
        """The counts since the last call; they begin anew."""
        taken = Traffic(self.bytes, self.waited, self.under_way)
        self.bytes, self.waited, self.under_way = _counts(), _seconds(), _seconds()
        return taken
