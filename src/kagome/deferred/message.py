"""Messages: what a layer sends along edges, written down and not computed until something needs its numbers.

Where it sits: ``intercept.interceptor`` gives a model a ``Lazy`` where it gathers rows by the ends of the
graph's edges; ``rewrite_rules`` says which torch calls keep it so; ``reduce`` then works on rows, and the
tensor of a row an edge never is.

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
    """Who knows which rows last."""

    def thinned(self, rows: Tensor) -> Tensor | SparseFeatures:
        """Rows that last and are nearly all zeros by what is not; others as they are."""

    def mark(self, tensor: Tensor, mark: Placement) -> Tensor:
        """Say what a tensor stands for."""


class MessageScope(Thins, Protocol):
    """What messages ask of the running interception."""

    turn: ForwardPass
    slices: bool
    """Whether ranks take some columns of all rows where they can."""
    bound: TileBound | None
    """The working memory that sums may take."""

    def where(self) -> str:
        """The module that is running."""

    @property
    def size(self) -> int:
        """Ranks that share the graph."""

    def of_each_vertex(self, tensor: Tensor) -> bool:
        """Whether a tensor has a row a vertex."""

    def roots(self, weight: Tensor | None, edges: EdgeSet) -> Tensor | None:
        """A number for each row that edges read, whose products are the weights."""

    def roots_of_all(self, weight: Tensor | None, edges: EdgeSet, slicing: EdgeLayout) -> Tensor | None:
        """The same for all ranks' rows."""

    def slicing(self, edges: EdgeSet) -> EdgeLayout:
        """The edges of all ranks."""

    def apart(
        self, rows: Tensor, cut: SliceCut, slicing: EdgeLayout, site: str, *, of_edges: bool = False
    ) -> Tensor:
        """All ranks' rows in this rank's columns; of rows that were read so before, without an exchange."""

    def beyond(self, part: Tensor, slicing: EdgeLayout, site: str) -> Tensor:
        """With rows of other parts, in the same columns."""

    def read(self, rows: Tensor, axis: int, mark: Placement, site: str = "") -> Tensor:
        """Own and halo rows."""

    def held(self, rows: Tensor, mark: Placement) -> Tensor | None:
        """Own and halo rows, if they were read before in this forward."""

    def lasting(self, tensor: Tensor | None) -> bool:
        """Whether a tensor is the same in every forward."""

    def keep(self, key: Any, value: Any) -> Any:
        """Keep for all forwards what was computed from lasting tensors."""

    def kept(self, key: Any) -> Any:
        """What was kept, unless it was changed since."""

    def once(self) -> AbstractContextManager[None]:
        """Around the computation of what is kept."""


@dataclass(frozen=True, eq=False)
class EdgeSet:
    """The graph's edges as messages run along them.

    Args:
        structure: Grouped by their ends.
        plan: Who supplies the halo rows.
        mark: Of their source ids.
        scope: The interception.
    """

    structure: Structure
    plan: HaloExchange
    mark: Placement
    scope: MessageScope

    def pairs(self, tensor: Tensor) -> Tensor:
        """Mark a tensor as having a row an edge."""
        return self.scope.mark(tensor, Placement(PlacementKind.PAIRS, self.mark.view, 0, self.mark.edges))

    def rows(self, tensor: Tensor) -> Tensor:
        """Mark a tensor as having a row a vertex."""
        return self.scope.mark(tensor, Placement(PlacementKind.ROWS))


@dataclass(frozen=True, eq=False)
class Source:
    """Rows that edges read: own ones, from which the halo's follow, or all.

    Args:
        rows: Own rows ``[n, ...]``, or all ``[n + H, ...]``.
        whole: Whether they are all.
        site: What the read is called.
    """

    rows: Tensor
    whole: bool
    site: str


@dataclass(frozen=True, eq=False)
class Linear:
    """``x W^T`` of own rows, not computed: the sum over neighbours may come first.

    Args:
        x: The rows.
        weight: The weight.
        scope: The interception.
    """

    x: Tensor
    weight: Tensor
    scope: Thins

    @property
    def shape(self) -> Sequence[int]:
        """The shape."""
        return (self.x.size(0), self.weight.size(0))

    @property
    def parts(self) -> Sequence[Tensor]:
        """What it is made from."""
        return (self.x, self.weight)

    def compute(self) -> Tensor:
        """The tensor."""
        return self.scope.mark(
            linear.linear(self.scope.thinned(self.x), self.weight), Placement(PlacementKind.ROWS)
        )


