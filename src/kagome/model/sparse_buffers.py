"""Sparse: the memory of a sparse tensor that a model keeps, as the dense tensors that it lies in.

Where it sits: whatever sends or counts a model's state asks; torch moves no sparse tensor as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that hold a tensor's numbers: itself, or the indices and values of a sparse one.

    They share its memory: what is written to them is written to it.
    """
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
