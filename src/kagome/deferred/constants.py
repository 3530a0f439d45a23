"""Lasting: tensors that are the same in every forward of a run.

Where it sits: ``intercept.interceptor`` keeps one; what is computed from lasting tensors alone is computed
once.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, strided
from torch._C import DisableTorchFunction

from kagome.kernels.base.address import address


class Constants:
    """Tensors known by where their numbers lie: a view of one is the same numbers.

    They are kept alive, so that no other tensor comes to lie there.
    """

    def __init__(self) -> None:
        self._held: dict[Any, tuple[Tensor, int]] = {}

    def add(self, tensor: Tensor) -> None:
        """From now on this tensor lasts, until it is written to."""
        if not tensor.requires_grad and tensor.layout is strided:
            self._held[_key(tensor)] = (tensor, tensor._version)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor, or one of the same numbers in the same order, lasts."""
        if type(tensor) is not Tensor:
            return False
        with DisableTorchFunction():  # it is asked in the middle of a user's forward
            if tensor.requires_grad or tensor.layout is not strided:
                return False
            held, version = self._held.get(_key(tensor), (None, -1))
            return (
                held is not None and tensor._version == version and (tensor is held or tensor.is_contiguous())
            )

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [tensor for tensor, _ in self._held.values()]


def _key(tensor: Tensor) -> Any:
    size = math.prod(
        filter(None, map(int, tensor.shape))
    )  # without rows, one row of two tells from two of two
    return address(tensor), size, tensor.dtype, tensor.is_contiguous()
