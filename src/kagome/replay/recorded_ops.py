"""Recorded operations: the torch calls made in one call of a layer, and how to repeat them on other rows.

Where it sits: ``layer_calls`` makes the interceptor record while a layer runs; the recorded calls are
repeated later.

::

    conv(x)     lin: h = linear(x, W)    propagate: s = sums of h, deferred   y = s + b
                     │                          │                               │
    recorded    linear[0, W] -> 1       sums again[1] -> 2              add[computed 2, b] -> 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import LazyTensor, now
from kagome.placement.placement import Placement, tensors

Part = tuple[int, Any]
"""How an argument is obtained, and from what."""
# ``VALUE`` and ``COMPUTED`` differ for a deferred sum: a rule may take it as it is, torch needs its numbers.
FIXED, VALUE, COMPUTED, NEST = range(4)
"""A fixed value; a recorded value; a recorded value, computed if it was deferred; a sequence of parts."""


class _UnknownError(Exception):
    """A tensor came from a source that no torch call showed."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One recorded call of a layer.

    Args:
        run: The function that is called.
        packed: Whether it takes its arguments as a tuple and a dict.
        args: Positional arguments.
        kwargs: Named arguments.
        path: The module in which the call was made, where that matters.
        placement: The placement of the result.
    """

    run: Callable[..., Any]
    packed: bool
    args: tuple[Part, ...]
    kwargs: tuple[tuple[str, Part], ...]
    path: str | None
    placement: Placement | None

    def replay(self, scope: Any, values: Sequence[Any]) -> Any:
        """Repeat the call on other values."""
        args = tuple([filled(part, values) for part in self.args])
        kwargs = {name: filled(part, values) for name, part in self.kwargs} if self.kwargs else {}
        if not self.packed:
            out = self.run(*args, **kwargs)
        elif self.path is None or self.path == scope.where():
            out = self.run(args, kwargs)
        else:
            # The call was made by a module inside the layer, whose path is part of a draw's key and of site
            # names. Its hooks do not run in a replay.
            scope.forward.path.append(self.path)
            try:
                out = self.run(args, kwargs)
            finally:
                scope.forward.path.pop()
        if self.placement is not None:
            scope.placements.put(out, self.placement)
        return out


def filled(part: Part, values: Sequence[Any]) -> Any:
    """Return an argument built from recorded values."""
    how, what = part
    if how == FIXED:
        return what
    if how == VALUE:
        return values[what]
    if how == COMPUTED:
        return now(values[what])
    kind, parts = what
    return kind(filled(each, values) for each in parts)


def _has_tensor(value: Any) -> bool:
    """Return True if an argument is a tensor or has one in it, at any depth."""
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, slice):
        return any(map(_has_tensor, (value.start, value.stop, value.step)))
    return isinstance(value, Tensor)


class CallRecorder:
    """The recording of one call of a layer.

    Args:
        scope: The interceptor.
        rows: The layer's arguments that differ in each call.
        fixed: Its weights and buffers.
    """

    def __init__(self, scope: Any, rows: Sequence[Tensor], fixed: Iterable[Tensor]) -> None:
        self.scope, self.ops, self.sound = scope, list[Op](), True
        self._values: list[Any] = list(rows)
        self._places = {id(value): place for place, value in enumerate(rows)}
        self._fixed = {id(tensor): tensor for tensor in fixed}
        # If the call adds to the cache, it has computed what the next call only finds: see ``place_of``.
        self._cached = len(scope.constants.computed)
        self._grad, self._paused = torch.is_grad_enabled(), 0

    def torch_call(self, func: Callable[..., Any], given: Any, passed: Any, out: Any, *, asked: bool) -> None:
        """Record a call that torch answered.

        Args:
            func: The function that was called.
            given: Its arguments, positional and named.
            passed: The same arguments, computed where necessary.
            out: The result of the call.
            asked: Whether it asks for a property that does not depend on the rows' values.
        """
        self._add(func, False, given, passed, out, None, asked)

    def answered(self, by: Callable[..., Any], given: Any, passed: Any, out: Any, *, asked: bool) -> None:
        """Record a call that a handler or a rule answered."""
        self._add(by, True, given, passed, out, self.scope.where(), asked)

    def summed(self, run: Callable[[Tensor], Tensor], rows: Tensor, out: Tensor) -> None:
        """Record a sum over neighbours that the propagate cache deferred again."""
        self._add(run, False, ((rows,), {}), ((rows,), {}), out, None, False)

    def paused(self) -> Callable[[], None]:
        """Pause the recording until the returned function is called."""
        # A count, because ``propagate`` of an inner layer may run inside that of an outer one.
        self._paused += 1
        return self._resume

    def _resume(self) -> None:
        self._paused -= 1

    def _add(
        self, run: Any, packed: bool, given: Any, passed: Any, out: Any, path: str | None, asked: bool
    ) -> None:
        if self._paused or not self.sound:
            return
        # A shape is a tuple too, an empty one for a scalar, but no sequence of results.
        outs = list(out) if isinstance(out, (tuple, list)) and not asked else [out]
        if not all(isinstance(value, Tensor) for value in outs):
            # A number on which Python may branch.
            self.sound = asked or all(self.scope.constants.is_constant(tensor) for tensor in tensors(*given))
            return
        # A replay runs in one mode from end to end, so a block under ``no_grad`` would get gradients.
        if torch.is_grad_enabled() != self._grad:
            self.sound = False
            return
        try:
            args = tuple(self._part(one, other) for one, other in zip(given[0], passed[0], strict=True))
            kwargs = tuple((name, self._part(one, passed[1][name])) for name, one in given[1].items())
        except _UnknownError:
            self.sound = False
            return
        single = isinstance(out, Tensor)
        self.ops.append(
            Op(run, packed, args, kwargs, path, self.scope.placements.get(out) if single else None)
        )
        # An ``Op`` holds one placement. Several results with placements (``x.chunk(2)``) are not replayed.
        self.sound = single or all(self.scope.placements.get(value) is None for value in outs)
        for value in outs:
            self._places[id(value)] = len(self._values)
            self._values.append(value)

    def _part(self, value: Any, passed: Any) -> Part:
        if isinstance(value, Tensor):
            return self._of(value, computed=not isinstance(passed, LazyTensor))
        if not _has_tensor(value):
            return FIXED, value
        # ``filled`` looks into plain sequences alone: a tensor in a slice or a dict would keep its value for
        # ever.
        if type(value) not in (tuple, list):
            raise _UnknownError
        parts = zip(value, passed, strict=True)
        return NEST, (type(value), tuple(self._part(one, other) for one, other in parts))

    def _of(self, tensor: Tensor, *, computed: bool) -> Part:
        place = self._places.get(id(tensor))
        if place is not None:
            return (COMPUTED if isinstance(tensor, LazyTensor) and computed else VALUE), place
        # The numbers of a deferred value are another object than the value. Torch was given these numbers.
        for place, value in enumerate(self._values):
            if isinstance(value, LazyTensor) and value.value is tensor:
                return COMPUTED, place
        if id(tensor) not in self._fixed and not self.scope.constants.is_constant(tensor):
            raise _UnknownError
        return FIXED, tensor

    def place_of(self, out: Any) -> int | None:
        """Return the position of the layer's result among the values; None if the recording is incomplete."""
        # What this call has computed and cached is found by later calls, which make other calls of torch.
        if not self.sound or len(self.scope.constants.computed) != self._cached:
            return None
        return self._places.get(id(out)) if isinstance(out, Tensor) else None
