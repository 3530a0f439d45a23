"""Copies of a user's model, also where a forward has left more on it than weights and buffers.

Where it sits: whatever runs a model apart from training - the check, forecasts, plans - runs a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model, shared: Mapping[int, Tensor] | None = None) -> Model:
    """A copy with weights and buffers of its own.

    ``nn.utils.spectral_norm`` and ``weight_norm`` compute a weight in each forward and leave it on the layer,
    with its history, which ``copy.deepcopy`` refuses: the copy has its values, until its own forward.

    Args:
        model: The model.
        shared: By ``id``, tensors that the copy has instead of those of its own.
    """
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }
    return deepcopy(model, {**computed, **(shared or {})})
