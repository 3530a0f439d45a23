"""Endpoint operations: applied to the rows at a message's ends instead of to one row per edge.

Where it sits: ``rewrite_rules`` and ``arithmetic`` build their rules from these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from kagome.deferred.lazy_tensor import LazyTensor, now
from kagome.deferred.message import Message, Source


def message_of(value: Any) -> Message | None:
    """Return the message that a tensor stands for; None for any other tensor."""
    return value.expr if isinstance(value, LazyTensor) and isinstance(value.expr, Message) else None


def put_off(message: Message) -> Tensor:
    """Return a lazy tensor that stands for a message."""
    return message.edges.pairs(LazyTensor(message))


def widened(message: Message) -> Message:
    """Return the message with halo rows fetched, for row-wise operations that would not send less.

    In feature slices the operation applies to own rows, since rows are sent later.
    """
    source = message.source
    if source is None or source.whole or message.edges.scope.slices:
        return message
    whole = message.whole()
    return replace(message, source=Source(whole, True, source.site))


def each(message: Message, do: Callable[[Tensor], Tensor], *, narrows: bool = False) -> Message:
    """Apply an operation to the rows at each end instead of to one row per edge."""
    message.check()
    if message.source is not None and not (narrows and not message.edges.scope.lasting(message.source.rows)):
        message = widened(message)
    target = None if message.target is None else do(message.target)
    source = None if message.source is None else do(now(message.source.rows))
    return with_rows(message, target, source)


def with_rows(message: Message, target: Tensor | None, source: Tensor | None) -> Message:
    """Return the message with other rows at its ends."""
    place = message.source
    if target is not None:
        message.edges.rows(target)
    if place is not None and source is not None and not place.whole:
        message.edges.rows(source)
    ends = None if place is None or source is None else replace(place, rows=source)
    return replace(message, target=target, source=ends, roots=())


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
    if one.source is not None and two.source is not None and one.source.whole is not two.source.whole:
        one, two = widened(one), widened(two)
    place = replace(one, source=one.source or two.source)
    return with_rows(place, added(one.target, two.target), added(source_rows(one), source_rows(two)))
