"""Lying: rows of other chunks that lie in a table, to be summed where they lie, or gathered.

Where it sits: ``historical.provider`` gives one for what a chunk reads; ``sparse_ops.edge_sum`` sums over the
table itself where it keeps no rows for backward, everything else takes the rows.

::

    edges      target <── column j of the halo          table rows, of this epoch and of the last one kept
    whereabouts                  j ──> place                │
    layout     target <── place ────────────────────────────┘          no copy of the halo in between
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from kagome.kernels import ops
from kagome.kernels.base.csr import CsrLayout, Structure
from kagome.placement.weak_map import WeakTensorMap


class TableIndex:
    """Where the rows that a chunk reads lie in each table.

    Args:
        places: Of each halo row.

    Shapes:
        ``places [H]``.

    Cost:
        4 bytes an edge that reads a halo row, once it was asked for a layout.
    """

    def __init__(self, places: Tensor) -> None:
        self.places = places
        self._layouts: WeakTensorMap[CsrLayout] = WeakTensorMap()

    def layout(self, edges: Structure) -> CsrLayout:
        """The edges that read halo rows, by target, with places for columns."""
        found = self._layouts.get(edges)
        if found is None:
            halo = edges.by_target.halo
            column = self.places.index_select(0, halo.column - edges.own).to(halo.column.dtype)
            found = CsrLayout(halo.pointer, halo.middle, column, halo.edge)
            self._layouts[edges] = found
        return found


class TableView:
    """Rows under way that will lie in a table.

    Args:
        settle: Waits for what is still to come and gives the table.
        where: Where they lie in it.
        by_edge: Factors of rows as factors of edges, kept as long as the rows' are.

    Shapes:
        table ``[*, W]``; rows ``[H, W]``.
    """

    def __init__(
        self, settle: Callable[[], Tensor], where: TableIndex, by_edge: WeakTensorMap[Tensor]
    ) -> None:
        self.where = where
        self._settle, self._by_edge = settle, by_edge
        self._table: Tensor | None = None

    def table(self) -> Tensor:
        """The table, when all rows are there."""
        if self._table is None:
            self._table = self._settle()
        return self._table

    def weights(self, factor: Tensor, edges: Structure) -> Tensor:
        """Each edge's factor: that of the row that it reads.

        Shapes:
            ``factor [n + H]`` -> ``[E]``.

        Cost:
            A number an edge, kept.
        """
        found = self._by_edge.get(factor)
        if found is None:
            found = factor.index_select(0, edges.source)
            self._by_edge[factor] = found
        return found

    def wait(self) -> Tensor:
        """The rows."""
        return ops.gather(self.where.places, self.table())

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """The rows."""
        yield self.wait()
