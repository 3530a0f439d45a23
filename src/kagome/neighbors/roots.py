"""Roots: weights of edges that are a number of the one end times the same of the other.

Where it sits: ``reduce`` and ``sliced`` ask for them before they sum with weights that last.

[Note: root] GCN's weights are ``d_i^-1/2 d_j^-1/2``. A weight an edge is read for each edge, at a place of
its own; a number a row is read with the row. So the sum is taken of ``r_j x_j``, plain, and its rows are
multiplied by ``r_i``: at 8 columns that takes a third of the time, at 128 nine tenths. Backward is the same
with the ends exchanged.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kagome.kernels.structure import Structure
from kagome.neighbors.marks import Mark

NEAR = 8
"""Roundings that a product of two roots may be away from its weight."""


class Reader(Protocol):
    """What this file needs of the running interception."""

    def read(self, rows: Tensor, axis: int, mark: Mark, site: str = "") -> Tensor:
        """Own and halo rows."""


def roots_of(weight: Tensor, edges: Structure, mark: Mark, scope: Reader) -> Tensor:
    """A number for each row that edges read, whose products are the weights; none at all if there are none.

    They are found at self-loops, whose weights are their squares. All ranks call it; each sees its own edges.

    Args:
        weight: One an edge.
        edges: This rank's edges.
        mark: Of their source ids.
        scope: Who supplies the halo's.

    Shapes:
        weight ``[E]`` -> ``[whole]``, or ``[0]``.

    Cost:
        Once a number a halo row.
    """
    loops = edges.source == edges.target
    ends = edges.target[loops]
    own = weight.new_zeros(edges.own).index_copy_(0, ends, weight[loops].clamp(min=0).sqrt())
    root = scope.read(own, 0, mark, "roots of weights")
    count = torch.bincount(ends, minlength=edges.own)
    away = (root[edges.target] * root[edges.source] - weight).abs()
    fits = (away <= NEAR * torch.finfo(weight.dtype).eps * weight.abs()).all()
    return root if bool(fits) and bool((count == 1).all()) else weight.new_empty(0)
