"""State: a model's weights and persistent buffers by name, also those missing in its state dict.

Where it sits: checkpoints, the best epoch and the stages of a pipeline use it in place of ``state_dict()``.
A layer may leave a parameter out of that: PyG's ``Linear`` writes ``weight``, also where pruning has put
``weight_orig`` in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict, with all parameters and persistent buffers that layers leave out of it."""
    state: dict[str, Tensor] = dict(model.state_dict())
    held = dict(_persistent(model))
    if held.keys() <= state.keys():
        return state
    # What such a layer writes instead is made of its parameters, and may be old.
    return held | {name: value for name, value in state.items() if name.endswith(_EXTRA_STATE_KEY_SUFFIX)}


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state that :func:`state_of` returned into a model.

    Raises:
        RuntimeError: If names or shapes differ.
    """
    # ``state_of`` may have names that ``load_state_dict`` calls unexpected: then it cannot be strict, and the
    # comparison of names here takes the place of its check.
    alike = state.keys() == state_of(model).keys()
    model.load_state_dict(state, strict=not alike)
    if alike and not model.state_dict().keys() >= dict(_persistent(model)).keys():
        with torch.no_grad():  # a layer that leaves a name out may not take it either
            for name, value in _persistent(model):
                value.copy_(state[name])


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters, and all buffers that are saved, with their names."""
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
