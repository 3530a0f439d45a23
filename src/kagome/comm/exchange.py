"""Exchange route: which rows of one exchange go where, for carriers that encode or delay them.

Where it sits: ``halo`` passes one with each exchange. ``halo.compressed_exchange`` reads it; a plain channel
ignores it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

Blocks = Sequence[tuple[int, int]]
"""Number of rows and columns, for each peer."""


@dataclass(frozen=True, slots=True)
class Trip:
    """Description of one exchange of one site.

    Args:
        site: Key of the site, the same in every forward pass.
        direction: 0 and 1 send rows to the ranks that read them; 2 and 3 send values at read rows back to the
            rows' owners. Odd directions belong to the backward pass.
        epoch: The training epoch, from 1.
        training: Whether the exchange belongs to the forward and backward pass of a training epoch.
        stamps: A number for each row that is sent, the same for any number of ranks: the vertex id.
        reads: Number of local edges that read each received row; empty if that is not known.
        blocks: Rows and columns of the block sent to each peer and of the block received from each. Given
            only if blocks of different widths are exchanged instead of rows of one width.
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
        """Site and direction in words, with the call's number if a module is called more than once."""
        module, call = self.site if isinstance(self.site, tuple) else (self.site, 1)
        times = f", call {call}" if call != 1 else ""
        return f"{module}{times} {'backward' if self.backward else 'forward'}"

    @property
    def backward(self) -> bool:
        """Whether the exchange carries gradients."""
        return self.direction % 2 == 1
