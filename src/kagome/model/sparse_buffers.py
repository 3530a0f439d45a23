"""Sparse buffers: the dense tensors that make up a sparse tensor kept by a model.

Where it sits: code that sends or counts a model's state uses it, because torch cannot send a sparse tensor as
a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that hold a tensor's values: itself, or a sparse tensor's indices and values.

    They share its memory, so that writing to them changes the tensor.
    """
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
