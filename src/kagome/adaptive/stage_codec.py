"""StageCodec: what rows look like between the stages of a pipeline, in training.

Where it sits: ``pipeline.p2p`` asks it of each value before it sends or receives; ``pipeline.chunk_engine``
says in which epochs rows go as they are.

::

    rows a vertex, floating point     coded, where that is shorter      decoded where they are waited for
    anything else                     as it is
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor

from kagome.comm.codec import Codec, lost_share
from kagome.config import CodecName
from kagome.halo.compressed_exchange import MEASURED_EVERY, MEASURED_ROWS, Crossed
from kagome.model.trace.shapes import Value


class IncomingValues(Protocol):
    """What this file needs of a message that was begun."""

    def wait(self) -> Tensor:
        """What it holds, once it has come."""


@dataclass(frozen=True)
class EncodedValues:
    """A coded message under way.

    Args:
        message: Its bytes.
        codec: By which they were written.
        shape: Of the value.
        dtype: Of the value.
    """

    message: IncomingValues
    codec: Codec
    shape: tuple[int, ...]
    dtype: torch.dtype

    def wait(self) -> Tensor:
        """The restored value."""
        message = self.message.wait()
        rows = torch.empty(self.shape[0], _width(self.shape), dtype=self.dtype, device=message.device)
        return self.codec.decode(message, rows).view(self.shape)


class StageCodec:
    """How one rank's values go to other stages.

    Args:
        name: The codec; None leaves all as it is.
        seed: Of the draws.
        stage: Of this rank.
    """

    def __init__(self, name: CodecName | None, seed: int, stage: int) -> None:
        self.codec, self.seed, self.stage = Codec(name or "none"), seed, stage
        self.crossed = Crossed()
        self._measured: set[str] = set()

    @property
    def exact(self) -> bool:
        """Whether all values go as they are."""
        return self.codec.exact

    @contextmanager
    def using(self, name: CodecName) -> Iterator[None]:
        """Let values go otherwise for a block; all ranks do."""
        before, self.codec = self.codec, Codec(name)
        try:
            yield
        finally:
            self.codec = before

    def take_counts(self) -> Crossed:
        """What crossed since the last call."""
        taken, self.crossed = self.crossed, Crossed()
        return taken

    def size(self, value: Value, shape: tuple[int, ...]) -> int | None:
        """Bytes of a coded message; None where the value goes as it is."""
        dtype = value.dtype
        if self.exact or value.kind != "rows" or dtype is None or not dtype.is_floating_point:
            return None
        width = _width(shape)
        size = self.codec.size(shape[0], width, dtype)
        return size if size < shape[0] * width * dtype.itemsize else None

    def encode(
        self, name: str, rows: Tensor, stamps: Tensor, size: int, epoch: int, *, backward: bool, where: str
    ) -> Tensor:
        """A value's message.

        Args:
            name: Of the value.
            rows: The value.
            stamps: Original ids of its rows.
            size: What :meth:`size` gave.
            epoch: For the draws.
            backward: Whether it is the value's gradient.
            where: For errors.

        Raises:
            ModelError: If a number is not finite, or too large for the codec.

        Shapes:
            ``rows [R, ...]``, ``stamps [R]`` -> ``[size]`` uint8.

        Cost:
            One pass over the rows; every so many epochs some rows twice, to measure what is lost.
        """
        flat = rows.reshape(rows.size(0), _width(tuple(rows.shape)))
        key = self._draws(name, epoch, backward=backward)
        message = torch.empty(size, dtype=torch.uint8, device=rows.device)
        self.codec.encode(flat, None, stamps, key, message, where=where)
        site = f"{name} (stage) {'backward' if backward else 'forward'}"
        if epoch % MEASURED_EVERY == 1 or site not in self._measured:
            self._measured.add(site)
            some = torch.arange(0, flat.size(0), max(flat.size(0) // MEASURED_ROWS, 1), device=flat.device)
            lost = lost_share(self.codec, flat[some], stamps[some], key, where)
            if lost is not None:
                self.crossed.errors[site] = lost
        return message

    def _draws(self, name: str, epoch: int, *, backward: bool) -> int:
        """64 bits: a value's readers get the same rows; each one's gradient is drawn apart."""
        text = repr((self.seed, epoch, name, backward, self.stage if backward else -1)).encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def _width(shape: tuple[int, ...]) -> int:
    return torch.Size(shape[1:]).numel()
