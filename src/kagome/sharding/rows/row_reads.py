"""Row reads: rows of any vertices, whichever ranks own them, with gradient; for losses on pairs of vertices.

Where it sits: :meth:`kagome.sharding.module.ShardedModel.read` and ``pairs`` use it.

::

    ids of this rank   [7 2 7 9]      asked for once each: [2 7 9]
                                        │ to the ranks that own them: which of their rows
    owners             rows of [2 7]  [9] ──────────> this rank puts them in the order of the ids
    backward           gradients of [2 7 9], each the sum over its places, go back and are added

The request goes along with each read, because a training loop reads other pairs in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest, swap_counts
from kagome.errors import ModelError
from kagome.kernels.base.ordered_sums import add_at, add_from_peers
from kagome.sharding.gradients.gradient_sync import GradientSync
from kagome.sharding.rows.row_sets import RowSet


@dataclass(frozen=True)
class _Lists:
    """One read: which rows travel.

    Args:
        send: Own rows that others, and this rank, asked for, by rank.
        send_counts: The number of them for each rank.
        recv_counts: The number of rows from each rank.
        places: For each id, its row among those received.
    """

    send: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    places: Tensor


class RowReads:
    """Reads of rows by the ids of the whole graph. All ranks call it together.

    Args:
        rows: The vertex set whose rows are read.
        channel: The channel of all ranks of the graph.
        sync: The synchronization of gradients.

    Cost:
        12 bytes for each vertex of the graph on each rank: its owner and its place there.
    """

    def __init__(self, rows: RowSet, channel: Channel, sync: GradientSync) -> None:
        self.channel, self.sync, self.vertices = channel, sync, rows.size
        every = channel.gather_rows(rows.own.to(channel.device), action=f"owners of {rows.name}")
        assert every is not None
        self._owner = torch.empty(rows.size, dtype=torch.int32, device=channel.device)
        self._place = torch.empty(rows.size, dtype=torch.int64, device=channel.device)
        for rank, ids in enumerate(every):
            self._owner[ids] = rank
            self._place[ids] = torch.arange(ids.numel(), device=channel.device)

    def read(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return the rows of these vertices.

        Args:
            rows: Own rows.
            ids: Ids in the whole graph, in any order and number; other ones on each rank.

        Raises:
            ModelError: If an id is out of range.

        Shapes:
            rows ``[n, ...]``, ids ``[P]`` -> ``[P, ...]``.

        Cost:
            Each distinct row of another rank once, and 8 bytes for each of them; the same back in backward.
        """
        ids = self._valid(ids)
        lists = self._lists(ids)
        return _Read.apply(rows, self, lists)  # type: ignore[no-any-return,no-untyped-call]

    def _valid(self, ids: Tensor) -> Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise ModelError("ids of vertices, whole numbers", f"{ids.dtype}", where="net.read, net.pairs")
        ids = ids.to(self.channel.device).long()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vertices:
            raise ModelError(
                f"ids from 0 to {self.vertices - 1:,}, the graph's vertices",
                f"ids from {int(ids.min()):,} to {int(ids.max()):,}",
                where=f"net.read, net.pairs, rank {self.channel.rank}",
            )
        return ids

    def _lists(self, ids: Tensor) -> _Lists:
        asked, inverse = torch.unique(ids, return_inverse=True)
        owner = self._owner[asked]
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=self.channel.size).tolist()
        if self.channel.size == 1:
            return _Lists(self._place[asked], counts, counts, inverse)
        theirs = swap_counts(self.channel, counts, "rows of pairs: counts")
        wanted = self._place[asked[order]].unsqueeze(1)
        request = ExchangeRequest(counts, theirs, "rows of pairs: ids", "other")
        send = self.channel.start(wanted, request).wait().squeeze(1).clone()
        # The rows arrive by owner: the k-th of them is asked[order[k]].
        arrived = torch.empty_like(order)
        arrived[order] = torch.arange(order.numel(), device=order.device)
        return _Lists(send, theirs, counts, arrived[inverse])

    def exchange(self, rows: Tensor, lists: _Lists) -> Tensor:
        """Return the received rows of one read, without gradient."""
        if self.channel.size == 1:
            return rows.index_select(0, lists.send)
        request = ExchangeRequest(lists.send_counts, lists.recv_counts, "rows of pairs", index=lists.send)
        return self.channel.start(rows.contiguous(), request).wait()

    def give_back(self, gradients: Tensor, lists: _Lists, own: int) -> Tensor:
        """Return the sums at own rows of gradients at received rows: the transpose of :meth:`exchange`."""
        sums = gradients.new_zeros(own, gradients.size(1))
        if self.channel.size > 1:
            request = ExchangeRequest(lists.recv_counts, lists.send_counts, "gradients of pairs")
            gradients = self.channel.start(gradients.contiguous(), request).wait()
        return add_from_peers(sums, lists.send, lists.send_counts, gradients)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, reads: RowReads, lists: _Lists) -> Tensor:
        ctx.reads, ctx.lists, ctx.shape = reads, lists, rows.shape
        flat = rows.reshape(rows.size(0), rows.shape[1:].numel())
        found = reads.exchange(flat, lists).index_select(0, lists.places)
        return found.view(lists.places.numel(), *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        reads, lists, shape = ctx.reads, ctx.lists, ctx.shape
        if torch.is_grad_enabled():
            raise ModelError(
                "one derivative of rows that net.read or net.pairs returned",
                "torch.autograd.grad(..., create_graph=True) through them",
                where="net.read, net.pairs",
                hint="take that derivative inside of forward, or before the rows are read",
            )
        reads.sync.started()
        g = grads[0].reshape(grads[0].size(0), shape[1:].numel())
        each = add_at(g.new_zeros(sum(lists.recv_counts), g.size(1)), lists.places, g)
        return reads.give_back(each, lists, shape[0]).view(shape), None, None
