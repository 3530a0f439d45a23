"""Arithmetic: sums, differences, products and quotients of deferred messages.

Where it sits: the rule of ``rewrite_rules`` for calls with two operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kagome.deferred.endpoint_ops import each, joined, message_of, put_off, source_rows, widened, with_rows
from kagome.deferred.lazy_tensor import LazyTensor
from kagome.deferred.message import Message, Shared, SoftmaxShare
from kagome.placement.placement import PlacementKind, Placements


def binary(
    marks: Placements, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
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
    mark = marks.get(other)
    along = isinstance(other, Tensor) and other.dim() > 0 and other.size(0) == m.shape[0]
    if along and (m.shape[0] > 1 or (mark is not None and mark.kind is PlacementKind.PAIRS)):
        return _weighted(m, other) if what in ("mul", "rmul") else NotImplemented
    if mark is not None or not _plain(other, m):
        return NotImplemented
    if m.form == "leaky":
        scales = what in ("mul", "rmul") and isinstance(other, Tensor) and m.att is None
        return (
            put_off(replace(m, att=other.reshape(other.shape[-len(m.trailing) :])))
            if scales
            else NotImplemented
        )
    if m.form != "sum" or m.weight is not None:
        return NotImplemented
    if what in ("mul", "rmul") or (what in ("div", "true_divide") and lazy is one):
        return put_off(each(m, lambda rows: func(rows, other)))
    if not m.one_ended:
        return NotImplemented
    return put_off(each(m, lambda rows: func(rows, other) if lazy is one else func(other, rows)))


def _plain(other: Any, m: Message) -> bool:
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
    if torch.promote_types(weight.dtype, kind) != kind:
        return NotImplemented
    weight = weight.to(kind)
    inner = tuple(weight.shape[1:])
    if all(s == 1 for s in inner):
        return put_off(replace(m, weight=weight.reshape(-1)))
    if dims == 3 and inner == (m.trailing[0], 1):
        return put_off(replace(m, weight=weight.squeeze(-1)))
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
        return put_off(joined(a, b, 1 if what == "add" else -1))
    if what != "mul" or not (a.one_ended and b.one_ended):
        return NotImplemented
    if a.source is None and b.source is not None:
        return put_off(replace(b, target=a.target, form="product", roots=a.roots + b.roots))
    if a.source is not None and b.source is None:
        return put_off(replace(a, target=b.target, form="product", roots=a.roots + b.roots))
    a.check()
    b.check()
    if a.target is not None and b.target is not None:
        return put_off(with_rows(a, a.target * b.target, None))
    first, second = source_rows(widened(a)), source_rows(widened(b))
    assert first is not None
    assert second is not None
    return put_off(with_rows(widened(a), None, first * second))


def _shared(share: SoftmaxShare, m: Message) -> Any:
    if m.edges is not share.logits.edges or m.shape != share.shape or not m.one_ended or m.source is None:
        return NotImplemented
    return m.edges.pairs(LazyTensor(Shared(share, m)))
