"""Rewrite rules: which torch calls on messages give messages again.

Where it sits: ``intercept.interceptor`` asks :func:`answer` for each torch call that was given a lazy tensor.
A call without a rule gets the computed tensor, as if nothing had been deferred.

To keep another call lazy: write a rule ``(placements, name, func, args, kwargs)`` -> result or
NotImplemented, and add it to ``RULES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kagome.deferred import edge_map, sliced_attention, sliced_reduce
from kagome.deferred.lazy_tensor import EscapeError, LazyTensor, now
from kagome.deferred.message import (
    Beside,
    EdgeSet,
    Linear,
    Message,
    Shared,
    SoftmaxShare,
    Source,
    defer,
    each,
    joined,
    message_of,
    source_rows,
    widened,
    with_rows,
)
from kagome.deferred.reduce import Total, settled
from kagome.placement.axis_rules import attribute
from kagome.placement.placement import PlacementKind, Placements
from kagome.placement.torch_calls import Args, Func, Kwargs
from kagome.sparse_ops import edge_softmax, linear as dense
from kagome.sparse_ops.sparse_features import SparseFeatures

Rule = Callable[[Placements, str, Func, Args, Kwargs], Any]

# Calls that a lazy tensor answers by itself.
_ASK = (
    "size dim ndimension numel nelement __len__ is_floating_point is_complex stride element_size get_device "
    "is_same_size __hash__ is_contiguous"
)
_ATTRIBUTES = (
    "shape dtype device ndim requires_grad is_leaf layout is_sparse is_cuda is_nested is_quantized is_mps "
    "is_meta names _version"
)
ASK, ATTRIBUTES = frozenset(_ASK.split()), frozenset(_ATTRIBUTES.split())

# Properties that a part, and a lazy tensor, know as the whole graph would: most of a layer's torch calls.
KNOWN = frozenset(
    [
        Tensor.dim,
        Tensor.is_floating_point,
        *(
            getattr(Tensor, name).__get__
            for name in [
                "layout",
                "dtype",
                "device",
                "requires_grad",
                "is_leaf",
                "is_cuda",
                "ndim",
                "_version",
            ]
        ),
    ]
)


# Calls whose handler takes messages as they are.
WRITES = frozenset(
    ["scatter_add_", "scatter_add", "index_add_", "index_add", "scatter_reduce_", "scatter_reduce", "grad"]
)


HOOKS = frozenset(["register_hook", "retain_grad", "register_post_accumulate_grad_hook"])
"""Calls by which a model looks at the gradient of a value."""


def asks(name: str, func: Any) -> bool:
    """Return True if a call reads only properties that a lazy tensor knows without its values."""
    return name in ASK or (name == "__get__" and attribute(func) in ATTRIBUTES)


def answer(placements: Placements, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the result of a call on a lazy tensor, or NotImplemented where it needs the values."""
    # A sum that did not compute the value adds nothing to the gradient that a hook would see.
    if name in HOOKS and torch.is_grad_enabled():
        raise EscapeError(
            "fast paths to see each torch call of a model",
            f"{name} of a value that they compute only where it is used",
            hint="--model.no-fast",
        )
    if any(isinstance(value, LazyTensor) and value.value is not None for value in args):
        return NotImplemented  # computed already, so it costs nothing to use it
    # Each kind of expression has its own module. A value is of one kind at a time.
    if any(sliced_attention.share_of(value) is not None for value in args):
        found = sliced_attention.answer(name, args, kwargs)
        if found is not NotImplemented:
            return found
    if any(edge_map.expression(value) is not None for value in args):
        with torch._C.DisableTorchFunction():  # this is not the user's computation
            return edge_map.answer(placements, name, func, args, kwargs)
    if name in sliced_reduce.NAMES:
        args = tuple(map(settled, args))
        if any(sliced_reduce.in_slices(value) is not None for value in args):
            with torch._C.DisableTorchFunction():
                return sliced_reduce.answer(name, func, args, kwargs)
    rule = RULES.get(name)
    return NotImplemented if rule is None else rule(placements, name, func, args, kwargs)


def computed_for(name: str, args: Args) -> tuple[Any, ...]:
    """Return a call's arguments, with those lazy tensors computed that the call needs."""
    if name == "dropout" and args and sliced_attention.share_of(args[0]) is not None:
        return args  # its handler draws by head
    if name in WRITES:
        return args  # the handler of writes reduces messages without computing them
    first, *rest = args or (None,)
    if isinstance(first, LazyTensor) and name.startswith("new_"):
        while isinstance(first, LazyTensor):  # only type and device matter, so any tensor with both will do
            first = first.expr.parts[0]
    elif name not in ("index_select", "__getitem__") or not _gathers_lazily(settled(first)):
        first = computed(first)
    return (first, *(computed(value) for value in rest)) if args else ()


