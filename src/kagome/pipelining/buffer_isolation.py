"""Buffer isolation: each chunk changes the model's buffers as if it were the only chunk.

Where it sits: ``chunk_passes`` uses one :class:`BufferIsolation` in each pass; ``ownership`` makes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.model.buffers import Buffers

WATCHED: Final = 64 * 2**20
"""Largest buffer, in bytes, that each pass copies in case a forward changes it for the first time."""


# [Note: buffers by chunk] A running mean with the value b before a pass of three chunks in the order 2 0 1:
#
#     history   chunk 2 writes the model's tensor      b -> b2      the model keeps b2
#               chunk 0 writes a copy, swapped in      b -> b0      dropped with the pass
#               chunk 1 writes a copy, swapped in      b -> b1      dropped with the pass
#     exact     all chunks at once write the model's tensor
#     drop      each chunk writes the model's tensor   b -> b2 -> b0 -> b1, as micro-batches do


class BufferIsolation:
    """The buffers in one pass: each chunk changes its own copies, and the changes of one chunk remain.

    Each chunk has its own tensors, because autograd may have saved another chunk's. It saves no buffer of
    torch's and PyG's own modules, so these stay the same objects and only their values are exchanged.

    Args:
        buffers: All buffers that the stages use.
        known: Names of the buffers that a forward changes; newly found ones are added to this set.
        alone: Names of the buffers that one stage alone uses.
        watches: Whether to look for further buffers that change, as a forward may begin to do in a later
            epoch.

    Cost:
        One copy per chunk of each buffer that changes, and one copy of each watched buffer.
    """

    def __init__(self, buffers: Buffers, known: set[str], alone: Collection[str], *, watches: bool) -> None:
        self._buffers, self._known = buffers, known
        tensors = buffers.now()
        others = {name for name in tensors if watches and name not in known}
        few = {name for name in others if name in alone and tensors[name].nbytes <= WATCHED}
        # Values before the pass: every chunk begins with them, as the only chunk would.
        self._before = {name: tensors[name].clone() for name in (*known, *few)}
        # `_version` shows writes in place without a copy of the buffer.
        self._watched = {name: (tensors[name], tensors[name]._version) for name in others}
        self._own: dict[int, dict[str, Tensor]] = {}
        # Layer replay recognises calls of such modules by their tensors (``replay.layer_calls``).
        self._still = {name for name in tensors if buffers.of_library(name)}

    @contextmanager
    def running(self, chunk: int, *, stays: bool) -> Iterator[None]:
        """Run a chunk inside this block; with ``stays`` its changes remain afterwards."""
        # The chunk whose changes remain works on the model's own tensors, where further changing buffers are
        # looked for.
        if stays:
            yield
            self._look()
            return
        if not self._known:
            yield
            return
        own = self._own.get(chunk, {})
        # A chunk of several stages enters once for each, and finds its own tensors of the stage before.
        own |= {name: self._before[name].clone() for name in self._known if name not in own}
        theirs = self._swap(own)
        try:
            yield
        finally:
            self._own[chunk] = self._swap(theirs)

    def _swap(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Set buffers to these values; return the values that they had before."""
        now = self._buffers.now()
        still = {name: now[name] for name in values if name in self._still}
        # Library buffers swap values by copying and stay the same objects. Others swap the tensor objects.
        before = {name: now[name].clone() if name in still else now[name] for name in values}
        self._buffers.put({name: value for name, value in values.items() if name not in still})
        with torch.no_grad():
            for name, tensor in still.items():
                tensor.copy_(values[name])
        return before

    def _look(self) -> None:
        """Find the buffers that have changed for the first time.

        Raises:
            ModelError: If the former value of one was not copied: it is too large, or another stage uses it.
        """
        now = self._buffers.now() if self._watched else {}
        for name, (tensor, version) in list(self._watched.items()):
            if now[name] is tensor and tensor._version == version:
                continue
            if name not in self._before:
                raise ModelError(
                    "a buffer that forward changes under chunks to be of one stage and to change every epoch",
                    f"{name}, of {tensor.nbytes} bytes, which first changes now",
                    hint="a forward that writes to it in every epoch, or chunks=1",
                )
            self._known.add(name)
            del self._watched[name]
