"""Moved: what a forward does to buffers where the graph passes in chunks.

Where it sits: ``executor`` has one in each pass, made by ``ownership``.
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
"""Bytes of a buffer up to which it is copied in each pass, lest it move for the first time."""


class BufferIsolation:
    """Buffers in one pass: each chunk moves them as if it were alone, and one chunk's stay.

    A chunk has tensors of its own, as autograd may have kept another's; only torch's and PyG's own modules,
    which keep no such thing, have the same ones with other values.

    Args:
        buffers: All that the stages use.
        known: Names of those that a forward moves; what is found to move besides is added.
        alone: Names of those that no other stage uses.
        watches: Whether the pass may find that others move, as a forward may do first in a later epoch.

    Cost:
        A copy of what moves a chunk; of all others one, where they are watched.
    """

    def __init__(self, buffers: Buffers, known: set[str], alone: Collection[str], *, watches: bool) -> None:
        self._buffers, self._known = buffers, known
        tensors = buffers.now()
        others = {name for name in tensors if watches and name not in known}
        few = {name for name in others if name in alone and tensors[name].nbytes <= WATCHED}
        self._before = {name: tensors[name].clone() for name in (*known, *few)}
        self._watched = {name: (tensors[name], tensors[name]._version) for name in others}
        self._own: dict[int, dict[str, Tensor]] = {}
        # What is known of such modules' calls is known by their tensors (``neighbors.calls``).
        self._still = {name for name in tensors if buffers.of_library(name)}

    @contextmanager
    def by(self, chunk: int, *, stays: bool) -> Iterator[None]:
        """While a chunk runs, or a piece of it; ``stays``: what it moves is what there is afterwards."""
        if stays:
            yield
            self._look()
            return
        if not self._known:
            yield
            return
        own = self._own.get(chunk, {})
        own |= {name: self._before[name].clone() for name in self._known if name not in own}
        theirs = self._swap(own)
        yield
        self._own[chunk] = self._swap(theirs)

    def _swap(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Let buffers be these; what they were."""
        now = self._buffers.now()
        still = {name: now[name] for name in values if name in self._still}
        before = {name: now[name].clone() if name in still else now[name] for name in values}
        self._buffers.put({name: value for name, value in values.items() if name not in still})
        with torch.no_grad():
            for name, tensor in still.items():
                tensor.copy_(values[name])
        return before

    def _look(self) -> None:
        """Find what has moved for the first time.

        Raises:
            ModelError: If other chunks, or other stages, cannot be given what it was before.
        """
        now = self._buffers.now() if self._watched else {}
        for name, (tensor, version) in list(self._watched.items()):
            if now[name] is tensor and tensor._version == version:
                continue
            if name not in self._before:
                raise ModelError(
                    "under chunks a buffer that a forward changes is of one stage and changes in every epoch",
                    f"{name}, of {tensor.nbytes} bytes, first changes now",
                    hint="a forward that writes to it in every epoch, or chunks=1",
                )
            self._known.add(name)
            del self._watched[name]
