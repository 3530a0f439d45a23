"""Edge view: the edges of a rank's own vertices in one direction, with the exchange of the rows they read.

Where it sits: made from a ``graph.partition.Partition``; ``intercept.interceptor`` gives its tensors to the
user's model. View 0 holds the in-edges. View 1 holds the out-edges. It is fetched from the peers when a layer
first flips the edges (DirGNNConv) or lets messages flow from target to source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kagome.comm.exchange import Exchange, ExchangeRequest, swap_counts
from kagome.graph.partition.partition import Partition
from kagome.halo.exchange import HaloExchange
from kagome.placement.vertex_sets import VertexSet


@dataclass(frozen=True)
class EdgeView:
    """The edges of own vertices in one direction.

    Args:
        ids: Original ids of own rows, then of halo rows.
        edge_index: Local ids; row 0 is read (own or halo), row 1 is own. In the order of the whole graph.
        given: The same edges as a user's model receives them: row 0 is row 0 of the graph.
        edge_ids: Position of each edge in the whole graph, ascending; view 0 shares the tensor of the
            partition.
        attributes: Edge attributes, in the order of ``edge_index``.
        rows: Exchange of the rows that row 0 names.
        across: View 1: exchange of values that belong to these edges, from rows of view 0's edges.
        across_index: View 1: index of each edge in the result of ``across``.
        name: The name of the edges among those of the graph; empty if it has one list of edges.
        count: The number of these edges in the whole graph.
        sources: The number of the vertex set that row 0 names.
        targets: The number of the vertex set that row 1 names.
        source_size: The number of vertices of the whole graph in the set that row 0 names.
        copies: Of the edges of a batch flattened into rows: how many samples, one after the other.
        single: The number of the view of one sample; None for edges of no batch.

    Shapes:
        ``ids [n + H]``, ``edge_index [2, E]``, ``edge_ids [E]``, ``across_index [E]``, attributes
        ``[E, ...]``.
    """

    ids: Tensor
    edge_index: Tensor
    given: Tensor
    edge_ids: Tensor
    rows: HaloExchange
    attributes: dict[str, Tensor] = field(default_factory=dict)
    across: HaloExchange | None = None
    across_index: Tensor | None = None
    name: str = ""
    count: int = 0
    sources: int = 0
    targets: int = 0
    source_size: int = 0
    copies: int = 1
    single: int | None = None


def in_view(
    part: Partition,
    channel: Exchange,
    device: torch.device,
    rows: HaloExchange | None = None,
    *,
    name: str = "",
    sources: int = 0,
    targets: int = 0,
) -> EdgeView:
    """Return the in-edges of a part's own vertices, as the partition holds them.

    Args:
        part: The part of the graph.
        channel: Channel to the other parts.
        device: Device of the view's tensors.
        rows: The exchange of rows, if it is not the plain halo exchange of the part.
        name: The name of the edges.
        sources: The number of the vertex set that they read.
        targets: The number of the vertex set that they write.
    """
    ids, send = torch.cat([part.own, part.halo]).to(device), part.send.to(device)
    edge_index, own = part.edge_index.to(device), part.own.numel()
    reads = torch.bincount(edge_index[0], minlength=ids.numel())[own:]
    rows = rows or HaloExchange(
        own, part.halo.numel(), send, part.send_counts, part.recv_counts, channel, ids, reads
    )
    return EdgeView(
        ids=ids,
        edge_index=edge_index,
        given=edge_index,
        edge_ids=part.edge_ids,
        rows=rows,
        attributes={key: value.to(device) for key, value in part.edges.items()},
        name=name,
        count=part.num_edges,
        sources=sources,
        targets=targets,
        source_size=part.num_nodes,
    )


def joined_view(view: EdgeView, targets: VertexSet, rows: int, *, targets_first: bool) -> EdgeView:
    """Return edges between two vertex sets as edges of their concatenation, whose rows they read and write.

    ::

        sources 0 1 2 | halo 3        edges 3 -> 0, 1 -> 1
        targets 0 1                   targets first:  rows 0 1 | 2 3 4 | halo 5      5 -> 0, 3 -> 1

    Args:
        view: The edges.
        targets: The vertex set that they write.
        rows: The number of the set of both.
        targets_first: Whether the targets' rows come first.
    """
    held, n, m = view.rows, view.rows.own, targets.own
    source, target = view.edge_index
    own = view.ids[:n]
    if targets_first:
        source, send = source + m, held.send + m
        ids = torch.cat([targets.ids, own + targets.size, view.ids[n:] + targets.size])
    else:
        source, target, send = torch.where(source < n, source, source + m), target + n, held.send
        ids = torch.cat([own, targets.ids + view.source_size, view.ids[n:]])
    edge_index = torch.stack([source, target])
    return replace(
        view,
        ids=ids,
        edge_index=edge_index,
        given=edge_index,
        rows=replace(held, own=n + m, send=send, ids=ids),
        attributes={},
        sources=rows,
        targets=rows,
    )


# [Note: batches] A batch of B samples over one graph, flattened into rows, is a graph of B copies. Its edges
# are those of one copy, with ids shifted by the number of vertices from copy to copy:
#
#     one sample    own 0 1 2 | halo of peer 1: 3   of peer 2: 4       edges 3 -> 0, 4 -> 1
#     two samples   own 0 1 2, 3 4 5 | of peer 1: 6 7   of peer 2: 8 9 edges 6 -> 0, 8 -> 1, 7 -> 3, 9 -> 4
#
# Each peer still gets one message, with the rows of all samples.
def batched_view(
    view: EdgeView, number: int, copies: int, sources: int, targets: int, sets: Sequence[VertexSet]
) -> EdgeView:
    """Return the edges of a batch of samples that is flattened into rows: see [Note: batches].

    Args:
        view: The edges of one sample.
        number: Its number.
        copies: How many samples.
        sources: The number of the vertex set of the batch that the edges read.
        targets: The number of the one that they write.
        sets: The vertex sets.

    Shapes:
        ``[2, E]`` -> ``[2, copies * E]``.
    """
    held, n, own = view.rows, view.rows.own, sets[view.targets].own
    each = torch.arange(copies, device=view.ids.device).unsqueeze(1)
    halo = copies * n + _copied(held.recv_counts, copies, view.ids.device)
    source, target = view.edge_index
    # A halo row h of one sample is row ``halo[i, h]`` of sample i.
    local = torch.cat([torch.arange(n, device=each.device) + each * n, halo], dim=1)
    edge_index = torch.stack([local[:, source].view(-1), (target + each * own).view(-1)])
    ids = torch.empty(copies * view.ids.numel(), dtype=view.ids.dtype, device=view.ids.device)
    ids[local] = view.ids + each * sets[view.sources].size
    send = torch.empty(copies * held.send.numel(), dtype=held.send.dtype, device=held.send.device)
    send[_copied(held.send_counts, copies, send.device)] = held.send + each * n
    reads = None
    if held.reads is not None:
        reads = torch.empty(copies * held.halo, dtype=held.reads.dtype, device=held.reads.device)
        reads[halo - copies * n] = held.reads
    rows = replace(
        held,
        own=copies * n,
        halo=copies * held.halo,
        send=send,
        send_counts=tuple(copies * count for count in held.send_counts),
        recv_counts=tuple(copies * count for count in held.recv_counts),
        ids=ids,
        reads=reads,
    )
    return replace(
        view,
        ids=ids,
        edge_index=edge_index,
        given=edge_index,
        edge_ids=(view.edge_ids + each.to(view.edge_ids.device) * view.count).view(-1),
        rows=rows,
        attributes={},
        count=copies * view.count,
        sources=sources,
        targets=targets,
        source_size=copies * view.source_size,
        copies=copies,
        single=number,
    )


def _copied(counts: Sequence[int], copies: int, device: torch.device) -> Tensor:
    """Return where each row of each sample is, of rows by peer: by peer, then by sample.

    Shapes:
        ``[copies, sum(counts)]``.
    """
    count = torch.tensor(counts, dtype=torch.int64, device=device)
    begin = (count.cumsum(0) - count).repeat_interleave(count)
    within = torch.arange(begin.numel(), device=device) - begin
    each = torch.arange(copies, device=device).unsqueeze(1)
    return copies * begin + each * count.repeat_interleave(count) + within


# [Note: out-edges] An out-edge of an own vertex is an in-edge at its other end, so some rank has it already:
#
#     [1] each rank sends every in-edge, as original ids, to the owner of the edge's source (itself included)
#     [2] the received edges are this rank's out-edges; sorted by edge id, they follow the whole graph's list
#     [3] their targets become the new halo, and each owner is asked to send those rows from now on
#     [4] ``across`` repeats [1] for values that belong to edges
def out_view(view: EdgeView, channel: Exchange) -> EdgeView:
    """Fetch the out-edges of own vertices from ranks that hold them as in-edges. All ranks call it.

    Cost:
        Once: three ids and the attributes of each edge that is cut, and the ids of the new halo.
    """
    halo_exchange, own = view.rows, view.rows.own
    # Rows are own first, then the halo by owner, so the counts say which rank holds an edge's source.
    counts = torch.tensor([own, *halo_exchange.recv_counts])
    holder = torch.repeat_interleave(torch.tensor([channel.rank, *range(channel.size)]), counts)
    to = holder.to(view.ids.device)[view.edge_index[0]]
    places = order = torch.argsort(to, stable=True)
    give = torch.bincount(to, minlength=channel.size).tolist()
    take = swap_counts(channel, give, "counts")

    def send(values: Tensor) -> Tensor:
        return channel.start(values[order], ExchangeRequest(give, take, "out-edges", "other")).wait()

    ends = send(
        # [E, 3]: target, source and number of the edge, all as original ids, since local ids differ by rank.
        torch.stack([*(view.ids[view.edge_index[k]] for k in (1, 0)), view.edge_ids.to(to.device)], dim=1)
    )
    attributes = {name: send(value) for name, value in view.attributes.items()}
    # Messages run against the edges in this view: the former target is read, the former source is own.
    read, owned, edge_ids = ends.t().contiguous().unbind(0)
    # Own ids ascend on each part, so a binary search finds the local row.
    mine = view.ids[:own]
    target = torch.searchsorted(mine, owned)
    order = torch.argsort(edge_ids)
    read, target, edge_ids = read[order], target[order], edge_ids[order]
    origin = torch.repeat_interleave(torch.arange(channel.size), torch.tensor(take)).to(read.device)[order]
    source, ids, rows = _reads_of(read, origin, mine, channel)
    edge_index = torch.stack([source, target])
    return EdgeView(
        ids=ids,
        edge_index=edge_index,
        given=edge_index.flip(0),
        edge_ids=edge_ids,
        rows=rows,
        attributes={name: value[order] for name, value in attributes.items()},
        across=(across := _across(places, give, take, channel)),
        across_index=_across_index(places, give, take, across)[order],
        count=view.count,
    )


def _reads_of(
    read: Tensor, origin: Tensor, mine: Tensor, channel: Exchange
) -> tuple[Tensor, Tensor, HaloExchange]:
    """Return the local rows of vertices that edges read, the ids of all rows, and the exchange of the halo.

    Args:
        read: The vertex that each edge reads, by its original id.
        origin: The rank that owns it.
        mine: The ids of own vertices, ascending.
        channel: The ranks. All of them call it.
    """
    own, away = mine.numel(), origin != channel.rank
    # Halo rows are ordered by owner, then by id, as in a partition. Owners are told which rows to send.
    halo_key = torch.unique(torch.stack([origin[away], read[away]], dim=1), dim=0)
    halo = halo_key[:, 1]
    recv_counts = torch.bincount(halo_key[:, 0], minlength=channel.size).tolist()
    send_counts = swap_counts(channel, recv_counts, "counts")
    request = ExchangeRequest(recv_counts, send_counts, "out-edges", "other")
    asked = channel.start(halo.unsqueeze(1), request).wait()
    source = torch.empty_like(read)
    source[~away] = torch.searchsorted(mine, read[~away])
    # The halo is sorted by owner first, so its ids ascend within an owner only: search in a sorted copy.
    by_id = torch.argsort(halo)
    source[away] = own + by_id[torch.searchsorted(halo[by_id], read[away])]
    send, ids = torch.searchsorted(mine, asked.squeeze(1)), torch.cat([mine, halo])
    counts = tuple(send_counts), tuple(recv_counts)
    return source, ids, HaloExchange(own, halo.numel(), send, *counts, channel, ids)


def _across(places: Tensor, give: list[int], take: list[int], channel: Exchange) -> HaloExchange:
    """Return the exchange of edge values that other ranks hold with their in-edges.

    Args:
        places: The part's in-edges, grouped by the rank that holds their source.
        give: Number of them for each rank, this one included.
        take: Number of edges received from each rank.
        channel: Channel to the peers.
    """
    me = channel.rank
    # Edges with both ends on this rank need no exchange: cut them out of the middle of the send list.
    begin = sum(give[:me])
    send = torch.cat([places[:begin], places[begin + give[me] :]])
    gives = tuple(0 if peer == me else count for peer, count in enumerate(give))
    takes = tuple(0 if peer == me else count for peer, count in enumerate(take))
    return HaloExchange(places.numel(), sum(takes), send, gives, takes, channel)


def _across_index(places: Tensor, give: list[int], take: list[int], across: HaloExchange) -> Tensor:
    """Return the index of each edge among own in-edges and received ones, in the order of receipt."""
    me = across.channel.rank
    begin, before = sum(give[:me]), sum(take[:me])
    away = torch.arange(across.own, across.own + across.halo, device=places.device)
    return torch.cat([away[:before], places[begin : begin + give[me]], away[before:]])


def pair_ids(source: Tensor, target: Tensor) -> Tensor:
    """Number the edges that share both ends: 0, 1, ... in their order.

    Shapes:
        ``source [E]``, ``target [E]`` -> ``[E]``.
    """
    if source.numel() == 0:
        return torch.zeros_like(source)
    order = torch.argsort(source, stable=True)
    # Two stable sorts order by target, then source, then position in the list.
    order = order[torch.argsort(target[order], stable=True)]
    s, t = source[order], target[order]
    first = torch.ones_like(s, dtype=torch.bool)
    first[1:] = (s[1:] != s[:-1]) | (t[1:] != t[:-1])
    place = torch.arange(s.numel(), device=s.device)
    # The position of the first edge with the same ends, carried forward to the edges after it.
    start = torch.cummax(torch.where(first, place, 0), dim=0).values
    out = torch.empty_like(s)
    out[order] = place - start
    return out
