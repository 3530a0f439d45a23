"""Roots: weights of edges that are a number of the one end times the same of the other.

Where it sits: ``deferred.reduce`` and ``deferred.sliced_reduce`` ask for them before they sum with weights
that last.

[Note: root] GCN's weights are ``d_i^-1/2 d_j^-1/2``. A weight an edge is read for each edge, at a place of
its own; a number a row is read with the row. So the sum is taken of ``r_j x_j``, plain, and its rows are
multiplied by ``r_i``: at 8 columns that takes a third of the time, at 128 nine tenths. Backward is the same
with the ends exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kagome.kernels.base.csr import Structure

NEAR = 16
"""Roundings that a product of two roots may be away from its weight."""


def roots_of(weight: Tensor, edges: Structure) -> Tensor:
    """A number for each row that edges read, whose products are the weights; none at all if there are none.

    An own row's is the root of its self-loop's weight; another's follows from any edge that reads it. Each
    rank finds its own, of its own edges: whether they have roots is nobody else's business.

    Args:
        weight: One an edge.
        edges: This rank's edges.

    Shapes:
        weight ``[E]`` -> ``[whole]``, or ``[0]``.
    """
    loops = edges.source == edges.target
    ends = edges.target[loops]
    root = weight.new_zeros(edges.whole)
    root[ends] = weight[loops].clamp(min=0).sqrt()
    beyond = edges.source >= edges.own
    root[edges.source[beyond]] = weight[beyond] / root[edges.target[beyond]]
    count = torch.bincount(ends, minlength=edges.own)
    away = (root[edges.target] * root[edges.source] - weight).abs()
    fits = (away <= NEAR * torch.finfo(weight.dtype).eps * weight.abs()).all()
    return root if bool(fits) and bool((count == 1).all()) else weight.new_empty(0)
