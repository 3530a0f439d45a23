"""Edge layout: the edges of a tensor group, and how rows and weights reach the rank that reduces over them.

Where it sits: ``deferred.sliced_reduce`` makes one for each edge list that messages are reduced over in
feature slices. Rows of a vertex set are numbered by rank, and each rank's own rows keep their order. Rows
received from the peers can therefore be read where they are written.

::

    ranks   0 1 | 2 3 | 4 5      three parts, each with two slices of its features: three tensor groups
            rank 2 reduces some columns over all in-edges of its part's vertices, its own and rank 3's.
            Those edges also read rows of other parts. Ranks 0 and 4 hold the same columns: they send them.

All exchanges use the channel of all these ranks, and every rank takes part in each. Most peers receive
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kagome.comm.exchange import Exchange, ExchangeRequest, swap_counts
from kagome.feature_parallel.all_to_all import AllToAll, SliceCut, by_head, even, everything
from kagome.halo.exchange import HaloExchange
from kagome.kernels.base.csr import Structure


@dataclass(frozen=True)
class SlicedRows(HaloExchange):
    """Halo exchange of some columns: own rows of the part, and other parts' rows in the same columns."""

    def agreed(self, width: int) -> int:
        """Return 0 for every width: ranks differ in width, and the whole channel compares the header."""
        return 0


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that slice the features of one part: a tensor group among all ranks of the channel.

    Args:
        rank: This rank.
        size: Number of all ranks.
        tensor: Number of ranks in a group.
    """

    rank: int
    size: int
    tensor: int

    @property
    def first(self) -> int:
        """The first rank of this group."""
        return self.rank // self.tensor * self.tensor

    def inside(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the counts of all ranks, set to 0 for ranks of other groups."""
        mine = range(self.first, self.first + self.tensor)
        return tuple(count if rank in mine else 0 for rank, count in enumerate(counts))

    def alike(self, group: int) -> int:
        """Return the rank of another group that holds the same columns as this rank."""
        return group * self.tensor + self.rank - self.first

    def cut(self, cut: SliceCut) -> SliceCut:
        """Extend a cut among the group's ranks to all ranks; ranks of other groups take no columns."""
        before, after = (0,) * self.first, (0,) * (self.size - self.first - self.tensor)
        return SliceCut((*before, *cut.begins, *after), (*before, *cut.ends, *after), cut.width)


