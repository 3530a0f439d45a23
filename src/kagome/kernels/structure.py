"""Structure: the edges grouped by the row they write and by the row they read.

Where it sits: ``neighbors`` makes one for each edge list and keeps it as long as the edges live; all of
``ops`` walks its layouts. It knows numbers of rows, nothing of graphs, parts or layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kagome.errors import DataError

LARGEST = 2**31 - 1
"""Columns and edges are int32: half the bytes of what every kernel reads."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Edges grouped by one end: a compressed sparse row matrix whose entries know their edge.

    Args:
        pointer: Where each row's entries begin; one more for the end of the last row.
        middle: Where each row's entries that read halo rows begin; the end of the row where none does.
        column: The other end of each entry's edge.
        edge: Which edge of the given list each entry is.

    Shapes:
        ``pointer [R + 1]`` and ``middle [R]`` int64, ``column [E]`` and ``edge [E]`` int32.
    """

    pointer: Tensor
    middle: Tensor
    column: Tensor
    edge: Tensor

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.middle.numel()

    @property
    def edges(self) -> int:
        """How many entries there are."""
        return self.column.numel()

    @cached_property
    def straight(self) -> bool:
        """Whether entry k is edge k, so that what belongs to edges is read without ``edge``."""
        return bool(
            torch.equal(self.edge, torch.arange(self.edges, dtype=torch.int32, device=self.edge.device))
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the four tensors."""
        return sum(t.nbytes for t in (self.pointer, self.middle, self.column, self.edge))


@dataclass(frozen=True, eq=False)
class Structure:
    """An edge list with what the kernels ask of it, each part built when first asked for and kept.

    Args:
        source: Row read by each edge.
        target: Row written by each edge.
        own: Rows that may be written; every target is below it.
        whole: Rows that may be read; every source is below it, and ``own <= whole``.

    Shapes:
        ``source [E]``, ``target [E]``, int64.

    Cost:
        8 bytes an edge and 16 a row for each of the two layouts; O(E) time.
    """

    source: Tensor
    target: Tensor
    own: int
    whole: int

    @cached_property
    def by_target(self) -> Layout:
        """In-edges of each own row, sorted by source, equal ones in the order given."""
        return _sorted(self.target, self.source, self.own, self.whole, self.own)

    @cached_property
    def by_source(self) -> Layout:
        """Out-edges of each row that may be read, sorted by target, equal ones in the order given."""
        return _sorted(self.source, self.target, self.whole, self.own, self.own)

    @cached_property
    def degree(self) -> Tensor:
        """In-edges of each own row."""
        return self.by_target.pointer.diff()

    @property
    def edges(self) -> int:
        """How many edges there are."""
        return self.source.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of what is built so far; the edge list itself is the caller's."""
        built = (self.__dict__.get(name) for name in ("by_target", "by_source", "degree"))
        return sum(part.nbytes for part in built if part is not None)


def _sorted(major: Tensor, minor: Tensor, rows: int, columns: int, own: int) -> Layout:
    """The layout by one stable sort of (major, minor): any device."""
    _held(max(rows, columns), major.numel())
    edge = torch.argsort(major * max(columns, 1) + minor, stable=True)
    column, row = minor[edge], major[edge]
    pointer = torch.zeros(rows + 1, dtype=torch.int64, device=major.device)
    torch.cumsum(torch.bincount(major, minlength=rows), 0, out=pointer[1:])
    middle = pointer[:-1] + torch.bincount(row[column < own], minlength=rows)
    return Layout(pointer, middle, column.to(torch.int32), edge.to(torch.int32))


def _held(rows: int, edges: int) -> None:
    if max(rows, edges) > LARGEST:
        raise DataError(
            f"a part may have {LARGEST} rows and edges",
            f"this one has {rows} rows and {edges} edges",
            hint="more parts: --parallel.graph",
        )
