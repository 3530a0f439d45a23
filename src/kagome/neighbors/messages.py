"""Messages: what a layer sends along edges, written down and not computed until something needs its numbers.

Where it sits: ``intercept`` gives a model a :class:`Lazy` where it gathers rows by the ends of the graph's edges;
``algebra`` says which torch calls keep it so; a reduction over in-edges then runs on rows, through ``aggregate``,
and the tensor of a row an edge never is.

::

    x[source]             Message(source=x)                        w * x[source]     Message(source=x, weight=w)
    x[target]             Message(target=x)                        a_i + b_j         Message(a, b)
    f(x[source])          Message(source=f(x)), f row by row       leaky(a_i + b_j)  Message(a, b, form="leaky")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.kernels.structure import Structure
from kagome.neighbors import aggregate
from kagome.neighbors.marks import Kind, Mark
from kagome.neighbors.rows import NeighborRows, Turn

Reduce = Literal["sum", "mean", "max", "min"]
Form = Literal["sum", "product", "leaky"]
NAMES: dict[str, Reduce] = {
    "sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min", "amin": "min",
}  # fmt: skip


class EscapeError(ModelError):
    """A message reached code that torch does not show to the interception; the model runs without fast paths."""


class Expr(Protocol):
    """What a :class:`Lazy` stands for."""

    @property
    def shape(self) -> Sequence[int]:
        """The tensor's shape."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """Tensors it is made from: type, device and gradient follow from them."""

    def compute(self) -> Tensor:
        """The tensor."""


class Lazy(Tensor):
    """A tensor that is not there yet: shape and type are known, its numbers are not."""

    expr: Any
    value: Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, expr: Expr) -> Lazy:
        """A stand-in for what an expression will give."""
        first = expr.parts[0]
        grad = torch.is_grad_enabled() and any(part.requires_grad for part in expr.parts)
        self: Lazy = Tensor._make_wrapper_subclass(
            cls, tuple(expr.shape), dtype=first.dtype, device=first.device, requires_grad=grad
        )
        self.expr, self.value = expr, None
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Nothing may come here: it would pass the gradient by."""
        raise EscapeError(
            "fast paths see each torch call of a model",
            f"{func} was reached through code that torch does not show",
            hint="--model.no-fast",
        )

    def now(self) -> Tensor:
        """The tensor, computed at the first call."""
        if self.value is None:
            with torch._C.DisableTorchFunction():  # it is not the user's computation
                self.value = self.expr.compute()
        return self.value


class Scope(Protocol):
    """What messages ask of the running interception."""

    turn: Turn

    @property
    def size(self) -> int:
        """Ranks that share the graph."""

    def read(self, rows: Tensor, axis: int, mark: Mark, site: str = "") -> Tensor:
        """Own and halo rows."""

    def held(self, rows: Tensor, mark: Mark) -> Tensor | None:
        """Own and halo rows, if they were read before in this forward."""

    def mark(self, tensor: Tensor, mark: Mark) -> Tensor:
        """Say what a tensor stands for."""

    def lasting(self, tensor: Tensor | None) -> bool:
        """Whether a tensor is the same in every forward."""

    def keep(self, key: Any, value: Any) -> Any:
        """Keep for all forwards what was computed from lasting tensors."""

    def kept(self, key: Any) -> Any:
        """What was kept, unless it was changed since."""


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
    plan: NeighborRows
    mark: Mark
    scope: Scope

    def pairs(self, tensor: Tensor) -> Tensor:
        """Mark a tensor as having a row an edge."""
        return self.scope.mark(tensor, Mark(Kind.PAIRS, self.mark.view, 0, self.mark.edges))

    def rows(self, tensor: Tensor) -> Tensor:
        """Mark a tensor as having a row a vertex."""
        return self.scope.mark(tensor, Mark(Kind.ROWS))


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
    """``x W^T`` of own rows, not computed: the sum over neighbours may come first."""

    x: Tensor
    weight: Tensor

    @property
    def shape(self) -> Sequence[int]:
        return (self.x.size(0), self.weight.size(0))

    @property
    def parts(self) -> Sequence[Tensor]:
        return (self.x, self.weight)

    def compute(self) -> Tensor:
        return torch.nn.functional.linear(self.x, self.weight)


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
        """Refuse rows that were written to since they were gathered: gathered at once, they were the old ones."""
        if any(rows._version != version for rows, version in self.roots):
            raise EscapeError(
                "rows stay as they are until their neighbours have read them",
                "they were changed in place in between",
                hint="--model.no-fast",
            )

    @property
    def trailing(self) -> tuple[int, ...]:
        """The shape without the edges."""
        rows = self.target if self.source is None else self.source.rows
        assert rows is not None
        return tuple(rows.shape[1:])

    @property
    def shape(self) -> Sequence[int]:
        return (self.edges.structure.edges, *self.trailing)

    @property
    def parts(self) -> Sequence[Tensor]:
        found = (self.target, None if self.source is None else self.source.rows, self.weight, self.att)
        return [part for part in found if part is not None]

    @property
    def one_ended(self) -> bool:
        """Whether it is a function of one end's row alone."""
        return self.form == "sum" and self.weight is None and (self.target is None) is not (self.source is None)

    def whole(self) -> Tensor:
        """All rows that the edges read, own and halo."""
        assert self.source is not None
        self.check()
        rows = now(self.source.rows)
        return rows if self.source.whole else self.edges.scope.read(rows, 0, self.edges.mark, self.source.site)

    def compute(self) -> Tensor:
        """A row an edge."""
        self.check()
        s = self.edges.structure
        if self.source is None:
            assert self.target is not None
            out = gather(self.target, s, "target")
        elif self.target is None:
            out = gather(self.whole(), s, "source")
            if self.weight is not None:
                out = out * self.weight.view(*self.weight.shape, *[1] * (out.dim() - self.weight.dim()))
        elif self.form == "product":
            out = gather(self.target, s, "target") * gather(self.whole(), s, "source")
        else:
            slope = self.slope if self.form == "leaky" else None
            out = aggregate.Join.apply(self.target, self.whole(), slope, s)  # type: ignore[no-untyped-call]
            out = out if self.att is None else out * self.att
        return self.edges.pairs(out)


