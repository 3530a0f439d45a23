"""Buffers: those of a model by name, whichever tensors they are by now.

Where it sits: whatever runs a model beside training puts its buffers back by them; under chunks
``pipeline.buffer_isolation`` gives each chunk its own. A forward may write to a buffer or put another tensor
in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

LIBRARIES: Final = ("torch.", "torch_geometric.")
"""Where a module's class is no user's."""


class Buffers:
    """Some of a model's buffers.

    Args:
        model: The user's module.
        names: Full names; by default all.
    """

    def __init__(self, model: nn.Module, names: Collection[str] | None = None) -> None:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(id(buffer), []).append((module, key))
        # One buffer may have several places.
        self._places = {
            name: places[id(buffer)]
            for name, buffer in model.named_buffers()
            if names is None or name in names
        }

    def now(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        return {name: getattr(*places[0]) for name, places in self._places.items()}

    def of_library(self, name: str) -> bool:
        """Whether one is of a module of torch's or PyG's own."""
        return any(type(module).__module__.startswith(LIBRARIES) for module, _ in self._places[name])

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors in the places of some."""
        for name, tensor in tensors.items():
            for module, key in self._places[name]:
                setattr(module, key, tensor)

    def copies(self) -> dict[str, Tensor]:
        """What they hold, by name."""
        return {name: tensor.clone() for name, tensor in self.now().items()}

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """For a block; they are the same tensors with the same numbers afterwards."""
        tensors, before = self.now(), self.copies()
        yield
        self.restore(tensors, before)

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Put these tensors back, with these values."""
        self.put(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