def _gathers_lazily(value: Any) -> bool:
    """Return True if rows stay deferred when gathered: a linear map after the sum, or feature slices."""
    linear = isinstance(value, LazyTensor) and isinstance(value.expr, Linear)
    return linear or sliced_reduce.in_slices(value) is not None


def spread(value: Tensor) -> Tensor:
    """Remove from a message what is equal for all in-edges of a row."""
    # A variance over the in-edges of row i does not change with a_i, which all of them share.
    m = message_of(value)
    if m is None or m.form != "sum" or m.target is None or m.source is None:
        return value
    return defer(replace(m, target=None))


def computed(values: Any) -> Any:
    """Return arguments with every lazy tensor computed, one level deep."""
    if isinstance(values, LazyTensor):
        return values.now()
    # Sequences are arguments of ``cat`` and ``stack``.
    if isinstance(values, (tuple, list)) and any(isinstance(v, LazyTensor) for v in values):
        return type(values)(now(v) for v in values)
    return values


def all_computed(args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with every lazy tensor computed."""
    return tuple(computed(v) for v in args), {key: computed(v) for key, v in kwargs.items()}


def has_lazy(args: Args, kwargs: Kwargs) -> bool:
    """Return True if a call was given a lazy tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, LazyTensor):
            return True
        if isinstance(value, (tuple, list)) and any(isinstance(v, LazyTensor) for v in value):
            return True
    return False


def gathered(edges: EdgeSet, rows: Tensor, kind: PlacementKind, site: str) -> Tensor:
    """Return ``rows[source]`` or ``rows[target]`` as a deferred message."""
    # Targets are own rows, so they may be computed now. Rows read at the source stay as they are: a linear
    # map of them may come after the sum.
    if kind is PlacementKind.TARGET:
        return defer(Message(edges, now(rows), None))
    return defer(Message(edges, None, Source(rows, edges.halo_exchange.closed, site)))


# One message -------------------------------------------------------------------------------------


def _pointwise(placements: Placements, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``relu`` and the like: row by row if the message is a function of one end's row."""
    m = message_of(args[0]) if args else None
    # An in-place relu writes to the message itself, so it needs the values.
    if m is None or kwargs.get("inplace"):
        return NotImplemented
    # leaky_relu(a_i + b_j) is no function of one row, but softmax and dot products have kernels for it. relu
    # is the case of slope 0.
    if name in ("relu", "leaky_relu") and m.form == "sum" and m.target is not None and m.source is not None:
        slope = (
            kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01) if name == "leaky_relu" else 0.0
        )
        if m.weight is None and isinstance(slope, (int, float)) and slope >= 0.0:
            return defer(replace(m, form="leaky", slope=float(slope)))
        return NotImplemented
    # f(x_j) = f(x)_j for a function of single numbers: n rows in place of E. A tensor argument could differ
    # from edge to edge.
    if not m.one_ended or any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    return defer(each(m, lambda rows: func(rows, *args[1:], **kwargs)))


# [Note: why a linear map computes the sum] A GCN layer is written as ``lin(sum over neighbours of x_j)`` or
# as ``sum over neighbours of lin(x_j)``. Both orders give the same result, because both maps are linear, but
# they differ in what is multiplied, kept and sent. The sum is deferred, so the linear map is the first call
# that needs its values, and it can choose the order:
#
#     constant x    A x once for all epochs, then (A x) W^T in each epoch        no exchange
#     W narrows     x W^T on own rows first, then the sum of narrower rows       a narrower halo
#     W widens      the sum first, then the product, which torch computes        the narrow rows
#
# The same choice is made for ``sum(lin(x_j))`` in ``deferred.reduce._linear_sum``. The order must be the same
# on all ranks, because it decides what is exchanged: it depends on shapes and on constants, never on the
# number of a rank's edges.


