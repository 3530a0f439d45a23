"""Row blocks: the rows of a cut table as equal blocks of the graph's order, each on one rank, as a DTensor.

Where it sits: ``torch.distributed.checkpoint`` saves and loads blocks; ``model_state`` asks for them. The
rows that a rank owns lie anywhere in the graph's order, and a checkpoint would have a piece for each run of
them.

::

    own rows       rank 0: 0 3 4     rank 1: 1 2 5         as the graph is cut
    row blocks     rank 0: 0 1 2     rank 1: 3 4 5         Shard(0), read by any number of ranks
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest, swap_counts


class RowBlocks:
    """The blocks of rows of one set.

    Args:
        channel: The channel of all ranks of the graph.
        ids: The ids of own rows in the whole graph.
        count: The number of rows of all ranks.
    """

    def __init__(self, channel: Channel, ids: Tensor, count: int) -> None:
        self._channel, self._ids, self._count = channel, ids, count
        # Blocks as torch.chunk makes them, which is how ``Shard(0)`` divides rows.
        self._size = -(-count // channel.size) or 1
        holder = ids // self._size
        self._order = torch.argsort(holder, stable=True)
        self._sends = torch.bincount(holder, minlength=channel.size).tolist()

    def of(self, rows: Tensor, group: dist.ProcessGroup, action: str) -> DTensor:
        """Return own rows as a tensor of all rows, of which each rank has a block. All ranks call it.

        Args:
            rows: Own rows.
            group: The process group of these ranks.
            action: The description of the messages, for errors.

        Shapes:
            ``[n, ...]`` -> ``[N, ...]``.

        Cost:
            Each row and its id is sent once.
        """
        rows, comes, places = rows.detach(), *self._arrivals(action)
        request = ExchangeRequest(self._sends, comes, action, "other")
        come = self._channel.start(rows[self._order], request).wait()
        block = rows.new_empty((places.numel(), *rows.shape[1:]))
        block[places] = come
        mesh = DeviceMesh.from_group(group, rows.device.type)
        shape = torch.Size((self._count, *rows.shape[1:]))
        stride = rows.new_empty(shape, device="meta").stride()
        return DTensor.from_local(block, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def own(self, blocks: DTensor, action: str) -> Tensor:
        """Return own rows of a tensor of which each rank has a block. All ranks call it.

        Shapes:
            ``[N, ...]`` -> ``[n, ...]``.

        Cost:
            Each row and its id is sent once.
        """
        comes, places = self._arrivals(action)
        block = blocks.to_local().detach()
        request = ExchangeRequest(comes, self._sends, action, "other")
        come = self._channel.start(block[places], request).wait()
        own = torch.empty_like(come)
        own[self._order] = come
        return own

    def _arrivals(self, action: str) -> tuple[list[int], Tensor]:
        """Return how many rows of this rank's block each rank owns, and their places in the block."""
        comes = swap_counts(self._channel, self._sends, f"{action}: counts")
        request = ExchangeRequest(self._sends, comes, f"{action}: ids", "other")
        ids = self._channel.start(self._ids[self._order], request).wait()
        return comes, ids - self._channel.rank * self._size
