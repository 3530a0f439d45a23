"""Sliced reduce: each rank of a tensor group reduces some columns of all rows over the whole graph.

Where it sits: ``reduce`` calls it instead of the halo exchange where columns of a message do not interact:
sums and means (with a weight per edge or per head), extremes, and softmax by column. The result stays in
feature slices until something needs whole rows, so the next hop of a propagation sends nothing.

::

    own rows [n, D] ──split──> [V, d] ──reduce over all edges──> [V, d] ──gather──> [n, D]
                                 ^____________ next hop ____________│

Source: NeutronTP, PVLDB 18(2), section 3; exact here also for layers that are not decoupled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import LazyTensor, changed_in_place, supports
from kagome.deferred.message import EdgeSet, Message, flat, width
from kagome.deferred.sliced_attention import share_of
from kagome.feature_parallel.all_to_all import AllToAll, SliceCut
from kagome.feature_parallel.edge_layout import (
    EdgeLayout,
    GroupRows,
    RowPlaces,
    edge_layout_of,
    group_rows,
    places_of,
)
from kagome.feature_parallel.tiled_columns import ColumnSoftmax, Extreme, Reduction, by_chunk
from kagome.feature_parallel.tiled_reduce import Hop, TileBound
from kagome.halo.comm_recorder import RecordedRows
from kagome.halo.forward_pass import ForwardPass, RunningForward
from kagome.kernels.base.address import address
from kagome.placement.weak_map import WeakTensorMap
from kagome.scope.constants import Constants
from kagome.scope.exchanges import NeighborReads
from kagome.scope.rows import Axes
from kagome.sparse_ops import edge_softmax, edge_sum


class SlicedReads:
    """All ranks' rows in some columns, and all ranks' edges, as one part reads them.

    Args:
        tensor: How many ranks split the columns, each reducing some columns of all their rows instead of all
            columns of its own rows. This applies where columns do not interact; 1 turns it off.
        channel: The channel to the other parts.
        forward: The running forward, which numbers the exchanges.
        constants: The constant tensors, whose rows are exchanged once.
        reads: The reads of the layer that is running.
    """

    def __init__(
        self,
        tensor: int,
        channel: RecordedRows,
        forward: RunningForward,
        constants: Constants,
        reads: NeighborReads,
    ) -> None:
        self.on, self._tensor, self._channel, self._forward = tensor > 1, tensor, channel, forward
        self._constants, self._reads = constants, reads
        self.bound: TileBound | None = None
        """The limit of working memory for sums; None for no limit."""
        self._layouts: WeakTensorMap[Any] = WeakTensorMap()
        self._places: dict[int, RowPlaces] = {}
        self._rows: dict[int, GroupRows] = {}

    def layout(self, edges: EdgeSet) -> EdgeLayout:
        """Return the edges of all ranks, fetched at the first call. All ranks make that call together."""
        if edges not in self._layouts:
            halo_exchange, view = edges.halo_exchange, edges.placement.view
            with torch._C.DisableTorchFunction(), self._channel.unrecorded():
                rows = self._rows_of(edges.sources, halo_exchange.own, edges)
                written = self._rows_of(edges.targets, edges.structure.own, edges)
                if view not in self._places:
                    self._places[view] = places_of(halo_exchange, rows)
                self._layouts[edges] = edge_layout_of(
                    edges.structure, self._places[view], rows, written, halo_exchange.channel
                )
        found: EdgeLayout = self._layouts[edges]
        return found

    def _rows_of(self, vertex_set: int, own: int, edges: EdgeSet) -> GroupRows:
        """Return the rows of a vertex set, counted once: edge sets that share it number them alike."""
        if vertex_set not in self._rows:
            channel, device = edges.halo_exchange.channel, edges.structure.source.device
            self._rows[vertex_set] = group_rows(own, self._tensor, channel, device)
        return self._rows[vertex_set]

    def layouts(self) -> Sequence[EdgeLayout]:
        """Return the edge layouts that were fetched so far."""
        return list(self._layouts.values())

    def factors(self, weight: Tensor | None, edges: EdgeSet, edge_layout: EdgeLayout) -> Tensor | None:
        """Return the factors of ``edges.factors`` for all ranks' rows; None if some rank's weights have none.

        Shapes:
            weight ``[E]`` -> ``[V]``.
        """
        constants = self._constants
        if weight is None or weight.dim() != 1 or not constants.is_constant(weight):
            return None
        if edges.structure.bipartite:
            return None  # see ``factors_of``
        key = ("factors of all", address(weight), weight.numel(), edges.number)
        found: Tensor | None = constants.cached(key)
        if found is None:
            own, count = edges.factors(weight), edges.halo_exchange.own
            # Ranks find factors each from its own edges. NaN tells the others that this rank has found none.
            told = weight.new_full((count, 1), nan) if own is None else own[:count].unsqueeze(1)
            with constants.once():
                cut, site = edge_layout.everything(1), "roots of weights"
                found = edge_layout.rows.split(told, cut, self._forward.forward_pass, site)
                found = self.beyond(found, edge_layout, site).view(-1)
                doubt = found.isnan().any()
                if edge_layout.halo is not None:  # all parts refuse what one part cannot do
                    doubt = self._channel.all_reduce(doubt.to(weight.dtype), "max", action=site, kind="other")
            found = constants.cache(key, weight.new_empty(0) if bool(doubt) else found)
        return found if found.numel() == edge_layout.structure.num_sources else None

    def split(self, rows: Tensor, cut: SliceCut, way: AllToAll, site: str) -> Tensor:
        """Return all ranks' rows in this rank's columns; rows that were read before need no exchange.

        Args:
            rows: Own rows, of vertices or of edges.
            cut: The columns of each rank.
            way: The exchange of an edge layout that is for such rows.
            site: The name of the read.

        Shapes:
            ``[n, ...]`` -> ``[V, d]``.
        """
        constants, forward_pass = self._constants, self._forward.forward_pass
        if constants.is_constant(rows):
            key = ("split", address(rows), tuple(rows.shape), cut, id(way))
            found: Tensor | None = constants.cached(key)
            if found is None:
                with constants.once():
                    found = constants.cache(key, way.split(flat(rows), cut, forward_pass, site))
            return found
        # Keyed by the base tensor, since different views of it arrive here: attention is one for all hops.
        base = rows if rows._base is None else rows._base
        known = self._reads.parts.setdefault(base, {})
        grad = torch.is_grad_enabled() and rows.requires_grad
        # The exchange sends flat rows. Contiguous views of one memory that differ in their inner shape are
        # the same rows.
        shape = (rows.size(0), rows.numel()) if rows.is_contiguous() else (rows.shape, rows.stride())
        place = address(rows), shape, rows._version, grad
        if (place, cut, way) not in known:
            known[place, cut, way] = way.split(flat(rows), cut, forward_pass, site)
        return cast(Tensor, known[place, cut, way])

    def beyond(self, part: Tensor, edge_layout: EdgeLayout, site: str) -> Tensor:
        """Return all rows that the group's edges read, in this rank's columns: own rows, then other parts'.

        Shapes:
            ``[V, d]`` -> ``[num_sources, d]``.
        """
        # One part: the tensor group has all vertices.
        if edge_layout.halo is None:
            return part
        constants, forward_pass = self._constants, self._forward.forward_pass
        if not constants.is_constant(part):
            return edge_layout.halo.gather(part, forward_pass, site)
        key = ("beyond", address(part), tuple(part.shape), id(edge_layout))
        found: Tensor | None = constants.cached(key)
        if found is None:
            with constants.once():
                found = constants.cache(key, edge_layout.halo.gather(part, forward_pass, site))
        return found


@dataclass(frozen=True, eq=False)
class SlicedWork:
    """A deferred sum, computed once it is known whether its whole rows are needed.

    Args:
        hop: The sum, chunk by chunk.
        rows: Its rows: own whole rows for the first hop, else slices.
        weight: The weights of all ranks' edges.
        version: The version of the rows when they were read.
    """

    hop: Hop
    rows: Tensor
    weight: Tensor | None
    version: int

    def run(self, forward_pass: ForwardPass, site: str, *, last: bool) -> Tensor:
        """Compute the sum, in slices or as whole rows."""
        if self.rows._version != self.version:
            raise changed_in_place()
        return replace(self.hop, last=last).run(self.rows, self.weight, forward_pass, site)


class InSlices:
    """Rows of all vertices, of which this rank has some columns.

    Args:
        part: This rank's columns, or a deferred sum that gives them.
        cut: Which columns they are.
        trailing: The shape of a whole row.
        edges: The edges it was reduced over.
        edge_layout: The edge layout, which also converts slices back to own rows.
        site: The name of the read.

    Shapes:
        part ``[V, d]``.
    """

    def __init__(
        self,
        part: Tensor | SlicedWork,
        cut: SliceCut,
        trailing: tuple[int, ...],
        edges: EdgeSet,
        edge_layout: EdgeLayout,
        site: str,
    ) -> None:
        self._part, self.cut, self.trailing = part, cut, trailing
        self.edges, self.edge_layout, self.site = edges, edge_layout, site

    @property
    def part(self) -> Tensor:
        """All rows in this rank's columns."""
        if isinstance(self._part, SlicedWork):
            # A further call works on slices, so the sum is computed as slices and kept.
            self._part = self._part.run(self.edges.deferral.forward.forward_pass, self.site, last=False)
        return self._part

    def of(self, part: Tensor) -> InSlices:
        """Return slices with other values in the same layout."""
        return InSlices(part, self.cut, self.trailing, self.edges, self.edge_layout, self.site)

    @property
    def shape(self) -> Sequence[int]:
        """The shape of own rows, whole."""
        return (self.edges.structure.own, *self.trailing)

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        if isinstance(self._part, Tensor):
            return (self._part,)
        found = (self._part.rows, self._part.weight)
        return [part for part in found if part is not None]

    def compute(self) -> Tensor:
        """Compute own rows, whole, by an exchange of slices."""
        forward_pass = self.edges.deferral.forward.forward_pass
        if isinstance(self._part, SlicedWork):
            # Whole rows are needed at once: the tiled sum sends each chunk to the owners of its rows itself.
            own = self._part.run(forward_pass, self.site, last=True)
        else:
            own = self.edge_layout.written.gather(self._part, self.cut, forward_pass, self.site)
        return self.edges.rows(own.view(*self.shape))

    def lazy(self) -> Tensor:
        """Return a lazy tensor that stands for it."""
        return self.edges.rows(LazyTensor(self))


