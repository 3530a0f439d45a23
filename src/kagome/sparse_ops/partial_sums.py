"""Partial sums: what a part reads of other parts, with sums in place of rows where these are fewer.

Where it sits: ``deferred.summed_reads`` makes the tables once for each edge set, and gives a sum over
neighbours the edges, weights and exchange of this module in place of those of the part.

[Note: sums in place of rows] A sum over neighbours can be taken in two steps, of which the rank that owns the
rows takes one. It then sends the partial sum as it would send a row, and its reader has one edge of weight 1
to it. Gradients go the same way back: the gradient of the partial sum is sent to the owner, who spreads it::

    rows                                     the smallest cover: a row and a sum
    a b c d ─────> a b c d                   a, b + c + d ─────> a, s
                   x = a + b + c + d                             x = a + s
                   y = a                                         y = a

The reader knows all edges of its vertices, so it finds the cover by itself (``graph.partition.covers``) and
tells each owner once which rows and sums it wants. With fixed weights of edges it also tells the weights of
the edges that are summed there, which may be products with a factor of the row that is read: see [Note: root]
in ``factored_weights``. So ranks need not agree on whether weights have factors.

Source: SuperGCN (pre- and post-aggregation by a vertex cover), arXiv 2411.16025.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kagome.comm.exchange import Exchange, ExchangeRequest, Work, swap_counts
from kagome.graph.partition.covers import Ids, halo_cover
from kagome.halo.exchange import HaloExchange
from kagome.halo.forward_pass import Site
from kagome.kernels import ops
from kagome.kernels.base.csr import Structure

SUMS_BEGIN: Final = 2**62
"""The least number of a partial sum; vertices have smaller ones."""
EDGE_BYTES: Final = 2 * 8 + 2 * 8 + 8 + 1
"""Bytes that the tables keep of an edge: its ends, two layouts, its weight, and who sums it."""
ROW_BYTES: Final = 2 * 2 * 8
"""Bytes that they keep of a row: two numbers in each of two layouts."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """What a part asks of its peers in place of all halo rows.

    Args:
        edges: The edges that the peers sum, or of which they send the rows, by peer: the first edge that
            reads a row stands for it.
        row: The row that each of them reads, as its place among the rows that the peer sends without sums.
        place: The place in the peer's message that each of them is added to.
        summed: Whether the edge's weight belongs to the sum; a row is sent as it is.
        edge_counts: The number of these edges of each peer.
        recv_counts: The number of rows and sums that each peer sends.
        rest: Whether this part sums an edge itself, with its own rows or rows that it receives.
        source: What each edge of the rest reads: an own row, or a row of the messages after them.
        target: The row that each partial sum belongs to.
        arrived: The place of each partial sum among the rows of all messages.
        rows: The number of rows that it would read without sums.

    Shapes:
        ``edges``, ``row``, ``place``, ``summed`` ``[K]``; ``rest [E]``, ``source [E']``; ``target``,
        ``arrived`` ``[S]``.
    """

    edges: Ids
    row: Ids
    place: Ids
    summed: NDArray[np.bool_]
    edge_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    rest: NDArray[np.bool_]
    source: Ids
    target: Ids
    arrived: Ids
    rows: int


# [Note: places] What a part asks of a peer that has the rows a b c d for it, if the cover is a's row and the
# sum of b, c and d for x:
#
#     edge       a -> x   a -> y   b -> x   c -> x   d -> x
#     row        0                 1        2        3          in the peer's list of rows
#     place      0                 1        1        1          in its message: rows first, then sums
#     summed     no                yes      yes      yes        whether the edge's weight goes with it
#     rest       yes      yes      no       no       no         whether this part sums the edge itself
#
# The edge a -> y is not asked for again: it reads place 0 too. The part has one more edge, from place 1 to x,
# whose weight is 1.
def wanted(source: Ids, target: Ids, own: int, recv_counts: tuple[int, ...], least: float = 0.0) -> Wanted:
    """Return what a part asks of its peers, the smallest cover of what it reads of each.

    Args:
        source: The row that each edge reads: an own row, or a halo row after them.
        target: The row that each edge writes.
        own: The number of own rows that edges read.
        recv_counts: The number of halo rows of each peer.
        least: The share of a peer's rows that sums must save. Below it, the peer sends rows alone.

    Shapes:
        ``source [E]``, ``target [E]``.

    Cost:
        A matching over the edges that read halo rows.
    """
    peers, counts = len(recv_counts), np.asarray(recv_counts)
    peer_of, first = np.repeat(np.arange(peers), counts), np.cumsum(counts) - counts
    cover = halo_cover(source, target, own, recv_counts, least)
    kept = cover.kept
    beyond = np.flatnonzero(source >= own)
    sender = source[beyond] - own
    away = ~kept[sender]
    # One sum for each peer and target of edges whose rows do not come; by peer, then by target.
    span = int(target.max(initial=0)) + 1
    sums, which = np.unique(peer_of[sender[away]] * span + target[beyond[away]], return_inverse=True)
    kept_of = np.bincount(peer_of[kept], minlength=peers)
    sums_of = np.bincount(sums // span, minlength=peers)
    # A message has its rows first, then its sums.
    total = kept_of + sums_of
    begin = np.cumsum(total) - total
    place = np.full(kept.size, -1, np.int64)
    place[kept] = _within(kept_of)
    place_of_sum = _within(sums_of) + np.repeat(kept_of, sums_of)
    # Of the edges that read a row, one asks for it.
    asks = np.full(kept.size, -1, np.int64)
    asks[sender[::-1]] = beyond[::-1]
    row = np.concatenate([np.flatnonzero(kept), sender[away]])
    order = np.argsort(peer_of[row], kind="stable")
    rest = np.ones(source.size, np.bool_)
    rest[beyond[away]] = False
    read = source.copy()
    read[beyond] = own + begin[peer_of[sender]] + place[sender]
    return Wanted(
        edges=np.concatenate([asks[kept], beyond[away]])[order],
        row=(row - first[peer_of[row]])[order],
        place=np.concatenate([place[kept], place_of_sum[which]])[order],
        summed=np.repeat([False, True], [row.size - which.size, which.size])[order],
        edge_counts=tuple(np.bincount(peer_of[row], minlength=peers).tolist()),
        recv_counts=tuple(total.tolist()),
        rest=rest,
        source=read[rest],
        target=sums % span,
        arrived=begin[sums // span] + place_of_sum,
        rows=int(cover.read.sum()),
    )


def _within(counts: Ids) -> Ids:
    """Return 0, 1, ... for each group of so many, one group after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True)
