"""Engine: the interface of what trains a rank's share, whichever way the work is split.

Where it sits: ``train.trainer`` drives one. ``train.graph_engine.GraphEngine`` runs the whole model on a part
at once; ``pipelining.chunk_engine.ChunkEngine`` runs some of its layers over the part's chunks.
``train.engines`` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.checkpoint.epoch_state import EpochState, RestoredState
from kagome.comm.channel import Channel
from kagome.components.forward_reuse import ForwardReuse
from kagome.components.offload import Offload
from kagome.components.parallelize import ParallelModel
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.records.memory import MemoryByKind


class PhaseTimer(Protocol):
    """The part of :class:`kagome.records.spans.Spans` that engines need."""

    def phase(self, name: str, epoch: int | None = None) -> AbstractContextManager[Any]:
        """Time the block as a named phase."""


class Engine(Protocol):
    """One rank's model, ready to train. All ranks call every method except ``take_*``."""

    @property
    def model(self) -> nn.Module:
        """The user's module on this rank."""

    @property
    def channel(self) -> Channel:
        """The channel to the ranks of the other parts."""

    @property
    def exchange(self) -> CompressedExchange:
        """The exchange that brings rows from other parts."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Inputs of own rows by name, with labels and masks."""

    @property
    def forward_reuse(self) -> ForwardReuse:
        """Whether an evaluation may be the next epoch's forward pass."""

    @property
    def net(self) -> ParallelModel:
        """The model on its part: on it while the engine trains or evaluates, and in ``with`` blocks."""

    @property
    def offload(self) -> Offload:
        """Where saved activations wait for backward."""

    @property
    def fast(self) -> bool:
        """Whether messages are deferred and reduced by kernels; a forward pass may turn it off."""

    @property
    def recompute(self) -> bool:
        """Whether layers run again in backward."""

    def train(self, epoch: int, optimizer: Optimizer, *, stop: bool = False) -> tuple[float, bool]:
        """Make one weight update; return the mean loss before it, and whether any rank was asked to stop."""

    def look_ahead(self, epoch: int) -> Tensor | None:
        """Return scores of own rows from the coming epoch's forward pass; None where there are none."""

    def evaluate(self, epoch: int) -> Any:
        """Return exact scores of own rows, with dropout off."""

    def join_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Give the model, or a copy of its weights, the weights of all stages."""

    def joined(self, optimizer: Optimizer, best: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
        """Join the weights, the optimizer's state and the best weights of all stages for a block."""

    def epoch_state(self, epoch: int) -> EpochState:
        """Return the state of an epoch that the next epoch may read."""

    def resumed(self, optimizer: Optimizer, restored: RestoredState) -> str:
        """Continue from a checkpoint whose weights the model has; return how the run continues."""

    def held(self, optimizer: Optimizer, best: Mapping[str, Tensor] | None) -> MemoryByKind:
        """Return the memory that this rank holds between epochs, and what autograd saves within one."""

    def facts(self) -> dict[str, Any]:
        """Return what the summary reports about exchanged rows."""

    def final_notes(self) -> tuple[str, ...]:
        """Return the notes for the end of a run."""

    def take_notes(self) -> tuple[str, ...]:
        """Return the notes since the last call."""

    def take_uncoded(self) -> Mapping[str, int]:
        """Return the bytes, by kind, that this rank would have sent without codecs since the last call."""


def without_fast(why: str, *, slices: bool) -> str:
    """Return the note on a model that runs without fast paths."""
    instead = " It reads a halo instead of feature slices." if slices else ""
    return f"the model runs without fast paths, as PyG runs it: {why}{instead}"
