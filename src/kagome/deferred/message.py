"""Message: what a layer sends along edges, kept as an expression until its values are needed.

Where it sits: ``intercept.interceptor`` gives a model a ``LazyTensor`` where it gathers rows by the ends of
the graph's edges. ``rewrite_rules`` says which torch calls keep it lazy. ``reduce`` then works on rows, and
the tensor with one row per edge is never allocated.

::

    x[source]         Message(source=x)                     w * x[source]     Message(source=x, weight=w)
    x[target]         Message(target=x)                     a_i + b_j         Message(a, b)
    f(x[source])      Message(source=f(x)), row by row      leaky(a_i + b_j)  Message(a, b, form="leaky")
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import changed_in_place, now
from kagome.feature_parallel.all_to_all import SliceCut
from kagome.feature_parallel.edge_layout import EdgeLayout
from kagome.feature_parallel.tiled_reduce import TileBound
from kagome.halo.exchange import HaloExchange
from kagome.halo.forward_pass import ForwardPass
from kagome.kernels.base.csr import Structure
from kagome.placement.placement import Placement, PlacementKind
from kagome.sparse_ops import edge_softmax, edge_sum, linear
from kagome.sparse_ops.sparse_features import SparseFeatures

Reduce = Literal["sum", "mean", "max", "min"]
Form = Literal["sum", "product", "leaky"]


class Thins(Protocol):
    """An object that knows which rows are constant."""

    def thinned(self, rows: Tensor) -> Tensor | SparseFeatures:
        """Return constant rows that are nearly all zeros in sparse form, and any other rows unchanged."""

    def mark(self, tensor: Tensor, mark: Placement) -> Tensor:
        """Record the placement of a tensor."""


class MessageScope(Thins, Protocol):
    """What messages ask of the running interceptor."""

    turn: ForwardPass
    slices: bool
    """Whether ranks take some columns of all rows where they can (feature slices)."""
    bound: TileBound | None
    """The limit of working memory for sums; None for no limit."""

    def where(self) -> str:
        """Return the path of the module that is running."""

    @property
    def size(self) -> int:
        """Number of ranks that share the graph."""

    def of_each_vertex(self, tensor: Tensor) -> bool:
        """Return True if a tensor has one row per vertex."""

    def roots(self, weight: Tensor | None, edges: EdgeSet) -> Tensor | None:
        """Return one factor per row that edges read, whose products are the weights; else None."""

    def roots_of_all(self, weight: Tensor | None, edges: EdgeSet, slicing: EdgeLayout) -> Tensor | None:
        """Return the factors of :meth:`roots` for the rows of all ranks."""

    def slicing(self, edges: EdgeSet) -> EdgeLayout:
        """Return the layout of the edges of all ranks."""

    def apart(
        self, rows: Tensor, cut: SliceCut, slicing: EdgeLayout, site: str, *, of_edges: bool = False
    ) -> Tensor:
        """Return all ranks' rows in this rank's columns; rows that were read before need no exchange."""

    def beyond(self, part: Tensor, slicing: EdgeLayout, site: str) -> Tensor:
        """Return rows extended by those of other parts, in the same columns."""

    def read(self, rows: Tensor, axis: int, mark: Placement, site: str = "") -> Tensor:
        """Return own and halo rows."""

    def held(self, rows: Tensor, mark: Placement) -> Tensor | None:
        """Return own and halo rows if they were read before in this forward; else None."""

    def lasting(self, tensor: Tensor | None) -> bool:
        """Return True if a tensor is constant across forward passes."""

    def keep(self, key: Any, value: Any) -> Any:
        """Cache, for all forward passes, a value computed from constant tensors."""

    def kept(self, key: Any) -> Any:
        """Return a cached value, or None if there is none or it was written to since."""

    def once(self) -> AbstractContextManager[None]:
        """Surround the computation of a cached value."""


@dataclass(frozen=True, eq=False)
class EdgeSet:
    """The graph's edges in the direction in which messages run.

    Args:
        structure: The edges grouped by their ends.
        plan: The provider of halo rows.
        mark: The placement of their source ids.
        scope: The interceptor.
    """

    structure: Structure
    plan: HaloExchange
    mark: Placement
    scope: MessageScope

    def pairs(self, tensor: Tensor) -> Tensor:
        """Place a tensor as having one row per edge."""
        return self.scope.mark(tensor, Placement(PlacementKind.PAIRS, self.mark.view, 0, self.mark.edges))

    def rows(self, tensor: Tensor) -> Tensor:
        """Place a tensor as having one row per vertex."""
        return self.scope.mark(tensor, Placement(PlacementKind.ROWS))


@dataclass(frozen=True, eq=False)
class Source:
    """Rows that edges read: own rows, to be completed by halo rows, or all of them.

    Args:
        rows: Own rows ``[n, ...]``, or all ``[n + H, ...]``.
        whole: Whether halo rows are included.
        site: The name of the read.
    """

    rows: Tensor
    whole: bool
    site: str


@dataclass(frozen=True, eq=False)
class Linear:
    """``x W^T`` of own rows, not computed, because the sum over neighbours may come first.

    Args:
        x: The rows.
        weight: The weight matrix.
        scope: The interceptor.
    """

    x: Tensor
    weight: Tensor
    scope: Thins

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the product."""
        return (self.x.size(0), self.weight.size(0))

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        return (self.x, self.weight)

    def compute(self) -> Tensor:
        """Compute the product of rows and weight."""
        return self.scope.mark(
            linear.linear(self.scope.thinned(self.x), self.weight), Placement(PlacementKind.ROWS)
        )


@dataclass(frozen=True, eq=False)
class Message:
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
        roots: The tensors that were gathered, each with its version at that time.
    """

    edges: EdgeSet
    target: Tensor | None
    source: Source | None
    weight: Tensor | None = None
    form: Form = "sum"
    slope: float = 0.0
    att: Tensor | None = None
    roots: tuple[tuple[Tensor, int], ...] = ()

    def check(self) -> None:
        """Refuse rows that were written to since they were gathered: their earlier values are lost."""
        if any(rows._version != version for rows, version in self.roots):
            raise changed_in_place()

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

    def whole(self) -> Tensor:
        """Return all rows that the edges read, own and halo."""
        assert self.source is not None
        self.check()
        rows = now(self.source.rows)
        return (
            rows if self.source.whole else self.edges.scope.read(rows, 0, self.edges.mark, self.source.site)
        )

    def compute(self) -> Tensor:
        """Compute the tensor with one row per edge."""
        self.check()
        s = self.edges.structure
        if self.source is None:
            assert self.target is not None
            out = edge_sum.gather(self.target, s, "target")
        elif self.target is None:
            out = edge_sum.gather(self.whole(), s, "source")
            if self.weight is not None:
                weight = now(self.weight)
                out = out * weight.view(*weight.shape, *[1] * (out.dim() - weight.dim()))
        elif self.form == "product":
            out = edge_sum.gather(self.target, s, "target") * edge_sum.gather(self.whole(), s, "source")
        else:
            slope = self.slope if self.form == "leaky" else None
            out = edge_softmax.join(self.target, self.whole(), slope, s)
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


def flat(rows: Tensor) -> Tensor:
    """Return a tensor reshaped to rows and columns."""
    return rows.reshape(rows.size(0), width(rows.shape[1:])).contiguous()


def width(trailing: Sequence[int]) -> int:
    """Return the number of columns of a row of this shape."""
    columns = 1
    for size in trailing:
        columns *= size
    return columns
