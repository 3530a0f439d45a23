"""Codec: how rows are encoded for sending: in their own type, as shorter floats, or with a few bits a number.

Where it sits: ``halo.compressed_exchange`` encodes exchanges between all ranks with it, and
``pipelining.p2p`` the rows sent from stage to stage. A codec does not know about peers: it maps rows to
bytes.

::

    cast      [ numbers of the shorter type ]                                    rows x width x its size
    bits      [ low, float32 ] [ span, 16 bits ] [ codes ]      6 bytes a row + ceil(rows x bits / 8) x width

``low`` is the smallest number of a row. ``span``, the distance to the largest, is stored as the upper half of
a float32, rounded up. Codes are rounded stochastically against the stored values, so restored rows are
unbiased and constant rows are exact.

Source: Sylvie's low-bit module; header and draws are ours, see ``kernels.quantize.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kagome.config import CodecName
from kagome.errors import ModelError
from kagome.kernels.quantize import ops

HEADER: Final = 6
"""Bytes of header for each row in the codecs with few bits."""
BITS: Final[dict[CodecName, int]] = {"onebit": 1, "int2": 2, "int4": 4, "int8": 8}
CASTS: Final[dict[CodecName, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
SEGMENTS: Final = 4
"""Segments of a message to one peer. While one is in transit, the sender encodes the next and the receiver
decodes the one before."""
LEAST_SEGMENT: Final = 128 * 1024
"""Approximate minimum size of a segment in bytes, because each message has a fixed cost."""
FINER: Final[tuple[CodecName, ...]] = ("onebit", "int2", "int4", "int8", "bf16", "none")
"""The codecs in order of precision, from the fewest bits to the rows' own type."""