class SummedExchange(HaloExchange):
    """A halo exchange whose messages have rows and partial sums of own rows.

    Args:
        sums: The own rows that are added up for each row of the messages.
        weight: The weights of these edges; None if all are 1.
        sent_ids: The numbers of the rows and sums that are sent.

    Shapes:
        ``weight [K]``, ``sent_ids [sum(send_counts)]``.

    Cost:
        A walk over the K edges in each direction, beside what the rows' exchange costs.
    """

    sums: Structure | None = None
    weight: Tensor | None = None
    sent_ids: Tensor | None = None

    @cached_property
    def row_ids(self) -> tuple[Tensor, Tensor]:
        """The numbers of what is sent, and of what is received."""
        assert self.sent_ids is not None
        assert self.ids is not None
        return self.sent_ids, self.ids[self.own :]

    def start_gather(self, rows: Tensor, site: Site, label: str, direction: int) -> Work:
        """Begin to send the rows and sums of own rows ``[n, W]``, and to fetch ``[H, W]`` of them."""
        assert self.sums is not None
        # A row is a sum of one edge of weight 1, so one walk makes the message.
        message = ops.sum_rows(self.sums.by_target, rows.contiguous(), self.weight)
        return super().start_gather(message, site, label, direction)

    def add(self, received: Tensor, own: Tensor) -> Tensor:
        """Add received values to own rows, those at a sum to each row that it has, in place."""
        assert self.sums is not None
        return ops.sum_rows(self.sums.by_source, received, self.weight, into=own)


