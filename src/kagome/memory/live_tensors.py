"""Live tensors: follows the memory behind tensors through one epoch, and keeps what lived at its peak.

Where it sits: ``train.graph_engine`` enters it for the first epoch where ``report.memory`` asks for it. The
result is a record of ``records.peak_tensors``.

::

    an operator makes a tensor ──> its storage counts, until it is freed ──> the most at any time
                └── where: the running module, or the node that backward is at

An operator's own working memory is no tensor, so it is not seen. PyTorch sums two gradients in place where it
holds the only reference to one; under any dispatch mode it makes a third, which is seen here.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kagome.launch.allocator import freed_bytes
from kagome.memory.tensor_bytes import TensorMemory
from kagome.records.peak_tensors import PeakTensor, PeakTensors


@dataclass(frozen=True)
class _Live:
    """A storage: its address and bytes, and how the tensor that brought it was made."""

    place: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    layer: str
    made_by: str
    backward: bool


class LiveTensors(TorchDispatchMode):
    """A context that follows the storages which operators make on one device.

    Args:
        device: The device.
        where: Returns the path of the running module.
        held: The addresses of what is held before and throughout: a view of such a tensor makes no memory.

    Cost:
        20 microseconds an operator, and a list of all live storages at each new maximum.
    """

    def __init__(
        self, device: torch.device, where: Callable[[], str], held: Container[int] = frozenset()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._where, self._held = device.type, where, held
        self._live: dict[int, tuple[_Live, weakref.ref[Any]]] = {}
        self._at_peak: list[_Live] = []
        self._rising = False
        # Nodes are numbered as forward makes them: from such a number on, the module of that path ran.
        self._numbers: list[int] = []
        self._paths: list[str] = []
        self.bytes = 0
        """Bytes of the storages made here that are alive."""
        self.peak = 0
        """The most of these bytes so far."""

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and follow what it has made."""
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self._follow(value, func)
        return out

    def at_peak(self) -> list[_Live]:
        """Return the storages that were alive when they took most."""
        return [live for live, _ in self._live.values()] if self._rising else self._at_peak

    def alive(self) -> set[int]:
        """Return the addresses of the storages that are alive."""
        return {live.place for live, _ in self._live.values()}

    def _follow(self, tensor: Tensor, func: Any) -> None:
        if tensor.device.type != self._device or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not size or key in self._live or storage.data_ptr() in self._held:
            return
        node = torch._C._current_autograd_node()
        name, path = str(func).removesuffix(".default"), self._path(node)
        live = _Live(
            storage.data_ptr(),
            size,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            path,
            name if node is None else f"{name} in {node.name()}",
            node is not None,
        )
        # The storage's Python object lives as long as the storage does.
        self._live[key] = live, weakref.ref(storage, lambda _: self._freed(key))
        self.bytes += size
        if self.bytes > self.peak:
            self.peak, self._rising = self.bytes, True

    def _freed(self, key: int) -> None:
        # Only when memory is freed for the first time after a maximum is it known to have been one.
        if self._rising:
            self._at_peak, self._rising = [live for live, _ in self._live.values()], False
        gone, _ = self._live.pop(key)
        self.bytes -= gone.bytes

    def _path(self, node: Any) -> str:
        if node is not None:
            place = bisect_right(self._numbers, node._sequence_nr())
            return self._paths[place - 1] if place else ""
        path, number = self._where(), torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if not self._paths or self._paths[-1] != path:
            self._numbers.append(number)
            self._paths.append(path)
        return path


def peak_of(
    live: LiveTensors, before: TensorMemory, after: TensorMemory, saved: Container[int]
) -> PeakTensors:
    """Return the record of an epoch that :class:`LiveTensors` has followed.

    Args:
        live: The storages that the epoch made, beside those of ``before``.
        before: What the rank held before the epoch, by kind.
        after: What it holds now.
        saved: The addresses of what autograd saved for backward.
    """
    at_peak, alive = live.at_peak(), live.alive()

    def reason(each: _Live) -> str:
        # A storage that is alive has its address for itself, so what is held there is this storage.
        if each.place in alive and each.place in after.held:
            return after.held[each.place].kind
        if each.place in saved and not each.backward:
            return "saved for backward"
        return f"in flight in {'backward' if each.backward else 'forward'}"

    tensors = [
        PeakTensor(each.bytes, each.shape, each.dtype, each.layer, each.made_by, reason(each))
        for each in at_peak
    ]
    tensors += [
        PeakTensor(each.bytes, each.shape, each.dtype, "", "", each.kind) for each in before.held.values()
    ]
    return PeakTensors.of(tensors, _kept_free(sum(t.bytes for t in tensors) - before.total - live.bytes))


def _kept_free(more: int) -> int | None:
    """Return the bytes that the allocator kept free when so many more of them were in use than now."""
    freed = freed_bytes()
    return None if freed is None else max(freed - max(more, 0), 0)
