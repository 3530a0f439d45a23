"""Message: what a layer sends along edges, kept as an expression until its values are needed.

Where it sits: ``deferral`` gives a model a ``LazyTensor`` where it gathers rows by the ends of
the graph's edges. ``rewrite_rules`` says which torch calls keep it lazy. ``reduce`` then works on rows, and
the tensor with one row per edge is never allocated.

::

    x[source]         Message(source=x)                     w * x[source]     Message(source=x, weight=w)
    x[target]         Message(target=x)                     a_i + b_j         Message(a, b)
    f(x[source])      Message(source=f(x)), row by row      leaky(a_i + b_j)  Message(a, b, form="leaky")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import LazyTensor, Versioned, now
from kagome.halo.exchange import HaloExchange
from kagome.kernels.base.address import address
from kagome.kernels.base.csr import Structure
from kagome.placement.placement import Placement, PlacementKind
from kagome.sparse_ops import edge_softmax, edge_sum, linear
from kagome.sparse_ops.factored_weights import factors_of

if TYPE_CHECKING:
    from kagome.deferred.deferral import Deferral

Form = Literal["sum", "product", "leaky"]


@dataclass(frozen=True, eq=False)
class EdgeSet:
    """The graph's edges in the direction in which messages run.

    Args:
        structure: The edges grouped by their ends.
        halo_exchange: The provider of halo rows.
        placement: The placement of their source ids.
        deferral: The deferral that made it.
        sources: The number of the vertex set that they read.
        targets: The number of the vertex set that they write.
        number: A number that no other edge set of the deferral has or had, for keys of what is kept.
    """

    structure: Structure
    halo_exchange: HaloExchange
    placement: Placement
    deferral: Deferral
    sources: int = 0
    targets: int = 0
    number: int = 0

    def pairs(self, tensor: Tensor) -> Tensor:
        """Place a tensor as having one row per edge."""
        return self.deferral.placements.put(
            tensor, Placement(PlacementKind.PAIRS, self.placement.view, 0, self.placement.edges)
        )

    def rows(self, tensor: Tensor) -> Tensor:
        """Place a tensor as having one row per vertex that the edges write."""
        return self.deferral.placements.put(tensor, Placement(PlacementKind.ROWS, vertex_set=self.targets))

    def source_rows(self, tensor: Tensor) -> Tensor:
        """Place a tensor as having one row per vertex that the edges read."""
        return self.deferral.placements.put(tensor, Placement(PlacementKind.ROWS, vertex_set=self.sources))

    def factors(self, weight: Tensor | None) -> Tensor | None:
        """Return factors of rows that edges read, whose products are the weights; else None.

        Shapes:
            weight ``[E]`` -> ``[num_sources]``.
        """
        constants = self.deferral.constants
        if weight is None or weight.dim() != 1 or not constants.is_constant(weight):
            return None
        key = ("factors", address(weight), weight.numel(), self.number)
        found: Tensor | None = constants.cached(key)
        if found is None:
            with constants.once():
                found = factors_of(weight, self.structure)
            constants.cache(key, found)
        # An empty tensor records that the weights have no factors.
        return found if found.numel() == self.structure.num_sources else None


@dataclass(frozen=True, eq=False)
class Source:
    """Rows that edges read: own rows, to be completed by halo rows, or all of them.

    Args:
        rows: Own rows ``[n, ...]``, or all ``[n + H, ...]``.
        has_halo: Whether halo rows are included.
        site: The name of the read.
    """

    rows: Tensor
    has_halo: bool
    site: str


@dataclass(frozen=True, eq=False)
class Linear(Versioned):
    """``x W^T`` of own rows, not computed, because the sum over neighbours may come first.

    Args:
        x: The rows.
        weight: The weight matrix.
        deferral: The deferral that it is part of.
    """

    x: Tensor
    weight: Tensor
    deferral: Deferral

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the product."""
        return (self.x.size(0), self.weight.size(0))

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        return (self.x, self.weight)

    def noted(self) -> Sequence[Tensor | None]:
        """Return the source's rows and the weight."""
        return self.parts

    def compute(self) -> Tensor:
        """Compute the product of rows and weight."""
        self.check()
        return self.deferral.axes.like(linear.linear(self.deferral.as_sparse(self.x), self.weight), self.x)