@dataclass(frozen=True, eq=False)
class SumTables:
    """The rows and sums of one edge set that all ranks have agreed on, before any weights of edges.

    Args:
        reader: The edges that this rank sums: to own rows, and to rows and sums that it receives.
        exchange: The exchange of the rows and sums.
        asked: The edges that peers sum for this rank, by peer.
        summed: Whether such an edge's weight belongs to the sum; a row is sent as it is.
        rest: Whether the part sums an edge itself: these come first in ``reader``, then one for each sum.
        ask_counts: The number of ``asked`` of each peer.
        give_counts: The number of edges that this rank sums for each peer.
        crossing: The rows that all ranks would read without sums, and the rows and sums that they read.

    Shapes:
        ``asked [K]``, ``summed [K]``, ``rest [E]``.
    """

    reader: Structure
    exchange: SummedExchange
    asked: Tensor
    summed: Tensor
    rest: Tensor
    ask_counts: tuple[int, ...]
    give_counts: tuple[int, ...]
    crossing: tuple[int, int]

    @property
    def structures(self) -> tuple[Structure, Structure]:
        """The edges that this rank sums for itself, and those that it sums for others."""
        assert self.exchange.sums is not None
        return self.reader, self.exchange.sums

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The lists of edges and of numbers."""
        return (self.asked, self.summed, self.rest, *self.exchange.row_ids)

    def weighted(self, weight: Tensor | None, factor: Tensor | None, source: Tensor) -> WeightedSums:
        """Return the sums for some weights of edges. All ranks call it, with weights or without.

        Args:
            weight: The weight of each edge of the part; None if all are 1.
            factor: A factor for each row that edges read, whose product with one of the result is the weight;
                None without.
            source: The row that each edge of the part reads.

        Shapes:
            ``weight [E]``, ``factor [n + H]``, ``source [E]``.

        Cost:
            Once: a number for each edge that is summed elsewhere; nothing without weights.
        """
        if weight is None:
            return WeightedSums(self.reader, self.exchange, None, None)
        # The part of an edge's weight that multiplies the row: all of it, or the row's factor. A row that is
        # sent as it is has 1, since its reader may have several edges to it, of different weights.
        each = weight[self.asked] if factor is None else factor[source[self.asked]]
        told = torch.where(self.summed, each, torch.ones_like(each)).unsqueeze(1)
        request = ExchangeRequest(self.ask_counts, self.give_counts, "weights of partial sums", "other")
        given = self.exchange.channel.start(told, request).wait().squeeze(1)
        exchange, rest = replace(self.exchange, weight=given), weight[self.rest]
        if factor is None:
            ones = weight.new_ones(self.reader.edges - rest.numel())
            return WeightedSums(self.reader, exchange, torch.cat([rest, ones]), None)
        # Sums arrive multiplied; rows get their factors here.
        own, halo = exchange.own, factor.new_ones(exchange.halo)
        read, source = self.reader.source[: rest.numel()], source[self.rest]
        beyond = read >= own
        halo[read[beyond] - own] = factor[source[beyond]]
        return WeightedSums(self.reader, exchange, None, torch.cat([factor[:own], halo]))


@dataclass(frozen=True, eq=False)
class WeightedSums:
    """What ``edge_sum.neighbor_sum`` takes for a sum whose halo has partial sums.

    Args:
        edges: The edges that this rank sums.
        exchange: The exchange of rows and sums.
        weight: The weight of each edge; None if all are 1 or ``factor`` is given.
        factor: A factor for each row that edges read.
    """

    edges: Structure
    exchange: SummedExchange
    weight: Tensor | None
    factor: Tensor | None


def sum_tables(edges: Structure, rows: HaloExchange, least: float = 0.0) -> SumTables | None:
    """Agree with all peers on rows and sums. All ranks call it; None if no rank asks for a sum.

    Args:
        edges: The part's edges.
        rows: The exchange of halo rows that they read.
        least: The share of a peer's rows that sums must save; see :func:`wanted`.

    Cost:
        Once: a matching over the edges that read halo rows; 16 bytes sent for each edge that is summed
        elsewhere and for each row that is sent. Keeps a second list of the edges, with layouts:
        :data:`EDGE_BYTES` an edge with weights.
    """
    channel, device, own = rows.channel, edges.source.device, rows.own
    source, target = edges.source.cpu().numpy(), edges.target.cpu().numpy()
    asked = wanted(source, target, own, rows.recv_counts, least)
    # Of all ranks: sums, rows without them, and rows and sums. Whole numbers, exact as doubles.
    told = [float(asked.target.size), float(asked.rows), float(sum(asked.recv_counts))]
    count = torch.tensor(told, dtype=torch.float64, device=device)
    sums, before, after = channel.all_reduce(count, action="number of partial sums", kind="other").tolist()
    if not sums:
        return None
    reader = Structure(
        torch.from_numpy(np.concatenate([asked.source, own + asked.arrived])).to(device),
        torch.from_numpy(np.concatenate([target[asked.rest], asked.target])).to(device),
        edges.own,
        own + sum(asked.recv_counts),
        edges.own_sources,
    )
    give_counts = tuple(swap_counts(channel, asked.edge_counts, "counts of partial sums"))
    exchange = _exchange(rows, asked, channel, give_counts, device)
    return SumTables(
        reader,
        exchange,
        asked=torch.from_numpy(asked.edges).to(device),
        summed=torch.from_numpy(asked.summed).to(device),
        rest=torch.from_numpy(asked.rest).to(device),
        ask_counts=asked.edge_counts,
        give_counts=give_counts,
        crossing=(int(before), int(after)),
    )


def _exchange(
    rows: HaloExchange, asked: Wanted, channel: Exchange, give_counts: tuple[int, ...], device: torch.device
) -> SummedExchange:
    """Tell the peers what is asked of them, and return the exchange of that. All ranks call it."""
    request = ExchangeRequest(asked.edge_counts, give_counts, "partial sums", "other")
    # [K, 2]: a row among those that the peer sends without sums, and its place in the message.
    table = torch.from_numpy(np.stack([asked.row, asked.place], axis=1))
    row, place = channel.start(table.to(device), request).wait().cpu().unbind(1)
    send_counts = _most(place, give_counts)
    read = rows.send.cpu()[row + _begins(rows.send_counts, give_counts)]
    at = place + _begins(send_counts, give_counts)
    me, size, peers = channel.rank, channel.size, range(channel.size)
    # The same numbers from both sides: from the rows that peers read, and from those that this rank reads.
    sent = _numbers(rows, read, at, send_counts, [me * size + peer for peer in peers])
    theirs = rows.own + torch.from_numpy(asked.row) + _begins(rows.recv_counts, asked.edge_counts)
    arrives = torch.from_numpy(asked.place) + _begins(asked.recv_counts, asked.edge_counts)
    come = _numbers(rows, theirs, arrives, asked.recv_counts, [peer * size + me for peer in peers])
    ids = torch.arange(rows.own) if rows.ids is None else rows.ids[: rows.own].cpu()
    return SummedExchange(
        rows.own,
        sum(asked.recv_counts),
        torch.arange(sum(send_counts), device=device),  # all that ``sums`` makes
        send_counts,
        asked.recv_counts,
        channel,
        torch.cat([ids, come]).to(device),
        sums=Structure(read.to(device), at.to(device), sum(send_counts), rows.own, rows.own),
        sent_ids=sent.to(device),
    )


def _begins(counts: tuple[int, ...], of_each: tuple[int, ...]) -> Tensor:
    """Return where each peer's rows begin, once for each of so many entries of that peer."""
    count = torch.tensor(counts)
    return (count.cumsum(0) - count).repeat_interleave(torch.tensor(of_each))


