"""Traffic statistics: the bytes that one rank has sent and the time its exchanges took, by kind.

Where it sits: each ``channel`` adds to a ``Traffic``; the trainer takes the counts after each epoch.
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
    """Counters by kind. Every kind is always present, and all in one order.

    While an exchange is in progress, a rank either waits for it or computes. The share spent computing, ``1 -
    waited / under_way``, is hidden communication. With nccl, whose waits are ordered on the device's stream,
    neither is counted, and no share is told.
    """

    bytes: dict[str, int] = field(default_factory=_counts)
    """Bytes sent by this rank."""
    messages: dict[str, int] = field(default_factory=_counts)
    """Messages sent by this rank: for each exchange, one to each peer that gets a byte; 1 for a collective of
    torch's."""
    waited: dict[str, float] = field(default_factory=_seconds)
    """Seconds spent blocked until messages from peers had arrived."""
    under_way: dict[str, float] = field(default_factory=_seconds)
    """Seconds during which at least one exchange was between its start and the end of its wait."""
    _until: dict[str, float] = field(default_factory=_seconds, compare=False, repr=False)
    """For each kind, the time up to which ``under_way`` has been counted."""

    def add(self, other: Traffic) -> None:
        """Add another object's counts to these."""
        for kind in KINDS:
            self.bytes[kind] += other.bytes[kind]
            self.messages[kind] += other.messages[kind]
            self.waited[kind] += other.waited[kind]
            self.under_way[kind] += other.under_way[kind]

    def ended(self, kind: Kind, begun: float, ended: float) -> None:
        """Record that an exchange has ended. Calls must come in the order in which exchanges end.

        Overlapping exchanges are not counted twice: late rows of all layers are in progress at once for a
        whole epoch, and the computation of one epoch can hide at most the epoch's length.
        """
        # The length of the union of the intervals [begun, ended], as exchanges end in order:
        #
        #     a  ├──────────┤              adds  ├──────────┤
        #     b      ├─────────────┤       adds             ├──┤    from _until, the end of a
        self.under_way[kind] += max(ended - max(begun, self._until[kind]), 0.0)
        self._until[kind] = ended

    def take(self) -> Traffic:
        """Return the counts since the last call and reset them."""
        taken = Traffic(self.bytes, self.messages, self.waited, self.under_way)
        self.bytes, self.messages, self.waited, self.under_way = _counts(), _counts(), _seconds(), _seconds()
        return taken

    def copy(self) -> Traffic:
        """Return the counts so far, without resetting them."""
        copied = Traffic()
        copied.add(self)
        return copied

    def since(self, earlier: Traffic) -> Traffic:
        """Return what was counted after an earlier copy.

        Args:
            earlier: What :meth:`copy` returned then.
        """
        found = Traffic()
        for name in ("bytes", "messages", "waited", "under_way"):
            before, after = getattr(earlier, name), getattr(self, name)
            setattr(found, name, {kind: after[kind] - before[kind] for kind in KINDS})
        return found
