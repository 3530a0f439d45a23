"""Tensor address: a number that identifies where a tensor's values are stored.

Where it sits: used by every cache whose key is the tensor that a result was computed from; it imports nothing
from Kagome.
"""

from __future__ import annotations

from torch import Tensor


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's data, or of its storage object if the tensor is empty.

    Empty tensors all have data pointer 0. On a rank without edges two different tensors must still get two
    keys, so that its caches hold the same entries as the other ranks'.
    """
    return tensor.data_ptr() or int(tensor.untyped_storage()._cdata)