@dataclass(frozen=True, eq=False)
class Scaled:
    """A multiple of own rows, not computed: where it is added to slices, only the rows are exchanged, once.

    Args:
        rows: Own rows.
        factor: The number they are multiplied by.
        version: The version of the rows when they were multiplied.
    """

    rows: Tensor
    factor: float
    version: int

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the rows."""
        return tuple(self.rows.shape)

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        return (self.rows,)

    def check(self) -> None:
        """Refuse rows that were written to since: their earlier values are lost."""
        if self.rows._version != self.version:
            raise changed_in_place()

    def compute(self) -> Tensor:
        """Compute the multiple of the rows."""
        self.check()
        return self.rows * self.factor


def in_slices(value: Any) -> InSlices | None:
    """Return the feature slices that a tensor stands for; None for any other tensor."""
    found = isinstance(value, LazyTensor) and value.value is None and isinstance(value.expr, InSlices)
    return value.expr if found else None


def edge_layout_for(message: Message) -> EdgeLayout | None:
    """Return the edges of all ranks if a message's columns are reduced in slices; None for a halo exchange.

    Rows that this layer has already read with their halo are not sliced.
    """
    source, deferral = message.source, message.edges.deferral
    if source is None or source.has_halo or not deferral.sliced.on:
        return None
    if (
        not isinstance(source.rows, LazyTensor)
        and deferral.reads.held(source.rows, message.edges.placement) is not None
    ):
        return None
    return deferral.sliced.layout(message.edges)


def summed(message: Message, rows: Tensor, how: str, edge_layout: EdgeLayout) -> Tensor:
    """Return the sum or mean over in-edges, in feature slices."""
    source, weight = message.source, message.weight
    assert source is not None
    inside, edges = in_slices(rows), message.edges
    trailing = tuple(rows.shape[1:])
    # Weights by head: a rank takes whole heads where there are enough, and the weights of those heads.
    if weight is not None and weight.dim() == 2:
        heads = weight.size(1)
        each = width(trailing) // max(heads, 1)
        cut, of_weight = edge_layout.by_head(heads, each)
    else:
        cut, of_weight = edge_layout.even(width(trailing)), edge_layout.everything(1)
    # The sum before divided the columns in another way: back to whole rows, and divide them anew.
    if inside is not None and inside.cut != cut:
        rows, inside = rows.now() if isinstance(rows, LazyTensor) else rows, None
    deferral, site = edges.deferral, source.site
    root = deferral.sliced.factors(weight, edges, edge_layout)
    weight = weight if root is None else None
    if weight is not None:
        share = share_of(weight)
        if share is not None:
            weight = share.heads(of_weight)
        else:
            taken = deferral.sliced.split(weight, of_weight, edge_layout.edges, f"{site} (weights)")
            weight = taken.view(-1) if weight.dim() == 1 else taken
    scale = None
    if how == "mean":
        scale = edge_layout.structure.degree.clamp(min=1).to(rows.dtype).reciprocal()
    if root is not None:
        own_root = root[: edge_layout.rows.total]
        scale = own_root if scale is None else own_root * scale
    if deferral.sliced.bound is not None:
        # With a memory bound the hop itself divides whole rows, chunk by chunk. Constant rows are divided
        # once and kept, and slices of an earlier hop are divided already.
        first = inside is None and not deferral.constants.is_constant(rows)
        own = flat(rows) if first else None
        part = (
            own
            if own is not None
            else inside.part
            if inside
            else deferral.sliced.split(rows, cut, edge_layout.rows, site)
        )
        hop = deferral.sliced.bound.hop(
            edge_layout, cut, weight, part.itemsize, scale=scale, factor=root, first=first
        )
        return InSlices(
            SlicedWork(hop, part, weight, part._version), cut, trailing, edges, edge_layout, site
        ).lazy()
    part = inside.part if inside is not None else deferral.sliced.split(rows, cut, edge_layout.rows, site)
    part = deferral.sliced.beyond(part, edge_layout, site)
    if weight is not None and weight.dim() == 2:
        part = part.view(part.size(0), weight.size(1), part.size(1) // max(weight.size(1), 1))
    out = edge_sum.neighbor_sum(
        part.contiguous(), edge_layout.structure, weight=weight, scale=scale, factor=root
    )
    return InSlices(flat(out), cut, trailing, edges, edge_layout, source.site).lazy()


def extreme(message: Message, sign: int, edge_layout: EdgeLayout) -> Tensor:
    """Return the largest (sign 1) or smallest (-1) of the neighbours' rows, column by column."""
    return _by_column(
        (message,),
        edge_layout,
        Extreme(sign),
        lambda part: edge_sum.neighbor_extreme(part, edge_layout.structure, sign),
    )


