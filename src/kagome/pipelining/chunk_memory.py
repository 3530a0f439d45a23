"""Saving: the memory that autograd keeps of a rank's chunks in flight, watched in a run's first epochs.

Where it sits: ``chunk_engine`` runs the stages' forwards inside; ``train.admission`` sets what was found
beside what was foreseen. For a part in one piece it is ``holdings.Saved``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.components.offload import Offload
from kagome.memory.tensor_bytes import HeldTensor, TensorMemory, add_scope, restored, tensors_in
from kagome.pipelining.chunking import Chunking
from kagome.records.memory import MemoryByKind

WATCHED: Final = 2
"""Epochs that are watched: with history the first is exact, the second is as most are."""


class ChunkActivations:
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


def ledger_of_chunks(chunks: Chunking, model: nn.Module, copies: Iterable[Tensor] = ()) -> TensorMemory:
    """The same for a rank with chunks: all of them together, and the tables between them.

    Args:
        chunks: Of its part.
        model: The user's module.
        copies: Further weights: the best epoch's.
    """
    ledger = TensorMemory(0, 0, chunks.scopes[0].device)
    ledger.add("weights", (*model.parameters(), *model.buffers(), *copies))
    _add_tables(ledger, chunks)
    for scope in dict.fromkeys((*chunks.scopes, *chunks.apart)):
        add_scope(ledger, scope)
    return ledger


def _add_tables(ledger: TensorMemory, chunks: Chunking) -> None:
    """Count the rows that chunks read of each other."""
    sites = () if chunks.tables is None else chunks.tables.sites.values()
    known = (each for site in sites for each in (site.rows, site.gradients, site.due))
    ledger.add("halo", (each for each in known if each is not None))


def held_by_chunks(
    chunks: Chunking,
    model: nn.Module,
    optimizer: Optimizer,
    saved: int | None,
    copies: Iterable[Tensor] = (),
) -> MemoryByKind:
    """What a rank with chunks holds between epochs, and in ``saved`` what is kept of them within one.

    Args:
        chunks: Of its part.
        model: The user's module.
        optimizer: Over its parameters.
        saved: Bytes that autograd keeps; None if nobody looked.
        copies: Further weights: the best epoch's, and those that may be put back.
    """
    ledger = ledger_of_chunks(chunks, model, copies)
    ledger.add("gradients", (p.grad for p in model.parameters() if p.grad is not None))
    ledger.add("optimizer", (t for state in optimizer.state.values() for t in tensors_in(state.values())))
    found = ledger.bytes
    return MemoryByKind(
        weights=found["weights"],
        gradients=found["gradients"],
        optimizer=found["optimizer"],
        features=found["features"],
        edges=found["edges"],
        tables=found["tables"],
        activations=saved,
        halo=found["halo"],
    )
