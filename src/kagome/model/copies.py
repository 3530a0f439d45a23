"""Model copies: copies of a user's model, even if a forward pass left computed tensors on its modules.

Where it sits: code that runs a model apart from training, such as the check, forecasts and plans, runs a
copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model, shared: Mapping[int, Tensor] | None = None) -> Model:
    """Return a copy with weights and buffers of its own.

    ``nn.utils.spectral_norm`` and ``weight_norm`` compute a weight in each forward pass and leave it on the
    layer with its autograd history, which ``copy.deepcopy`` refuses. The copy has its values until its own
    first forward pass.

    Args:
        model: The model.
        shared: Tensors that the copy uses in place of its own, by ``id`` of the tensor that they replace.
    """
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }
    # The second argument is deepcopy's memo: it takes what it finds there by ``id`` in place of a copy.
    return deepcopy(model, {**computed, **(shared or {})})
