"""Layer snapshot: everything a layer depends on when it begins, so that it can run again from there.

Where it sits: ``checkpoint`` takes one of each kind before a layer runs, and restores them in backward.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome.errors import ModelError
from kagome.halo.forward_pass import ForwardPass
from kagome.intercept.interceptor import Interceptor
from kagome.placement.placement import Placement

# Fields of ``RunningForward`` that a layer reads or changes, besides its forward pass.
_STATE = ("path", "arguments", "draws", "fault", "layers", "fast")
# Value of an attribute that did not exist before the first pass.
_NOTHING = object()


class LayerSnapshot:
    """The state of the forward: its pass, the running modules, the number of draws, Python's generators.

    ``torch.utils.checkpoint`` keeps torch's own generators.

    Args:
        scope: The interceptor.
    """

    def __init__(self, scope: Interceptor) -> None:
        self._scope, self._forward_pass, self._collectives = (
            scope,
            scope.forward.forward_pass,
            scope.forward.forward_pass.collectives,
        )
        self._state, self._draws = self._read()

    @contextmanager
    def restored(self, hook: Any) -> Iterator[None]:
        """Restore that state in a forward pass of its own, where torch's ``hook`` may run layers again."""
        scope, then = self._scope, self._forward_pass
        found, there = self._read(), scope.forward.forward_pass
        # The second run has a token and site names of its own: backward is walking the graph of the first
        # token, which must not grow. Its sites are numbered from where the first run began.
        forward_pass = scope.forward.forward_pass = ForwardPass(
            then.epoch, checked=then.checked, device=scope.device, grad=True
        )
        forward_pass.collectives = self._collectives
        scope.reads.forget()
        self._write((self._state, self._draws))
        try:
            with pardoned(forward_pass, hook):
                yield
        finally:
            scope.reads.forget()
            scope.forward.forward_pass = there
            self._write(found)
            # Its graph refers to the pass; keeping the token attached would make a reference cycle.
            forward_pass.token = forward_pass.token.detach()

    def _read(self) -> tuple[dict[str, Any], tuple[Any, Any]]:
        state = {name: _copied(getattr(self._scope.forward, name)) for name in _STATE}
        return state, (random.getstate(), np.random.get_state())

    def _write(self, found: tuple[dict[str, Any], tuple[Any, Any]]) -> None:
        for name, value in found[0].items():
            setattr(self._scope.forward, name, _copied(value))
        random.setstate(found[1][0])
        np.random.set_state(found[1][1])


def _copied(value: Any) -> Any:
    # ``path`` and ``arguments`` are stacks, to which hooks push and from which they pop.
    return list(value) if isinstance(value, list) else value


@contextmanager
def pardoned(forward_pass: ForwardPass, hook: Any) -> Iterator[None]:
    """Surround a layer that this hook of torch's saved tensors may run again."""
    forward_pass.pardoned = hook
    try:
        yield
    finally:
        forward_pass.pardoned = None


