"""Rollback: weights and optimizer state of one epoch, saved for a model that history makes fall back.

Where it sits: ``pipelining.chunk_engine`` saves them when history is tried again after a plateau
(``plateau``), and restores them if the loss rose again. A rank saves those of its own stages; a checkpoint
has them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.adaptive.plateau import Weights
from kagome.halo.resumed_rows import Entry, ResumedRows

KIND: Final = "kept"
"""The kind of these entries in a checkpoint."""


class Rollback:
    """The saved weights of one rank.

    Args:
        model: The user's module.
        parameters: The parameters that this rank trains.
        buffers: The buffers that its stages write.

    Cost:
        A copy of the weights and of their optimizer state; nothing before the first :meth:`keep`.
    """

    def __init__(
        self, model: nn.Module, parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor]
    ) -> None:
        mine = {id(tensor) for tensor in (*parameters, *buffers)}
        named = (*model.named_parameters(), *model.named_buffers())
        self._model, self._names = model, {name for name, tensor in named if id(tensor) in mine}
        self._kept: dict[str, tuple[Tensor, dict[str, Any]]] = {}

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """Look tensors up by name each time: a forward pass may replace a buffer object."""
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor for name, tensor in named if name in self._names}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are saved."""
        return [
            value
            for kept, state in self._kept.values()
            for value in (kept, *state.values())
            if isinstance(value, Tensor)
        ]

    def apply(self, weights: Weights, optimizer: Optimizer) -> bool:
        """Do what the progress monitor decided.

        Returns:
            Whether a step is to follow.
        """
        if weights == "keep":
            self.keep(optimizer)
        elif weights == "undo" and self._kept:
            self._put_back(optimizer)
            return False
        return True

    def keep(self, optimizer: Optimizer) -> None:
        """Save the present weights, buffers and optimizer state."""
        states: Mapping[Any, dict[str, Any]] = optimizer.state
        self._kept = {
            name: (tensor.detach().clone(), deepcopy(dict(states.get(tensor, {}))))
            for name, tensor in self._tensors.items()
        }

    @torch.no_grad()
    def _put_back(self, optimizer: Optimizer) -> None:
        tensors = self._tensors
        for name, (value, state) in self._kept.items():
            tensor = tensors[name]
            # In place, because the optimizer and autograd refer to these tensors.
            tensor.copy_(value)
            if isinstance(tensor, nn.Parameter):
                # A weight without state at that time must have none now. The copy keeps the saved state for a
                # second rollback.
                optimizer.state.pop(tensor, None)
                if state:
                    optimizer.state[tensor] = deepcopy(state)

    def state_entries(self) -> Iterator[Entry]:
        """Yield the entries that a checkpoint stores."""
        for name, (value, state) in self._kept.items():
            yield KIND, name, {"value": value, **{f"state {key}": each for key, each in state.items()}}

    def restore(self, resumed_rows: ResumedRows, epoch: int) -> bool:
        """Restore the saved copies from a checkpoint.

        Args:
            resumed_rows: The entries of the checkpoint.
            epoch: The epoch after which it was written.

        Returns:
            Whether it had all of them; true for a rank without weights.
        """
        # All or nothing: weights of one epoch beside optimizer state of another would be no state of the run.
        found = {name: resumed_rows.take(KIND, name, epoch) for name in self._tensors}
        self._kept = {
            name: (state["value"], {key[6:]: each for key, each in state.items() if key != "value"})
            for name, state in found.items()
            if state is not None
        }
        whole = len(self._kept) == len(self._tensors)
        if not whole:
            self._kept = {}
        return whole
