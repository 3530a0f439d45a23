"""Saved-tensor hook: records what autograd saves for backward within a block.

Where it sits: ``memory`` and ``pipelining.chunk_memory`` measure activations with it, ``profile.operators``
those of single operators. ``components.offload`` sets hooks of its own: it replaces what autograd saves, and
does not record it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class SavedTensors:
    """The tensors that autograd saves in recorded blocks; each is freed as soon as autograd releases it.

    Args:
        keeps: Whether tensors stay here until :meth:`take`, so that no memory is used twice meanwhile.

    Cost:
        Some microseconds for each tensor that autograd saves.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self.keeps = keeps
        self._found: list[weakref.ref[_Saved]] = []
        self._kept: list[_Saved] = []

    def recording(
        self, beneath: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of a forward pass whose saved tensors are recorded.

        Args:
            beneath: Hooks that say what autograd holds, where others have set some; None where it holds the
                tensors themselves.
        """
        pack, unpack = beneath or (self._pack, _unpack)

        def noted(tensor: Tensor) -> Any:
            self._pack(tensor)
            return pack(tensor)

        return torch.autograd.graph.saved_tensors_hooks(noted if beneath else pack, unpack)

    def alive(self) -> list[Tensor]:
        """Return those recorded tensors that autograd still holds, and all of them if they stay here."""
        # Unless tensors stay here, autograd has the only strong
        # reference: a dead one was released by backward.
        alive = [(reference, saved.tensor) for reference in self._found if (saved := reference()) is not None]
        self._found = [reference for reference, _ in alive]
        return [tensor for _, tensor in alive]

    def take(self) -> list[Tensor]:
        """Return the tensors of :meth:`alive`, and forget all that was recorded."""
        alive = self.alive()
        self._found, self._kept = [], []
        return alive

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._found.append(weakref.ref(saved))
        if self.keeps:
            self._kept.append(saved)
        return saved


class _Saved:
    """The object that autograd holds in place of a tensor that it saves."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # The detached tensor shares memory and version with the saved one, but has no graph: a result saved
        # by its own node would keep that node alive for ever.
        with torch._C.DisableTorchFunction():  # this is not part of the user's computation
            self.tensor, self.version = tensor.detach(), tensor._version


def _unpack(saved: _Saved) -> Tensor:
    """Return the tensor that was saved.

    Raises:
        RuntimeError: If the tensor has been written to since.
    """
    if saved.tensor._version != saved.version:  # with hooks set, torch leaves this check to them
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {list(saved.tensor.shape)} is at version {saved.tensor._version}; "
            f"expected version {saved.version}"
        )
    return saved.tensor
