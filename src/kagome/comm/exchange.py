"""Trip: which rows go where in one exchange, for those on the way who code them or bring them late.

Where it sits: ``neighbors`` says it of each exchange; ``crossing`` reads it, a plain channel does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

Blocks = Sequence[tuple[int, int]]
"""Rows and columns, by peer."""


@dataclass(frozen=True, slots=True)
class Trip:
    """One exchange of one site.

    Args:
        site: The same in every forward.
        direction: 0 and 1: rows to those who read them; 2 and 3: what lies on read rows to their owners.
        epoch: Of training, from 1.
        training: Whether it belongs to the forward and backward of an epoch, and to no other.
        stamps: A number for each row that is sent, the same on any ranks: the vertex.
        reads: How many edges here read each row that comes; empty where that is not known.
        blocks: Rows and columns of what goes to each peer, and of what comes from each, where numbers and not
            rows of one width are exchanged.
    """

    site: Hashable
    direction: int
    epoch: int
    training: bool
    stamps: Tensor
    reads: Tensor
    blocks: tuple[Blocks, Blocks] | None = None

    @property
    def name(self) -> str:
        """The site and the way in words: which call of a module it is, where it is called more than once."""
        module, call = self.site if isinstance(self.site, tuple) else (self.site, 1)
        times = f", call {call}" if call != 1 else ""
        return f"{module}{times} {'backward' if self.backward else 'forward'}"

    @property
    def backward(self) -> bool:
        """Whether gradients travel."""
        return self.direction % 2 == 1