# [Note: life of a message] The logits of GAT, as PyG writes them, and the weighted sum that follows:
#
#     a[target] + b[source]    Message(target=a, source=Source(b))     one row per vertex at each end
#     leaky_relu(...)          the same with form="leaky"              no longer linear in a and b
#     softmax(..., index)      reads the halo of b, H numbers a row    alpha [E, H], from one kernel
#     x[source] * alpha        Message(source=Source(x), weight=alpha)
#     scatter(..., index)      sums over own rows, reads the halo of x, adds the sum over it
#
# ``Source.has_halo`` becomes True when an operation that does not narrow rows needs all of them: see
# ``widened``. From then on the rows are [n + H, ...], and no later step exchanges them again. With a
# single part it is True from the start.
@dataclass(frozen=True, eq=False)
class Message(Versioned):
    """A message along edges, expressed by the rows at their ends.

    Args:
        edges: The edges it runs along.
        target: Own rows ``a``, read at each edge's target.
        source: Rows ``b``, read at each edge's source.
        weight: One per edge, or one per edge and head; only with a source alone.
        form: ``sum``: a_i + b_j (or the only one present); ``product``: a_i * b_j; ``leaky``:
            leaky_relu(a_i + b_j).
        slope: The negative slope of the leaky relu.
        att: A factor per column, applied after the form.
        versions: The rows at its ends and what they were multiplied with, each with its version at that time.
    """

    edges: EdgeSet
    target: Tensor | None
    source: Source | None
    weight: Tensor | None = None
    form: Form = "sum"
    slope: float = 0.0
    att: Tensor | None = None

    def noted(self) -> Sequence[Tensor | None]:
        """Return the rows at both ends, which may be the user's own tensors, the weight, and the factor."""
        return (self.target, None if self.source is None else self.source.rows, self.weight, self.att)

    @property
    def trailing(self) -> tuple[int, ...]:
        """The shape without the edge axis."""
        rows = self.target if self.source is None else self.source.rows
        assert rows is not None
        return tuple(rows.shape[1:])

    @property
    def shape(self) -> Sequence[int]:
        """The shape: edges, then the shape of a row."""
        return (self.edges.structure.edges, *self.trailing)

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        found = (self.target, None if self.source is None else self.source.rows, self.weight, self.att)
        return [part for part in found if part is not None]

    @property
    def one_ended(self) -> bool:
        """Whether it is a function of one end's row alone."""
        return (
            self.form == "sum" and self.weight is None and (self.target is None) is not (self.source is None)
        )

    def with_halo(self) -> Tensor:
        """Return all rows that the edges read, own and halo."""
        assert self.source is not None
        self.check()
        rows = now(self.source.rows)
        return (
            rows
            if self.source.has_halo
            else self.edges.deferral.reads.read(rows, 0, self.edges.placement, self.source.site)
        )

    def compute(self) -> Tensor:
        """Compute the tensor with one row per edge."""
        self.check()
        s = self.edges.structure
        # The fallback where no rule and no kernel fits: what PyG would have computed.
        if self.source is None:
            assert self.target is not None
            out = edge_sum.gather(self.target, s, "target")
        elif self.target is None:
            out = edge_sum.gather(self.with_halo(), s, "source")
            if self.weight is not None:
                weight = now(self.weight)
                out = out * weight.view(*weight.shape, *[1] * (out.dim() - weight.dim()))
        elif self.form == "product":
            out = edge_sum.gather(self.target, s, "target") * edge_sum.gather(self.with_halo(), s, "source")
        else:
            slope = self.slope if self.form == "leaky" else None
            out = edge_softmax.join(self.target, self.with_halo(), slope, s)
            out = out if self.att is None else out * self.att
        return self.edges.pairs(out)


