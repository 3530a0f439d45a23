"""Algebra: which torch calls on messages give messages again.

Where it sits: ``intercept`` asks :func:`answer` for each torch call that was given a lazy tensor. A call that is
not known here gets the computed tensor, as if nothing had been put off.

To keep another call lazy: write a rule (name, args, kwargs) -> result or NotImplemented, and add it to ``RULES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kagome.neighbors import aggregate
from kagome.neighbors.axes import attribute
from kagome.neighbors.marks import ALIGNED, Kind, Mark, Marks
from kagome.neighbors.messages import Beside, EdgeSet, Lazy, Linear, Message, Share, Shared, Source, Total, now

Rule = Callable[[Marks, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: What a stand-in knows by itself.
ASK = frozenset(
    ["size", "dim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "is_complex", "stride"]
    + ["element_size", "get_device", "is_same_size", "__hash__", "is_contiguous"]
)
ATTRIBUTES = frozenset(
    ["shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_sparse", "is_cuda"]
    + ["is_nested", "is_quantized", "is_mps", "is_meta", "names"]
)


def asks(name: str, func: Any) -> bool:
    """Whether a call asks only for what a lazy tensor knows by itself."""
    return name in ASK or (name == "__get__" and attribute(func) in ATTRIBUTES)


def answer(
    marks: Marks, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a call that was given a lazy tensor, or NotImplemented where it needs the numbers."""
    if any(isinstance(value, Lazy) and value.value is not None for value in args):
        return NotImplemented  # computed already: it costs nothing to use it
    rule = RULES.get(name)
    return NotImplemented if rule is None else rule(marks, name, func, args, kwargs)


def stood_in(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``x_j.new_zeros(...)`` asks for a type and a place, not for numbers: any tensor of both will do."""
    if name.startswith("new_") and isinstance(args[0], Lazy):
        return (args[0].expr.parts[0], *args[1:])
    return args


def spread(value: Tensor) -> Tensor:
    """A message without what is the same for all in-edges of a row."""
    m = _message(value)
    if m is None or m.form != "sum" or m.target is None or m.source is None:
        return value
    return _lazy(replace(m, target=None))


def computed(values: Any) -> Any:
    """Arguments with every lazy tensor computed, one list deep."""
    if isinstance(values, Lazy):
        return values.now()
    if isinstance(values, (tuple, list)) and any(isinstance(v, Lazy) for v in values):
        return type(values)(now(v) for v in values)
    return values


def has_lazy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call was given a lazy tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Lazy):
            return True
        if isinstance(value, (tuple, list)) and any(isinstance(v, Lazy) for v in value):
            return True
    return False


def gathered(edges: EdgeSet, rows: Tensor, kind: Kind, site: str) -> Tensor:
    """``rows[source]`` or ``rows[target]``, put off."""
    roots = ((rows, rows._version),)
    if kind is Kind.TARGET:
        rows = now(rows)
        return _lazy(Message(edges, rows, None, roots=((rows, rows._version),)))
    return _lazy(Message(edges, None, Source(rows, edges.scope.size == 1, site), roots=roots))


def _message(value: Any) -> Message | None:
    return value.expr if isinstance(value, Lazy) and isinstance(value.expr, Message) else None


def _lazy(message: Message) -> Tensor:
    return message.edges.pairs(Lazy(message))


def _widened(message: Message) -> Message:
    """The message with all rows at hand, for what is done row by row and sends no less."""
    source = message.source
    if source is None or source.whole:
        return message
    whole = message.whole()
    return replace(message, source=Source(whole, True, source.site))


def _each(message: Message, do: Callable[[Tensor], Tensor], *, narrows: bool = False) -> Message:
    """Do to the rows at each end what was to be done to a row an edge."""
    message.check()
    if message.source is not None and not (narrows and not message.edges.scope.lasting(message.source.rows)):
        message = _widened(message)
    target = None if message.target is None else do(message.target)
    source = None if message.source is None else do(now(message.source.rows))
    return _with(message, target, source)


def _with(message: Message, target: Tensor | None, source: Tensor | None) -> Message:
    """The message with other rows at its ends."""
    place = message.source
    if target is not None:
        message.edges.rows(target)
    if place is not None and source is not None and not place.whole:
        message.edges.rows(source)
    ends = None if place is None or source is None else replace(place, rows=source)
    return replace(message, target=target, source=ends, roots=())


# One message -------------------------------------------------------------------------------------


def _pointwise(
    marks: Marks, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``relu`` and the like: row by row where the message is one end's row."""
    m = _message(args[0]) if args else None
    if m is None or kwargs.get("inplace"):
        return NotImplemented
    if name in ("relu", "leaky_relu") and m.form == "sum" and m.target is not None and m.source is not None:
        slope = kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01) if name == "leaky_relu" else 0.0
        if m.weight is None and isinstance(slope, (int, float)) and 0.0 <= slope:
            return _lazy(replace(m, form="leaky", slope=float(slope)))
        return NotImplemented
    if not m.one_ended or any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    return _lazy(_each(m, lambda rows: func(rows, *args[1:], **kwargs)))


