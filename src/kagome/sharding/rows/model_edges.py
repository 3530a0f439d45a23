"""Model edges: edge lists that modules hold in buffers, attributes, lists and dicts, replaced by own edges.

Where it sits: :class:`kagome.sharding.module.ShardedModel` puts own edges there for each forward pass and the
user's tensors back after it, so that ``state_dict`` and the user see their own.

A list is recognized by its values: those of an edge set of the graph, in either order of its two rows, or
with ids of one end shifted so that both ends number one tensor::

    grid 4, mesh 2       edge set up: grid -> mesh    [[0 1 2 3], [0 0 1 1]]
    in the module        the same                     ids of grid and of mesh
                         [[2 3 4 5], [0 0 1 1]]       ids of cat([mesh, grid])
                         [[0 1 2 3], [4 4 5 5]]       ids of cat([grid, mesh])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kagome.errors import ModelError
from kagome.intercept.interceptor import Interceptor


@dataclass(frozen=True, eq=False)
class _Slot:
    """Where a module holds an edge list.

    Args:
        name: Its name in the model.
        holder: The dict or list that has it.
        key: Its key or index there.
        given: The user's tensor.
        own: The edges of this part.
    """

    name: str
    holder: Any
    key: Any
    given: Tensor
    own: Tensor


class ModelEdges:
    """The edge lists that a model holds.

    Args:
        model: The user's module.
        scope: The interceptor of the part.
        graph: The edges of each edge set by the number of its view.

    Raises:
        ModelError: If the model holds a list as long as an edge set, with other values, and the graph has
            several sets.
    """

    def __init__(self, model: nn.Module, scope: Interceptor, graph: Mapping[int, Tensor]) -> None:
        self._model, self._scope, self._graph = model, scope, graph
        self._slots: list[_Slot] = []
        self._find()

    def _find(self) -> None:
        self._slots = []
        for name, holder, key, value in _integers_of(self._model):
            own = self._own(name, value)
            if own is not None:
                self._slots.append(_Slot(name, holder, key, value, own))

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Within a block, modules hold own edges in place of the graph's."""
        # ``model.to(device)`` makes new tensors.
        if any(slot.holder[slot.key] is not slot.given for slot in self._slots):
            self._find()
        # Set in the dict itself: ``setattr`` would register a tensor of another shape.
        for slot in self._slots:
            slot.holder[slot.key] = slot.own
        try:
            yield
        finally:
            for slot in self._slots:
                slot.holder[slot.key] = slot.given

    def __bool__(self) -> bool:
        return bool(self._slots)

    def _own(self, name: str, value: Tensor) -> Tensor | None:
        """Return own edges for a list that a module holds; None if it has not the size of one."""
        alike = [n for n, index in self._graph.items() if index.size(1) == value.size(1)]
        # Compared on the CPU, once: the graph's edges are there.
        given = value.detach().cpu()
        for number in alike:
            for turned in (False, True):
                found = self._matched(number, given.flip(0) if turned else given)
                if found is not None:
                    return self._scope.batches.edges(found, 1, turned=turned)
        for number, index in self._graph.items():
            for turned in (False, True):
                copies = self._scope.batches.copies_in(number, index, given.flip(0) if turned else given)
                if copies > 1:
                    return self._scope.batches.edges(number, copies, turned=turned)
        if alike and value.size(1) and self._scope.sets.several:
            raise ModelError(
                "edges in the model that are an edge set of the graph, with ids of its vertex sets or of "
                "their concatenation",
                f"{name} of shape {list(value.shape)}, with other values",
                where=name,
                hint="the same edges in kagome.Graph, or an argument of forward",
            )
        return None

    def _matched(self, number: int, given: Tensor) -> int | None:
        """Return the view of the edges, or of a concatenation, if a list is the edge set with shifted ids."""
        view, index = self._scope.views[number], self._graph[number]
        # A shift of a whole row means that its ids count the rows of a concatenation.
        shifts = given - index
        if shifts.numel() and not bool((shifts == shifts[:, :1]).all()):
            return None
        source, target = shifts[:, 0].tolist() if shifts.numel() else (0, 0)
        if (source, target) == (0, 0):
            return number
        if view.sources != view.targets:
            if (source, target) == (self._scope.sets[view.targets].size, 0):
                return self._scope.joined_view(number, targets_first=True)
            if (source, target) == (0, self._scope.sets[view.sources].size):
                return self._scope.joined_view(number, targets_first=False)
        return None


def _integers_of(model: nn.Module) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield all tensors int64 [2, E] that modules hold, with the dict or list that holds each."""
    for path, module in model.named_modules():
        # Registered buffers are not in ``vars`` by their names; lists and dicts are one level deep.
        holders: list[tuple[str, Any]] = [("", module._buffers), ("", vars(module))]
        for name, value in vars(module).items():
            if isinstance(value, dict | list) and name not in ("_parameters", "_buffers", "_modules"):
                holders.append((f"{name}.", value))
        for prefix, holder in holders:
            items = holder.items() if isinstance(holder, dict) else enumerate(holder)
            for key, value in [*items]:
                if _is_edges(value):
                    yield f"{path}.{prefix}{key}".lstrip("."), holder, key, value


def _is_edges(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.dtype == torch.int64 and value.dim() == 2 and value.size(0) == 2
