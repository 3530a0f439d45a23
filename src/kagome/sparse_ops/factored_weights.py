"""Factored edge weights: weights that are the product of a number at each end, as in D^-1/2 A D^-1/2.

Where it sits: ``deferred.reduce`` and ``deferred.sliced_reduce`` look for such factors before they sum with
weights that are constant.

[Note: root] GCN's weights are ``d_i^-1/2 d_j^-1/2``. A weight of an edge is read once for each edge, from an
array of its own. A factor of a row is read together with the row. The sum is therefore taken over ``r_j x_j``
without weights, and its rows are multiplied by ``r_i``. At 8 columns this takes a third of the time, at 128
columns nine tenths. Backward is the same with the ends exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kagome.kernels.base.csr import Structure

NEAR = 16
"""Largest difference between the product of two factors and the weight, in units of rounding."""


def factors_of(weight: Tensor, edges: Structure) -> Tensor:
    """Return a factor for each row that edges read, whose products are the weights; empty if there are none.

    The factor of an own row is the root of its self-loop's weight. The factor of a halo row follows from any
    edge that reads it. Each rank uses its own edges alone, so ranks need not agree on whether there are
    factors.

    Args:
        weight: One number per edge.
        edges: This rank's edges.

    Shapes:
        weight ``[E]`` -> ``[num_sources]``, or ``[0]``.
    """
    if edges.bipartite:
        return weight.new_empty(0)  # an edge has no root at its source: there are no self-loops
    loops = edges.source == edges.target
    ends = edges.target[loops]
    root = weight.new_zeros(edges.num_sources)
    # A self-loop's weight is r_i * r_i. A row without a loop keeps root 0. Its halo rows then get inf or NaN,
    # and the comparison below fails.
    root[ends] = weight[loops].clamp(min=0).sqrt()
    beyond = edges.source >= edges.own
    root[edges.source[beyond]] = weight[beyond] / root[edges.target[beyond]]
    # Each own row needs exactly one loop: of several, the root of any one would remain.
    count = torch.bincount(ends, minlength=edges.own)
    away = (root[edges.target] * root[edges.source] - weight).abs()
    fits = (away <= NEAR * torch.finfo(weight.dtype).eps * weight.abs()).all()
    return root if bool(fits) and bool((count == 1).all()) else weight.new_empty(0)
