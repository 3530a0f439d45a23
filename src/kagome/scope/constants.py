"""Constants: tensors that are the same in every forward of a run, and what was computed from them.

Where it sits: fast paths, layer rules and reads ask it. A value made of constant tensors alone is
computed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, strided
from torch._C import DisableTorchFunction

from kagome.halo.comm_recorder import RecordedRows
from kagome.halo.forward_pass import RunningForward, transformed
from kagome.kernels.base.address import address
from kagome.placement.weak_map import WeakTensorMap


class Constants:
    """Constant tensors, recognised by their memory address, so that a view of one is recognised too.

    They are kept alive, so that no other tensor can be allocated at that address.

    Args:
        channel: The channel to the other parts, by which some values are computed.
        forward: The running forward.
    """

    def __init__(self, channel: RecordedRows, forward: RunningForward) -> None:
        self._channel, self._forward = channel, forward
        self._held: dict[Any, tuple[Tensor, int]] = {}
        self.computed: dict[Any, Any] = {}
        """Values computed from constant tensors alone, by what decides them."""
        self.with_halo: WeakTensorMap[dict[int, tuple[int, Tensor]]] = WeakTensorMap()
        """Own and halo rows of tensors that need no gradient, each with the version of the read, by the view
        that reads them: several edge sets may read one vertex set."""

    def add(self, tensor: Tensor) -> None:
        """Record that a tensor is constant until it is written to."""
        if not tensor.requires_grad and tensor.layout is strided:
            # The tensor is held, so that its memory cannot be given to another one with the same key.
            self._held[_key(tensor)] = (tensor, tensor._version)

    def has(self, tensor: Tensor) -> bool:
        """Return True if a tensor, or one with the same values in the same memory, is constant."""
        if type(tensor) is not Tensor:
            return False
        with DisableTorchFunction():  # called in the middle of a user's forward
            if tensor.requires_grad or tensor.layout is not strided:
                return False
            # Views that are not contiguous can have one key and different
            # strides: of these only the object itself counts.
            held, version = self._held.get(_key(tensor), (None, -1))
            return (
                held is not None and tensor._version == version and (tensor is held or tensor.is_contiguous())
            )

    def held_for(self, tensor: Tensor) -> Tensor:
        """Return the tensor that is held for a constant one, which may be a view of it; else the argument."""
        if not self.has(tensor):
            return tensor
        with DisableTorchFunction():
            return self._held[_key(tensor)][0]

    def is_constant(self, tensor: Tensor | None) -> bool:
        """Return True if a tensor is constant across forward passes. None counts as constant."""
        if tensor is None:
            return True
        # What is computed inside a transform belongs to the transform.
        return not transformed() and self.has(tensor)

    def cache(self, key: Any, value: Any) -> Any:
        """Cache, for all forward passes, a value computed from constant tensors alone."""
        # The result is constant in turn, so a chain such as degree, norm, weighted sum is computed once.
        found = [value] if isinstance(value, Tensor) else [v for v in value if isinstance(v, Tensor)]
        self.computed[key] = (value, [(tensor, tensor._version) for tensor in found])
        for tensor in found:
            self.add(tensor)
        return value

    def cached(self, key: Any) -> Any:
        """Return a cached value, or None if there is none or it was written to since."""
        value, versions = self.computed.get(key, (None, []))
        return value if all(tensor._version == version for tensor, version in versions) else None

    @contextmanager
    def once(self) -> Iterator[None]:
        """Surround the computation of a cached value: it has no gradient, and no second pass replays it."""
        with torch.no_grad(), self._channel.unrecorded(), self._forward.forward_pass.reading_once():
            yield

    def forget(self) -> None:
        """Drop everything computed or read from constant tensors."""
        self.computed.clear()
        self.with_halo.clear()

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept from one forward pass to the next."""
        for value, _ in self.computed.values():
            yield from [value] if isinstance(value, Tensor) else (v for v in value if isinstance(v, Tensor))
        for views in self.with_halo.values():
            yield from (rows for _, rows in views.values())
        for tensor, _ in self._held.values():
            yield tensor


def _key(tensor: Tensor) -> Any:
    # Sizes of 0 are left out of the product, or [1, 0] and [2, 0] would have one key.
    size = math.prod(filter(None, map(int, tensor.shape)))
    return address(tensor), size, tensor.dtype, tensor.is_contiguous()
