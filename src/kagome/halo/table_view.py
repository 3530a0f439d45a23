"""Table view: rows of other chunks in a history table, which aggregation reads in place or gathers.

Where it sits: ``historical.provider`` returns one for the rows that a chunk reads. ``sparse_ops.edge_sum``
sums over the table itself where it keeps no rows for backward; all other operations gather a copy.

::

    edges      target <── column j of the halo          table rows, of this epoch and of the last one kept
    index                        j ──> place                │
    layout     target <── place ────────────────────────────┘          no copy of the halo in between
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kagome.comm.exchange import Work
from kagome.kernels import ops
from kagome.kernels.base.csr import CsrLayout, Structure
from kagome.placement.weak_map import WeakTensorMap


class TableIndex:
    """The positions in a table of the rows that a chunk reads.

    Args:
        places: Table position of each halo row.

    Shapes:
        ``places [H]``.

    Cost:
        4 bytes for each edge that reads a halo row, once a layout has been requested.
    """

    def __init__(self, places: Tensor) -> None:
        self.places = places
        self._layouts: WeakTensorMap[CsrLayout] = WeakTensorMap()
        self._walked: WeakTensorMap[CsrLayout] = WeakTensorMap()

    def layout(self, edges: Structure) -> CsrLayout:
        """Return the edges that read halo rows, by target, with table positions as columns."""
        found = self._layouts.get(edges)
        if found is None:
            # ``halo`` is the tail of each row's in-edges, those with a source beyond the own rows. Its
            # columns count from ``own``; table positions replace them, so the kernel reads the table and no
            # halo is gathered.
            halo = edges.by_target.halo
            column = self.places.index_select(0, halo.column - edges.own).to(halo.column.dtype)
            found = CsrLayout(halo.pointer, halo.middle, column, lambda: halo.edge)
            # The same rows are as long in each epoch: what kernels derive from that is derived once.
            vars(found)["prepared"] = halo.prepared
            self._layouts[edges] = found
        return found

    def walked(self, edges: Structure, number: Tensor) -> CsrLayout:
        """Return :meth:`layout` for edge values in the order of its entries, which ``number`` counts."""
        found = self._walked.get(edges)
        if found is None:
            layout = self.layout(edges)
            found = replace(layout, order=number)
            vars(found)["prepared"] = layout.prepared
            self._walked[edges] = found
        return found


class TableView(Work):
    """A view of table rows that may still be in transit.

    Args:
        settle: Waits for the missing rows and returns the table.
        where: Positions of the rows in the table.
        by_entry: Cache of row factors expanded to entries; one lives as long as the row factors.

    Shapes:
        table ``[*, W]``; rows ``[H, W]``.
    """

    def __init__(
        self,
        settle: Callable[[], Tensor],
        where: TableIndex,
        by_entry: WeakTensorMap[tuple[Tensor, Tensor]],
    ) -> None:
        self.where = where
        self._settle, self._by_entry = settle, by_entry
        self._table: Tensor | None = None

    def table(self) -> Tensor:
        """Return the table, once all rows have arrived."""
        if self._table is None:
            self._table = self._settle()
        return self._table

    def weighted(self, factor: Tensor, edges: Structure) -> tuple[CsrLayout, Tensor]:
        """Return the edges that read halo rows, and for each of their entries the factor of its row.

        A sum then reads the factors one after the other; in the order of the edges they lie anywhere.

        Shapes:
            ``factor [n + H]`` -> one number for each edge that reads a halo row.

        Cost:
            8 bytes for each such edge, cached.
        """
        # Of the factor tensor, not of the chunk: a layer passes the same degree factors in every epoch.
        found = self._by_entry.get(factor)
        if found is None:
            edge = self.where.layout(edges).edge
            weights = factor.index_select(0, edges.source.index_select(0, edge))
            found = torch.arange(edge.numel(), dtype=edge.dtype, device=edge.device), weights
            self._by_entry[factor] = found
        number, weights = found
        return self.where.walked(edges, number), weights

    def wait(self) -> Tensor:
        """Gather the rows and return the copy."""
        return ops.gather(self.where.places, self.table())