def column_softmax(logits: Message, message: Message, edge_layout: EdgeLayout) -> Tensor:
    """Return sums of neighbours' rows, each column weighted by a softmax of its own."""
    return _by_column(
        (logits, message),
        edge_layout,
        ColumnSoftmax(),
        lambda z, m: edge_softmax.column_softmax(z, m, edge_layout.structure),
    )


def _by_column(
    messages: tuple[Message, ...], edge_layout: EdgeLayout, how: Reduction, do: Callable[..., Tensor]
) -> Tensor:
    """Reduce some columns of rows, at once or within the memory bound; the result stays in slices."""
    parts, cut, last = [], None, messages[-1]
    for message in messages:
        message.check()
        assert message.source is not None
        rows = message.source.rows
        # No two columns interact in these reductions, so they may be divided anywhere. All messages have one
        # width.
        cut = edge_layout.even(width(tuple(rows.shape[1:])))
        inside = in_slices(rows)
        deferral, site = message.edges.deferral, message.source.site
        if inside is not None and inside.cut == cut:
            part = inside.part
        else:
            rows = rows.now() if isinstance(rows, LazyTensor) else rows
            part = deferral.sliced.split(rows, cut, edge_layout.rows, site)
        parts.append(deferral.sliced.beyond(part, edge_layout, site))
    assert cut is not None
    assert last.source is not None
    found, bound = tuple(part.contiguous() for part in parts), last.edges.deferral.sliced.bound
    out = do(*found) if bound is None else by_chunk(bound, edge_layout, cut, how, found)
    return InSlices(out, cut, last.trailing, last.edges, edge_layout, last.source.site).lazy()


