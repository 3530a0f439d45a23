"""Deferral: which reads, softmaxes and reductions of neighbours are deferred, and as which expressions.

Where it sits: the handlers of ``intercept.gather_scatter`` and the layer rules ask it first. It finds the
constant edge lists, builds their kernels' structure once, and answers gathers, softmaxes and reductions by an
end of those edges with the messages beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from kagome.deferred import message, reduce, rewrite_rules, sliced_attention
from kagome.deferred.edge_map import WIDENS
from kagome.deferred.lazy_tensor import LazyTensor, supports
from kagome.deferred.sliced_reduce import SlicedReads
from kagome.deferred.summed_reads import SummedReads
from kagome.halo.forward_pass import RunningForward, transformed
from kagome.kernels.base.address import address
from kagome.kernels.base.csr import Structure
from kagome.placement.placement import Placement, PlacementKind
from kagome.placement.symbolic_size import SymbolicSize
from kagome.placement.weak_map import WeakTensorMap
from kagome.scope.constants import Constants
from kagome.scope.exchanges import NeighborReads, RankSums
from kagome.scope.rows import Axes
from kagome.sparse_ops.edge_view import EdgeView
from kagome.sparse_ops.sparse_features import SparseFeatures, sparse_of

SUMS = frozenset(("sum", "add", "mean"))
"""Reductions whose expected value a sample of rows preserves."""


class Deferral:
    """The deferred messages of one part.

    Args:
        views: The part's in-edges, and its out-edges once they were fetched.
        axes: The rows of tensors.
        forward: The running forward.
        constants: The constant tensors.
        ranks: The ranks that share the graph.
        reads: The reads of other ranks' rows.
        sliced: The rows of all ranks in some columns.
        summed: The sums that other ranks take in part; None if all of them read rows.
    """

    def __init__(
        self,
        views: Sequence[EdgeView],
        axes: Axes,
        forward: RunningForward,
        constants: Constants,
        ranks: RankSums,
        reads: NeighborReads,
        sliced: SlicedReads,
        summed: SummedReads | None,
    ) -> None:
        self._views, self.axes, self.placements, self.forward = views, axes, axes.placements, forward
        self.constants, self.ranks, self.reads, self.sliced = constants, ranks, reads, sliced
        self.summed = summed
        self._edge_sets: WeakTensorMap[Any] = WeakTensorMap()
        self._numbers = count()

    def as_sparse(self, rows: Tensor) -> Tensor | SparseFeatures:
        """Return constant rows that are nearly all zeros in sparse form, and any other rows unchanged."""
        if not self.forward.fast or not self.constants.is_constant(rows):
            return rows
        with torch._C.DisableTorchFunction():  # this is not the user's computation
            key = ("sparse", address(rows), tuple(rows.shape))
            found = self.constants.cached(key)
            if found is None:
                # An empty tuple records that the rows are dense. None would mean that nothing is known yet,
                # and the rows would be counted again in each forward pass.
                found = self.constants.cache(key, sparse_of(rows) or ())
        return found if isinstance(found, SparseFeatures) else rows

    def spread(self, value: Tensor) -> Tensor:
        """Remove from a message what all in-edges of a row have in common. Its variance stays the same."""
        with torch._C.DisableTorchFunction():
            return rewrite_rules.spread(value)

    def leave_layer(self, out: Any) -> Any:
        """End a message-passing layer. Compute whatever it deferred, so that nothing deferred leaves it."""
        self.forward.layers = max(self.forward.layers - 1, 0)
        self.reads.forget()
        return rewrite_rules.computed(out)

    def edge_set(self, placement: Placement | None) -> message.EdgeSet | None:
        """Return the graph's edges and kernel structure if ids of this placement are one end; else None."""
        edges = (
            placement.edges
            if placement is not None and placement.kind in (PlacementKind.SOURCE, PlacementKind.TARGET)
            else None
        )
        # Edges that forward itself makes (DropEdge) are new in each pass, so sorting them would not pay.
        if not self.forward.fast or edges is None or transformed() or not self.constants.has(edges):
            return None
        if edges not in self._edge_sets:
            ends = self.placements.get(edges)
            assert ends is not None
            # ``edge_index.detach()`` is another tensor in each pass. With an edge set of its own, everything
            # that is computed once would be computed and kept again in each pass.
            kept = self._kept(edges)
            if kept is not edges:
                assert placement is not None
                self._edge_sets[edges] = same = self.edge_set(replace(placement, edges=kept))
                return same
            # ``swapped`` edges hold targets in row 0, as an adjacency matrix does.
            view = self._views[ends.view]
            halo_exchange, own = view.rows, self.axes.sets[view.targets].own
            source, target = (edges[1], edges[0]) if ends.swapped else (edges[0], edges[1])
            structure = Structure(
                source,
                target,
                own,
                halo_exchange.own + halo_exchange.halo,
                None if view.sources == view.targets else halo_exchange.own,
            )
            sources = Placement(PlacementKind.SOURCE, ends.view, edges=edges)
            self._edge_sets[edges] = message.EdgeSet(
                structure, halo_exchange, sources, self, view.sources, view.targets, next(self._numbers)
            )
        found: message.EdgeSet = self._edge_sets[edges]
        return found

    def writes_all(self, index: Tensor, rows: int | None) -> bool:
        """Return whether a reduction by targets of edges has a row for each own vertex of their set.

        Args:
            index: The targets.
            rows: The number of rows of the result, as it was asked for.
        """
        placement = self.placements.get(index)
        written = self.axes.sets[0 if placement is None else self._views[placement.view].targets]
        # Of a concatenation, rows of the receivers alone are asked for by the whole graph's number, which
        # may be this part's number of both.
        if written.members and not isinstance(rows, SymbolicSize):
            return False
        return rows is None or rows == written.own

    def drops_shares(self, value: Any) -> bool:
        """Return True if a tensor is deferred attention, so that its dropout is deferred too."""
        return sliced_attention.share_of(value) is not None

    def drop_shares(self, value: Tensor, draw: sliced_attention.Draw, counters: Tensor) -> Tensor:
        """Apply dropout to deferred attention.

        Args:
            value: The deferred attention.
            draw: The function that drops values, given one random word per edge and the first head.
            counters: One random word for each of this rank's edges.
        """
        share = sliced_attention.share_of(value)
        assert share is not None
        edges, edge_layout = share.logits.edges, share.edge_layout
        key = ("words of all edges", edges.number, edge_layout is None, id(counters))
        every: Tensor | None = self.constants.cached(key)
        if every is None:
            with torch._C.DisableTorchFunction(), self.constants.once():
                # Words follow their edges: into the order of ``walked``, or to the ranks that compute some
                # heads of them.
                if edge_layout is None:
                    every = counters[edges.structure.by_target.entries().long()]
                else:
                    cut, way = edge_layout.everything(1), edge_layout.edges
                    every = way.split(
                        counters.unsqueeze(1), cut, self.forward.forward_pass, "words of edges"
                    ).view(-1)
            self.constants.cache(key, every)
        return sliced_attention.dropped(share, draw, counters, every)

    def defer(self, base: Tensor, index: Tensor, placement: Placement) -> Tensor | None:
        """Return ``base[index]`` as a deferred message if the ids are one end of graph edges; else None."""
        edges = self.edge_set(placement)
        # Rows of another number, such as an embedding's, are no rows of vertices: torch gathers them.
        if edges is None or not supports(base) or base.dim() == 0:
            return None
        s = edges.structure
        if base.size(0) != (s.own if placement.kind is PlacementKind.TARGET else s.first_halo):
            return None
        # Ids of some edges only, ``edge_index[0][mask]``: the kernels sum over all edges of the structure.
        if index.numel() != edges.structure.edges:
            return None
        return rewrite_rules.gathered(edges, base, placement.kind, self.forward.site(base))

    def sums_late(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if ``x W^T`` is deferred, so that neighbours' rows can be summed before the map."""
        if (
            not self.forward.fast
            or self.forward.layers == 0
            or not isinstance(x, Tensor)
            or x.dim() != 2
            or weight.dim() != 2
        ):
            return False
        fits = self.axes.of_each_vertex(x) and self.axes.of(x) == 0 and supports(x)
        placement = self.placements.get(x)
        fits = fits and placement is not None and x.size(0) == self.axes.sets.of(placement).own
        # Under autocast torch would multiply in another type than that of the rows.
        if not fits or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
            return False
        # A widening map goes after the sum, which then reads and sends fewer columns. The sum of constant
        # rows is computed once: see [Note: why a linear map computes the sum] in ``rewrite_rules``.
        return weight.size(1) < weight.size(0) or self.constants.is_constant(x)

    def maps_late(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if ``x W^T`` of edge features is deferred, so that it is applied after sums over edges.

        Decided by shapes that are the same on all ranks.
        """
        lazily = self.forward.fast and self.forward.layers > 0 and not self.sliced.on
        if not lazily or transformed() or isinstance(x, LazyTensor):
            return False
        if x.dim() != 2 or weight.dim() != 2 or self.placements.get(weight) is not None:
            return False
        placement = self.placements.get(x)
        fits = (
            placement is not None
            and placement.kind is PlacementKind.PAIRS
            and placement.axis == 0
            and placement.is_complete
        )
        if not fits or not supports(x) or x.dtype != weight.dtype:
            return False
        return WIDENS * weight.size(1) <= weight.size(0) and not torch.is_autocast_enabled(x.device.type)

    def edge_softmax(self, value: Tensor, index: Any, dim: int) -> Tensor | None:
        """Return the softmax over each row's in-edges if ``index`` holds the graph's targets; else None."""
        edges = self._by_target(value, index, dim)
        # A sample of halo rows changes the total of a softmax, so its result is biased, with kernels or
        # without.
        if self.axes.names_targets(index):
            self.reads.refuse_sample("a softmax over neighbours")
        if edges is None:
            return None
        with torch._C.DisableTorchFunction():  # this is not the user's computation
            return reduce.softmax(value, edges)

    def edge_reduce(self, value: Tensor, index: Any, dim: int, how: str) -> Tensor | None:
        """Return a reduction over each row's in-edges if ``index`` holds the graph's targets; else None."""
        self.axes.refuse_lost(value)
        edges = self._by_target(value, index, dim) if how in reduce.NAMES else None
        if how not in SUMS and self.axes.names_targets(index):
            self.reads.refuse_sample(f"the reduction {how} over neighbours")
        if edges is None:
            return None
        with torch._C.DisableTorchFunction():
            return reduce.reduced(value, edges, reduce.NAMES[how])

    def structures(self) -> Iterator[Structure]:
        """Yield the edges, grouped by their ends, that are kept from one forward pass to the next."""
        yield from (edges.structure for edges in self._edge_sets.values())
        yield from (layout.structure for layout in self.sliced.layouts())
        if self.summed is not None:
            yield from self.summed.structures()

    def _by_target(self, value: Any, index: Any, dim: int) -> message.EdgeSet | None:
        placement = self.placements.get(index)
        if (
            placement is None
            or placement.kind is not PlacementKind.TARGET
            or not isinstance(value, Tensor)
            or value.dim() == 0
        ):
            return None
        edges = self.edge_set(placement)
        if edges is None or dim % value.dim() != 0 or value.size(0) != edges.structure.edges:
            return None
        # A deferred message knows its edges. Numbers per edge are taken to belong to the edges of ``index``.
        if not isinstance(value, LazyTensor):
            return edges if supports(value) else None
        held = self.placements.get(value)  # a message along other edges is computed first
        if held is None or held.edges is placement.edges:
            return edges
        return edges if self._kept(held.edges) is self._kept(placement.edges) else None

    def _kept(self, edges: Tensor | None) -> Tensor | None:
        """Return the constant edges of which a tensor is a view with the same ends, or the tensor itself."""
        if edges is None:
            return None
        kept = self.constants.held_for(edges)
        if kept is edges or kept.shape != edges.shape:
            return edges
        one, other = self.placements.get(kept), self.placements.get(edges)
        if one is None or other is None or (one.view, one.swapped) != (other.view, other.swapped):
            return edges
        return kept