@dataclass(frozen=True, eq=False)
class Message:
    """What runs along edges, by the rows at their ends.

    Args:
        edges: The edges.
        target: Own rows ``a``, read at each edge's target.
        source: Rows ``b``, read at each edge's source.
        weight: One an edge, or one an edge and head; with a source alone.
        form: ``sum``: a_i + b_j (or the one that there is); ``product``: a_i * b_j; ``leaky``:
            leaky_relu(a_i + b_j).
        slope: Of the leaky relu.
        att: A factor a column after it.
        roots: The tensors that were gathered, each with its version then.
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
        """Refuse rows that were written to since they were gathered: those of then are gone."""
        if any(rows._version != version for rows, version in self.roots):
            raise changed_in_place()

    @property
    def trailing(self) -> tuple[int, ...]:
        """The shape without the edges."""
        rows = self.target if self.source is None else self.source.rows
        assert rows is not None
        return tuple(rows.shape[1:])

    @property
    def shape(self) -> Sequence[int]:
        """The shape."""
        return (self.edges.structure.edges, *self.trailing)

    @property
    def parts(self) -> Sequence[Tensor]:
        """What it is made from."""
        found = (self.target, None if self.source is None else self.source.rows, self.weight, self.att)
        return [part for part in found if part is not None]

    @property
    def one_ended(self) -> bool:
        """Whether it is a function of one end's row alone."""
        return (
            self.form == "sum" and self.weight is None and (self.target is None) is not (self.source is None)
        )

    def whole(self) -> Tensor:
        """All rows that the edges read, own and halo."""
        assert self.source is not None
        self.check()
        rows = now(self.source.rows)
        return (
            rows if self.source.whole else self.edges.scope.read(rows, 0, self.edges.mark, self.source.site)
        )

    def compute(self) -> Tensor:
        """A row an edge."""
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
    """Messages put side by side along their last axis."""

    messages: tuple[Message, ...]

    @property
    def shape(self) -> Sequence[int]:
        """The shape."""
        first = self.messages[0].shape
        return (*first[:-1], sum(m.shape[-1] for m in self.messages))

    @property
    def parts(self) -> Sequence[Tensor]:
        """What it is made from."""
        return [part for m in self.messages for part in m.parts]

    def compute(self) -> Tensor:
        """The tensor."""
        return self.messages[0].edges.pairs(torch.cat([m.compute() for m in self.messages], -1))


@dataclass(frozen=True, eq=False)
class SoftmaxShare:
    """Softmax over each row's in-edges of a message, each column by itself."""

    logits: Message

    @property
    def shape(self) -> Sequence[int]:
        """The shape."""
        return self.logits.shape

    @property
    def parts(self) -> Sequence[Tensor]:
        """What it is made from."""
        return self.logits.parts

    def compute(self) -> Tensor:
        """The tensor."""
        edges, logits = self.logits.edges, self.logits.compute()
        out = edge_softmax.edge_softmax(flat(logits), edges.structure)
        return edges.pairs(out.view(logits.shape))


@dataclass(frozen=True, eq=False)
class Shared:
    """A message times a share of the same edges."""

    share: SoftmaxShare
    message: Message

    @property
    def shape(self) -> Sequence[int]:
        """The shape."""
        return self.message.shape

    @property
    def parts(self) -> Sequence[Tensor]:
        """What it is made from."""
        return (*self.message.parts, *self.share.parts)

    def compute(self) -> Tensor:
        """The tensor."""
        return self.message.edges.pairs(self.message.compute() * self.share.compute())


def flat(rows: Tensor) -> Tensor:
    """A tensor as rows and columns."""
    return rows.reshape(rows.size(0), width(rows.shape[1:])).contiguous()


def width(trailing: Sequence[int]) -> int:
    """Columns of a row of this shape."""
    columns = 1
    for size in trailing:
        columns *= size
    return columns
