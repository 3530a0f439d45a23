"""Codec: what rows look like on the wire - their own type, a shorter float, or a few bits a number.

Where it sits: ``halo.compressed_exchange`` codes what goes to all peers with it, ``pipeline.p2p`` what goes
from stage to stage. It knows nothing of peers: a message is bytes.

::

    cast      [ numbers of the shorter type ]                                    rows x width x its size
    bits      [ low, float32 ] [ span, 16 bits ] [ codes ]      6 bytes a row + ceil(rows x bits / 8) x width

``low`` is a row's least number; ``span``, the way to its greatest, is the upper half of a float32,
rounded up. Codes are drawn against what is stored: restored rows are right on the mean, constant rows
exactly.

Source: Sylvie's low-bit module; header and draws are ours, see ``kernels.quantize.ops``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kagome.config import CodecName
from kagome.errors import ModelError
from kagome.kernels.quantize import ops

HEADER: Final = 6
"""Bytes a row, of the codecs with few bits."""
BITS: Final[dict[CodecName, int]] = {"onebit": 1, "int2": 2, "int4": 4, "int8": 8}
CASTS: Final[dict[CodecName, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
SHEETS: Final = 4
"""Of the rows for one peer: while one travels the next is coded, and the one before restored over there."""
LEAST_SHEET: Final = 128 * 1024
"""Bytes of a sheet, about, at least: a message has its cost."""
FINER: Final[tuple[CodecName, ...]] = ("onebit", "int2", "int4", "int8", "bf16", "none")
"""Codecs from few bits to all of them."""


@dataclass(frozen=True)
class Codec:
    """One way of writing rows.

    Args:
        name: As in the settings.
    """

    name: CodecName

    @property
    def bits(self) -> int | None:
        """Bits of a number, where they are few; else None."""
        return BITS.get(self.name)

    @property
    def exact(self) -> bool:
        """Whether what is restored is what was given."""
        return self.name == "none"

    def shortens(self, width: int, dtype: torch.dtype) -> bool:
        """Whether rows so wide take fewer bytes than they have: a header may be longer than a narrow row."""
        return self.size(8, width, dtype) < 8 * width * dtype.itemsize

    def size(self, rows: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of a message."""
        if rows == 0 or width == 0:
            return 0
        if self.bits is not None:
            return HEADER * rows + ops.groups(rows, self.bits) * width
        return rows * width * CASTS.get(self.name, dtype).itemsize

    def sheets(self, rows: int, width: int, dtype: torch.dtype) -> list[int]:
        """Rows of each sheet, as both ends know: coded by themselves they take the bytes of all at once."""
        count = min(max(self.size(rows, width, dtype) // LEAST_SHEET, 1), SHEETS)
        step = -(-rows // count)
        step += -step % 8  # rows that share bytes stay together
        return [min(step, rows - first) for first in range(0, rows, step or 1)] or [0]

    def encode(
        self, rows: Tensor, pick: Tensor | None, stamps: Tensor, key: int, message: Tensor, *, where: str
    ) -> None:
        """Write rows as a message.

        Args:
            rows: Rows.
            pick: Code these of them, in this order; all if None.
            stamps: A number a coded row, by which it draws: the same row draws the same on any ranks.
            key: What else the draws depend on.
            message: Where the bytes go.
            where: For errors.

        Raises:
            ModelError: If a number is not finite, or too large for the codec.

        Shapes:
            ``rows [*, W]``, ``pick [R]`` and ``stamps [R]`` int64, ``message [size]`` uint8.
        """
        if not message.numel():
            return
        count, width = stamps.numel(), rows.size(1)
        if self.bits is None:
            picked = rows if pick is None else rows.index_select(0, pick)
            cast = picked.to(CASTS.get(self.name, rows.dtype)).contiguous()
            if self.name in CASTS and not bool(cast.isfinite().all()):
                raise self._refusal(int((~cast.isfinite()).any(1).sum()), count, where)
            message.copy_(cast.view(-1).view(torch.uint8))
            return
        head, body = message[: HEADER * count], message[HEADER * count :].view(-1, width)
        if rows.dtype != torch.float32 and pick is not None:
            rows, pick = rows.index_select(0, pick), None
        low, span, bad = ops.encode(rows.float(), pick, stamps, key, self.bits, body)
        if bad:
            raise self._refusal(bad, count, where)
        head[: 4 * count].copy_(low.view(torch.uint8))
        head[4 * count :].copy_(span.view(torch.uint8))

    def decode(self, message: Tensor, out: Tensor) -> Tensor:
        """A message's rows, written to ``out``.

        Shapes:
            ``message [size]`` uint8, ``out [R, W]`` contiguous, of any type -> ``out``.
        """
        count, width = out.shape
        if not message.numel():
            return out.zero_()
        if self.bits is None:
            # A message may begin anywhere in what came: numbers want to begin at a multiple of their size.
            cast = CASTS.get(self.name, out.dtype)
            return out.copy_(aligned(message, cast).view(count, width))
        head, body = message[: HEADER * count], message[HEADER * count :].view(-1, width)
        low = aligned(head[: 4 * count], torch.float32)
        span = aligned(head[4 * count :], torch.int16)
        if out.dtype == torch.float32:
            ops.decode(body, low, span, self.bits, out)
            return out
        restored = torch.empty(count, width, device=out.device)
        ops.decode(body, low, span, self.bits, restored)
        return out.copy_(restored)

    def _refusal(self, bad: int, count: int, where: str) -> ModelError:
        return ModelError(
            f"the codec {self.name} writes finite numbers within its range",
            f"{bad} of {count} rows hold others (infinite, not a number, or too large)",
            where=where,
            hint="a lower --train.lr or --train.clip 1.0; codec bf16 or none for wider ranges",
        )


def lost_share(codec: Codec, sample: Tensor, stamps: Tensor, key: int, where: str) -> float | None:
    """Length of what a codec loses of some rows, over theirs; None where that is 0."""
    lost, whole = lost_squares(codec, sample, stamps, key, where)
    return None if whole == 0 else math.sqrt(lost / whole)


def lost_squares(codec: Codec, sample: Tensor, stamps: Tensor, key: int, where: str) -> tuple[float, float]:
    """Squares of the length of what a codec loses of some rows, and of theirs."""
    whole = float(sample.double().square().sum())
    if whole == 0:
        return 0.0, 0.0
    size = codec.size(sample.size(0), sample.size(1), sample.dtype)
    message = torch.empty(size, dtype=torch.uint8, device=sample.device)
    codec.encode(sample, None, stamps, key, message, where=where)
    lost = codec.decode(message, torch.empty_like(sample)).sub_(sample)
    return float(lost.double().square().sum()), whole


def aligned(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of a message as numbers, copied where they do not lie as numbers must."""
    if message.storage_offset() % dtype.itemsize:
        message = message.clone()
    return message.view(dtype)