def _linear_of_message(placements: Placements, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``F.linear`` of a message, of concatenated messages, or of a sum that it narrows."""
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    value = args[0] if args else None
    if not isinstance(value, LazyTensor) or not isinstance(weight, Tensor) or isinstance(weight, LazyTensor):
        return NotImplemented
    if torch.is_autocast_enabled(value.device.type):
        return NotImplemented
    expr = value.expr
    if isinstance(expr, Total):
        cached = expr.cached() if weight.dtype == value.dtype else None
        if cached is None:
            return _narrowed(expr, weight, bias)
        return expr.message.edges.rows(dense.linear(cached, weight, bias))
    # W [a | b] = W_a a + W_b b: the weight is divided by the columns of the pieces, as EdgeConv needs it for
    # [x_i | x_j - x_i].
    pieces = expr.messages if isinstance(expr, Beside) else (expr,)
    if not all(isinstance(m, Message) and m.form == "sum" and m.weight is None for m in pieces):
        return NotImplemented
    total: Message | None = None
    for m, part in zip(pieces, weight.split([m.shape[-1] for m in pieces], dim=1), strict=True):
        mapped = each(
            m, partial(_mapped, m.edges.deferral.as_sparse, part), narrows=part.size(0) < part.size(1)
        )
        total = mapped if total is None else joined(total, mapped)
    assert total is not None
    # The message is the sum of both ends, so the bias is added to one of them.
    if bias is not None and total.target is not None:
        total = with_rows(total, total.target + bias, source_rows(total))
    elif bias is not None and total.source is not None:
        total = with_rows(total, None, now(total.source.rows) + bias)
    return defer(total)


def _mapped(as_sparse: Callable[[Tensor], Tensor | SparseFeatures], weight: Tensor, rows: Tensor) -> Tensor:
    return dense.linear(as_sparse(rows), weight)


def _narrowed(total: Total, weight: Tensor, bias: Tensor | None) -> Any:
    """Return a linear map of a sum, with the map applied first because it has fewer columns."""
    m = total.message
    if weight.size(0) >= weight.size(1) or m.source is None:
        return NotImplemented
    m.check()
    rows = dense.linear(now(m.source.rows), weight)
    out = Total(with_rows(m, None, rows), total.how).compute()
    return m.edges.rows(out if bias is None else out + bias)


def _binary(placements: Placements, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer a sum, difference, product or quotient with a message."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    what = name.strip("_")
    one, two = args
    if isinstance(one, LazyTensor) and isinstance(two, LazyTensor):
        return _of_two(what, one, two)
    lazy, other = (one, two) if isinstance(one, LazyTensor) else (two, one)
    m = message_of(lazy)
    if m is None:
        return NotImplemented
    placement = placements.get(other)
    # An operand with one row per edge is a weight. On a part with a single edge, a leading axis of size 1 may
    # also be one that broadcasts; the placement tells.
    along = isinstance(other, Tensor) and other.dim() > 0 and other.size(0) == m.shape[0]
    if along and (m.shape[0] > 1 or (placement is not None and placement.kind is PlacementKind.PAIRS)):
        return _weighted(m, other) if what in ("mul", "rmul") else NotImplemented
    if placement is not None or not _keeps_shape(other, m):
        return NotImplemented
    # GATv2's leaky_relu(a_i + b_j) * att: the factor per column is kept beside the form for ``_dotted``.
    if m.form == "leaky":
        scales = what in ("mul", "rmul") and isinstance(other, Tensor) and m.att is None
        return (
            defer(replace(m, att=other.reshape(other.shape[-len(m.trailing) :])))
            if scales
            else NotImplemented
        )
    if m.form != "sum" or m.weight is not None:
        return NotImplemented
    # c * (a_i + b_j) = c * a_i + c * b_j, so both ends are scaled.
    if what in ("mul", "rmul") or (what in ("div", "true_divide") and lazy is one):
        return defer(each(m, lambda rows: func(rows, other)))
    # A number must not be added to both ends, and a quotient c / (a_i + b_j) is not a sum.
    if not m.one_ended:
        return NotImplemented
    return defer(each(m, lambda rows: func(rows, other) if lazy is one else func(other, rows)))


def _keeps_shape(other: Any, m: Message) -> bool:
    """Return True if an operand is a number, or a tensor without rows that keeps the shape of a row."""
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


def _weighted(m: Message, weight: Tensor) -> Any:
    """Return ``w_e * b_j``, with one weight per edge, or one per edge and head."""
    dims, kind = len(m.shape), m.parts[0].dtype
    if weight.dim() != dims or not m.one_ended or m.source is None:
        return NotImplemented
    # Torch would give the product the wider type, but the kernels sum in the type of the rows.
    if torch.promote_types(weight.dtype, kind) != kind:
        return NotImplemented
    weight = weight.to(kind)
    inner = tuple(weight.shape[1:])
    if all(s == 1 for s in inner):
        return defer(replace(m, weight=weight.reshape(-1)))
    if dims == 3 and inner == (m.trailing[0], 1):
        return defer(replace(m, weight=weight.squeeze(-1)))
    return NotImplemented


def _of_two(what: str, one: LazyTensor, two: LazyTensor) -> Any:
    if what == "mul" and isinstance(two.expr, SoftmaxShare) and message_of(one) is not None:
        return _shared(two.expr, one.expr)
    if what == "mul" and isinstance(one.expr, SoftmaxShare) and message_of(two) is not None:
        return _shared(one.expr, two.expr)
    a, b = message_of(one), message_of(two)
    if a is None or b is None or a.edges is not b.edges or a.shape != b.shape:
        return NotImplemented
    if any(m.form != "sum" or m.weight is not None for m in (a, b)):
        return NotImplemented
    if what in ("add", "sub"):
        return defer(joined(a, b, 1 if what == "add" else -1))
    if what != "mul" or not (a.one_ended and b.one_ended):
        return NotImplemented
    # q_i * k_j, kept for its sum over columns: the kernel then computes dot products.
    if a.source is None and b.source is not None:
        return defer(replace(b, target=a.target, form="product", versions=a.versions + b.versions))
    if a.source is not None and b.source is None:
        return defer(replace(a, target=b.target, form="product", versions=a.versions + b.versions))
    a.check()
    b.check()
    # Both are read at the same end, so the product is one of rows.
    if a.target is not None and b.target is not None:
        return defer(with_rows(a, a.target * b.target, None))
    first, second = source_rows(widened(a)), source_rows(widened(b))
    assert first is not None
    assert second is not None
    return defer(with_rows(widened(a), None, first * second))


def _shared(share: SoftmaxShare, m: Message) -> Any:
    if m.edges is not share.logits.edges or m.shape != share.shape or not m.one_ended or m.source is None:
        return NotImplemented
    return m.edges.pairs(LazyTensor(Shared(share, m)))


def _shape(placements: Placements, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``view``, ``unsqueeze``, ``x[:, i]`` and the like, which change the shape of each row."""
    value = args[0]
    expr = value.expr if isinstance(value, LazyTensor) else None
    # An index that keeps the last axis is applied to each piece.
    if isinstance(expr, Beside) and name == "__getitem__" and _inner(args[1], len(expr.shape)):
        parts = [
            message_of(_shape(placements, name, func, (LazyTensor(m), args[1]), {})) for m in expr.messages
        ]
        known = tuple(m for m in parts if m is not None)
        side = LazyTensor(Beside(known))
        return expr.messages[0].edges.pairs(side) if len(known) == len(parts) else NotImplemented
    m = message_of(value)
    if m is None or m.form != "sum" or m.weight is not None:
        return NotImplemented
    # The new shape is given for a message. Ends with other axes, which broadcasting would align, cannot be
    # reshaped alike.
    if m.target is not None and m.source is not None and m.target.dim() != m.source.rows.dim():
        return NotImplemented
    edges = m.edges.structure.edges
    if name == "__getitem__":
        index = args[1]
        if not isinstance(index, tuple) or index[0] != slice(None):
            return NotImplemented
        if not all(i is None or isinstance(i, (int, slice)) for i in index[1:]):
            return NotImplemented
        return defer(each(m, lambda rows: rows[index], narrows=True))
    if name in ("unsqueeze", "squeeze"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(dim, int):
            return NotImplemented
        dim = dim % (value.dim() + (1 if name == "unsqueeze" else 0))
        return NotImplemented if dim == 0 else defer(each(m, lambda rows: func(rows, dim), narrows=True))
    if kwargs:  # a named shape is left to torch
        return NotImplemented
    shape: Any = args[1:] if len(args) > 2 or not isinstance(args[1], (tuple, list)) else args[1]
    if not all(isinstance(s, int) for s in shape) or not shape:
        return NotImplemented
    # Decide by width alone, not by the number of edges: all ranks must defer the same calls.
    width, inner = math.prod(m.trailing), [int(size) for size in shape[1:]]
    given = math.prod(size for size in inner if size != -1)
    if -1 in inner and given and shape[0] != -1:
        inner = [width // given if size == -1 else size for size in inner]
    if shape[0] not in (-1, edges) or math.prod(inner) != width:
        return NotImplemented
    return defer(each(m, lambda rows: rows.reshape(rows.size(0), *inner), narrows=True))


def _inner(index: Any, dims: int) -> bool:
    """Return True if an index keeps the first and the last axis."""
    if not isinstance(index, tuple) or index[0] != slice(None) or len(index) >= dims:
        return False
    return all(isinstance(i, (int, slice)) for i in index)


def _side_by_side(placements: Placements, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``cat`` along the last axis, and ``stack`` of sums along an inner one."""
    values = args[0] if args else kwargs.get("tensors")
    found = [message_of(v) for v in values] if isinstance(values, (tuple, list)) else [None]
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    kept = [m for m in found if m is not None and m.form == "sum" and m.weight is None]
    if len(kept) != len(found) or any(m.edges is not kept[0].edges for m in kept) or not isinstance(dim, int):
        return NotImplemented
    first = kept[0]
    if name != "stack":
        # torch.cat wants equal sizes along all other axes: let torch report an error.
        same = {m.shape[:-1] for m in kept if isinstance(m.shape, tuple)}
        if dim % len(first.shape) != len(first.shape) - 1 or len(first.shape) < 2 or len(same) != 1:
            return NotImplemented
        return first.edges.pairs(LazyTensor(Beside(tuple(kept))))
    dim %= len(first.shape) + 1
    # Rows are stacked end by end, so all messages must have the same ends, with or without their halo.
    ends = {(m.target is None, m.source is None, m.source is not None and m.source.has_halo) for m in kept}
    if dim == 0 or len(ends) != 1:
        return NotImplemented
    for one in kept:
        one.check()
    targets = [m.target for m in kept if m.target is not None]
    sources = [rows for m in kept if (rows := source_rows(m)) is not None]
    target = torch.stack(targets, dim) if targets else None
    return defer(with_rows(first, target, torch.stack(sources, dim) if sources else None))


def _dotted(placements: Placements, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``(a_i * b_j).sum(-1)`` and ``(leaky(a_i + b_j) * att).sum(-1)``: a number per edge and head."""
    m = message_of(args[0]) if args else None
    if m is None:
        return NotImplemented
    m.check()
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    dims, keepdim = len(m.shape), kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if not isinstance(dim, int) or dim % dims != dims - 1 or dims < 2 or kwargs.get("dtype") is not None:
        return NotImplemented
    # The sum over columns of x_j is that of x, gathered: one number is sent in place of a row.
    if m.one_ended:
        return defer(each(m, lambda rows: func(rows, rows.dim() - 1, keepdim), narrows=True))
    if name != "sum" or m.target is None or m.source is None or dims > 3 or m.form == "sum":
        return NotImplemented
    if m.form == "leaky" and m.att is None:
        return NotImplemented
    # Two ends: dot products of q_i and k_j, or GATv2's <att, leaky_relu(a_i + b_j)>, as [E, H].
    s = m.edges.structure
    own, with_halo = _three(m.target), _three(m.with_halo())
    if m.form == "product":
        out = edge_softmax.dots(own, with_halo, s)
    else:
        assert m.att is not None
        att = m.att.expand(m.trailing).reshape(own.shape[1:])
        out = edge_softmax.leaky_dots(own, with_halo, att, m.slope, s)
    out = out if dims == 3 else out.squeeze(-1)
    return m.edges.pairs(out.unsqueeze(-1) if keepdim else out)


def _three(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 3 else rows.unsqueeze(1)


# Reads and writes --------------------------------------------------------------------------------


def _as_shape(placements: Placements, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``index.expand_as(x_j)`` from the shape of the message."""
    # ``torch_geometric.utils.scatter`` expands its index to the shape of what it scatters.
    base, like = args[0], args[1] if len(args) > 1 else kwargs.get("other")
    if isinstance(base, LazyTensor) or not isinstance(like, LazyTensor):
        return NotImplemented
    out = base.expand(like.shape)
    placement = placements.get(base)
    return out if placement is None else placements.put(out, placement)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("relu", "leaky_relu", "elu", "gelu", "silu", "sigmoid", "tanh", "exp", "neg"), _pointwise
    ),
    **dict.fromkeys(("abs", "sqrt", "square", "softplus", "log", "log1p", "selu", "celu", "pow"), _pointwise),
    "linear": _linear_of_message,
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "__getitem__"), _shape),
    **dict.fromkeys(("cat", "concat", "stack"), _side_by_side),
    **dict.fromkeys(("sum", "mean"), _dotted),
    **dict.fromkeys(("mul", "add", "sub", "div", "true_divide", "__rsub__", "__rmul__", "__radd__"), _binary),
    "expand_as": _as_shape,
}
"""The rule of each torch call, by the call's name."""