# What keeps rows in feature slices ---------------------------------------------------------------

NAMES = frozenset(("mul", "div", "true_divide", "add", "sub", "__rmul__", "__radd__", "__rsub__"))


def answer(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a multiple, sum or difference of rows in feature slices; NotImplemented for anything else."""
    if name not in NAMES or len(args) != 2 or kwargs:
        return NotImplemented
    one, two = (in_slices(value) for value in args)
    if one is not None and two is not None:
        # Sums of slices, as in H + alpha * H_0, are sums of the same columns of the same rows.
        if one.cut != two.cut or one.trailing != two.trailing:
            return NotImplemented
        return one.of(func(one.part, two.part)).lazy()
    inside, other = (one, args[1]) if one is not None else (two, args[0])
    assert inside is not None
    if isinstance(other, (int, float)) or (isinstance(other, Tensor) and other.dim() == 0):
        found = func(inside.part, other) if one is not None else func(other, inside.part)
        return inside.of(found).lazy()
    if name.strip("_") not in ("add", "radd", "sub", "rsub") or tuple(other.shape) != tuple(inside.shape):
        return NotImplemented
    # Own whole rows that are added to slices (APPNP's x at each hop) are divided first. ``split`` sends them
    # once in a layer, or once in a run if they are constant.
    deferral, factor = inside.edges.deferral, 1.0
    if isinstance(other, LazyTensor):
        multiple = other.expr
        if not isinstance(multiple, Scaled):
            return NotImplemented
        multiple.check()
        other, factor = multiple.rows, multiple.factor
    if (
        type(other) is not Tensor
        or other.dtype != inside.part.dtype
        or not deferral.axes.of_each_vertex(other)
    ):
        return NotImplemented
    part = deferral.sliced.split(other, inside.cut, inside.edge_layout.written, inside.site)
    part = part if factor == 1.0 else part * factor
    found = func(inside.part, part) if one is not None else func(part, inside.part)
    return inside.of(found).lazy()


class Layer(Protocol):
    """The interface of the running interceptor that :func:`scaled` uses."""

    sliced: SlicedReads
    forward: RunningForward
    axes: Axes


def scaled(
    scope: Layer, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Defer the product of own rows and a number inside a layer."""
    if not scope.sliced.on or scope.forward.layers == 0 or kwargs or len(args) != 2:
        return NotImplemented
    # ``alpha * h`` inside a layer: see ``Scaled``.
    rows, factor = args if isinstance(args[0], Tensor) else reversed(args)
    if type(rows) is not Tensor or not isinstance(factor, (int, float)) or not supports(rows):
        return NotImplemented
    if not scope.axes.of_each_vertex(rows) or scope.axes.of(rows) != 0:
        return NotImplemented
    return scope.axes.like(LazyTensor(Scaled(rows, float(factor), rows._version)), rows)


HANDLERS = {"mul": scaled, "__rmul__": scaled}
