"""Ahead: evaluation's scores from the forward of the coming epoch, where both compute the same.

Where it sits: ``train.graph_engine`` asks it at each forward. After the weight update of epoch e, evaluation
and the forward of epoch e + 1 run the same weights; they differ only by what a model does otherwise in
training.

Whether it does is found out, not assumed. A forward in training must be *plain*: it draws no number, writes
to no buffer and to no number that a module keeps. And once, scores of an evaluation must be those of the
forward after it, bit by bit, on all ranks. From then on the coming forward runs before the evaluation and is
kept for its own backward; one that is not plain ends that, on all ranks, and evaluation runs on its own.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kagome.model.sparse_buffers import laid_out


@dataclass
class Forward:
    """One forward in training.

    Args:
        epoch: Of the weight update that it is for.
        out: Scores of own rows, with their graph.
        token: What makes backward visit every site.
        plain: Whether it did nothing that evaluation would not do.
        state: Of the weights and buffers that it ran with.
    """

    epoch: int
    out: Tensor
    token: Tensor
    plain: bool
    state: tuple[Any, ...] = field(repr=False)


class ForwardReuse:
    """Whether evaluation may share a forward, and the forward that it shares.

    Args:
        model: The user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.allowed: bool | None = None
        self._scores: tuple[Tensor, tuple[Any, ...]] | None = None
        self._kept: Forward | None = None

    # Finding out ---------------------------------------------------------------------------------

    def evaluated(self, out: Tensor) -> None:
        """An evaluation ran on its own: the next forward in training is compared with it."""
        if self.allowed is None:
            self._scores = (out, self.state())

    @property
    def asks(self) -> bool:
        """Whether the next forward in training is compared: the same on all ranks."""
        return self.allowed is None and self._scores is not None

    def differs(self, forward: Forward) -> bool:
        """Whether a forward gave other scores than the evaluation before it, or is not plain."""
        if self._scores is None:
            return True
        (scores, state), self._scores = self._scores, None
        return not (forward.plain and state == forward.state and torch.equal(scores, forward.out.detach()))

    def anew(self) -> None:
        """The user's code has run since: whether evaluation may share a forward is found out again."""
        self._kept = self._scores = None
        self.allowed = None if self.allowed else self.allowed

    # Keeping -------------------------------------------------------------------------------------

    def keep(self, forward: Forward) -> None:
        """Keep a forward for the update of its epoch."""
        self._kept = forward

    def drop(self) -> None:
        """Let go of what was kept: its epoch will not come."""
        self._kept = None

    def take(self, epoch: int) -> Forward | None:
        """The forward that was kept for an epoch, unless weights or buffers have changed since."""
        kept, self._kept = self._kept, None
        return kept if kept is not None and kept.epoch == epoch and kept.state == self.state() else None

    # What a forward must not change ----------------------------------------------------------------

    def state(self) -> tuple[Any, ...]:
        """Which weights and buffers there are, and how often each was written to."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return tuple((id(t), laid_out(t.detach())[-1].data_ptr(), t._version) for t in tensors)

    @contextmanager
    def watching(self, on: bool) -> Iterator[list[bool]]:
        """Around a forward: afterwards the list holds True if it is known to have left all as it was."""
        found: list[bool] = []
        before = self._all() if on else None
        yield found
        found.append(before is not None and before == self._all())

    def _all(self) -> tuple[Any, ...]:
        numbers = tuple(
            (name, value)
            for module in self.model.modules()
            for name, value in vars(module).items()
            if isinstance(value, int | float | str)
        )
        devices = {p.device for p in self.model.parameters() if p.is_cuda}
        draws = (
            torch.get_rng_state().numpy().tobytes(),
            *(torch.cuda.get_rng_state(device).numpy().tobytes() for device in devices),
            random.getstate(),
            pickle.dumps(np.random.get_state()),
        )
        return self.state(), numbers, draws
