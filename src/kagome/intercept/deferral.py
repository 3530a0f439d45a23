"""Late: what an interception puts off, and what it keeps because it will not change.

Where it sits: ``intercept.Interception`` is one. It finds the edge lists that stay, makes their kernels'
structure once, and answers gathers, softmaxes and reductions by their ends with ``deferred.message``.
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
"""Reductions that a sample of rows gives right on the mean."""


class Deferral:
    """What is put off, and what is kept.

    Args:
        fast: Whether messages are put off and reduced by kernels; else all runs as PyG runs it.
        tensor: How many ranks each reduce some columns of all their rows, where columns do not meet, instead
            of all columns of own rows; 1 for none.
        sums_only: Whether a sample of other parts' rows is read: right on the mean for sums alone.
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
        """The axis along which a tensor has a row a vertex or an edge."""

    @abstractmethod
    def of_each_vertex(self, tensor: Any) -> bool:
        """Whether a tensor has one row for each own vertex."""

    @abstractmethod
    def where(self) -> str:
        """The module that is running."""

    @abstractmethod
    def site(self, rows: Tensor) -> str:
        """What a read of rows is called."""

    @abstractmethod
    def forget_reads(self) -> None:
        """The layer that read rows has ended."""

    def lasting(self, tensor: Tensor | None) -> bool:
        """Whether a tensor is the same in every forward; nothing is."""
        if tensor is None:
            return True
        if transformed():
            return False  # what is computed now is of the transform's own
        with torch._C.DisableTorchFunction():  # asked many times a layer, of the tensor itself
            return self.constants.has(tensor)

    def own_seed(self) -> bool:
        """Whether forward has seeded torch's generator since it began: what it draws then is its own."""
        return torch.initial_seed() != self.turn.seed

    def thinned(self, rows: Tensor) -> Tensor | SparseFeatures:
        """Rows that last and are nearly all zeros by what is not; others as they are."""
        if not self.fast or not self.lasting(rows):
            return rows
        with torch._C.DisableTorchFunction():  # it is not the user's computation
            key = ("thin", address(rows), tuple(rows.shape))
            found = self.kept(key)
            if found is None:
                found = self.keep(key, thin_of(rows) or ())
        return found if isinstance(found, SparseFeatures) else rows

    def keep(self, key: Any, value: Any) -> Any:
        """Keep for all forwards what was computed from lasting tensors alone."""
        found = [value] if isinstance(value, Tensor) else [v for v in value if isinstance(v, Tensor)]
        self.remembered[key] = (value, [(tensor, tensor._version) for tensor in found])
        for tensor in found:
            self.constants.add(tensor)
        return value

    def kept(self, key: Any) -> Any:
        """What was kept, unless it was written to since; else None."""
        value, versions = self.remembered.get(key, (None, []))
        return value if all(tensor._version == version for tensor, version in versions) else None

    @contextmanager
    def once(self) -> Iterator[None]:
        """Around the computation of what is kept: it has no gradient, and no second pass asks for it."""
        with torch.no_grad(), self.channel.aside(), self.turn.apart():
            yield

    def spread(self, value: Tensor) -> Tensor:
        """A message without what is the same for all in-edges of a row: its variance is the same."""
        with torch._C.DisableTorchFunction():
            return rewrite_rules.spread(value)

    def enter_layer(self) -> None:
        """A message-passing layer begins."""
        self.layers += 1

    def leave_layer(self, out: Any) -> Any:
        """A message-passing layer ends: nothing that it put off leaves it."""
        self.layers = max(self.layers - 1, 0)
        self.forget_reads()
        return rewrite_rules.computed(out)

    def edge_set(self, mark: Placement | None) -> message.EdgeSet | None:
        """The graph's edges that ids of this mark are an end of, with their kernels' structure; else None."""
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
        """A number for each row that edges read, whose products are the weights; None where there are none.

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
        """The same for all ranks' rows; None where some rank's weights have none.

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
                if slicing.halo is not None:  # what one part cannot do no part does
                    doubt = self.channel.all_reduce(doubt.to(weight.dtype), "max", action=site, kind="other")
            found = self.keep(key, weight.new_empty(0) if bool(doubt) else found)
        return found if found.numel() == slicing.structure.whole else None

    def slicing(self, edges: message.EdgeSet) -> EdgeLayout:
        """The edges of all ranks, fetched at the first call. All ranks reach it at the same call."""
        if edges not in self._slicings:
            plan, view = edges.plan, edges.mark.view
            with torch._C.DisableTorchFunction(), self.channel.aside():
                if view not in self._places:
                    self._places[view] = places_of(plan, self.tensor)
                self._slicings[edges] = slicing_of(edges.structure, self._places[view], plan.channel)
        found: EdgeLayout = self._slicings[edges]
        return found

    def drops_shares(self, value: Any) -> bool:
        """Whether a tensor is attention whose dropout is put off with it."""
        return sliced_attention.share_of(value) is not None

    def drop_shares(self, value: Tensor, draw: sliced_attention.Draw, words: Tensor) -> Tensor:
        """Attention that was put off, some of it dropped.

        Args:
            value: The attention.
            draw: What drops, given a word an edge and the first head.
            words: A word for each of this rank's edges.
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
        """Those that were fetched."""
        return list(self._slicings.values())

    def apart(
        self, rows: Tensor, cut: SliceCut, slicing: EdgeLayout, site: str, *, of_edges: bool = False
    ) -> Tensor:
        """All ranks' rows in this rank's columns; of rows that were read so before, without an exchange.

        Shapes:
            ``[n, ...]`` -> ``[V, d]``, or of edges.
        """
        way = slicing.edges if of_edges else slicing.rows
        if self.lasting(rows):
            key = ("apart", address(rows), tuple(rows.shape), cut, id(way))
            found: Tensor | None = self.kept(key)
            if found is None:
                with self.once():
                    found = self.keep(key, way.apart(message.flat(rows), cut, self.turn, site))
            return found
        # Of one tensor, whichever views of it come here: attention is one tensor over all hops.
        base = rows if rows._base is None else rows._base
        known = self._parts.setdefault(base, {})
        grad = torch.is_grad_enabled() and rows.requires_grad
        shape = (rows.size(0), rows.numel()) if rows.is_contiguous() else (rows.shape, rows.stride())
        place = address(rows), shape, rows._version, grad
        if (place, cut, way) not in known:
            known[place, cut, way] = way.apart(message.flat(rows), cut, self.turn, site)
        return cast(Tensor, known[place, cut, way])

    def beyond(self, part: Tensor, slicing: EdgeLayout, site: str) -> Tensor:
        """All rows that the group's edges read, in this rank's columns: those of other parts behind its own.

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
        """``base[index]`` as a message, where the ids are an end of the graph's edges; else None."""
        edges = self.edge_set(mark)
        if edges is None or base.size(0) != self.own or not supports(base) or base.dim() == 0:
            return None
        if index.numel() != edges.structure.edges:
            return None
        return rewrite_rules.gathered(edges, base, mark.kind, self.site(base))

    def sums_late(self, x: Tensor, weight: Tensor) -> bool:
        """Whether ``x W^T`` is put off, so that neighbours' rows may be summed before they are mapped."""
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

    def edge_softmax(self, value: Tensor, index: Any, dim: int) -> Tensor | None:
        """Softmax over each row's in-edges, where ``index`` names the graph's targets; else None."""
        edges = self._by_target(value, index, dim)
        if self.names_targets(index):
            self.needs_all("a softmax over neighbours")
        if edges is None:
            return None
        with torch._C.DisableTorchFunction():  # it is not the user's computation
            return reduce.softmax(value, edges)

    def edge_reduce(self, value: Tensor, index: Any, dim: int, how: str) -> Tensor | None:
        """A reduction over each row's in-edges, where ``index`` names the graph's targets; else None."""
        self.refuse_lost(value)
        edges = self._by_target(value, index, dim) if how in reduce.NAMES else None
        if how not in SUMS and self.names_targets(index):
            self.needs_all(f"the reduction {how} over neighbours")
        if edges is None:
            return None
        with torch._C.DisableTorchFunction():
            return reduce.reduced(value, edges, reduce.NAMES[how])

    def refuse_lost(self, *values: Any) -> None:
        """Refuse what was made of rows by their places in this part."""
        if (gone := self.marks.lost(values, {})) is not None:
            raise lost(self, gone)

    def names_targets(self, index: Any) -> bool:
        """Whether a tensor holds ids of own rows: each edge's target."""
        mark = self.marks.get(index)
        return mark is not None and mark.kind is PlacementKind.TARGET

    def needs_all(self, what: str) -> None:
        """Refuse what a sample of rows cannot give: it is right on the mean for sums alone."""
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
        held = self.marks.get(value)  # a message along other edges is first computed
        return edges if held is None or held.edges is mark.edges else None