@dataclass(frozen=True)
class Codec:
    """One way of encoding rows as bytes.

    Args:
        name: The codec's name in the settings.
    """

    name: CodecName

    @property
    def bits(self) -> int | None:
        """Bits of each number, for the codecs with few bits; None for the others."""
        return BITS.get(self.name)

    @property
    def exact(self) -> bool:
        """Whether decoding returns exactly the rows that were encoded."""
        return self.name == "none"

    def shortens(self, width: int, dtype: torch.dtype) -> bool:
        """Return whether encoding saves bytes at this width.

        For narrow rows the header may cost more than it saves.
        """
        # Eight rows fill whole bytes with any number of bits, so the rounding in ``size`` does not count.
        return self.size(8, width, dtype) < 8 * width * dtype.itemsize

    def size(self, rows: int, width: int, dtype: torch.dtype) -> int:
        """Return the number of bytes of an encoded message."""
        if rows == 0 or width == 0:
            return 0
        if self.bits is not None:
            return HEADER * rows + ops.groups(rows, self.bits) * width
        return rows * width * CASTS.get(self.name, dtype).itemsize

    def segments(self, rows: int, width: int, dtype: torch.dtype) -> list[int]:
        """Return the number of rows in each segment, which both sides compute alike.

        The encoded segments together take as many bytes as a message of all rows.
        """
        # A function of rows, width and type alone: the receiver posts its buffers before any byte has
        # arrived.
        count = min(max(self.size(rows, width, dtype) // LEAST_SEGMENT, 1), SEGMENTS)
        step = -(-rows // count)
        step += -step % 8  # rows that share bytes must be in one segment
        return [min(step, rows - first) for first in range(0, rows, step or 1)] or [0]

    def encode(
        self,
        rows: Tensor,
        index: Tensor | None,
        row_ids: Tensor,
        key: int,
        message: Tensor,
        *,
        where: str,
        later: UnreadRefusals | None = None,
    ) -> None:
        """Encode rows into a message.

        Args:
            rows: The rows to select from.
            index: Indices of the rows to encode, in this order; all rows if None.
            row_ids: One number for each encoded row that seeds its random draws, so that a row gets the same
                draws on any number of ranks.
            key: A further seed of the draws.
            message: Buffer that the bytes are written to.
            where: Location for error messages.
            later: Collects what a device has found, for a check at the end of a pass.

        Raises:
            ModelError: If a number is NaN, infinite, or too large for the codec; on a device not here but in
                ``later``, if that is given.

        Shapes:
            ``rows [*, W]``, ``index [R]`` and ``row_ids [R]`` int64, ``message [size]`` uint8.
        """
        if not message.numel():
            return
        count, width = row_ids.numel(), rows.size(1)
        if self.bits is None:
            picked = rows if index is None else rows.index_select(0, index)
            # "none" is in no table, so it keeps the rows' own type here, in ``size`` and in ``decode``.
            cast = picked.to(CASTS.get(self.name, rows.dtype)).contiguous()
            if self.name in CASTS:
                sound = cast.isfinite()
                # The host asks a CPU for one flag first, and does not wait for a device to answer.
                if cast.device.type != "cpu" or not bool(sound.all()):
                    self._judge((~sound).any(1).sum(), count, where, later)
            message.copy_(cast.view(-1).view(torch.uint8))
            return
        # head   [ low: float32 x R ][ span: int16 x R ]
        # body   [ ceil(R x bits / 8), W ]: one byte holds the codes of 8 / bits rows in one column
        head, body = message[: HEADER * count], message[HEADER * count :].view(-1, width)
        # The kernel reads float32. ``rows.float()`` below would otherwise convert the whole table for a few
        # rows.
        if rows.dtype != torch.float32 and index is not None:
            rows, index = rows.index_select(0, index), None
        low, span, bad = ops.encode(rows.float(), index, row_ids, key, self.bits, body)
        self._judge(bad, count, where, later)
        head[: 4 * count].copy_(low.view(torch.uint8))
        head[4 * count :].copy_(span.view(torch.uint8))

    def decode(self, message: Tensor, out: Tensor) -> Tensor:
        """Decode a message into ``out`` and return it.

        Shapes:
            ``message [size]`` uint8, ``out [R, W]`` contiguous, of any type -> ``out``.
        """
        count, width = out.shape
        if not message.numel():
            return out.zero_()
        if self.bits is None:
            # A message may begin at any byte of the received buffer, but a view needs an aligned start.
            cast = CASTS.get(self.name, out.dtype)
            return out.copy_(aligned(message, cast).view(count, width))
        head, body = message[: HEADER * count], message[HEADER * count :].view(-1, width)
        low = aligned(head[: 4 * count], torch.float32)
        span = aligned(head[4 * count :], torch.int16)
        # The kernel writes float32; rows of other types are restored beside ``out`` and converted.
        if out.dtype == torch.float32:
            ops.decode(body, low, span, self.bits, out)
            return out
        restored = torch.empty(count, width, device=out.device)
        ops.decode(body, low, span, self.bits, restored)
        return out.copy_(restored)

    def _judge(self, bad: Tensor | int, count: int, where: str, later: UnreadRefusals | None) -> None:
        if later is not None and isinstance(bad, Tensor) and bad.device.type != "cpu":
            later.add(bad, partial(self._refusal, count=count, where=where))
        elif int(bad):
            raise self._refusal(int(bad), count, where)

    def _refusal(self, bad: int, count: int, where: str) -> ModelError:
        return ModelError(
            f"finite numbers within the range of the codec {self.name}",
            f"others in {bad} of {count} rows (infinite, not a number, or too large)",
            where=where,
            hint="a lower --train.lr or --train.clip 1.0; codec bf16 or none for wider ranges",
        )


class UnreadRefusals:
    """Counts of rows that codecs cannot encode, which a device has and the host has not read.

    To read one, the host waits for the device. So it reads all of them at once, at the end of a pass and
    before the weights are updated.
    """

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Callable[[int], ModelError]]] = []

    def add(self, bad: Tensor, refusal: Callable[[int], ModelError]) -> None:
        """Add a count, and the error if it is not 0."""
        self._found.append((bad, refusal))

    def check(self) -> None:
        """Read the counts of all codings.

        Raises:
            ModelError: The error of the first count that is not 0.
        """
        found, self._found = self._found, []
        if not found:
            return
        for bad, (_, refusal) in zip(torch.stack([bad for bad, _ in found]).tolist(), found, strict=True):
            if bad:
                raise refusal(bad)


def lost_share(codec: Codec, sample: Tensor, row_ids: Tensor, key: int, where: str) -> float | None:
    """Return the norm of a codec's error on sample rows over the rows' own norm; None if that is zero."""
    lost, whole = lost_squares(codec, sample, row_ids, key, where)
    return None if whole == 0 else math.sqrt(lost / whole)


def lost_squares(codec: Codec, sample: Tensor, row_ids: Tensor, key: int, where: str) -> tuple[float, float]:
    """Return the squared norm of a codec's error on sample rows, and that of the rows."""
    # In double, because the squares of large float32 numbers overflow.
    whole = float(sample.double().square().sum())
    if whole == 0:
        return 0.0, 0.0
    size = codec.size(sample.size(0), sample.size(1), sample.dtype)
    message = torch.empty(size, dtype=torch.uint8, device=sample.device)
    codec.encode(sample, None, row_ids, key, message, where=where)
    lost = codec.decode(message, torch.empty_like(sample)).sub_(sample)
    return float(lost.double().square().sum()), whole


def aligned(message: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes of a message as numbers, copying them first if they are not aligned."""
    if message.storage_offset() % dtype.itemsize:
        message = message.clone()
    return message.view(dtype)
