"""Ordered sums: rows are added to the rows that an index names, with the same bits in every run.

Where it sits: the plain kernels use it, and whoever adds received rows to own rows.

``index_add_`` adds one index after the other on a CPU. On a GPU it adds by atomics: rows that an index names
twice are added in any order, and the bits differ between runs. Three ways have one order there, too:

::

    index_put_(accumulate=True)    sorts the index first, and adds rows of one index in their order
    index_add_ of distinct rows    each row gets one summand, so there is no order
    x[index]                       its gradient is an index_put_, that of index_select is an index_add_
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def adds_in_order(device: torch.device) -> bool:
    """Return whether ``index_add_`` adds in the order of its index on a device."""
    return device.type == "cpu"


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x[index]``, whose gradient has the same bits in every run.

    Shapes:
        ``x [n, ...]``, ``index [E]`` -> ``[E, ...]``.
    """
    followed = torch.is_grad_enabled() and x.requires_grad
    return x[index] if followed and not adds_in_order(x.device) else x.index_select(0, index)


def add_at(out: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """``out[index[e]] += rows[e]`` in place, in the order of e; an index may name a row several times.

    Shapes:
        ``out [n, ...]``, ``index [E]``, ``rows [E, ...]``; the result is ``out``.

    Cost:
        On a GPU a sort of the index.
    """
    if adds_in_order(out.device):
        return out.index_add_(0, index, rows)
    return out.index_put_((index,), rows, accumulate=True)


def add_from_peers(out: Tensor, index: Tensor, counts: Sequence[int], rows: Tensor) -> Tensor:
    """``out[index[e]] += rows[e]`` in place, one peer after the other; a peer names a row once at most.

    Args:
        out: The rows that are added to.
        index: The rows that each peer's rows belong to, by peer.
        counts: How many of them belong to each peer.
        rows: The peers' rows.

    Shapes:
        ``out [n, ...]``, ``index [E]``, ``rows [E, ...]``; the result is ``out``.

    Cost:
        On a GPU a call for each peer that has rows; no sort.
    """
    if adds_in_order(out.device):
        return out.index_add_(0, index, rows)
    for places, mine in zip(index.split(list(counts)), rows.split(list(counts)), strict=True):
        if places.numel():
            out.index_add_(0, places, mine)
    return out
