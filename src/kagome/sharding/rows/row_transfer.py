"""Row transfer: rank 0's tensor to the owners of its rows, and the owners' rows back into one tensor.

Where it sits: ``cut_tables`` uses it, and ``net.gather``. Rows travel in blocks, so that beside the whole
tensor a rank holds one block.

::

    rank 0   [ row 0 | row 1 | row 2 | row 3 ]  ──spread──>  rank 0 [row 0, row 3]   rank 1 [row 1, row 2]
    all      [ row 0 | row 1 | row 2 | row 3 ]  <──joined──
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kagome.comm.channel import Channel

BLOCK_BYTES: Final = 64 * 2**20
"""The most bytes of rows in one message of all ranks together."""


def spread(channel: Channel, whole: Tensor, ids: Tensor, device: torch.device, action: str) -> Tensor:
    """Return the rows of these ids of rank 0's tensor. All ranks call it.

    Args:
        channel: The channel of all ranks of the graph.
        whole: The tensor on rank 0. On other ranks only its shape and type matter: it may be on ``meta``.
        ids: The rows that this rank gets.
        device: Where they are put.
        action: The description of the messages, for errors.

    Shapes:
        whole ``[N, ...]``, ids ``[n]`` -> ``[n, ...]``.

    Cost:
        Each row is sent once, by rank 0.
    """
    if channel.size == 1:
        return whole.detach().index_select(0, ids.to(whole.device)).to(device)
    wanted = channel.gather_rows(ids, action=f"{action}: ids", dst=0)
    own = torch.empty(ids.numel(), *whole.shape[1:], dtype=whole.dtype, device=device)
    # Rank 0 makes a copy of the rows that it sends: one of all rows would be a second table.
    size = _block(channel, own)
    none = own.new_empty((0, *own.shape[1:]), device=channel.send_device)
    for start in range(0, _most(channel, ids.numel(), action), size):
        parts, counts = [none] * channel.size, [0] * channel.size
        if wanted is not None and channel.rank == 0:
            asked = [each[start : start + size].to(whole.device) for each in wanted]
            parts = [whole.detach().index_select(0, each).to(channel.send_device) for each in asked]
        mine = own[start : start + size]
        counts[0] = mine.size(0)  # all rows come from rank 0
        mine.copy_(channel.start_parts(parts, counts, action, "other").wait())
    return own


def joined(
    channel: Channel, rows: Tensor, ids: Tensor, count: int, action: str, *, dst: int | None = None
) -> Tensor | None:
    """Return all rows, each at its id. All ranks call it.

    Args:
        channel: The channel of all ranks of the graph.
        rows: Own rows.
        ids: Their ids.
        count: The number of rows of all ranks.
        action: The description of the messages, for errors.
        dst: The rank that gets them; all ranks do if None.

    Returns:
        The rows; None on ranks other than ``dst``.

    Shapes:
        rows ``[n, ...]``, ids ``[n]`` -> ``[N, ...]``.

    Cost:
        Each row and its id, to one rank or to all others.
    """
    rows = rows.detach()
    # All ranks take part in each exchange, also those that get no rows.
    gets = dst in (None, channel.rank)
    whole = rows.new_empty((count, *rows.shape[1:])) if gets else None
    size = _block(channel, rows)
    for start in range(0, _most(channel, ids.numel(), action), size):
        found = channel.gather_rows(rows[start : start + size], action=action, dst=dst)
        places = channel.gather_rows(ids[start : start + size], action=f"{action}: ids", dst=dst)
        if whole is not None and found is not None and places is not None:
            for place, each in zip(places, found, strict=True):
                whole[place.to(whole.device)] = each.to(whole.device)
    return whole


def _block(channel: Channel, rows: Tensor) -> int:
    """Return the rows of each rank in one message."""
    width = rows.shape[1:].numel() * rows.element_size()
    return max(1, BLOCK_BYTES // max(1, width * channel.size))


def _most(channel: Channel, own: int, action: str) -> int:
    """Return the largest number of rows that a rank owns."""
    count = torch.tensor(own, dtype=torch.int64, device=channel.device)
    return int(channel.all_reduce(count, "max", action=f"{action}: counts", kind="other"))
