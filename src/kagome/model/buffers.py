"""Model buffers: a model's buffers by name, whichever tensors hold them at present.

Where it sits: code that runs a model outside of training uses it to restore the buffers; under chunks
``pipelining.buffer_isolation`` gives each chunk its own. A forward pass may write to a buffer or replace it
by another tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

LIBRARIES: Final = ("torch.", "torch_geometric.")
"""Prefixes of modules whose classes are not the user's own."""


class Buffers:
    """Some of a model's buffers, looked up by name.

    Args:
        model: The user's module.
        names: Full names of the buffers; all of them by default.
    """

    def __init__(self, model: nn.Module, names: Collection[str] | None = None) -> None:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(id(buffer), []).append((module, key))
        # Several modules may refer to one buffer.
        self._places = {
            name: places[id(buffer)]
            for name, buffer in model.named_buffers()
            if names is None or name in names
        }

    def now(self) -> dict[str, Tensor]:
        """Return the tensors that hold the buffers at present, by name."""
        return {name: getattr(*places[0]) for name, places in self._places.items()}

    def of_library(self, name: str) -> bool:
        """Return whether a buffer belongs to one of torch's or PyG's own modules."""
        return any(type(module).__module__.startswith(LIBRARIES) for module, _ in self._places[name])

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace buffers by these tensors, wherever the model refers to them."""
        for name, tensor in tensors.items():
            for module, key in self._places[name]:
                setattr(module, key, tensor)

    def copies(self) -> dict[str, Tensor]:
        """Return copies of the buffers' values, by name."""
        return {name: tensor.clone() for name, tensor in self.now().items()}

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Restore the buffers after a block: the same tensors with the same values."""
        tensors, before = self.now(), self.copies()
        try:
            yield
        finally:
            self.restore(tensors, before)

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Put these tensors back as the buffers, with these values."""
        # A forward may have set another tensor as the buffer, or written to the one that was there, or both.
        self.put(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
