"""Gradient probe: compare two gradients by the angle between them and the ratio of their lengths.

Where it sits: probes of ``train.graph_engine`` and ``pipelining.chunk_engine`` ask it;
``pipelining.ownership`` sums it over stages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def products(pairs: Iterable[tuple[nn.Parameter, Tensor | None]]) -> Tensor:
    """Return three sums over all parameters: squares of gradients, squares of others, and their products.

    Args:
        pairs: Parameters and other gradients of them; None counts as zeros. Parameters without a gradient
            do not count.

    Shapes:
        ``[3]``, float64, where the gradients are.
    """
    found: Tensor | None = None
    for parameter, other in pairs:
        if parameter.grad is None:
            continue
        # float64: the squares of millions of small numbers are summed.
        mine = parameter.grad.double().view(-1)
        its = torch.zeros_like(mine) if other is None else other.double().view(-1)
        sums = torch.stack([mine @ mine, its @ its, mine @ its])
        found = sums if found is None else found + sums
    return torch.zeros(3, dtype=torch.float64) if found is None else found


def agreement(exact: float, other: float, both: float) -> tuple[float, float]:
    """Return the cosine between a gradient and the exact one, and the ratio of their lengths.

    Args:
        exact: The square of the exact gradient.
        other: The square of the other gradient.
        both: The product of the two.
    """
    if exact == other == 0:  # two gradients of no length agree
        return 1.0, 1.0
    # If one gradient is zero, its cosine is 0, and the ratio is 0 or very large: no probe trusts it.
    return both / max((exact * other) ** 0.5, 1e-300), (other / max(exact, 1e-300)) ** 0.5
