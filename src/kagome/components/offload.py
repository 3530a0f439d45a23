"""Activation offload: tensors that autograd saves in a forward pass wait in host memory or in files.

Where it sits: ``train.graph_engine`` and ``pipelining.chunk_engine`` run each training forward pass inside
one. What a rank holds anyway (weights, features, edges) stays where it is, and so do small tensors. The
hooks are its own and not ``model.saved_tensor_hook``, because they replace what autograd saves.

::

    forward     tensor ──pack──> host memory, or a file that is unlinked at once and dropped from memory
    backward    ──unpack──> the device, once for each node that asks; gone when autograd releases it
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kagome.comm.channel import Channel
from kagome.config import Activations, MemorySettings
from kagome.errors import ConfigError

LEAST: Final = 64 * 1024
"""The least number of bytes of a tensor that is moved."""


class _InHost:
    """A tensor saved in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        # Always a copy: a tensor on the host itself may be written to before backward.
        self.copy = tensor.detach().to("cpu", copy=True)

    def back(self) -> Tensor:
        """Return the tensor on its device."""
        return self.copy.to(self.device)


class _InFile:
    """A tensor in an unnamed file, which is deleted when its last mapping ends."""

    def __init__(self, tensor: Tensor, folder: str) -> None:
        self.device, self.dtype, self.shape = tensor.device, tensor.dtype, tensor.shape
        size = tensor.numel() * tensor.itemsize
        with tempfile.TemporaryFile(dir=folder, prefix="kagome-") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises here, not a signal later
            except OSError as error:
                free = os.statvfs(folder)
                raise ConfigError(
                    f"{size:,} bytes of room in {folder} for parallel.activations='disk'",
                    f"{free.f_bavail * free.f_frsize:,} free ({error.strerror})",
                    hint="a folder with more room in TMPDIR",
                ) from None
            self._map = mmap.mmap(file.fileno(), size)
        self._whole().copy_(tensor.detach())
        self._map.madvise(mmap.MADV_DONTNEED)  # no longer this process's memory; the file has it

    def _whole(self) -> Tensor:
        return torch.frombuffer(self._map, dtype=self.dtype).view(self.shape)

    def back(self) -> Tensor:
        """Return the tensor on its device; on a CPU the mapped file itself."""
        return self._whole().to(self.device)


class Offload:
    """The offload of one rank's saved activations.

    Args:
        memory: Where to move them; ``device`` leaves them where they are, and so does ``host`` where the
            device is the host.
        device: The device that runs the model.
        stays: Returns whether a tensor is held anyway.
    """

    def __init__(self, memory: MemorySettings, device: torch.device, stays: Callable[[Tensor], bool]) -> None:
        where: Activations = memory.activations
        if where == "auto":
            where = "device" if memory.memory_gib is None else "host"
        self.where, self.stays = where, stays
        self.moves = where == "disk" or (where == "host" and device.type != "cpu")
        self.folder = tempfile.gettempdir()
        self.most = 0
        """The most bytes that one forward pass has moved."""
        self._moved = 0
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[_InHost | _InFile]]] = {}

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

    def _pack(self, tensor: Tensor) -> Tensor | _InHost | _InFile:
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
                kept = _InHost(tensor) if self.where == "host" else _InFile(tensor, self.folder)
                self._moved += tensor.numel() * tensor.itemsize
                # Weak references only: autograd alone decides how long the copy lives.
                self._known[key] = StorageWeakRef(storage), weakref.ref(kept)
            return kept


def _unpack(kept: Tensor | _InHost | _InFile) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.back()
