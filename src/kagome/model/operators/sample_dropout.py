"""Sample dropout: masks for independent samples that depend on the sample, not on its micro-batch.

Where it sits: ``probe`` finds the axis of the samples in each tensor that is dropped from; ``pipelining.dag``
enters the mode around each forward pass. A number depends on (seed, update, call, sample, column) alone: see
``model.exact.dropout``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kagome.errors import ModelError
from kagome.model.exact import dropout
from kagome.model.exact.global_attention import attention
from kagome.model.exact.scope import argument
from kagome.model.trace.graph import Step
from kagome.user_code.functional import opened


class DropoutSite(NamedTuple):
    """The axis of the samples in a tensor.

    Args:
        axis: Their axis.
        each: Number of consecutive rows for each sample.
    """

    axis: int
    each: int = 1


Call = tuple[str, int]
"""A step's name, and the number of the draw within it."""


class Masks(TorchFunctionMode):
    """Answers the dropout calls of a model's steps.

    Args:
        seed: Seed of the run.
        places: Axis of the samples at each draw; None to record the shapes and drop nothing, while that is
            being found.
    """

    def __init__(self, seed: int, places: Mapping[Call, DropoutSite | None] | None = None) -> None:
        super().__init__()
        self.seed, self.places = seed, places
        self.shapes: dict[Call, tuple[int, ...]] = {}
        self._update, self._ids = 0, torch.zeros(0, dtype=torch.int64)
        self._step, self._count = "", 0

    @contextmanager
    def on(self, update: int, ids: Tensor) -> Iterator[None]:
        """Draw masks for these samples, for the length of a block.

        Args:
            update: Number of the weights' update.
            ids: Index of each sample in the whole batch.

        Shapes: ids [n], int64.
        """
        self._update, self._ids = update, ids
        # A model without dropout runs without the mode, which costs microseconds a call.
        with nullcontext() if self.places is not None and not self.places else self:
            yield

    def at(self, step: Step) -> None:
        """Record that a step begins, so that its draws are numbered from 0."""
        self._step, self._count = step.name, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer dropout calls, and run all other calls as they are."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in dropout.DROPOUTS:
            return self._dropped(name, func, args, kwargs)
        if name == "scaled_dot_product_attention" and argument(args, kwargs, 4, "dropout_p", 0.0) > 0.0:
            with self:  # its kernel would draw for the whole micro-batch
                return attention(*args, **kwargs, drop=functional.dropout)
        if isinstance(func, FunctionType) and func.__globals__ is vars(functional):
            with self:  # multi_head_attention_forward and the like: call by call
                return opened(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropped(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, p, training, in_place = dropout.call_of(name, func, args, kwargs)
        if not training or p == 0.0 or not 0.0 <= p <= 1.0:
            return func(*args, **kwargs)
        if "alpha" in name:
            raise ModelError(
                "a dropout with a mask for each sample",
                f"{name}, which has none",
                where=self._step,
                hint="torch.nn.Dropout",
            )
        # The key has no rank and no micro-batch, so a sample's mask is the same in any pipeline.
        call = (self._step, self._count)
        self._count += 1
        # The probe compares values between runs, so nothing is dropped. A copy, as dropout returns.
        if self.places is None:
            self.shapes[call] = tuple(x.shape)
            return x.clone()
        ones = dropout.channels(x) if name.startswith("feature") else None
        out = self._drawn(x if ones is None else ones, call, p)
        out = out if ones is None else x * out
        return x.copy_(out) if in_place else out

    def _drawn(self, x: Tensor, call: Call, p: float) -> Tensor:
        assert self.places is not None
        key = dropout.call_key(self.seed, self._update, *call)
        place = self.places.get(call)
        if place is None:  # the tensor has no samples: its mask is the same everywhere
            return dropout.dropout(x, torch.arange(x.size(0), device=x.device), key, p)
        ids = self._ids.to(x.device)
        if place.each == 1:
            return dropout.dropout(x, ids, key, p, place.axis)
        # [.., samples * each, ..] -> [.., samples, each, ..]: the rows of one sample are its columns.
        apart = x.unflatten(place.axis, (ids.numel(), place.each))
        return dropout.dropout(apart, ids, key, p, place.axis).flatten(place.axis, place.axis + 1)


def place_of(
    shape: tuple[int, ...], samples: int, other: tuple[int, ...], others: int, *, several: bool = False
) -> DropoutSite | None:
    """Find the axis of the samples from a tensor's shapes for two numbers of samples.

    Args:
        shape: Shape for ``samples`` samples.
        samples: One number of samples.
        other: Shape for ``others`` samples.
        others: Another number of samples.
        several: Whether a sample may have several rows.

    Returns:
        The site; None if the shapes are the same.

    Raises:
        ValueError: If they differ in another way.
    """
    axes = [axis for axis, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
    if len(shape) == len(other) and not axes:
        return None
    if len(shape) == len(other) and len(axes) == 1:
        axis = axes[0]
        each, rest = divmod(shape[axis], samples)
        if not rest and other[axis] == each * others and (each == 1 or several):
            return DropoutSite(axis, each)
    raise ValueError
