"""Saving: the memory that autograd keeps of a rank's chunks in flight, watched in a run's first epochs.

Where it sits: ``pipeline`` runs the stages' forwards inside; ``accounts`` sets what was found beside what was
foreseen. For a part in one piece it is ``holdings.Saved``.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor, nn

from kagome.run.chunking import Chunking
from kagome.run.holdings import HeldTensor, ledger_of_chunks, restored
from kagome.run.offload import Offload

WATCHED: Final = 2
"""Epochs that are watched: with history the first is exact, the second is as most are."""


class Saving:
    """One rank's.

    Args:
        offload: Where activations go. Those that it moves are not watched here.
        chunks: Of this rank's part.
        model: The user's module.

    Cost:
        In the first epochs some microseconds a tensor that autograd saves, and after each chunk's forward a
        look at all of them and at what all chunks hold.
    """

    def __init__(self, offload: Offload, chunks: Chunking, model: nn.Module) -> None:
        self.offload, self.chunks, self.model = offload, chunks, model
        self.most: int | None = None
        """Bytes kept at once, at most; None where nothing was watched."""
        self._left = 0 if offload.moves else WATCHED
        self._found: list[weakref.ref[HeldTensor]] = []

    def saving(self) -> AbstractContextManager[None]:
        """Around a forward of training."""
        if not self._left:
            return self.offload.saving()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, restored)

    def look(self) -> None:
        """A chunk's forward has ended: count what is kept of it and of all others, and not anyhow."""
        if not self._left:
            return
        alive = [(reference, kept.tensor) for reference in self._found if (kept := reference()) is not None]
        self._found = [reference for reference, _ in alive]
        # In lockstep others are on their way too. What lies anyhow is asked anew: memory changes hands.
        anyhow = ledger_of_chunks(self.chunks, self.model)
        self.most = max(self.most or 0, sum(anyhow.apart(tensor for _, tensor in alive).values()))

    def done(self) -> None:
        """An epoch has ended."""
        self._left = max(self._left - 1, 0)
        self._found = []

    def _pack(self, tensor: Tensor) -> HeldTensor:
        kept = HeldTensor(tensor)
        self._found.append(weakref.ref(kept))
        return kept