def _most(place: Tensor, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of places in each peer's message: the largest that it names, and 1."""
    return tuple(int(mine.max()) + 1 if mine.numel() else 0 for mine in place.split(list(counts)))


# [Note: numbers of sums] Codecs draw by a number of each row that is the same for any number of ranks, the
# vertex id. A partial sum depends on the cut, so it has no such number; what counts is that no two have the
# same one. A sum of one edge is a row times a weight, and has the row's.
def _numbers(
    rows: HaloExchange, table: Tensor, at: Tensor, counts: tuple[int, ...], pairs: list[int]
) -> Tensor:
    """Return the number of each row and sum of all messages: see [Note: numbers of sums].

    Args:
        rows: The exchange of rows.
        table: The local row of each edge that is summed.
        at: The place among the rows of all messages that each of them is added to.
        counts: The number of rows of each message.
        pairs: The number of the pair of sender and reader of each message.
    """
    ids = torch.arange(rows.own + rows.halo) if rows.ids is None else rows.ids.cpu()
    count = torch.tensor(counts)
    within = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
    found = SUMS_BEGIN + (torch.tensor(pairs).repeat_interleave(count) << 32) + within
    single = torch.bincount(at, minlength=found.numel())[at] == 1
    found[at[single]] = ids[table[single]]
    return found
