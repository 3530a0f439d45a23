"""Stage codec: how rows are encoded between the stages of a pipeline, in training.

Where it sits: ``pipelining.p2p`` asks it about each value before it sends or receives;
``pipelining.chunk_engine`` says in which epochs rows are sent unencoded.

::

    rows a vertex, floating point     encoded, where that is shorter    decoded where they are waited for
    anything else                     unencoded
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor

from kagome.comm.codec import Codec, UnreadRefusals, lost_share
from kagome.comm.exchange import DeferredWork, Work
from kagome.config import CodecName
from kagome.halo.encoded_exchange import MEASURED_EVERY, MEASURED_ROWS
from kagome.halo.epoch_rows import CompressionCounts
from kagome.model.trace.shapes import Value


def decoded_values(message: Work, codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> Work:
    """Return the value of an encoded message in transit, which the first wait decodes.

    Args:
        message: The message's bytes.
        codec: The codec that encoded them.
        shape: The shape of the value.
        dtype: The number type of the value.
    """

    def decoded() -> Tensor:
        sent = message.wait()
        rows = torch.empty(shape[0], _width(shape), dtype=dtype, device=sent.device)
        return codec.decode(sent, rows).view(shape)

    return DeferredWork(decoded)


class StageCodec:
    """The codec for values that one rank sends to other stages.

    Args:
        name: The codec; None sends all values unencoded.
        seed: The seed of the random draws.
        stage: The stage of this rank.
    """

    def __init__(self, name: CodecName | None, seed: int, stage: int) -> None:
        self.codec, self.seed, self.stage = Codec(name or "none"), seed, stage
        self.counts = CompressionCounts()
        self.refusals = UnreadRefusals()
        """What a device refuses to encode, to be checked at the end of a pass."""
        self._measured: set[str] = set()

    @property
    def exact(self) -> bool:
        """Whether all values are sent unencoded."""
        return self.codec.exact

    @contextmanager
    def using(self, name: CodecName) -> Iterator[None]:
        """Use another codec for a block; all ranks do."""
        before, self.codec = self.codec, Codec(name)
        try:
            yield
        finally:
            self.codec = before

    def take_counts(self) -> CompressionCounts:
        """Return what was sent since the last call."""
        taken, self.counts = self.counts, CompressionCounts()
        return taken

    def size(self, value: Value, shape: tuple[int, ...]) -> int | None:
        """Return the bytes of an encoded message; None where the value is sent unencoded."""
        # Draws follow from the ids of vertices, so only rows of vertices can be encoded. Sender and receiver
        # compute this size independently, from the survey alone.
        dtype = value.dtype
        if self.exact or value.kind != "rows" or dtype is None or not dtype.is_floating_point:
            return None
        width = _width(shape)
        size = self.codec.size(shape[0], width, dtype)
        # Narrow rows may be longer when encoded: each row has a header.
        return size if size < shape[0] * width * dtype.itemsize else None

    def encode(
        self, name: str, rows: Tensor, row_ids: Tensor, size: int, epoch: int, *, backward: bool, where: str
    ) -> Tensor:
        """Encode a value as a message.

        Args:
            name: The name of the value.
            rows: The value.
            row_ids: Original ids of its rows.
            size: The bytes of the message, from :meth:`size`.
            epoch: The epoch, for the draws.
            backward: Whether it is the value's gradient.
            where: The place, for errors.

        Raises:
            ModelError: If a number is not finite, or too large for the codec; on a device in ``refusals``.

        Shapes:
            ``rows [R, ...]``, ``row_ids [R]`` -> ``[size]`` uint8.

        Cost:
            One pass over the rows. In some epochs a few rows are encoded twice, to measure what is lost.
        """
        flat = rows.reshape(rows.size(0), _width(tuple(rows.shape)))
        key = self._draws(name, epoch, backward=backward)
        message = torch.empty(size, dtype=torch.uint8, device=rows.device)
        self.codec.encode(flat, None, row_ids, key, message, where=where, later=self.refusals)
        site = f"{name} (stage) {'backward' if backward else 'forward'}"
        if epoch % MEASURED_EVERY == 1 or site not in self._measured:
            self._measured.add(site)
            # About MEASURED_ROWS rows, evenly spaced.
            some = torch.arange(0, flat.size(0), max(flat.size(0) // MEASURED_ROWS, 1), device=flat.device)
            lost = lost_share(self.codec, flat[some], row_ids[some], key, where)
            if lost is not None:
                self.counts.errors[site] = lost
        return message

    def _draws(self, name: str, epoch: int, *, backward: bool) -> int:
        """Return a 64-bit key: a value's readers get the same rows; each gradient has its own draws."""
        # Forward, the key lacks the reader, so that a value read by two stages is the same in both. Backward,
        # it has the sending stage: the errors of two gradients that are added must be independent.
        text = repr((self.seed, epoch, name, backward, self.stage if backward else -1)).encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def _width(shape: tuple[int, ...]) -> int:
    return torch.Size(shape[1:]).numel()
