"""Summed reads: for which sums over neighbours other parts send partial sums in place of rows.

Where it sits: ``reduce`` asks it where a sum or mean with fixed weights would read halo rows. The tables and
the exchange are those of ``sparse_ops.partial_sums``.

[Note: who takes rows] A partial sum serves one reduction of one edge set. These read rows as before:

* attention and other weights that change, or have a gradient: the sums' weights would be sent in each pass;
* maxima, softmax, and messages that are another function of a row than a multiple;
* sums of constant rows, which are read once: the tables would cost more than they save;
* chunks, feature slices and batches that are flattened into rows, which have exchanges of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kagome.config import PartialSums, sends_sums
from kagome.graph.partition.covers import LEAST_SAVED
from kagome.halo.exchange import HaloExchange
from kagome.halo.forward_pass import RunningForward
from kagome.kernels.base.address import address
from kagome.kernels.base.csr import Structure
from kagome.placement.weak_map import WeakTensorMap
from kagome.scope.constants import Constants
from kagome.sparse_ops.edge_view import EdgeView
from kagome.sparse_ops.partial_sums import SumTables, WeightedSums, sum_tables

if TYPE_CHECKING:
    from kagome.deferred.message import EdgeSet


class SummedReads:
    """The sums over neighbours that are partly taken by the ranks that own the rows.

    All ranks ask in the same order, and get sums or none alike.

    Args:
        setting: When partial sums are sent.
        views: The part's edges.
        forward: The running forward.
        constants: The constant tensors.
    """

    def __init__(
        self,
        setting: PartialSums,
        views: Sequence[EdgeView],
        forward: RunningForward,
        constants: Constants,
    ) -> None:
        self._setting, self._views, self._forward, self._constants = setting, views, forward, constants
        self._tables: WeakTensorMap[SumTables | None] = WeakTensorMap()

    def of(self, edges: EdgeSet, weight: Tensor | None) -> WeightedSums | None:
        """Return how a sum over neighbours is taken with partial sums; None if it reads rows.

        Args:
            edges: The edges.
            weight: The weight of each edge; None if all are 1.

        Cost:
            The tables and the weights of sums, at the first call for them. See :func:`sum_tables`.
        """
        # All that is asked here is the same on all ranks: they agree on what is constant, and on numbers of
        # edges of the whole graph. A rank that went another way would leave its peers waiting for the tables.
        constants = self._constants
        if not self._serve(edges) or (weight is not None and weight.dim() != 1):
            return None
        if self._forward.forward_pass.once or not constants.is_constant(weight):
            return None
        key = ("partial sums", edges.number, None if weight is None else (address(weight), weight.numel()))
        found: Any = constants.cached(key)
        if found is None:
            factor = edges.factors(weight)
            with torch._C.DisableTorchFunction(), constants.once():
                tables = self._tables_of(edges)
                sums = None if tables is None else tables.weighted(weight, factor, edges.structure.source)
            # The tensors stand beside what holds them, so that they count as kept.
            held = () if sums is None else (sums.weight, sums.factor, sums.exchange.weight)
            found = constants.cache(key, (sums, *held))
        return found[0]  # type: ignore[no-any-return]

    def _serve(self, edges: EdgeSet) -> bool:
        """Return whether partial sums may be sent along an edge set, whatever its weights. Ranks agree."""
        view = self._views[edges.placement.view]
        # Subclasses are exchanges of chunks, which supply rows by their own ways.
        plain = type(edges.halo_exchange) is HaloExchange and view.copies == 1
        return plain and sends_sums(self._setting, view.count)

    def _tables_of(self, edges: EdgeSet) -> SumTables | None:
        if edges not in self._tables:
            least = 0.0 if self._setting == "on" else LEAST_SAVED
            self._tables[edges] = sum_tables(edges.structure, edges.halo_exchange, least)
        return self._tables[edges]

    def structures(self) -> Iterator[Structure]:
        """Yield the edges, grouped by their ends, that are kept from one forward pass to the next."""
        yield from chain.from_iterable(tables.structures for tables in self._known())

    def held_lists(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept from one forward pass to the next."""
        yield from chain.from_iterable(tables.held for tables in self._known())

    def notes(self) -> tuple[str, ...]:
        """Return a sentence on the sums of each edge set for which partial sums are sent."""
        told = {
            f"partial sums: an exchange of all ranks has {after:,} rows and sums in place of {before:,} rows "
            f"({(after - before) / before:+.0%})": None
            for before, after in (tables.crossing for tables in self._known())
        }
        return tuple(told)

    def _known(self) -> list[SumTables]:
        return [tables for tables in self._tables.values() if tables is not None]
