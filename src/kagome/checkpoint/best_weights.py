"""Best weights: the best epoch so far and its weights; also copies and marks of a model's weights.

Where it sits: ``train.trainer`` shows it every evaluation; checkpoints store it; ``train.callbacks`` asks for
marks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kagome.checkpoint.files import RunPosition
from kagome.errors import ModelError
from kagome.model.sparse_buffers import laid_out
from kagome.model.state import load_state, state_of


class BestWeights:
    """The best epoch so far and its weights."""

    def __init__(self) -> None:
        self.epoch, self.waited = 0, 0
        self.metric: float | None = None
        self.weights: dict[str, Tensor] | None = None

    @classmethod
    def at(cls, place: RunPosition, weights: dict[str, Tensor] | None) -> BestWeights:
        """Return the best weights that a checkpoint holds."""
        best = cls()
        best.epoch, best.metric, best.waited = place.best_epoch, place.best_metric, place.waited
        best.weights = weights
        return best

    def observe(self, epoch: int, metric: float | None, model: nn.Module, *, higher: bool = True) -> None:
        """Note an evaluation; of equal ones the first stays. Without a metric the last epoch is the best.

        Args:
            epoch: The evaluated epoch.
            metric: The metric of its weights.
            model: The model with its weights.
            higher: Whether more of the metric is better.
        """
        # Without a metric this branch is never taken: each epoch replaces the last one as the best.
        if metric is not None and self.metric is not None and not _better(metric, self.metric, higher):
            self.waited = epoch - self.epoch
            return
        self.epoch, self.metric, self.waited = epoch, metric, 0
        self.weights = None  # release the old copy before making a new one
        self.weights = None if metric is None else copied(state_of(model))

    def restore(self, model: nn.Module, epoch: int) -> dict[str, Tensor] | None:
        """Load the best epoch's weights into the model.

        Args:
            model: The model with the weights of the last epoch.
            epoch: The last epoch.

        Returns:
            The weights that it had, if they differ from the best.
        """
        if self.weights is None or self.epoch == epoch:
            return None
        last = copied(state_of(model))
        load_state(model, self.weights)
        return last

    def place(self, epoch: int, seed: int, world_size: int, graph: str) -> RunPosition:
        """Return the position of the run that a checkpoint stores."""
        return RunPosition(epoch, seed, self.epoch, self.metric, self.waited, world_size, graph)


def _better(metric: float, before: float, higher: bool) -> bool:
    # Comparisons with NaN are false, so any number is better than NaN, and NaN is better than nothing.
    return not math.isnan(metric) and not (before >= metric if higher else before <= metric)


Mark = tuple[Any, ...]
"""How often each tensor of a model was written to, and its checksum; the numbers that modules keep."""


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of a state dict that later epochs do not change."""
    return {name: value.detach().clone() for name, value in weights.items()}


def holds(model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Return whether a model's state equals this one, bit by bit."""
    state = state_of(model)
    return state.keys() == weights.keys() and all(
        (value.shape, value.dtype) == (weights[name].shape, weights[name].dtype)
        and all(map(torch.equal, _as_bytes(value), _as_bytes(weights[name])))
        for name, value in state.items()
    )


def mark(model: nn.Module) -> Mark:
    """Return a mark of weights, buffers and the numbers in a model's modules: all that forward depends on.

    Writing to one of them changes the mark, also through ``.data``; ``train()`` and ``eval()`` do not.

    Cost:
        One pass over them.
    """
    tensors = (*model.parameters(), *model.buffers())
    # Plain attributes that forward may depend on, such as a temperature. `training` changes in every
    # evaluation.
    numbers = (
        (name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and name != "training"
    )
    return (*((tensor._version, bits(tensor)) for tensor in tensors), *numbers)


def bits(tensor: Tensor) -> int:
    """Return a checksum of a tensor's values in their order: the same on all ranks for the same values."""
    found = 0
    for plain in _as_bytes(tensor):
        found = zlib.crc32(plain.cpu().numpy().data, found)
    return found


def _as_bytes(tensor: Tensor) -> list[Tensor]:
    """Return the bytes of a tensor, in which NaN equals itself; of a sparse one, also of its indices."""
    plain = (each.resolve_conj().resolve_neg() for each in laid_out(tensor.detach()))
    return [each.contiguous().view(-1).view(torch.uint8) for each in plain]


def unlike_on_ranks(model: nn.Module, sums: Sequence[Sequence[int]]) -> ModelError:
    """Return the error for weights that are not the same on all ranks.

    Args:
        model: The model whose weights they are.
        sums: For each rank, :func:`bits` of each parameter; not all are equal.
    """
    names = [name for name, _ in model.named_parameters()]
    rank, name = next(
        (rank, name)
        for rank, theirs in enumerate(sums)
        for name, one, other in zip(names, theirs, sums[0], strict=True)
        if one != other
    )
    return ModelError(
        "the same weights on all ranks",
        f"{name} on rank {rank} with other values than on rank 0",
        hint="change weights on every rank in the same way",
    )
