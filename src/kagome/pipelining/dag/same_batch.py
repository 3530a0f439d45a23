"""Same batch: checks that all ranks were given the batch of which each takes its own samples.

Where it sits: ``pipeline`` calls it before each update and prediction. Ranks that shuffle with seeds of their
own would otherwise train on inputs of one batch and targets of another, with losses that look right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.errors import DataError

LOOKED_AT: Final = 4096
"""Numbers that are read of each tensor, spread over it."""
APART: Final = 1e-6
"""The difference of marks, about 1 at most each, above which batches differ. Rounding is far below it."""


def mark_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return a number that depends on the values of some tensors and on their order.

    A change in the last bits of values, as of data that each rank has normalised itself, hardly changes it.

    Shapes:
        A float64 scalar.

    Example:
        >>> batch = torch.arange(6.0)
        >>> bool(mark_of([batch]) == mark_of([batch.clone()]))
        True
        >>> bool(mark_of([batch]) == mark_of([batch.flip(0)]))
        False
    """
    total = torch.zeros((), dtype=torch.float64)
    for place, tensor in enumerate(tensors):
        numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        # An odd step, as an even one would read the same few columns of each row.
        few = numbers.flatten()[:: numbers.numel() // LOOKED_AT | 1].double()
        # Weights without a period, so that no two orders have the same sum; of either sign, so that the sum
        # of numbers that are all alike is near zero and a change of one of them shows.
        weights = torch.arange(len(few), dtype=torch.float64, device=few.device).cos_()
        found = (weights * few).sum() / few.abs().sum().clamp_min(torch.finfo(torch.float64).tiny)
        # NaN and infinity are for `check_finite` to find, of the loss.
        total = total.to(few.device) + found.nan_to_num() / (place + 1)
    return total


def check_same(channel: Channel, tensors: Iterable[Tensor], action: str) -> None:
    """Check that all ranks hold the same batch. All ranks call it.

    Raises:
        DataError: If their values differ.

    Cost:
        A few thousand numbers of each tensor, and an all-reduce of two numbers.
    """
    # One rank takes all samples.
    if channel.size == 1:
        return
    mark = mark_of(tensors).to(channel.device)
    # The largest, and the smallest with its sign turned: equal marks differ by zero, not by rounding.
    high, low = channel.all_reduce(torch.stack([mark, -mark]), "max", action=action, kind="other").tolist()
    if high + low > APART:
        # All ranks have found the same numbers, so all of them come here.
        marks = cast("list[float]", channel.gather_objects(float(mark), f"{action}, by rank"))
        unlike = [rank for rank, one in enumerate(marks) if abs(one - marks[0]) > APART / channel.size]
        raise DataError(
            "the same batch on all ranks, of which each takes its own samples",
            f"another one than rank 0's on {', '.join(f'rank {rank}' for rank in unlike)}",
            where=action,
            hint="the same seed for the shuffle on all ranks, and no DistributedSampler",
        )
