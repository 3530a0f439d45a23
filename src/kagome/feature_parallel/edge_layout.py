"""Slicing: the edges of a tensor group, and how rows and weights come to them.

Where it sits: ``intercept.deferral`` makes one for each edge list that messages are reduced over in feature
slices; ``deferred.sliced_reduce`` reduces by it. Rows of a part are counted by rank, each rank's own rows in
their order, so that what comes from the peers lies where it is read.

::

    ranks   0 1 | 2 3 | 4 5      three parts, each with two slices of its features: three tensor groups
            rank 2 reduces some columns over all in-edges of its part's vertices, own and rank 3's. Of rows
            that those read in other parts, ranks 0 and 4 have the same columns: they send them.

All goes over the channel of all these ranks, who come to each exchange together; to most peers nothing goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kagome.feature_parallel.all_to_all import AllToAll, SliceCut, by_head, even, everything
from kagome.halo.exchange import Carrier, HaloExchange
from kagome.kernels.base.csr import Structure


@dataclass(frozen=True)
class SlicedRows(HaloExchange):
    """Rows of a part in some columns, and those of other parts in the same."""

    def agreed(self, width: int) -> int:
        """Nothing: ranks of the same columns alone exchange, where all of the channel compare."""
        return 0


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that slice the features of a part: a tensor group among all ranks of the channel.

    Args:
        rank: This rank.
        size: All ranks.
        tensor: Ranks of a group.
    """

    rank: int
    size: int
    tensor: int

    @property
    def first(self) -> int:
        """The first rank of this group."""
        return self.rank // self.tensor * self.tensor

    def inside(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Counts of all ranks, with none where a rank is of another group."""
        mine = range(self.first, self.first + self.tensor)
        return tuple(count if rank in mine else 0 for rank, count in enumerate(counts))

    def alike(self, group: int) -> int:
        """The rank of a group that has the same columns."""
        return group * self.tensor + self.rank - self.first

    def cut(self, cut: SliceCut) -> SliceCut:
        """A cut among the group's ranks as one among all: the others take nothing."""
        before, after = (0,) * self.first, (0,) * (self.size - self.first - self.tensor)
        return SliceCut((*before, *cut.begins, *after), (*before, *cut.ends, *after), cut.width)


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Where a view's rows lie among the rows of a tensor group, with those that it reads elsewhere behind.

    Args:
        team: The group.
        counts: Own rows of each of its ranks; of others none.
        place: Of each own and halo row.
        halo: How columns of rows of other parts come; None where there is one part.

    Shapes:
        place ``[n + H]``.
    """

    team: TensorGroup
    counts: tuple[int, ...]
    place: Tensor
    halo: HaloExchange | None


@dataclass(frozen=True, eq=False)
class EdgeLayout:
    """An edge list of all ranks of a tensor group.

    Args:
        rows: Between vertex slices and feature slices of rows.
        edges: The same of values an edge.
        structure: All these ranks' edges by place, rank after rank.
        team: The group.
        halo: How columns of rows of other parts come; None where there is one part.
    """

    rows: AllToAll
    edges: AllToAll
    structure: Structure
    team: TensorGroup
    halo: HaloExchange | None = None

    def even(self, width: int) -> SliceCut:
        """Columns shared out evenly."""
        return self.team.cut(even(width, self.team.tensor))

    def everything(self, width: int) -> SliceCut:
        """All columns for every rank of the group."""
        return self.team.cut(everything(width, self.team.tensor))

    def by_head(self, heads: int, each: int) -> tuple[SliceCut, SliceCut]:
        """Whole heads for each rank where there are enough: of columns, and of heads."""
        columns, touched = by_head(heads, each, self.team.tensor)
        return self.team.cut(columns), self.team.cut(touched)


def places_of(plan: HaloExchange, tensor: int) -> RowPlaces:
    """Where own and halo rows lie. All ranks call it.

    Args:
        plan: The rows of a view.
        tensor: Ranks of a tensor group.

    Cost:
        Once: 8 bytes a halo row; with several parts 16 more of those that lie in others.
    """
    channel = plan.channel
    team = TensorGroup(channel.rank, channel.size, tensor)
    counts = _counts(plan.own, channel)
    begin = sum(counts[team.first : channel.rank])
    own = torch.arange(begin, begin + plan.own, device=plan.send.device)
    halo = channel.exchange(
        own[plan.send].unsqueeze(1),
        plan.send_counts,
        plan.recv_counts,
        action="places of halo rows",
        kind="other",
    ).view(-1)
    if tensor == channel.size:
        return RowPlaces(team, counts, torch.cat([own, halo]), None)
    # Rows of other parts by group and place there: one number for both.
    bases = [sum(counts[: group * tensor]) for group in range(channel.size // tensor + 1)]
    base = torch.tensor(bases, device=own.device)
    owner = torch.repeat_interleave(
        torch.arange(channel.size) // tensor, torch.tensor(plan.recv_counts, dtype=torch.int64)
    ).to(own.device)
    away = owner != team.first // tensor
    named = halo + base[owner]
    beyond = torch.unique(_told(named[away].unique().unsqueeze(1), team, channel))
    total = sum(team.inside(counts))
    place = torch.where(away, total + torch.searchsorted(beyond, named), halo)
    rows = _beyond(beyond, base, total, team, channel)
    return RowPlaces(team, team.inside(counts), torch.cat([own, place]), rows)


def _beyond(beyond: Tensor, base: Tensor, total: int, team: TensorGroup, channel: Carrier) -> HaloExchange:
    """How this rank's columns of other parts' rows come from those that have the same columns of them."""
    want = [0] * channel.size
    edges = torch.searchsorted(beyond, base).tolist()
    for group, (begin, end) in enumerate(pairwise(edges)):
        want[team.alike(group)] = end - begin
    ones: Sequence[int] = [1] * channel.size
    told = channel.exchange(
        torch.tensor(want).unsqueeze(1), ones, ones, action="counts of other parts' rows", kind="other"
    )
    give = told.view(-1).tolist()
    begins = base[torch.searchsorted(base, beyond, right=True) - 1]
    asked = channel.exchange(
        (beyond - begins).unsqueeze(1), want, give, action="places of other parts' rows", kind="other"
    )
    return SlicedRows(total, beyond.numel(), asked.view(-1), tuple(give), tuple(want), channel)


def slicing_of(structure: Structure, places: RowPlaces, channel: Carrier) -> EdgeLayout:
    """The edges of all ranks of the group, from each rank's own. All ranks call it.

    Cost:
        Once: 8 bytes an edge to each peer of the group. Keeps 32 bytes an edge of the part.
    """
    ends = torch.stack([places.place[structure.source], places.place[structure.target]], 1).to(torch.int32)
    source, target = _told(ends, places.team, channel).t().to(torch.int64).contiguous().unbind(0)
    total = sum(places.counts)
    counts = places.team.inside(_counts(structure.edges, channel))
    whole = total + (0 if places.halo is None else places.halo.halo)
    return EdgeLayout(
        AllToAll(places.counts, channel, source.device),
        AllToAll(counts, channel, source.device),
        Structure(source, target, total, whole),
        places.team,
        places.halo,
    )


def _told(rows: Tensor, team: TensorGroup, channel: Carrier) -> Tensor:
    """The rows of all ranks of the group, by rank."""
    counts = team.inside(_counts(rows.size(0), channel))
    sends = team.inside([rows.size(0)] * channel.size)
    return channel.exchange(
        rows.repeat(team.tensor, 1), sends, counts, action="edges of all ranks", kind="other"
    )


def _counts(mine: int, channel: Carrier) -> tuple[int, ...]:
    ones: Sequence[int] = [1] * channel.size
    told = torch.full((channel.size, 1), mine)
    return tuple(channel.exchange(told, ones, ones, action="counts", kind="other").view(-1).tolist())
