"""Constants: tensors that are the same in every forward of a run.

Where it sits: ``intercept.interceptor`` holds one. What is computed from constant tensors alone is computed
once.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, strided
from torch._C import DisableTorchFunction

from kagome.kernels.base.address import address


class Constants:
    """Constant tensors, recognised by their memory address, so that a view of one is recognised too.

    They are kept alive, so that no other tensor can be allocated at that address.
    """

    def __init__(self) -> None:
        self._held: dict[Any, tuple[Tensor, int]] = {}

    def add(self, tensor: Tensor) -> None:
        """Record that a tensor is constant until it is written to."""
        if not tensor.requires_grad and tensor.layout is strided:
            self._held[_key(tensor)] = (tensor, tensor._version)

    def has(self, tensor: Tensor) -> bool:
        """Return True if a tensor, or one with the same values in the same memory, is constant."""
        if type(tensor) is not Tensor:
            return False
        with DisableTorchFunction():  # called in the middle of a user's forward
            if tensor.requires_grad or tensor.layout is not strided:
                return False
            held, version = self._held.get(_key(tensor), (None, -1))
            return (
                held is not None and tensor._version == version and (tensor is held or tensor.is_contiguous())
            )

    def tensors(self) -> list[Tensor]:
        """Return all tensors recorded as constant."""
        return [tensor for tensor, _ in self._held.values()]


def _key(tensor: Tensor) -> Any:
    size = math.prod(
        filter(None, map(int, tensor.shape))
    )  # a zero size must not make [1, 0] and [2, 0] equal
    return address(tensor), size, tensor.dtype, tensor.is_contiguous()