@dataclass(frozen=True, eq=False)
class Beside:
    """Messages concatenated along their last axis."""

    messages: tuple[Message, ...]

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the concatenation."""
        first = self.messages[0].shape
        return (*first[:-1], sum(m.shape[-1] for m in self.messages))

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        return [part for m in self.messages for part in m.parts]

    def compute(self) -> Tensor:
        """Compute the messages and concatenate them."""
        return self.messages[0].edges.pairs(torch.cat([m.compute() for m in self.messages], -1))


@dataclass(frozen=True, eq=False)
class SoftmaxShare:
    """Softmax of a message over each row's in-edges, each column by itself."""

    logits: Message

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the softmax, that of its logits."""
        return self.logits.shape

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        return self.logits.parts

    def compute(self) -> Tensor:
        """Compute the softmax over each row's in-edges."""
        edges, logits = self.logits.edges, self.logits.compute()
        out = edge_softmax.edge_softmax(flat(logits), edges.structure)
        # Each column is a head of its own: [E, F].
        return edges.pairs(out.view(logits.shape))


@dataclass(frozen=True, eq=False)
class Shared:
    """A message multiplied by a softmax over the same edges."""

    share: SoftmaxShare
    message: Message

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the product, that of the message."""
        return self.message.shape

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        return (*self.message.parts, *self.share.parts)

    def compute(self) -> Tensor:
        """Compute the product of message and softmax."""
        return self.message.edges.pairs(self.message.compute() * self.share.compute())


def message_of(value: Any) -> Message | None:
    """Return the message that a tensor stands for; None for any other tensor."""
    return value.expr if isinstance(value, LazyTensor) and isinstance(value.expr, Message) else None


def defer(message: Message) -> Tensor:
    """Return a lazy tensor that stands for a message."""
    return message.edges.pairs(LazyTensor(message))


def widened(message: Message) -> Message:
    """Return the message with halo rows fetched, for row-wise operations that would not send less.

    In feature slices the operation applies to own rows, since rows are sent later.
    """
    source = message.source
    if source is None or source.has_halo or message.edges.deferral.sliced.on:
        return message
    with_halo = message.with_halo()
    return replace(message, source=Source(with_halo, True, source.site))


def each(message: Message, do: Callable[[Tensor], Tensor], *, narrows: bool = False) -> Message:
    """Apply an operation to the rows at each end instead of to one row per edge."""
    message.check()
    # An operation that narrows rows is applied to own rows, so that fewer columns are sent. Otherwise the
    # halo is read first; that of constant rows is exchanged once in a run.
    if message.source is not None and not (
        narrows and not message.edges.deferral.constants.is_constant(message.source.rows)
    ):
        message = widened(message)
    target = None if message.target is None else do(message.target)
    source = None if message.source is None else do(now(message.source.rows))
    return with_rows(message, target, source)


def with_rows(message: Message, target: Tensor | None, source: Tensor | None) -> Message:
    """Return the message with other rows at its ends."""
    place = message.source
    # Rows made here have no placement yet. Rows with halo get none: their number is not that of the vertices.
    if target is not None:
        message.edges.rows(target)
    if place is not None and source is not None and not place.has_halo:
        message.edges.source_rows(source)
    ends = None if place is None or source is None else replace(place, rows=source)
    return replace(message, target=target, source=ends, versions=())


def source_rows(m: Message) -> Tensor | None:
    """Return the rows read at the source: own rows, or own and halo rows."""
    return None if m.source is None else now(m.source.rows)


def joined(one: Message, two: Message, sign: int = 1) -> Message:
    """Return ``one + sign * two``, where both are plain sums of their ends."""

    def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if b is None:
            return a
        b = b if sign == 1 else -b
        return b if a is None else a + b

    one.check()
    two.check()
    # Only one of them has halo rows: both need them, so that the rows can be added.
    if one.source is not None and two.source is not None and one.source.has_halo is not two.source.has_halo:
        one, two = widened(one), widened(two)
    place = replace(one, source=one.source or two.source)
    return with_rows(place, added(one.target, two.target), added(source_rows(one), source_rows(two)))


def flat(rows: Tensor) -> Tensor:
    """Return a tensor reshaped to rows and columns."""
    return rows.reshape(rows.size(0), width(rows.shape[1:])).contiguous()


def width(trailing: Sequence[int]) -> int:
    """Return the number of columns of a row of this shape."""
    columns = 1
    for size in trailing:
        columns *= size
    return columns
