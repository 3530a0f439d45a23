"""Part size: the numbers of rows, halo rows, edges and more that memory and time grow with.

Where it sits: ``memory.estimate`` scales with it. It is counted from a part, or from a cut of the whole graph
for ranks that do not exist yet.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from kagome.graph.partition.partition import Partition

Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True)
class PartSize:
    """The size of one part, which estimates scale with."""

    rows: int
    """Number of own rows, n."""
    halo: int
    """Number of halo rows, H."""
    edges: int
    """Number of in-edges, E."""
    loops: int
    """Number of edges from a vertex to itself."""
    cut: int
    """Number of edges that read a halo row."""
    sent: int
    """Number of rows sent to all peers together."""
    train: int
    """Number of training vertices."""

    @property
    def units(self) -> tuple[int, ...]:
        """The counts of this part for each of :data:`UNITS`."""
        return (1, *astuple(self)[: len(UNITS) - 1])


@dataclass(frozen=True)
class GroupSize:
    """The size of a group of ranks that slice features together, as if one rank had all their vertices.

    Args:
        rows: The number of vertices of the group.
        edges: The number of in-edges of the group.
        halo: The number of rows that the group reads from other groups.
        ranks: The number of ranks in the group.
    """

    rows: int
    edges: int
    halo: int
    ranks: int


UNITS: Final = ("one", "rows", "halo", "edges", "loops", "cut")
"""The units that bytes are fitted to: a constant, and the counts that a model can see."""


def counts_of(part: Partition) -> PartSize:
    """Count the size of one part.

    Cost: one pass over its edges.
    """
    own, source = part.own.numel(), part.edge_index[0]
    mask = part.nodes.get("train_mask")
    return PartSize(
        rows=own,
        halo=part.halo.numel(),
        edges=source.numel(),
        loops=int((source == part.edge_index[1]).sum()),
        cut=int((source >= own).sum()),
        sent=part.send.numel(),
        train=0 if mask is None else int(mask.sum()),
    )


def split_counts(
    edge_index: Tensor, owner: Tensor, parts: int, train: Tensor | None = None
) -> tuple[PartSize, ...]:
    """Count the sizes of all parts of a whole graph; no rank needs to exist.

    Args:
        edge_index: All edges of the graph.
        owner: The part of each vertex.
        parts: The number of parts.
        train: The mask of the training vertices; None if there is none.

    Shapes:
        edge_index ``[2, E]``, owner and train ``[N]``.

    Cost: a sort of the edges that are cut.
    """
    # Counts need owners and edges only, so a plan for a thousand ranks costs a few passes over the edges.
    source, target = edge_index
    of_source, of_target = owner[source], owner[target]
    away = of_source != of_target
    # A part receives a halo row once, however many of its edges read it.
    # A pair (part that reads, vertex that is read) as one number: part * N + vertex. Its quotient by N is the
    # part that receives the row, its remainder the vertex, whose owner sends it.
    pairs = torch.unique(of_target[away] * owner.numel() + source[away])
    learns = owner if train is None else owner[train]

    def by_part(which: Tensor) -> list[int]:
        found: list[int] = torch.bincount(which, minlength=parts).tolist()
        return found

    columns = (
        # In the order of PartSize: rows, halo, edges, loops, cut, sent, train.
        by_part(owner),
        by_part(pairs // max(owner.numel(), 1)),
        by_part(of_target),
        by_part(of_target[source == target]),
        by_part(of_target[away]),
        by_part(owner[pairs % max(owner.numel(), 1)]),
        [0] * parts if train is None else by_part(learns),
    )
    return tuple(PartSize(*row) for row in zip(*columns, strict=True))


def fitted(
    counts: Sequence[PartSize], found: Sequence[Mapping[Kind, int]], among: Collection[str] = UNITS
) -> dict[Kind, tuple[float, ...]]:
    """Fit bytes for each of :data:`UNITS`, by kind; whole numbers where the bytes grow linearly.

    Args:
        counts: The sizes of some parts.
        found: The bytes by kind of each of them.
        among: The units to fit; no more than there are parts.

    Returns:
        Kind -> bytes for each of :data:`UNITS`; 0 for a unit that is not fitted.
    """
    units = np.array([one.units for one in counts], dtype=np.float64)
    # A unit that no part has (no loops, no halo) would make the system singular.
    there = units.any(axis=0) & np.isin(UNITS, list(among))
    scale = units[:, there].max(axis=0)
    rates = {}
    for kind in dict.fromkeys(chain.from_iterable(found)):
        bytes_ = np.array([one.get(kind, 0) for one in found], dtype=np.float64)
        # bytes = units @ rates, least squares. Units range from 1 to the number of edges; scaling to at most
        # 1 keeps the solution accurate.
        solved = np.linalg.lstsq(units[:, there] / scale, bytes_, rcond=None)[0] / scale
        # Rates are bytes, whole numbers up to rounding, if memory grows linearly: a row of 16 floats has 64.
        near = np.round(solved)
        row = np.zeros(len(UNITS))
        row[there] = np.where(np.abs(solved - near) < 1e-4 * np.maximum(1, np.abs(near)), near, solved)
        rates[kind] = tuple(row.tolist())
    return rates
