"""Counts: how large one part is, by all that memory grows with.

Where it sits: ``memory.estimate`` scales with them; they come from a part, or from a cut for ranks that are
not there.
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
    """How large one part is: what a forecast scales with."""

    rows: int
    """Own rows n."""
    halo: int
    """Halo rows H."""
    edges: int
    """In-edges E."""
    loops: int
    """Edges from a vertex to itself."""
    cut: int
    """Edges that read a halo row."""
    sent: int
    """Rows sent, to all peers together."""
    train: int
    """Training vertices."""

    @property
    def units(self) -> tuple[int, ...]:
        """As many as there are of each of :data:`UNITS`."""
        return (1, *astuple(self)[: len(UNITS) - 1])


@dataclass(frozen=True)
class GroupSize:
    """Ranks that slice features together, as if one had all their vertices.

    Args:
        rows: Vertices.
        edges: In-edges.
        halo: Rows that are read of others.
        ranks: How many.
    """

    rows: int
    edges: int
    halo: int
    ranks: int


UNITS: Final = ("one", "rows", "halo", "edges", "loops", "cut")
"""What bytes are told apart by: one for all, and the counts that a model can see."""


def counts_of(part: Partition) -> PartSize:
    """The counts of one part.

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
    """The counts of all parts of a whole graph, for ranks that need not be there.

    Args:
        edge_index: All edges.
        owner: Part of each vertex.
        parts: Parts.
        train: Mask of the training vertices.

    Shapes:
        edge_index ``[2, E]``, owner and train ``[N]``.

    Cost: a sort of the edges that are cut.
    """
    source, target = edge_index
    of_source, of_target = owner[source], owner[target]
    away = of_source != of_target
    # A halo row is read by a part once, however many of its edges read it.
    pairs = torch.unique(of_target[away] * owner.numel() + source[away])
    learns = owner if train is None else owner[train]

    def by_part(which: Tensor) -> list[int]:
        found: list[int] = torch.bincount(which, minlength=parts).tolist()
        return found

    columns = (
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
    """Bytes for each of :data:`UNITS`, by kind: whole numbers where all is linear.

    Args:
        counts: Of some parts.
        found: Bytes of each of them.
        among: Which units count: no more than there are parts.
    """
    units = np.array([one.units for one in counts], dtype=np.float64)
    there = units.any(axis=0) & np.isin(UNITS, list(among))
    scale = units[:, there].max(axis=0)
    rates = {}
    for kind in dict.fromkeys(chain.from_iterable(found)):
        bytes_ = np.array([one.get(kind, 0) for one in found], dtype=np.float64)
        solved = np.linalg.lstsq(units[:, there] / scale, bytes_, rcond=None)[0] / scale
        near = np.round(solved)
        row = np.zeros(len(UNITS))
        row[there] = np.where(np.abs(solved - near) < 1e-4 * np.maximum(1, np.abs(near)), near, solved)
        rates[kind] = tuple(row.tolist())
    return rates
