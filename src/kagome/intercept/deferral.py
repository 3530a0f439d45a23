"""Deferral: which calls an interceptor defers, and which values it keeps because they are constant.

Where it sits: ``intercept.Interceptor`` is one. It finds the constant edge lists, builds their kernels'
structure once, and answers gathers, softmaxes and reductions by an end of those edges with
``deferred.message``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from typing import Any, cast

import torch
from torch import Tensor

from kagome.deferred import message, reduce, rewrite_rules, sliced_attention
from kagome.deferred.constants import Constants
from kagome.deferred.edge_map import WIDENS
from kagome.deferred.lazy_tensor import LazyTensor, supports
from kagome.errors import ModelError
from kagome.feature_parallel.all_to_all import SliceCut
from kagome.feature_parallel.edge_layout import EdgeLayout, RowPlaces, places_of, slicing_of
from kagome.feature_parallel.tiled_reduce import TileBound
from kagome.halo.comm_recorder import RecordedRows
from kagome.halo.forward_pass import ForwardPass, transformed
from kagome.kernels.base.address import address
from kagome.kernels.base.csr import Structure
from kagome.placement.placement import Placement, PlacementKind, Placements
from kagome.placement.weak_map import WeakTensorMap
from kagome.positions.refusals import lost
from kagome.sparse_ops.edge_view import EdgeView
from kagome.sparse_ops.factored_weights import roots_of
from kagome.sparse_ops.sparse_features import SparseFeatures, thin_of

SUMS = frozenset(("sum", "add", "mean"))
"""Reductions whose expected value a sample of rows preserves."""


class Deferral:
    """Deferred messages and cached constants of one interceptor.

    Args:
        fast: Whether messages are deferred and reduced by kernels. False runs everything as PyG runs it.
        tensor: How many ranks split the columns, each reducing some columns of all their rows instead of all
            columns of its own rows. This applies where columns do not interact; 1 turns it off.
        sums_only: Whether only a sample of other parts' rows is read. The sample is unbiased for sums alone.
    """

    marks: Placements
    views: list[EdgeView]
    channel: RecordedRows
    turn: ForwardPass

    def __init__(self, fast: bool, tensor: int = 1, *, sums_only: bool = False) -> None:
        self.fast, self.tensor, self.sums_only = fast, tensor, sums_only
        self.slices = tensor > 1
        self.bound: TileBound | None = None
        self.constants = Constants()
        self.remembered: dict[Any, Any] = {}
        self.layers = 0
        self._edge_sets: WeakTensorMap[Any] = WeakTensorMap()
        self._slicings: WeakTensorMap[Any] = WeakTensorMap()
        self._places: dict[int, RowPlaces] = {}
        self._parts: WeakTensorMap[Any] = WeakTensorMap()

    @property
    @abstractmethod
    def own(self) -> int:
        """The number of vertices that this rank owns."""

    @abstractmethod
    def axis(self, tensor: Any) -> int | None:
        """Return the axis along which a tensor has one row per vertex or edge."""

    @abstractmethod
    def of_each_vertex(self, tensor: Any) -> bool:
        """Return True if a tensor has one row for each own vertex."""

    @abstractmethod
    def where(self) -> str:
        """Return the path of the module that is running."""

    @abstractmethod
    def site(self, rows: Tensor) -> str:
        """Return the site name under which a read of these rows is exchanged."""

    @abstractmethod
    def forget_reads(self) -> None:
        """Drop the rows that the layer has read, because the layer has ended."""

    def lasting(self, tensor: Tensor | None) -> bool:
        """Return True if a tensor is constant across forward passes. None counts as constant."""
        if tensor is None:
            return True
        if transformed():
            return False  # what is computed now belongs to the transform
        with torch._C.DisableTorchFunction():  # called many times per layer: ask about the tensor itself
            return self.constants.has(tensor)

    def own_seed(self) -> bool:
        """Return True if forward has seeded torch's generator since it began. Its draws are then its own."""
        return torch.initial_seed() != self.turn.seed

    def thinned(self, rows: Tensor) -> Tensor | SparseFeatures:
        """Return constant rows that are nearly all zeros in sparse form, and any other rows unchanged."""
        if not self.fast or not self.lasting(rows):
            return rows
        with torch._C.DisableTorchFunction():  # this is not the user's computation
            key = ("thin", address(rows), tuple(rows.shape))
            found = self.kept(key)
            if found is None:
                found = self.keep(key, thin_of(rows) or ())
        return found if isinstance(found, SparseFeatures) else rows

    def keep(self, key: Any, value: Any) -> Any:
        """Cache, for all forward passes, a value computed from constant tensors alone."""
        found = [value] if isinstance(value, Tensor) else [v for v in value if isinstance(v, Tensor)]
        self.remembered[key] = (value, [(tensor, tensor._version) for tensor in found])
        for tensor in found:
            self.constants.add(tensor)
        return value

    def kept(self, key: Any) -> Any:
        """Return a cached value, or None if there is none or it was written to since."""
        value, versions = self.remembered.get(key, (None, []))
        return value if all(tensor._version == version for tensor, version in versions) else None

    @contextmanager
    def once(self) -> Iterator[None]:
        """Surround the computation of a cached value: it has no gradient, and no second pass replays it."""
        with torch.no_grad(), self.channel.aside(), self.turn.apart():
            yield

    def spread(self, value: Tensor) -> Tensor:
        """Remove from a message what all in-edges of a row have in common. Its variance stays the same."""
        with torch._C.DisableTorchFunction():
            return rewrite_rules.spread(value)

    def enter_layer(self) -> None:
        """Count a message-passing layer that begins."""
        self.layers += 1

    def leave_layer(self, out: Any) -> Any:
        """End a message-passing layer. Compute whatever it deferred, so that nothing deferred leaves it."""
        self.layers = max(self.layers - 1, 0)
        self.forget_reads()
        return rewrite_rules.computed(out)

    def edge_set(self, mark: Placement | None) -> message.EdgeSet | None:
        """Return the graph's edges and kernel structure if ids of this placement are one end; else None."""
        edges = (
            mark.edges
            if mark is not None and mark.kind in (PlacementKind.SOURCE, PlacementKind.TARGET)
            else None
        )
        if not self.fast or edges is None or transformed() or not self.constants.has(edges):
            return None
        if edges not in self._edge_sets:
            ends = self.marks.get(edges)
            assert ends is not None
            plan = self.views[ends.view].rows
            source, target = (edges[1], edges[0]) if ends.swapped else (edges[0], edges[1])
            structure = Structure(source, target, plan.own, plan.own + plan.halo)
            sources = Placement(PlacementKind.SOURCE, ends.view, edges=edges)
            self._edge_sets[edges] = message.EdgeSet(
                structure, plan, sources, cast(message.MessageScope, self)
            )
        found: message.EdgeSet = self._edge_sets[edges]
        return found

    def roots(self, weight: Tensor | None, edges: message.EdgeSet) -> Tensor | None:
        """Return one factor per row that edges read, whose products are the weights; None if there are none.

        Shapes:
            weight ``[E]`` -> ``[whole]``.
        """
        if weight is None or weight.dim() != 1 or not self.lasting(weight):
            return None
        key = ("roots", address(weight), weight.numel(), id(edges))
        found: Tensor | None = self.kept(key)
        if found is None:
            with self.once():
                found = roots_of(weight, edges.structure)
            self.keep(key, found)
        return found if found.numel() == edges.structure.whole else None

    def roots_of_all(
        self, weight: Tensor | None, edges: message.EdgeSet, slicing: EdgeLayout
    ) -> Tensor | None:
        """Return the factors of :meth:`roots` for all ranks' rows; None if some rank's weights have none.

        Shapes:
            weight ``[E]`` -> ``[V]``.
        """
        if weight is None or weight.dim() != 1 or not self.lasting(weight):
            return None
        key = ("roots of all", address(weight), weight.numel(), id(edges))
        found: Tensor | None = self.kept(key)
        if found is None:
            own = self.roots(weight, edges)
            told = weight.new_full((self.own, 1), nan) if own is None else own[: self.own].unsqueeze(1)
            with self.once():
                cut, site = slicing.everything(1), "roots of weights"
                found = self.beyond(slicing.rows.apart(told, cut, self.turn, site), slicing, site).view(-1)
                doubt = found.isnan().any()
                if slicing.halo is not None:  # all parts refuse what one part cannot do
                    doubt = self.channel.all_reduce(doubt.to(weight.dtype), "max", action=site, kind="other")
            found = self.keep(key, weight.new_empty(0) if bool(doubt) else found)
        return found if found.numel() == slicing.structure.whole else None

    def slicing(self, edges: message.EdgeSet) -> EdgeLayout:
        """Return the edges of all ranks, fetched at the first call. All ranks make that call together."""
        if edges not in self._slicings:
            plan, view = edges.plan, edges.mark.view
            with torch._C.DisableTorchFunction(), self.channel.aside():
                if view not in self._places:
                    self._places[view] = places_of(plan, self.tensor)
                self._slicings[edges] = slicing_of(edges.structure, self._places[view], plan.channel)
        found: EdgeLayout = self._slicings[edges]
        return found

    def drops_shares(self, value: Any) -> bool:
        """Return True if a tensor is deferred attention, so that its dropout is deferred too."""
        return sliced_attention.share_of(value) is not None

    def drop_shares(self, value: Tensor, draw: sliced_attention.Draw, words: Tensor) -> Tensor:
        """Apply dropout to deferred attention.

        Args:
            value: The deferred attention.
            draw: The function that drops values, given one random word per edge and the first head.
            words: One random word for each of this rank's edges.
        """
        share = sliced_attention.share_of(value)
        assert share is not None
        edges, slicing = share.logits.edges, share.slicing
        key = ("words of all edges", id(edges if slicing is None else slicing), id(words))
        every: Tensor | None = self.kept(key)
        if every is None:
            with torch._C.DisableTorchFunction(), self.once():
                if slicing is None:
                    every = words[edges.structure.by_target.edge.long()]
                else:
                    cut, way = slicing.everything(1), slicing.edges
                    every = way.apart(words.unsqueeze(1), cut, self.turn, "words of edges").view(-1)
            self.keep(key, every)
        return sliced_attention.dropped(share, draw, words, every)

    def slicings(self) -> list[EdgeLayout]:
        """Return the edge layouts that were fetched so far."""
        return list(self._slicings.values())

    def apart(
        self, rows: Tensor, cut: SliceCut, slicing: EdgeLayout, site: str, *, of_edges: bool = False
    ) -> Tensor:
        """Return all ranks' rows in this rank's columns; rows that were read before need no exchange.

        Shapes:
            ``[n, ...]`` -> ``[V, d]``; with ``of_edges``, the rows are those of edges.
        """
        way = slicing.edges if of_edges else slicing.rows
        if self.lasting(rows):
            key = ("apart", address(rows), tuple(rows.shape), cut, id(way))
            found: Tensor | None = self.kept(key)
            if found is None:
                with self.once():
                    found = self.keep(key, way.apart(message.flat(rows), cut, self.turn, site))
            return found
        # Keyed by the base tensor, since different views of it arrive here: attention is one for all hops.
        base = rows if rows._base is None else rows._base
        known = self._parts.setdefault(base, {})
        grad = torch.is_grad_enabled() and rows.requires_grad
        shape = (rows.size(0), rows.numel()) if rows.is_contiguous() else (rows.shape, rows.stride())
        place = address(rows), shape, rows._version, grad
        if (place, cut, way) not in known:
            known[place, cut, way] = way.apart(message.flat(rows), cut, self.turn, site)
        return cast(Tensor, known[place, cut, way])

    def beyond(self, part: Tensor, slicing: EdgeLayout, site: str) -> Tensor:
        """Return all rows that the group's edges read, in this rank's columns: own rows, then other parts'.

        Shapes:
            ``[V, d]`` -> ``[whole, d]``.
        """
        if slicing.halo is None:
            return part
        if not self.lasting(part):
            return slicing.halo.extend(part, self.turn, site)
        key = ("beyond", address(part), tuple(part.shape), id(slicing))
        found: Tensor | None = self.kept(key)
        if found is None:
            with self.once():
                found = self.keep(key, slicing.halo.extend(part, self.turn, site))
        return found

    def put_off(self, base: Tensor, index: Tensor, mark: Placement) -> Tensor | None:
        """Return ``base[index]`` as a deferred message if the ids are one end of graph edges; else None."""
        edges = self.edge_set(mark)
        if edges is None or base.size(0) != self.own or not supports(base) or base.dim() == 0:
            return None
        if index.numel() != edges.structure.edges:
            return None
        return rewrite_rules.gathered(edges, base, mark.kind, self.site(base))

    def sums_late(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if ``x W^T`` is deferred, so that neighbours' rows can be summed before the map."""
        if (
            not self.fast
            or self.layers == 0
            or not isinstance(x, Tensor)
            or x.dim() != 2
            or weight.dim() != 2
        ):
            return False
        fits = self.of_each_vertex(x) and self.axis(x) == 0 and x.size(0) == self.own and supports(x)
        if not fits or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
            return False
        return weight.size(1) < weight.size(0) or self.lasting(x)

    def maps_late(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if ``x W^T`` of edge features is deferred, so that it is applied after sums over edges.

        Decided by shapes that are the same on all ranks.
        """
        if not self.fast or self.layers == 0 or self.slices or transformed() or isinstance(x, LazyTensor):
            return False
        if x.dim() != 2 or weight.dim() != 2 or self.marks.get(weight) is not None:
            return False
        mark = self.marks.get(x)
        fits = mark is not None and mark.kind is PlacementKind.PAIRS and mark.axis == 0 and mark.whole
        if not fits or not supports(x) or x.dtype != weight.dtype:
            return False
        return WIDENS * weight.size(1) <= weight.size(0) and not torch.is_autocast_enabled(x.device.type)

    def edge_softmax(self, value: Tensor, index: Any, dim: int) -> Tensor | None:
        """Return the softmax over each row's in-edges if ``index`` holds the graph's targets; else None."""
        edges = self._by_target(value, index, dim)
        if self.names_targets(index):
            self.needs_all("a softmax over neighbours")
        if edges is None:
            return None
        with torch._C.DisableTorchFunction():  # this is not the user's computation
            return reduce.softmax(value, edges)

    def edge_reduce(self, value: Tensor, index: Any, dim: int, how: str) -> Tensor | None:
        """Return a reduction over each row's in-edges if ``index`` holds the graph's targets; else None."""
        self.refuse_lost(value)
        edges = self._by_target(value, index, dim) if how in reduce.NAMES else None
        if how not in SUMS and self.names_targets(index):
            self.needs_all(f"the reduction {how} over neighbours")
        if edges is None:
            return None
        with torch._C.DisableTorchFunction():
            return reduce.reduced(value, edges, reduce.NAMES[how])

    def refuse_lost(self, *values: Any) -> None:
        """Refuse values that were made from rows by their positions in this part."""
        if (gone := self.marks.lost(values, {})) is not None:
            raise lost(self, gone)

    def names_targets(self, index: Any) -> bool:
        """Return True if a tensor holds ids of own rows, one per edge: each edge's target."""
        mark = self.marks.get(index)
        return mark is not None and mark.kind is PlacementKind.TARGET

    def needs_all(self, what: str) -> None:
        """Refuse a computation that a sample of rows would bias: the sample is unbiased for sums alone."""
        if self.sums_only:
            raise ModelError(
                "a sample of other parts' rows serves layers that sum or average over neighbours",
                f"{what} wants all of them",
                where=self.where(),
                hint="--parallel.halo-sample 1, or a layer such as GCNConv, SAGEConv or GINConv",
            )

    def _by_target(self, value: Any, index: Any, dim: int) -> message.EdgeSet | None:
        mark = self.marks.get(index)
        if (
            mark is None
            or mark.kind is not PlacementKind.TARGET
            or not isinstance(value, Tensor)
            or value.dim() == 0
        ):
            return None
        edges = self.edge_set(mark)
        if edges is None or dim % value.dim() != 0 or value.size(0) != edges.structure.edges:
            return None
        if not isinstance(value, LazyTensor):
            return edges if supports(value) else None
        held = self.marks.get(value)  # a message along other edges is computed first
        return edges if held is None or held.edges is mark.edges else None
