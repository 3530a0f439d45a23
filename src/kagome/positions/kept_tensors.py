"""Kept tensors: refuses what a model keeps from one forward to the next unless all ranks keep the same.

Where it sits: ``intercept.interceptor`` passes each call that may write, and calls it when a forward ends.

::

    self.Z.copy_(h)           a table with a row per vertex would get this part's rows: refused at the write
    self.Z[mask] = h[mask]    likewise, by a view of it, by its data, by out=self.Z
    self.Z = 0.9 * self.Z + h the model would hold rows of one rank: refused when the forward ends
    self.h = h                allowed where there was no table before, and it is not saved
    self.Z.mul_(0.9)          allowed: all ranks write the same
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from kagome.errors import ModelError
from kagome.placement.axis_rules import attribute
from kagome.placement.placement import Placement, PlacementKind, Placements, tensors
from kagome.placement.torch_calls import Args as Args, Kwargs as Kwargs
from kagome.placement.weak_map import WeakTensorMap
from kagome.placement.writes import written_by
from kagome.positions.edge_tables import EdgeTables, tensors_of
from kagome.scope.constants import Constants
from kagome.user_frame import from_library, user_line

ALIKE: Final = "what a model keeps from one forward to the next to be the same on all ranks"
WAY_OUT: Final = (
    "return these rows beside the scores, or keep them in an attribute that is None at first, no buffer "
    "(self.last = h); or train on one rank"
)


class Keeper(Protocol):
    """The interface of the running interceptor that this module uses."""

    placements: Placements
    parted: bool

    def where(self) -> str:
        """Return the path of the module whose forward is running."""


class Ending(Keeper, Protocol):
    """The interface of an interceptor whose forward pass has ended."""

    edge_tables: EdgeTables | None
    constants: Constants


class KeptTensors:
    """The tensors that one model keeps, and this part's own copies of some of their rows."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._tables: frozenset[str] = frozenset()
        self._held: WeakTensorMap[str] | None = None
        self._copies: WeakTensorMap[str] = WeakTensorMap()
        self.shown = False
        """Whether forward took the data of a constant tensor: a write to it changes no version."""

    def look(self, scope: Keeper, model: nn.Module, sizes: Sequence[int]) -> None:
        """Record which tensors of a model are tables before its first forward.

        Args:
            scope: The running interceptor.
            model: The user's module.
            sizes: The numbers of vertices and edges of the whole graph, of each set.
        """
        named = tensors_of(model)
        # An axis of N or E entries marks a table. Tensors with a placement already are rows of this part.
        tables = {
            name for name, each in named if {*sizes} & {*each.shape} and scope.placements.get(each) is None
        }
        self._model, self._tables = model, frozenset(tables)

    def copy(self, scope: Keeper, table: Tensor, rows: Tensor) -> bool:
        """Record rows that plain PyTorch returns as a view of a tensor: a write to this copy would be lost.

        Returns:
            Whether the model keeps that tensor.
        """
        label = self._label(scope, table)
        memory = None if label is None else _memory(rows)
        if memory is not None and label is not None:
            self._copies[memory] = label
        return label is not None

    def meet(self, scope: Keeper, name: str, func: Any, args: Args, kwargs: Kwargs) -> None:
        """Check a call that may write.

        Raises:
            ModelError: If it writes part-only values into what the model keeps, or writes into a copy.
        """
        for target in written_by(name, attribute(func) if name == "__set__" else "", args, kwargs):
            memory = _memory(target)
            copied = self._copies.get(memory) if memory is not None else None
            # The arguments that are read: all but the target. With ``out=`` that includes the first one.
            rest = (*args[1:], *(each for key, each in kwargs.items() if key != "out"))
            given = rest if "out" not in kwargs else (*args[:1], *rest)
            # Two faults: the target is a copy of rows of a kept tensor, which would stay as it was; or a
            # value with a placement, so of this part alone, is written into memory that the model keeps.
            found = None
            if copied is None and scope.placements.get(target) is None:
                found = next(
                    (m for t in tensors((*_opened(given),), {}) if (m := scope.placements.get(t))), None
                )
            label = copied if found is None else self._label(scope, target)
            if label is not None:
                what = "rows" if found is None else _named(found)
                raise ModelError(
                    ALIKE,
                    f"{name}, which writes {what} of a part into {label}, kept by the model",
                    where="; ".join(filter(None, (scope.where(), user_line()))),
                    hint=WAY_OUT,
                )

    def end(self, scope: Ending) -> None:
        """Check what the model keeps at the end of a forward.

        Raises:
            ModelError: If the model holds rows of this part in place of a table, or in a buffer it saves.
        """
        # The next forward may find other tensors under the model's names.
        self._held = None
        # A write through ``.data`` changes no version, by which cached results are told to be up to date.
        if self.shown:
            scope.constants.forget()
            self.shown = False
        if scope.edge_tables is not None:
            scope.edge_tables.forget()
        if self._model is None or not scope.parted:
            return
        # A buffer that checkpoints save, or a tensor that took a table's name, must not be of one part.
        for label, tensor in (*_saved(self._model), *self._replaced()):
            placement = scope.placements.get(tensor)
            if placement is not None:
                raise ModelError(
                    ALIKE,
                    f"{_named(placement)} of a part, of shape {list(tensor.shape)}, put by forward in the "
                    f"place of {label}",
                    where=label,
                    hint=WAY_OUT,
                )

    def _replaced(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that now have the names of tables."""
        if self._tables and self._model is not None:
            yield from (each for each in tensors_of(self._model) if each[0] in self._tables)

    def _label(self, scope: Keeper, tensor: Tensor) -> str | None:
        """Return the name of the model's tensor that shares memory with this one; else None."""
        if self._model is None or (memory := _memory(tensor)) is None:
            return None
        # The map is made at the first write of a forward, since most models write nothing. Its keys are
        # storages, so that a tensor is found through its views too.
        if self._held is None:
            self._held = WeakTensorMap()
            for label, each in tensors_of(self._model, libraries=True):
                # Rows that an earlier forward put there are rows of this part, and remain allowed.
                if scope.placements.get(each) is None and (there := _memory(each)) is not None:
                    self._held.setdefault(there, label)
        return self._held.get(memory)


def data(scope: Any, name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Observe ``x.data``, through which inputs can be written without changing their versions."""
    if (
        attribute(func) == "data"
        and isinstance(args[0], Tensor)
        and not args[0].requires_grad
        and not from_library()
    ):
        scope.constants.forget()
        scope.keeping.shown = True
    return NotImplemented


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the named buffers that a state dict has."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Tensor) and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _memory(tensor: Any) -> object | None:
    """Return the storage of a tensor; None if it has none of its own."""
    # Lazy tensors and other subclasses have no memory to compare.
    if type(tensor) not in (Tensor, nn.Parameter):
        return None
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        memory: object = tensor.untyped_storage()
        return memory


def _opened(values: Args) -> Iterator[Any]:
    """Yield values, with tuples and lists among them expanded: an index may contain a list."""
    for value in values:
        yield from value if isinstance(value, (tuple, list)) else (value,)


def _named(placement: Placement) -> str:
    return (
        "rows of edges"
        if placement.kind is PlacementKind.PAIRS
        else "ids"
        if placement.kind in _IDS
        else "rows"
    )


_IDS: Final = (
    PlacementKind.EDGES,
    PlacementKind.SOURCE,
    PlacementKind.TARGET,
    PlacementKind.LOCAL,
    PlacementKind.MIXED,
)

HANDLERS: Final = {"__get__": data}
