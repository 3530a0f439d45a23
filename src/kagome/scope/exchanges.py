"""Exchanges: what a forward asks of other ranks: sums over all of them, and rows that they own.

Where it sits: handlers of statistics and reductions sum by it; ``intercept.gather_scatter`` and
``deferred.message`` read and write rows by it. All ranks make the same calls in the same order, also a rank
with no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kagome.comm.exchange import ExchangeRequest
from kagome.errors import ModelError
from kagome.halo.comm_recorder import RecordedRows
from kagome.halo.exchange import HaloExchange, agree, all_rows, summing, total
from kagome.halo.forward_pass import RunningForward
from kagome.placement.placement import VERTICES, Placement, PlacementKind, Placements
from kagome.placement.weak_map import WeakTensorMap
from kagome.scope.constants import Constants
from kagome.scope.rows import Axes, VertexIds
from kagome.sparse_ops.edge_view import EdgeView, out_view


class RankSums:
    """All ranks of one channel, as a forward pass calls on them.

    Args:
        channel: The channel to the other ranks.
        forward: The running forward, which numbers the calls.
        axes: The rows of tensors.
        views: The part's in-edges.
        slices: Whether ranks split the columns of features.
    """

    def __init__(
        self,
        channel: RecordedRows,
        forward: RunningForward,
        axes: Axes,
        views: list[EdgeView],
        *,
        slices: bool,
    ) -> None:
        self.size, self._channel, self._forward, self._axes = channel.size, channel, forward, axes
        self._views, self._slices = views, slices

    def total(self, part: Tensor, what: str = "total") -> Tensor:
        """Return the sum over all ranks, with gradient."""
        return total(part, self._forward.forward_pass, self._channel, self._forward.where(), what)

    def summing(
        self,
        there: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        back: Callable[..., tuple[Tensor | None, ...]],
        inputs: tuple[Tensor | None, ...],
        what: str,
    ) -> Tensor:
        """Call a function that sums over ranks, forward and backward: see ``halo.exchange.summing``."""
        site = f"{self._forward.where()}.{what}"
        return summing(there, back, inputs, self._forward.forward_pass, self._channel, site)

    def greatest(self, part: Tensor) -> Tensor:
        """Return the maximum over all ranks, without gradient."""
        if self.size == 1:
            return part
        # Without gradient: the callers in ``model.exact.reductions`` add one, shared among equal values.
        site = self._forward.forward_pass.begin(self._forward.where())
        agree(self._channel, site, part)
        action, key = site.action("greatest"), (site.key, "greatest")
        return self._channel.all_reduce(part.detach(), "max", action=action, key=key)

    def have_equal(self, rows: Tensor) -> bool:
        """Return True if all ranks have equal rows, such as a virtual node's, and False if each has its own.

        For rows without a placement, which may be either.
        """
        # They compare the number of rows, and sums of the entries. One has a weight for each place: rows that
        # are one-hot, or in another order, have equal plain sums.
        wide = rows.detach().double().reshape(-1)
        placed = (wide * torch.arange(1, wide.numel() + 1, device=wide.device).sin()).sum()
        told = torch.stack([wide.new_tensor(float(rows.size(0))), wide.abs().sum(), placed])
        most, negated = self.greatest(torch.cat([told, -told])).view(2, -1)
        apart = most + negated
        # Equal to rounding: GPUs of several kinds may compute other last digits of equal numbers.
        return bool((apart[0] == 0) & (apart[1:] <= 1e-5 * most[1]).all())

    def knows_number(self, placement: Placement) -> bool:
        """Return True if the total number of rows of a placement is known without asking the other ranks."""
        if placement.kind in VERTICES:
            return self._axes.length(placement) >= 0
        return self._edges_of(placement) is not None

    def _edges_of(self, placement: Placement) -> EdgeView | None:
        """Return the in-edges that a tensor has a row for each of; None for any other rows."""
        if placement.kind is not PlacementKind.PAIRS or placement.edges is None:
            return None
        view = self._views[placement.view]
        return view if view.across is None and placement.edges is view.edge_index else None

    def number_of(self, placement: Placement, count: int) -> int:
        """Return how many rows all ranks have together, ``count`` of them on this rank."""
        if placement.kind in VERTICES and (length := self._axes.length(placement)) >= 0:
            return length
        if (view := self._edges_of(placement)) is not None:
            return view.count
        if self.size == 1:
            return count
        # Rows that a mask has chosen, or edges with loops: each rank knows only its own count.
        return int(self.total(torch.tensor(count, device=self._views[0].ids.device)))

    def loose(self) -> str:
        """Return why rows are not exchanged exactly in this epoch; an empty string if they are."""
        # ``user_code.derivatives`` asks: a derivative inside forward differentiates each exchange twice,
        # which these kinds of exchanges do not allow.
        if self._slices:
            return "feature slices"
        if self._channel.runs:
            return "layers that run again in backward"
        return "" if self._channel.exact else "chunks, codecs, or rows that are late or drawn"


class NeighborReads:
    """The reads and writes of other ranks' rows by one part.

    Args:
        channel: The channel to the other parts.
        forward: The running forward, which numbers the exchanges.
        views: The part's in-edges; out-edges are added where they are asked for.
        ids: The original ids of rows.
        placements: The placements.
        constants: The constant tensors, whose rows are exchanged once.
        sums_only: Whether only a sample of other parts' rows is read. The sample is unbiased for sums alone.
    """

    def __init__(
        self,
        channel: RecordedRows,
        forward: RunningForward,
        views: list[EdgeView],
        ids: VertexIds,
        placements: Placements,
        constants: Constants,
        *,
        sums_only: bool,
    ) -> None:
        self._channel, self._forward, self._views, self._ids = channel, forward, views, ids
        self._placements, self._constants, self._sums_only = placements, constants, sums_only
        self.parts: WeakTensorMap[Any] = WeakTensorMap()
        """What the layer has read in feature slices: see ``deferred.sliced_reduce``."""
        self._with_halo: WeakTensorMap[Any] = WeakTensorMap()
        self._all_rows: dict[int, tuple[HaloExchange, Tensor]] = {}
        self.turned: EdgeView | None = None
        """The out-edges, once they were fetched."""
        self.turned_at = -1
        """The number of their view; batches may have taken view 1."""

    def read(self, rows: Tensor, axis: int, placement: Placement, site: str = "") -> Tensor:
        """Return own and halo rows along ``axis``: all rows that ids of this placement can name.

        Rows that need no gradient and do not change are exchanged once. Others are exchanged once per layer.
        """
        # ``closed``: these edges read no row of another rank. Rows of another number than the own rows
        # include the halo already, or are no rows of this part.
        halo_exchange = self._views[placement.view].rows
        if halo_exchange.closed or rows.dim() == 0 or rows.size(axis) != halo_exchange.own:
            return rows
        if axis == 0 and (held := self.held(rows, placement)) is not None:
            return held
        constant, forward, constants = not rows.requires_grad, self._forward, self._constants
        # Rows without gradient are cached beyond the forward pass. All ranks find or miss them together,
        # because each makes the same calls on tensors of its own.
        known = constants.with_halo.get(rows, {}) if constant else {}
        version, held_rows = known.get(placement.view, (-1, None))
        there = held_rows is not None and version == rows._version
        # A layer that runs again takes the branch of its first run, also if the cache has been filled since.
        if constant and self._channel.same("rows that do not change", there):
            return held_rows  # type: ignore[return-value]
        # An exchange sends whole rows: the row axis moves to the front, the others are joined, [n, W].
        front = rows.movedim(axis, 0)
        flat = front.reshape(front.size(0), front.shape[1:].numel())
        # Rows made anew in each forward (dropped features) are exchanged again, though they need no gradient.
        with (
            forward.forward_pass.reading_once() if constant and constants.is_constant(rows) else nullcontext()
        ):
            with_halo = halo_exchange.gather(flat, forward.forward_pass, site or forward.site(rows))
        out = with_halo.reshape(with_halo.size(0), *front.shape[1:]).movedim(0, axis)
        # In a second run ``there`` may be true where the first had to ask: the cached tensor stays as it is.
        if constant:
            kept = held_rows if there and held_rows is not None else out
            constants.with_halo[rows] = {**known, placement.view: (rows._version, kept)}
        # Attention reads the same rows for scores and for values: one exchange serves both. ``forget`` drops
        # them with the layer, because [n + H, W] would otherwise live as long as its rows.
        elif forward.fast and axis == 0:
            self._with_halo[rows] = (rows._version, placement.view, torch.is_grad_enabled(), out)
        return out

    def held(self, rows: Tensor, placement: Placement) -> Tensor | None:
        """Return own and halo rows if this layer has read them before; else None."""
        version, view, grad, out = self._with_halo.get(rows, (None, None, None, None))
        # Rows read under ``no_grad`` have no history and cannot serve a read that needs one.
        same = version == rows._version and view == placement.view and grad == torch.is_grad_enabled()
        return out if same else None

    def forget(self) -> None:
        """Drop the rows that the layer has read, because the layer has ended."""
        self._with_halo.clear()
        self.parts.clear()

    def write(self, sums: Tensor, axis: int, placement: Placement) -> Tensor:
        """Reduce sums on own and halo rows along ``axis`` to sums on own rows."""
        halo_exchange = self._views[placement.view].rows
        front = sums.movedim(axis, 0)
        flat = front.reshape(front.size(0), front.shape[1:].numel())
        own = halo_exchange.reduce(flat, self._forward.forward_pass, self._forward.site(sums))
        return own.reshape(own.size(0), *front.shape[1:]).movedim(0, axis)

    def out_edges(self) -> EdgeView:
        """Return the out-edges, fetched from the peers at the first call. All ranks make that call together.

        Raises:
            ModelError: If the graph has several edge sets.
        """
        if self.turned is None:
            if self._views[0].name:
                raise ModelError(
                    "edge sets that are read as they are declared, in a graph with several",
                    "edges that are turned round",
                    where=self._forward.where(),
                    hint="declare the turned edges as an edge set of their own",
                )
            with self._forward.forward_pass.asking(self._channel, self._forward.where()):
                view = out_view(self._views[0], self._channel)
            self.turned, self.turned_at = view, len(self._views)
            self._views.append(view)
            edges = Placement(PlacementKind.EDGES, self.turned_at)
            self._placements.put(view.edge_index, edges)
            self._placements.put(view.given, replace(edges, swapped=True))
            for value in view.attributes.values():
                placed = Placement(PlacementKind.PAIRS, self.turned_at, edges=view.given)
                self._placements.put(value, placed)
            # Out-edges are as constant as the inputs, so fast paths and caches take them.
            for value in (view.edge_index, view.given, *view.attributes.values()):
                self._constants.add(value)
        return self.turned

    def gather_all(self, rows: Tensor, *, ordered: bool = True) -> Tensor:
        """Return the rows of all ranks, with gradient: in the graph's order, or own rows first."""
        self.refuse_sample("attention over all vertices")
        held = self._placements.get(rows)
        exchange, order = self._all_rows_of(0 if held is None else held.vertex_set)
        with_halo = exchange.gather(rows, self._forward.forward_pass, self._forward.where())
        # Dropout of attention weights needs the order of the graph, because a draw depends on the column. A
        # sum over all vertices does not.
        return with_halo.index_select(0, order) if ordered else with_halo

    def all_rows_exchange(self) -> HaloExchange:
        """Return the lists by which every rank reads all others' rows. All ranks first call it together."""
        return self._all_rows_of(0)[0]

    def _all_rows_of(self, vertex_set: int) -> tuple[HaloExchange, Tensor]:
        """Return the lists of a vertex set, and the order of the graph among what they bring."""
        if vertex_set not in self._all_rows:
            with self._forward.forward_pass.asking(self._channel, self._forward.where()):
                exchange = all_rows(self._ids.own(vertex_set), self._channel)
                assert exchange.ids is not None
                self._all_rows[vertex_set] = exchange, exchange.ids.argsort()
        return self._all_rows[vertex_set]

    def report_global_read(self) -> None:
        """Report, where all rows are local, a read that goes beyond a vertex's in-edges."""
        none = torch.empty(0, 1, device=self._views[0].ids.device)
        # Observers of the channel see it.
        self._channel.start(none, ExchangeRequest([0], [0], "sums for neighbours' rows", "other"))

    def refuse_sample(self, what: str) -> None:
        """Refuse a computation that a sample of rows would bias: the sample is unbiased for sums alone."""
        if self._sums_only:
            raise ModelError(
                "layers that sum or average over neighbours, because a sample of other parts' rows is read",
                f"{what}, which wants all of them",
                where=self._forward.where(),
                hint="--parallel.halo-sample 1, or a layer such as GCNConv, SAGEConv or GINConv",
            )

    def held_lists(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept from one forward pass to the next."""
        for exchange, order in self._all_rows.values():
            yield from (exchange.send, order)