@dataclass(frozen=True, eq=False)
class Beside:
    """Messages put side by side along their last axis."""

    messages: tuple[Message, ...]

    @property
    def shape(self) -> Sequence[int]:
        first = self.messages[0].shape
        return (*first[:-1], sum(m.shape[-1] for m in self.messages))

    @property
    def parts(self) -> Sequence[Tensor]:
        return [part for m in self.messages for part in m.parts]

    def compute(self) -> Tensor:
        return self.messages[0].edges.pairs(torch.cat([m.compute() for m in self.messages], -1))


@dataclass(frozen=True, eq=False)
class Share:
    """Softmax over each row's in-edges of a message, each column by itself."""

    logits: Message

    @property
    def shape(self) -> Sequence[int]:
        return self.logits.shape

    @property
    def parts(self) -> Sequence[Tensor]:
        return self.logits.parts

    def compute(self) -> Tensor:
        edges = self.logits.edges
        return edges.pairs(softmax(self.logits.compute(), edges))


@dataclass(frozen=True, eq=False)
class Shared:
    """A message times a share of the same edges."""

    share: Share
    message: Message

    @property
    def shape(self) -> Sequence[int]:
        return self.message.shape

    @property
    def parts(self) -> Sequence[Tensor]:
        return (*self.message.parts, *self.share.parts)

    def compute(self) -> Tensor:
        return self.message.edges.pairs(self.message.compute() * self.share.compute())


@dataclass(frozen=True, eq=False)
class Total:
    """A sum or mean of messages over in-edges, not computed: a linear map that narrows may come first."""

    message: Message
    how: Reduce

    @property
    def shape(self) -> Sequence[int]:
        return (self.message.edges.structure.own, *self.message.trailing)

    @property
    def parts(self) -> Sequence[Tensor]:
        return self.message.parts

    def compute(self) -> Tensor:
        return self.message.edges.rows(_linear_sum(self.message, self.how))


def now(tensor: Tensor) -> Tensor:
    """The tensor itself, or what a lazy one stands for."""
    return tensor.now() if isinstance(tensor, Lazy) else tensor


def supports(rows: Tensor) -> bool:
    """Whether the kernels take rows of this type on this device; others run as PyG runs them."""
    return rows.is_floating_point() and (rows.is_cuda or rows.dtype in (torch.float32, torch.float64))


def gather(rows: Tensor, structure: Structure, end: str) -> Tensor:
    """``rows[end of each edge]``."""
    out: Tensor = aggregate.Gather.apply(rows, structure, end)  # type: ignore[no-untyped-call]
    return out


# Reductions over in-edges ------------------------------------------------------------------------


def reduced(value: Tensor, edges: EdgeSet, how: Reduce) -> Tensor:
    """Reduce a row an edge, lazy or not, over each row's in-edges; a row without any gives zeros.

    Shapes:
        ``[E, ...]`` -> ``[n, ...]``.
    """
    expr = value.expr if isinstance(value, Lazy) and value.value is None else None
    s = edges.structure
    if isinstance(expr, Shared) and how == "sum" and expr.message.one_ended and len(expr.shape) == 2:
        z, m = expr.share.logits.whole(), expr.message.whole()
        return edges.rows(aggregate.ColumnSoftmax.apply(z, m, s))  # type: ignore[no-untyped-call]
    if isinstance(expr, Message) and expr.source is not None and expr.form == "sum":
        if how in ("sum", "mean"):
            return _total(expr, how)
        if expr.weight is None:
            flat = expr.whole()
            best = aggregate.NeighborExtreme.apply(_flat(flat), s, 1 if how == "max" else -1)  # type: ignore[no-untyped-call]
            best = best.view(s.own, *expr.trailing)
            if expr.target is not None:
                some = _column(s.degree > 0, best)
                best = torch.where(some, best + expr.target, best)
            return edges.rows(best)
    values = now(value)
    if how in ("max", "min"):
        best = aggregate.EdgeExtreme.apply(_flat(values), s, 1 if how == "max" else -1)  # type: ignore[no-untyped-call]
        return edges.rows(best.view(s.own, *values.shape[1:]))
    out = aggregate.EdgeSum.apply(values, s)  # type: ignore[no-untyped-call]
    return edges.rows(out if how == "sum" else out / _column(s.degree.clamp(min=1), out))