@dataclass(frozen=True, eq=False)
class GroupRows:
    """The rows of one vertex set that the ranks of a tensor group own.

    Args:
        tensor_group: The tensor group.
        counts: Own rows of each rank, also of other groups.
        way: Exchange between vertex slices and feature slices of these rows.
    """

    tensor_group: TensorGroup
    counts: tuple[int, ...]
    way: AllToAll

    @property
    def begin(self) -> int:
        """The index of this rank's first row among the rows of the group."""
        return sum(self.counts[self.tensor_group.first : self.tensor_group.rank])


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Indices of a view's rows among a tensor group's rows, followed by the rows read in other parts.

    Args:
        place: Index of each own and halo row.
        halo: Exchange of the columns of other parts' rows; None with a single part.

    Shapes:
        place ``[n + H]``.
    """

    place: Tensor
    halo: HaloExchange | None


@dataclass(frozen=True, eq=False)
class EdgeLayout:
    """The edges of all ranks of a tensor group, with the exchanges of rows and of edge values.

    Args:
        rows: Exchange between vertex slices and feature slices of the rows that edges read.
        written: The same of the rows that edges write; the same object if they are of one vertex set.
        edges: Exchange between the slices of values with a row for each edge.
        structure: Edges of all these ranks by row index, rank after rank.
        tensor_group: The tensor group.
        halo: Exchange of the columns of other parts' rows; None with a single part.
    """

    rows: AllToAll
    written: AllToAll
    edges: AllToAll
    structure: Structure
    tensor_group: TensorGroup
    halo: HaloExchange | None = None

    def even(self, width: int) -> SliceCut:
        """Divide columns evenly among the ranks of the group."""
        return self.tensor_group.cut(even(width, self.tensor_group.tensor))

    def everything(self, width: int) -> SliceCut:
        """Return the cut in which every rank of the group takes all columns."""
        return self.tensor_group.cut(everything(width, self.tensor_group.tensor))

    def by_head(self, heads: int, each: int) -> tuple[SliceCut, SliceCut]:
        """Cut columns, and heads, so that each rank of the group takes whole heads if there are enough."""
        columns, touched = by_head(heads, each, self.tensor_group.tensor)
        return self.tensor_group.cut(columns), self.tensor_group.cut(touched)


def group_rows(own: int, tensor: int, channel: Exchange, device: torch.device) -> GroupRows:
    """Count the rows of a vertex set on each rank. All ranks call it.

    Args:
        own: Number of own rows.
        tensor: Number of ranks in a tensor group.
        channel: Channel to all ranks.
        device: Device of the rows.
    """
    tensor_group = TensorGroup(channel.rank, channel.size, tensor)
    counts = _counts(own, channel)
    return GroupRows(tensor_group, counts, AllToAll(tensor_group.inside(counts), channel, device))


def places_of(halo_exchange: HaloExchange, rows: GroupRows) -> RowPlaces:
    """Find the indices of own and halo rows among the rows of the tensor group. All ranks call it.

    Args:
        halo_exchange: Halo exchange of a view.
        rows: The rows of the vertex set that the view's edges read.

    Cost:
        Once: 8 bytes a halo row; with several parts 16 more for each halo row of another part.
    """
    channel, tensor_group, counts = halo_exchange.channel, rows.tensor_group, rows.counts
    tensor = tensor_group.tensor
    # [Note: numbering] The rows that a group's edges can read, in one order for all its ranks:
    #
    #     [ own rows of the group's rank 0 | of rank 1 | ... ][ rows of other parts, ascending by name ]
    #       0 .. total - 1                                    total ...
    #
    # Each owner tells its readers these numbers, by the exchange that halo rows take.
    own = torch.arange(rows.begin, rows.begin + halo_exchange.own, device=halo_exchange.send.device)
    request = ExchangeRequest(
        halo_exchange.send_counts, halo_exchange.recv_counts, "places of halo rows", "other"
    )
    halo = channel.start(own[halo_exchange.send].unsqueeze(1), request).wait().view(-1)
    if tensor == channel.size:
        return RowPlaces(torch.cat([own, halo]), None)
    # A row of another part is named by its group and its index there, folded into one number.
    bases = [sum(counts[: group * tensor]) for group in range(channel.size // tensor + 1)]
    base = torch.tensor(bases, device=own.device)
    owner = torch.repeat_interleave(
        torch.arange(channel.size) // tensor, torch.tensor(halo_exchange.recv_counts, dtype=torch.int64)
    ).to(own.device)
    # ``halo`` holds numbers of the owner's group, so they are ambiguous until the group's base is added.
    away = owner != tensor_group.first // tensor
    named = halo + base[owner]
    # All ranks of the group get the union of what they read: each computes its columns for the edges of all.
    beyond = torch.unique(_told(named[away].unique().unsqueeze(1), tensor_group, channel))
    total = rows.way.total
    # For rows of the own part the search finds any place; ``where`` drops it.
    place = torch.where(away, total + torch.searchsorted(beyond, named), halo)
    exchange = _beyond(beyond, base, total, tensor_group, channel)
    return RowPlaces(torch.cat([own, place]), exchange)


def _beyond(
    beyond: Tensor, base: Tensor, total: int, tensor_group: TensorGroup, channel: Exchange
) -> HaloExchange:
    """Return the exchange of this rank's columns of other parts' rows, with ranks of the same columns."""
    # In each other group one rank holds the same columns: it is asked for all rows of that group.
    want = [0] * channel.size
    edges = torch.searchsorted(beyond, base).tolist()
    for group, (begin, end) in enumerate(pairwise(edges)):
        want[tensor_group.alike(group)] = end - begin
    give = swap_counts(channel, want, "counts of other parts' rows")
    # Back from a name to the index within its group, as the other rank numbers its rows.
    begins = base[torch.searchsorted(base, beyond, right=True) - 1]
    request = ExchangeRequest(want, give, "places of other parts' rows", "other")
    asked = channel.start((beyond - begins).unsqueeze(1), request).wait()
    return SlicedRows(total, beyond.numel(), asked.view(-1), tuple(give), tuple(want), channel)


def edge_layout_of(
    structure: Structure, places: RowPlaces, rows: GroupRows, written: GroupRows, channel: Exchange
) -> EdgeLayout:
    """Collect the edges of all ranks of the group from each rank's own edges. All ranks call it.

    Args:
        structure: This rank's own edges.
        places: The places of the rows that they read.
        rows: The rows of the vertex set that edges read.
        written: The rows of the vertex set that edges write.
        channel: Channel to all ranks.

    Cost:
        Once: 8 bytes an edge to each peer of the group. Keeps 32 bytes an edge of the part.
    """
    # [E, 2], as int32: this is the largest message of the setup, and a group has fewer than 2^31 rows.
    ends = torch.stack([places.place[structure.source], written.begin + structure.target], 1).to(torch.int32)
    source, target = _told(ends, rows.tensor_group, channel).t().to(torch.int64).contiguous().unbind(0)
    own, counts = rows.way.total, rows.tensor_group.inside(_counts(structure.edges, channel))
    num_sources = own + (0 if places.halo is None else places.halo.halo)
    return EdgeLayout(
        rows.way,
        written.way,
        AllToAll(counts, channel, source.device),
        Structure(source, target, written.way.total, num_sources, own if structure.bipartite else None),
        rows.tensor_group,
        places.halo,
    )


def _told(rows: Tensor, tensor_group: TensorGroup, channel: Exchange) -> Tensor:
    """Gather the rows of all ranks of the group, by rank."""
    counts = tensor_group.inside(_counts(rows.size(0), channel))
    sends = tensor_group.inside([rows.size(0)] * channel.size)
    request = ExchangeRequest(sends, counts, "edges of all ranks", "other")
    # One copy for each rank of the group, itself included.
    return channel.start(rows.repeat(tensor_group.tensor, 1), request).wait()


def _counts(mine: int, channel: Exchange) -> tuple[int, ...]:
    return tuple(swap_counts(channel, [mine] * channel.size, "counts"))
