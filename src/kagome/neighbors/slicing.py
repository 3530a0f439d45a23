"""Slicing: the edges of all ranks of a tensor group, and how rows and weights come to them.

Where it sits: ``late`` makes one for each edge list that messages are reduced over in feature slices;
``sliced`` reduces by it. Rows of the whole graph are counted by rank, each rank's own rows in their order, so
that what comes from the peers lies where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kagome.kernels.structure import Structure
from kagome.neighbors.rows import Carrier, NeighborRows
from kagome.neighbors.transpose import Transposer


@dataclass(frozen=True, eq=False)
class Places:
    """Where a view's rows lie among all ranks' rows.

    Args:
        counts: Own rows of each rank.
        place: Of each own and halo row.

    Shapes:
        place ``[n + H]``.
    """

    counts: tuple[int, ...]
    place: Tensor


@dataclass(frozen=True, eq=False)
class Slicing:
    """An edge list of all ranks.

    Args:
        rows: Between vertex slices and feature slices of rows.
        edges: The same of values an edge.
        structure: All ranks' edges by place, rank after rank.
    """

    rows: Transposer
    edges: Transposer
    structure: Structure


def places_of(plan: NeighborRows) -> Places:
    """Where own and halo rows lie. All ranks call it.

    Cost:
        Once: 8 bytes a halo row.
    """
    channel = plan.channel
    counts = _counts(plan.own, channel)
    begin = sum(counts[: channel.rank])
    own = torch.arange(begin, begin + plan.own, device=plan.send.device)
    halo = channel.exchange(
        own[plan.send].unsqueeze(1),
        plan.send_counts,
        plan.recv_counts,
        action="places of halo rows",
        kind="other",
    )
    return Places(counts, torch.cat([own, halo.view(-1)]))


def slicing_of(structure: Structure, places: Places, channel: Carrier) -> Slicing:
    """The edges of all ranks, from each rank's own. All ranks call it.

    Cost:
        Once: 8 bytes an edge to each peer. Keeps 32 bytes an edge of the whole graph.
    """
    counts = _counts(structure.edges, channel)
    ends = torch.stack([places.place[structure.source], places.place[structure.target]], 1).to(torch.int32)
    every = ends.repeat(channel.size, 1)
    come = channel.exchange(
        every, [structure.edges] * channel.size, counts, action="edges of all ranks", kind="other"
    )
    source, target = come.t().to(torch.int64).contiguous().unbind(0)
    total = sum(places.counts)
    return Slicing(
        Transposer(places.counts, channel, source.device),
        Transposer(counts, channel, source.device),
        Structure(source, target, total, total),
    )


def _counts(mine: int, channel: Carrier) -> tuple[int, ...]:
    ones: Sequence[int] = [1] * channel.size
    told = torch.full((channel.size, 1), mine)
    return tuple(channel.exchange(told, ones, ones, action="counts", kind="other").view(-1).tolist())