def _linear(
    marks: Marks, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``F.linear`` of a message, of messages side by side, or of a sum that it narrows."""
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    value = args[0] if args else None
    if not isinstance(value, Lazy) or isinstance(weight, Lazy) or torch.is_autocast_enabled(value.device.type):
        return NotImplemented
    expr, linear = value.expr, torch.nn.functional.linear
    if isinstance(expr, Total):
        return _narrowed(expr, weight, bias)
    pieces = expr.messages if isinstance(expr, Beside) else (expr,)
    if not all(isinstance(m, Message) and m.form == "sum" and m.weight is None for m in pieces):
        return NotImplemented
    total: Message | None = None
    for m, part in zip(pieces, weight.split([m.shape[-1] for m in pieces], dim=1), strict=True):
        mapped = _each(m, lambda rows, part=part: linear(rows, part), narrows=part.size(0) < part.size(1))
        total = mapped if total is None else _joined(total, mapped)
    assert total is not None
    if bias is not None and total.target is not None:
        total = _with(total, total.target + bias, _rows(total))
    elif bias is not None and total.source is not None:
        total = _with(total, None, now(total.source.rows) + bias)
    return _lazy(total)


def _narrowed(total: Total, weight: Tensor, bias: Tensor | None) -> Any:
    """A linear map of a sum that has fewer columns than it: the map first."""
    m = total.message
    if weight.size(0) >= weight.size(1) or m.source is None:
        return NotImplemented
    m.check()
    rows = torch.nn.functional.linear(now(m.source.rows), weight)
    out = Total(_with(m, None, rows), total.how).compute()
    return m.edges.rows(out if bias is None else out + bias)


def _rows(m: Message) -> Tensor | None:
    return None if m.source is None else now(m.source.rows)


def _joined(one: Message, two: Message, sign: int = 1) -> Message:
    """``one + sign * two``, both plain sums of ends."""

    def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if b is None:
            return a
        b = b if sign == 1 else -b
        return b if a is None else a + b

    one.check()
    two.check()
    if one.source is not None and two.source is not None and one.source.whole is not two.source.whole:
        one, two = _widened(one), _widened(two)
    place = replace(one, source=one.source or two.source)
    return _with(place, added(one.target, two.target), added(_rows(one), _rows(two)))


def _shape(
    marks: Marks, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``view``, ``unsqueeze``, ``x[:, i]``, ...: another shape of each row."""
    value = args[0]
    expr = value.expr if isinstance(value, Lazy) else None
    if isinstance(expr, Beside) and name == "__getitem__" and _inner(args[1], len(expr.shape)):
        parts = [_message(_shape(marks, name, func, (Lazy(m), args[1]), {})) for m in expr.messages]
        known = tuple(m for m in parts if m is not None)
        side = Lazy(Beside(known))
        return expr.messages[0].edges.pairs(side) if len(known) == len(parts) else NotImplemented
    m = _message(value)
    if m is None or m.form != "sum" or m.weight is not None or value.numel() == 0:
        return NotImplemented
    if m.target is not None and m.source is not None and m.target.dim() != m.source.rows.dim():
        return NotImplemented
    edges = m.edges.structure.edges
    if name == "__getitem__":
        index = args[1]
        if not isinstance(index, tuple) or index[0] != slice(None):
            return NotImplemented
        if not all(i is None or isinstance(i, (int, slice)) for i in index[1:]):
            return NotImplemented
        return _lazy(_each(m, lambda rows: rows[index], narrows=True))
    if name in ("unsqueeze", "squeeze"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(dim, int):
            return NotImplemented
        dim = dim % (value.dim() + (1 if name == "unsqueeze" else 0))
        return NotImplemented if dim == 0 else _lazy(_each(m, lambda rows: func(rows, dim), narrows=True))
    shape = args[1:] if len(args) > 2 or not isinstance(args[1], (tuple, list)) else args[1]
    if kwargs or not all(isinstance(s, int) for s in shape) or not shape:
        return NotImplemented
    known = 1
    for s in shape:
        known *= s if s != -1 else 1
    full = [value.numel() // known if s == -1 else int(s) for s in shape] if known else []
    if not full or full[0] != edges:
        return NotImplemented
    return _lazy(_each(m, lambda rows: rows.reshape(rows.size(0), *full[1:]), narrows=True))


def _inner(index: Any, dims: int) -> bool:
    """Whether an index leaves the first and the last axis as they are."""
    if not isinstance(index, tuple) or index[0] != slice(None) or len(index) >= dims:
        return False
    return all(isinstance(i, (int, slice)) for i in index)


def _side_by_side(
    marks: Marks, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``cat`` along the last axis; ``stack`` of sums along an inner one."""
    values = args[0] if args else kwargs.get("tensors")
    found = [_message(v) for v in values] if isinstance(values, (tuple, list)) else [None]
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    kept = [m for m in found if m is not None and m.form == "sum" and m.weight is None]
    if len(kept) != len(found) or any(m.edges is not kept[0].edges for m in kept) or not isinstance(dim, int):
        return NotImplemented
    first = kept[0]
    if name != "stack":
        same = {m.shape[:-1] for m in kept if isinstance(m.shape, tuple)}
        if dim % len(first.shape) != len(first.shape) - 1 or len(first.shape) < 2 or len(same) != 1:
            return NotImplemented
        return first.edges.pairs(Lazy(Beside(tuple(kept))))
    dim %= len(first.shape) + 1
    ends = {(m.target is None, m.source is None, m.source is not None and m.source.whole) for m in kept}
    if dim == 0 or len(ends) != 1:
        return NotImplemented
    for m in kept:
        m.check()
    targets = [m.target for m in kept if m.target is not None]
    sources = [rows for m in kept if (rows := _rows(m)) is not None]
    target = torch.stack(targets, dim) if targets else None
    return _lazy(_with(first, target, torch.stack(sources, dim) if sources else None))


def _dotted(
    marks: Marks, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``(a_i * b_j).sum(-1)`` and ``(leaky(a_i + b_j) * att).sum(-1)``: a number an edge and head."""
    m = _message(args[0]) if args else None
    if m is None:
        return NotImplemented
    m.check()
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    dims, keep = len(m.shape), kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if not isinstance(dim, int) or dim % dims != dims - 1 or dims < 2 or kwargs.get("dtype") is not None:
        return NotImplemented
    if m.one_ended:
        return _lazy(_each(m, lambda rows: func(rows, rows.dim() - 1, keep), narrows=True))
    if name != "sum" or m.target is None or m.source is None or dims > 3 or m.form == "sum":
        return NotImplemented
    if m.form == "leaky" and m.att is None:
        return NotImplemented
    s = m.edges.structure
    own, whole = _three(m.target), _three(m.whole())
    if m.form == "product":
        out = aggregate.Dots.apply(own, whole, s)  # type: ignore[no-untyped-call]
    else:
        assert m.att is not None
        att = m.att.expand(m.trailing).reshape(own.shape[1:])
        out = aggregate.LeakyDots.apply(own, whole, att, m.slope, s)  # type: ignore[no-untyped-call]
    out = out if dims == 3 else out.squeeze(-1)
    return m.edges.pairs(out.unsqueeze(-1) if keep else out)


def _three(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 3 else rows.unsqueeze(1)


# Two operands ------------------------------------------------------------------------------------


def _binary(
    marks: Marks, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Sums, differences, products and quotients."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    what = name.strip("_")
    one, two = args
    if isinstance(one, Lazy) and isinstance(two, Lazy):
        return _of_two(what, one, two)
    lazy, other = (one, two) if isinstance(one, Lazy) else (two, one)
    m = _message(lazy)
    if m is None:
        return NotImplemented
    if isinstance(other, Tensor) and marks.get(other) is not None:
        return _weighted(marks, what, m, other) if what in ("mul", "rmul") else NotImplemented
    if not _plain(other, m):
        return NotImplemented
    if m.form == "leaky":
        scales = what in ("mul", "rmul") and isinstance(other, Tensor) and m.att is None
        return _lazy(replace(m, att=other.reshape(other.shape[-len(m.trailing):]))) if scales else NotImplemented
    if m.form != "sum" or m.weight is not None:
        return NotImplemented
    if what in ("mul", "rmul") or (what in ("div", "true_divide") and lazy is one):
        return _lazy(_each(m, lambda rows: func(rows, other)))
    if not m.one_ended:
        return NotImplemented
    return _lazy(_each(m, lambda rows: func(rows, other) if lazy is one else func(other, rows)))


def _plain(other: Any, m: Message) -> bool:
    """Whether an operand is a number, or a tensor without rows that leaves a row's shape as it is."""
    if isinstance(other, (int, float)):
        return True
    if not isinstance(other, Tensor) or other.dtype != m.parts[0].dtype:
        return False
    shape = tuple(other.shape)
    if len(shape) == len(m.shape) and shape[0] == 1:
        shape = shape[1:]
    if len(shape) > len(m.trailing):
        return False
    inner = m.trailing[len(m.trailing) - len(shape) :]
    return all(s in (1, t) for s, t in zip(shape, inner, strict=True))


def _weighted(marks: Marks, what: str, m: Message, weight: Tensor) -> Any:
    """``w_e * b_j``: one weight an edge, or one an edge and head."""
    mark, dims = marks.get(weight), len(m.shape)
    along = mark is not None and mark.kind is Kind.PAIRS and mark.axis == 0
    fits = along and weight.size(0) == m.shape[0] and weight.dim() == dims and m.shape[0] > 0
    if not fits or not m.one_ended or m.source is None or weight.dtype != m.parts[0].dtype:
        return NotImplemented
    inner = tuple(weight.shape[1:])
    if all(s == 1 for s in inner):
        return _lazy(replace(m, weight=weight.reshape(-1)))
    if dims == 3 and inner == (m.trailing[0], 1):
        return _lazy(replace(m, weight=weight.squeeze(-1)))
    return NotImplemented


def _of_two(what: str, one: Lazy, two: Lazy) -> Any:
    if what == "mul" and isinstance(two.expr, Share) and _message(one) is not None:
        return _shared(two.expr, one.expr)
    if what == "mul" and isinstance(one.expr, Share) and _message(two) is not None:
        return _shared(one.expr, two.expr)
    a, b = _message(one), _message(two)
    if a is None or b is None or a.edges is not b.edges or a.shape != b.shape:
        return NotImplemented
    if any(m.form != "sum" or m.weight is not None for m in (a, b)):
        return NotImplemented
    if what in ("add", "sub"):
        return _lazy(_joined(a, b, 1 if what == "add" else -1))
    if what != "mul" or not (a.one_ended and b.one_ended):
        return NotImplemented
    if a.source is None and b.source is not None:
        return _lazy(replace(b, target=a.target, form="product", roots=a.roots + b.roots))
    if a.source is not None and b.source is None:
        return _lazy(replace(a, target=b.target, form="product", roots=a.roots + b.roots))
    a.check()
    b.check()
    if a.target is not None and b.target is not None:
        return _lazy(_with(a, a.target * b.target, None))
    first, second = _rows(_widened(a)), _rows(_widened(b))
    assert first is not None and second is not None
    return _lazy(_with(_widened(a), None, first * second))


def _shared(share: Share, m: Message) -> Any:
    if m.edges is not share.logits.edges or m.shape != share.shape or not m.one_ended or m.source is None:
        return NotImplemented
    return m.edges.pairs(Lazy(Shared(share, m)))


# Reads and writes --------------------------------------------------------------------------------


def _as_shape(
    marks: Marks, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``index.expand_as(x_j)``."""
    base, like = args[0], args[1] if len(args) > 1 else kwargs.get("other")
    if isinstance(base, Lazy) or not isinstance(like, Lazy):
        return NotImplemented
    out = base.expand(like.shape)
    mark = marks.get(base)
    return out if mark is None else marks.put(out, mark)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("relu", "leaky_relu", "elu", "gelu", "silu", "sigmoid", "tanh", "exp", "neg"), _pointwise),
    **dict.fromkeys(("abs", "sqrt", "square", "softplus", "log", "log1p", "selu", "celu", "pow"), _pointwise),
    "linear": _linear,
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "__getitem__"), _shape),
    **dict.fromkeys(("cat", "concat", "stack"), _side_by_side),
    **dict.fromkeys(("sum", "mean"), _dotted),
    **dict.fromkeys(("mul", "add", "sub", "div", "true_divide", "__rsub__", "__rmul__", "__radd__"), _binary),
    "expand_as": _as_shape,
}