class Standing:
    """A layer's buffers and attributes: statistics are updated and caches filled while it runs.

    The second pass works on copies of their values before the first pass. The copies are then discarded.

    Args:
        layer: The layer, with all modules inside it.

    Cost:
        A copy of the buffers while the layer runs the first time; then a copy of those that it has written
        to.
    """

    def __init__(self, layer: nn.Module) -> None:
        # A layer changes these tables in two ways: it replaces an entry (``self.count = new``), which a
        # comparison of objects shows, or it writes to a tensor in place, which the tensor's version shows.
        # Buffers alone are cloned in advance; a write to any other tensor is refused in backward.
        self._buffers = [module._buffers for module in layer.modules()]
        self._tables = [*self._buffers, *(vars(module) for module in layer.modules())]
        self._before = [dict(table) for table in self._tables]
        self._tensors = [
            (table, name, value, value._version, value.clone() if number < len(self._buffers) else None)
            for number, table in enumerate(self._tables)
            for name, value in table.items()
            if isinstance(value, Tensor) and not value.requires_grad
        ]
        self._changed: list[tuple[dict[str, Any], str, Any, bool]] = []
        self._lost = ""

    def compare(self) -> None:
        """Record, after the first pass, what it has changed."""
        for table, before in zip(self._tables, self._before, strict=True):
            for name in before.keys() | table.keys():
                value = before.get(name, _NOTHING)
                if table.get(name, _NOTHING) is not value:
                    self._changed.append((table, name, value, False))
        for table, name, value, version, kept in self._tensors:
            if value._version != version:
                self._changed.append((table, name, kept, True))
                self._lost = name if kept is None else self._lost
        self._before, self._tensors = [], []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the earlier buffers and attributes for a block, then the current ones.

        Raises:
            ModelError: If a tensor that is not a buffer was written to.
        """
        if self._lost:
            raise ModelError(
                "a layer that runs again to find its tensors as they were",
                f"a write in place to {self._lost!r}, which is not a buffer",
                hint=f"self.register_buffer({self._lost.lstrip('_')!r}, ...), or leave --model.recompute out",
            )
        found = [dict(table) for table in self._tables]
        for buffers in self._buffers:
            for name, buffer in buffers.items():
                # Torch's own norms write to their buffers without changing the version.
                if buffer is not None and buffer.dim() == 1 and buffer.is_floating_point():
                    buffers[name] = buffer.clone()
        for table, name, value, copied in self._changed:
            if value is _NOTHING:
                table.pop(name, None)
            else:
                table[name] = value.clone() if copied else value
        try:
            yield
        finally:
            for table, before in zip(self._tables, found, strict=True):
                table.clear()
                table.update(before)


@dataclass(frozen=True)
class _Slot:
    """Placeholder for a tensor that autograd keeps."""

    number: int


class Given:
    """A layer's arguments: autograd keeps the tensors with a gradient, everything else is kept as it is.

    Args:
        scope: The interceptor.
        args: Positional arguments.
        kwargs: Named arguments.
    """

    def __init__(self, scope: Interceptor, args: Any, kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self._placements, self._slots = scope.placements, dict[int, _Slot]()
        self._found: list[Placement | None] = []
        self._versions: list[tuple[Tensor, int]] = []
        # Containers are copied, because a layer may write its result into one that it was given.
        self._args, self._kwargs = mapped(args, self._keep, anew=True), mapped(kwargs, self._keep, anew=True)

    def restored(self, tensors: tuple[Tensor, ...]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments again, with the tensors that autograd kept, placed as before.

        Raises:
            ModelError: If an argument was written to since.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise ModelError(
                "what a layer is given to stay as it is until backward has run it again",
                "a write to it in place",
                hint="leave --model.recompute out",
            )
        # Not strict: without an argument that has a gradient, ``tensors`` is one placeholder.
        for tensor, placement in zip(tensors, self._found, strict=False):
            self._placements.put(tensor, placement)

        def take(value: Any) -> Any:
            return tensors[value.number] if isinstance(value, _Slot) else value

        return mapped(self._args, take, anew=True), mapped(self._kwargs, take, anew=True)

    def _keep(self, tensor: Tensor) -> Any:
        if not tensor.requires_grad:
            # A tensor without history is kept by reference; its version shows a write before backward.
            self._versions.append((tensor, tensor._version))
            return tensor
        # One slot for each tensor: what was one object in two arguments is one object again.
        if id(tensor) not in self._slots:
            self._slots[id(tensor)] = _Slot(len(self.tensors))
            self.tensors.append(tensor)
            self._found.append(self._placements.get(tensor))
        return self._slots[id(tensor)]


def mapped(value: Any, do: Callable[[Any], Any], *, anew: bool = False) -> Any:
    """Return a value with ``do`` applied to each tensor inside it.

    Args:
        value: A tensor, or lists, tuples, dicts and ``Data`` of tensors. Anything else is left as it is.
        do: The function to apply.
        anew: Whether to copy containers even where nothing changes.
    """
    if isinstance(value, (Tensor, _Slot)):
        return do(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, do, anew=anew) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)) and not anew:
            return value
        # A named tuple takes its fields as separate arguments.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, (dict, Data)):
        return value
    out = copy.copy(value) if anew else value
    for key, item in (value if isinstance(value, dict) else value.to_dict()).items():
        new = mapped(item, do, anew=anew)
        if new is not item:
            out[key] = new
    return out
