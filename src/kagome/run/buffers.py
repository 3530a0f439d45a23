"""Buffers: those of a model by name, whichever tensors they are by now.

Where it sits: ``passes``, ``owners`` and ``engine`` keep what a forward moves, let chunks move their own, and
put it back. A forward may write to a buffer or put another tensor in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from kagome.errors import ModelError

WATCHED: Final = 64 * 2**20
"""Bytes of a buffer up to which it is copied in each pass, lest it move for the first time."""


class Buffers:
    """Some of a model's buffers.

    Args:
        model: The user's module.
        names: Full names; by default all.
    """

    def __init__(self, model: nn.Module, names: Collection[str] | None = None) -> None:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(id(buffer), []).append((module, key))
        # One buffer may have several places.
        self._places = {
            name: places[id(buffer)]
            for name, buffer in model.named_buffers()
            if names is None or name in names
        }

    def __len__(self) -> int:
        return len(self._places)

    def now(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        return {name: getattr(*places[0]) for name, places in self._places.items()}

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors in the places of some."""
        for name, tensor in tensors.items():
            for module, key in self._places[name]:
                setattr(module, key, tensor)

    def copies(self) -> dict[str, Tensor]:
        """What they hold, by name."""
        return {name: tensor.clone() for name, tensor in self.now().items()}

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """For a block; they are the same tensors with the same numbers afterwards."""
        tensors, before = self.now(), self.copies()
        yield
        self.restore(tensors, before)

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Put these tensors back, with these values."""
        self.put(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(values[name])


class Moved:
    """Buffers in one pass: each chunk moves them as if it were alone, and one chunk's stay.

    A chunk has tensors of its own: autograd may have kept another chunk's.

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
        theirs = {name: tensor for name, tensor in self._buffers.now().items() if name in self._known}
        own = self._own.get(chunk, {})
        fresh = {name: self._before[name].clone() for name in self._known if name not in own}
        self._buffers.put({**own, **fresh})
        yield
        self._own[chunk] = {n: tensor for n, tensor in self._buffers.now().items() if n in self._known}
        self._buffers.put(theirs)

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
