"""First calls: kernels are run on two rows, so that they are compiled or loaded before they are needed.

Where it sits: ranks that wait for their parts do so (``train.data``), and the process that compiles ahead.
"""

from __future__ import annotations

import torch

from kagome.kernels import ops
from kagome.kernels.base.csr import CsrLayout, grouped, turned


def call_sums(width: int = 1) -> None:
    """Sum over the neighbours of two rows in float64, as the check of a model does, and in float32.

    Args:
        width: A width of rows that the model has; sums of odd widths have a loop in common.

    Cost:
        A few hundredths of a second where machine code is on disk, some seconds where it is not.
    """
    one = torch.tensor([0, 1])
    layout = CsrLayout(torch.tensor([0, 1, 2]), one + 1, one.to(torch.int32), one.to(torch.int32))
    # float64 first: the check of the model comes before the first epoch.
    for dtype in (torch.float64, torch.float32):
        ops.sum_rows(layout, torch.ones(2, 1, dtype=dtype))
        # A width that is a multiple of four may have a loop of its own, with and without weights.
        x, weight = torch.ones(2, width, dtype=dtype), torch.ones(2, dtype=dtype)
        ops.sum_rows(layout, x, weight)
        ops.sum_rows(layout, x)


def call_layouts() -> None:
    """Sort two edges, and transpose their layout."""
    # Copies, because a reversed view is not contiguous and would be of another type.
    ends = torch.tensor([0, 1]).numpy()
    pointer, _, column, edge = grouped(ends, ends[::-1].copy(), 2, 2)
    turned(pointer, column, edge, 2)
