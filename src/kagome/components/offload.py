"""Activation offload: tensors that autograd saves in a forward pass wait in host memory.

Where it sits: ``train.graph_engine`` and ``pipelining.chunk_engine`` run each training forward pass inside
one. What a rank holds anyway (weights, features, edges) stays where it is, and so do small tensors. The
hooks are its own and not ``model.saved_tensor_hook``, because they replace what autograd saves.

::

    forward     tensor ──pack──> a copy in host memory
    backward    ──unpack──> the device, once for each node that asks; gone when autograd releases it
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kagome.comm.channel import Channel
from kagome.config import MemorySettings

LEAST: Final = 64 * 1024
"""The least number of bytes of a tensor that is moved."""


class _InHost:
    """A tensor saved in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        # Always a copy: a tensor on the host itself may be written to before backward. With pinned memory
        # both copies run on the GPU's stream, in order, while the host goes on.
        pinned = tensor.device.type != "cpu"
        self.copy = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=pinned)
        self.copy.copy_(tensor.detach(), non_blocking=pinned)

    def back(self) -> Tensor:
        """Return the tensor on its device."""
        return self.copy.to(self.device, non_blocking=True)


class Offload:
    """The offload of one rank's saved activations.

    Args:
        memory: Where they wait; ``host`` moves none where the device is the host.
        device: The device that runs the model.
        stays: Returns whether a tensor is held anyway.
    """

    def __init__(self, memory: MemorySettings, device: torch.device, stays: Callable[[Tensor], bool]) -> None:
        wanted = memory.activations == "host" or (
            memory.activations == "auto" and memory.memory_gib is not None
        )
        self.moves, self.stays = wanted and device.type != "cpu", stays
        self.most = 0
        """The most bytes that one forward pass has moved."""
        self._moved = 0
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[_InHost]]] = {}

    def saving(self) -> AbstractContextManager[None]:
        """Return the context of a training forward pass."""
        return self._saving() if self.moves else nullcontext()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self._known.clear()
        self._moved = 0
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self.most = max(self.most, self._moved)

    def facts(self, channel: Channel) -> dict[str, int]:
        """Return the most bytes that any rank moved in one forward pass. All ranks call it."""
        if not self.moves:
            return {}
        most = channel.all_reduce(torch.tensor(self.most), "max", action="activations moved", kind="other")
        return {"activations_moved_bytes": int(most)}

    def _pack(self, tensor: Tensor) -> Tensor | _InHost:
        with torch._C.DisableTorchFunction():  # it is not the user's computation
            if tensor.numel() * tensor.itemsize < LEAST or tensor.layout != torch.strided:
                return tensor
            # Linear layers save a transposed view of their weight. The weight stays on the device, so moving
            # the view would only add a copy.
            whole = tensor if tensor._base is None else tensor._base
            if (whole.is_leaf and whole.requires_grad) or self.stays(tensor):
                return tensor
            storage = tensor.untyped_storage()
            # The version is part of the key: after a write in place the same address holds other values.
            key = (
                *(storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()),
                *(tensor.dtype, tensor._version),
            )
            # A tensor that several nodes save moves once; a later one may reuse the address of a freed one.
            storage_then, found = self._known.get(key, (None, None))
            kept = None if found is None or storage_then is None or storage_then.expired() else found()
            if kept is None:
                kept = _InHost(tensor)
                self._moved += tensor.numel() * tensor.itemsize
                # Weak references only: autograd alone decides how long the copy lives.
                self._known[key] = StorageWeakRef(storage), weakref.ref(kept)
            return kept


def _unpack(kept: Tensor | _InHost) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.back()