def _total(message: Message, how: Reduce) -> Tensor:
    message.check()
    edges, target = message.edges, message.target
    alone = replace(message, target=None)
    if target is None:
        assert message.source is not None
        rows = message.source.rows
        if rows.dim() == 2 and not isinstance(rows, Lazy) and not edges.scope.lasting(rows):
            return edges.rows(Lazy(Total(alone, how)))
        return edges.rows(_linear_sum(alone, how))
    degree = edges.structure.degree
    degree = degree if how == "sum" else degree.clamp(max=1)
    return edges.rows(_linear_sum(alone, how) + target * _column(degree, target).to(target.dtype))


def _linear_sum(message: Message, how: Reduce) -> Tensor:
    """Sum or mean of a source's rows, with what need not be computed again left out."""
    source, scope = message.source, message.edges.scope
    assert source is not None
    message.check()
    rows = source.rows
    if isinstance(rows, Lazy) and rows.value is None and isinstance(rows.expr, Linear):
        linear: Linear = rows.expr
        narrow = linear.weight.size(1) < linear.weight.size(0)
        if narrow or (scope.lasting(linear.x) and scope.lasting(message.weight)):
            first = replace(message, source=replace(source, rows=linear.x), roots=())
            return torch.nn.functional.linear(_linear_sum(first, how), linear.weight)
    rows = now(rows)
    if not (scope.lasting(rows) and scope.lasting(message.weight)):
        return _sum(message, rows, how)
    key = ("sum", how, id(message.edges), _place(rows), _place(message.weight))
    found: Tensor | None = scope.kept(key)
    if found is None:
        with torch.no_grad():
            found = _sum(message, rows, how)
        scope.keep(key, found)
    return found


def _place(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.data_ptr(), tuple(tensor.shape))


def _sum(message: Message, rows: Tensor, how: Reduce) -> Tensor:
    edges, s, weight = message.edges, message.edges.structure, message.weight
    assert message.source is not None
    trailing = rows.shape[1:]
    headed = weight is not None and weight.dim() == 2
    shaped = rows.reshape(rows.size(0), trailing[0], -1) if headed and rows.numel() else rows
    shaped = shaped if headed else _flat(rows)
    scale = s.degree.clamp(min=1).reciprocal() if how == "mean" else None
    road = None
    if not message.source.whole and edges.scope.size > 1:
        whole = edges.scope.held(rows, edges.mark)
        if whole is None:
            road = edges.plan.road(rows, edges.scope.turn, message.source.site)
        else:
            shaped = whole.reshape(whole.size(0), *shaped.shape[1:])
    out = aggregate.neighbor_sum(shaped.contiguous(), s, weight=weight, scale=scale, road=road)
    return out.reshape(s.own, *trailing)


def _flat(rows: Tensor) -> Tensor:
    width = 1
    for size in rows.shape[1:]:
        width *= size
    return rows.reshape(rows.size(0), width).contiguous()


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def softmax(value: Tensor, edges: EdgeSet) -> Tensor:
    """Softmax over each row's in-edges, lazy or not.

    Shapes:
        ``[E, ...]`` -> the same.
    """
    expr = value.expr if isinstance(value, Lazy) and value.value is None else None
    s = edges.structure
    if isinstance(expr, Message) and expr.target is not None and expr.source is not None:
        joint = expr.form == "leaky" or (expr.form == "sum" and expr.weight is None)
        if joint and expr.att is None:
            slope = expr.slope if expr.form == "leaky" else 1.0
            shape = expr.shape
            own, whole = _flat(expr.target), _flat(expr.whole())
            out: Tensor = aggregate.JointSoftmax.apply(own, whole, slope, s)  # type: ignore[no-untyped-call]
            return edges.pairs(out.view(*shape))
    if isinstance(expr, Message) and expr.one_ended and expr.source is not None and len(expr.shape) == 2:
        return edges.pairs(Lazy(Share(expr)))
    logits = now(value)
    out = aggregate.EdgeSoftmax.apply(_flat(logits), s)  # type: ignore[no-untyped-call]
    return edges.pairs(out.view(logits.shape))
