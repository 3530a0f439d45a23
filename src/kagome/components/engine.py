"""Runner: what trains a rank's share, whichever way the work is split.

Where it sits: ``train.trainer`` drives one; ``engine.Engine`` runs the whole model on a part at once,
``pipeline.Pipeline`` some of its layers over the part's chunks. ``train.engines`` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.checkpoint.epoch_state import EpochState, RestoredState
from kagome.comm.channel import Channel
from kagome.components.attached import Attachment
from kagome.components.forward_reuse import ForwardReuse
from kagome.components.offload import Offload
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.records.memory import MemoryByKind


class PhaseTimer(Protocol):
    """What this file needs of :class:`kagome.records.spans.Spans`."""

    def phase(self, name: str, epoch: int | None = None) -> AbstractContextManager[Any]:
        """Time a phase."""


class Engine(Protocol):
    """One rank's model, ready to train. Every method but ``take_*`` is called by all ranks."""

    @property
    def model(self) -> nn.Module:
        """The user's module."""

    @property
    def channel(self) -> Channel:
        """The other parts."""

    @property
    def crossing(self) -> CompressedExchange:
        """How rows come from them."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Labels and masks of own rows, and more."""

    @property
    def ahead(self) -> ForwardReuse:
        """Whether an evaluation may be the next epoch's forward."""

    @property
    def installed(self) -> Attachment:
        """What it sets on the model: on while it trains or evaluates, and in ``with`` blocks."""

    @property
    def offload(self) -> Offload:
        """Where activations wait for backward."""

    @property
    def fast(self) -> bool:
        """Whether messages are put off and reduced by kernels; a forward that cannot be may turn it off."""

    @property
    def recompute(self) -> bool:
        """Whether layers run again in backward."""

    def train(self, epoch: int, optimizer: Optimizer, *, stop: bool = False) -> tuple[float, bool]:
        """One weight update: the mean loss before it; whether any rank was asked to stop."""

    def look_ahead(self, epoch: int) -> Tensor | None:
        """Scores of own rows from the forward of the coming epoch; None where it tells none."""

    def evaluate(self, epoch: int) -> Any:
        """Scores of own rows with dropout off, exact."""

    def join_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Give the model, or a copy of its weights, those of all stages."""

    def joined(self, optimizer: Optimizer, best: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
        """Weights, the optimizer's state and the best weights of all stages, for a block."""

    def carried(self, epoch: int) -> EpochState:
        """What the epoch after this one may read of it."""

    def resumed(self, optimizer: Optimizer, told: RestoredState) -> str:
        """Go on from a checkpoint whose weights the model has; how it does."""

    def held(self, optimizer: Optimizer, best: Mapping[str, Tensor] | None) -> MemoryByKind:
        """What this rank holds between epochs, and what autograd keeps within one."""

    def facts(self) -> dict[str, Any]:
        """What the summary is told of what crossed."""

    def sum_up(self) -> tuple[str, ...]:
        """What there is to say at the end of a run."""

    def take_notes(self) -> tuple[str, ...]:
        """What there is to say since the last call."""

    def take_uncoded(self) -> Mapping[str, int]:
        """Bytes that this rank would have sent without codecs since the last call, by kind."""


def without_fast(why: str, *, slices: bool) -> str:
    """What is said of a model that runs without fast paths."""
    instead = " It reads a halo instead of feature slices." if slices else ""
    return f"the model runs without fast paths, as PyG runs it: {why}{instead}"
