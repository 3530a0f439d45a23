"""Chunk memory: the bytes that autograd saves for a rank's chunks in flight, measured in the first epochs.

Where it sits: ``chunk_engine`` runs the stages' forwards inside it. ``train.admission`` compares the
measurement with the estimate. For a part in one piece, ``memory.tensor_bytes.SavedMemory`` measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Final

from torch import Tensor, nn

from kagome.components.offload import Offload
from kagome.memory.tensor_bytes import TensorMemory, add_scope
from kagome.model.saved_tensor_hook import SavedTensors
from kagome.pipelining.chunking import Chunking

WATCHED: Final = 2
"""Epochs that are measured: with history the first is exact, and the second is like most others."""


class ChunkActivations:
    """The activations that autograd saves for one rank's chunks.

    Args:
        offload: Where activations are kept until backward. Nothing is measured here if it moves them.
        chunks: The chunks of this rank's part.
        model: The user's module.

    Cost:
        In the first epochs that of :class:`SavedTensors`. After each chunk's forward a pass over all saved
        tensors and all tensors that the chunks hold.
    """

    def __init__(self, offload: Offload, chunks: Chunking, model: nn.Module) -> None:
        self.offload, self.chunks, self.model = offload, chunks, model
        self.bytes: Mapping[str, int] | None = None
        """The most bytes that were saved at one time, as ``activations``; None if nothing was measured."""
        self._left = 0 if offload.moves else WATCHED
        self._saved = SavedTensors()

    def saving(self) -> AbstractContextManager[None]:
        """Return the context in which a forward of training runs."""
        if not self._left:
            return self.offload.saving()
        return self._saved.recording()

    def sample_peak(self) -> None:
        """Count the saved bytes of all chunks after a chunk's forward, without tensors held in any case."""
        if not self._left:
            return
        # What is held in any case is counted anew each time, because freed memory is used again for other
        # tensors.
        # `apart` leaves out weights, tables and constants, which autograd saves as well.
        anyhow = ledger_of_chunks(self.chunks, self.model)
        size = sum(anyhow.apart(self._saved.alive()).values())
        self.bytes = {"activations": max(size, (self.bytes or {}).get("activations", 0))}

    def done(self) -> None:
        """Note that an epoch has ended."""
        self._left = max(self._left - 1, 0)
        self._saved.take()


def ledger_of_chunks(chunks: Chunking, model: nn.Module, copies: Iterable[Tensor] = ()) -> TensorMemory:
    """Count the tensors that a rank with chunks holds: its weights, all its chunks and their tables.

    Chunks read each other's rows from tables, which count as halo rows. A part in one piece has no tables;
    there :func:`~kagome.memory.tensor_bytes.ledger_of` finds the halo rows by the shapes of tensors.

    Args:
        chunks: The chunks of its part.
        model: The user's module.
        copies: Further copies of weights: those of the best epoch, and those kept for a rollback.
    """
    # No row counts: halo rows of chunks are in tables, not recognised by shape.
    ledger = TensorMemory(0, 0, chunks.whole.device)
    ledger.add("weights", (*model.parameters(), *model.buffers(), *copies))
    sites = () if chunks.tables is None else chunks.tables.sites.values()
    known = (each for site in sites for each in (site.rows, site.gradients, site.due))
    ledger.add("halo", (each for each in known if each is not None))
    for scope in chunks.scopes:
        add_scope(ledger, scope)
    return ledger
