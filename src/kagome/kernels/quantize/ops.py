"""Quantization: rows of floats to a few bits per number and back, with repeatable stochastic rounding.

Where it sits: ``comm.codec`` codes messages with it. This module is plain PyTorch; the numba loops on a CPU
and Triton on a GPU give the same bits. Their draws are a hash of 32 bits, half as wide as that of
``model.exact.dropout``: a vector of the loops holds twice as many, and rounding needs no more.

::

    row r      low = min x,  span = max x - low rounded up to bf16,  L = 2^bits - 1
    code       q = floor((x - low) * L / span + u),  u in [0, 1) drawn by a counter: E[q] is the exact value
    packed     8 / bits rows share a byte a column: byte g holds row 8 / bits * g + j from bit j * bits on
    restored   low + q * (span / L)

Source: Sylvie's low-bit module, with its edge cases fixed. A constant row has span 0 and is restored exactly.
Spans are stored with a float32's exponent and never rounded down. Codes never carry into a neighbour's bits.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

WIDTHS: Final = (1, 2, 4, 8)
"""Bits per number that are allowed: those that divide a byte evenly."""
LEAST_SPAN: Final = 2.0**-118
"""Smallest span in use: smaller ones are raised to it, so that ``L / span`` is a finite float32."""
# GOLDEN is 2^32 over the golden ratio. FIRST and SECOND are the multipliers of the hash lowbias32 (C.
# Wellons, hash-prospector).
GOLDEN: Final = 0x9E3779B9
FIRST: Final = 0x7FEB352D
SECOND: Final = 0x846CA68B
_WORD: Final = 0xFFFFFFFF


def groups(rows: int, bits: int) -> int:
    """Return the bytes that a column takes: ``ceil(rows * bits / 8)``."""
    return -(-rows * bits // 8)


def encode(
    x: Tensor, index: Tensor | None, row_ids: Tensor, key: int, bits: int, body: Tensor
) -> tuple[Tensor, Tensor, Tensor | int]:
    """Encode rows with a few bits per number.

    Args:
        x: The rows.
        index: Indices of the rows to encode, in this order; all rows if None.
        row_ids: A number for each encoded row, such as its vertex id, that seeds the row's random draws.
        key: A number for everything else that the draws depend on: seed, epoch, site and direction.
        bits: Bits per number: 1, 2, 4 or 8.
        body: The tensor that the codes are written to.

    Returns:
        Each row's low and span (the upper half of a float32's bits), and the number of rows that cannot be
        coded because a value is not finite or the span exceeds float32; the codes of these rows are
        undefined. The number may be a tensor, so that the host need not wait for a device.

    Shapes:
        ``x [*, W]`` float32; ``index [R]`` and ``row_ids [R]`` int64; ``body [ceil(R * bits / 8), W]`` uint8;
        ``low [R]`` float32, ``span [R]`` int16.

    Cost:
        One pass over the rows in the loops; in plain PyTorch a dozen passes and as many tensors of that size.
    """
    found: tuple[Tensor, Tensor, Tensor | int] = _way(x).encode(x, index, row_ids, key, bits, body)
    return found


def decode(body: Tensor, low: Tensor, span: Tensor, bits: int, out: Tensor) -> None:
    """Decode the rows that :func:`encode` coded.

    Shapes:
        ``body [ceil(R * bits / 8), W]``, ``low [R]``, ``span [R]``; ``out [R, W]`` float32, contiguous.
    """
    _way(out).decode(body, low, span, bits, out)


def _way(x: Tensor) -> Any:
    return _module(x.device.type)


@cache  # importable modules do not change within a process
def _module(device: str) -> Any:
    if device == "cpu":
        return import_module("kagome.kernels.quantize.cpu")
    if device == "cuda" and find_spec("triton") is not None:
        return import_module("kagome.kernels.quantize.triton")
    return ReferenceCodec


def drawn(row_ids: Tensor, key: int, width: int) -> Tensor:
    """Return the random draws of rows, uniform in [0, 1) and the same on every rank and in every call.

    Shapes:
        ``row_ids [R]`` -> ``[R, width]`` float32 with 24 bits.
    """
    # int64 stands for uint32: a product may overflow, but its lower 32 bits are right. ``+`` binds tighter
    # than ``&``.
    row = _mixed((_mixed(row_ids & _WORD) ^ (key & _WORD)) + (row_ids >> 32) & _WORD)
    row = _mixed(row ^ (key >> 32 & _WORD))
    # Both words are mixed already, so two products suffice; the products take most of a loop's time.
    h = (row.unsqueeze(1) ^ columns(width, row_ids.device)) * FIRST & _WORD
    h = (h ^ h >> 15) * SECOND & _WORD
    return (h >> 8).float() * 2.0**-24


def columns(width: int, device: torch.device) -> Tensor:
    """Return one pseudo-random word for each column.

    Shapes:
        ``[width]`` int64.
    """
    return _mixed(torch.arange(1, width + 1, device=device) * GOLDEN & _WORD)


def _mixed(h: Tensor) -> Tensor:
    """Return 32 bits, each of which depends on all of the 32 given."""
    h = (h ^ h >> 16) * FIRST & _WORD
    h = (h ^ h >> 15) * SECOND & _WORD
    return h ^ h >> 16


# [Note: unbiased codes] A number x between two codes becomes the upper one with a probability equal to its
# distance from the lower one. ``floor(s + u)`` does this for u uniform in [0, 1):
#
#     s = (x - low) * levels / span           2.3   ──>   2 with probability 0.7, 3 with probability 0.3
#
# The mean of the restored number is x only if s is never clipped and sender and receiver use the same span.
# So the sender divides by the span as it is sent, in 16 bits, and rounds it up: with a span rounded down, the
# largest number of a row would lie above the last code.


class ReferenceCodec:
    """The reference codec in plain PyTorch."""

    @staticmethod
    def encode(
        x: Tensor, index: Tensor | None, row_ids: Tensor, key: int, bits: int, body: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | int]:
        """Encode rows in plain PyTorch; see the module's :func:`encode`."""
        rows = x if index is None else x.index_select(0, index)
        count, width = rows.shape
        levels = 2**bits - 1
        if count == 0 or width == 0:
            return rows.new_zeros(count), rows.new_zeros(count, dtype=torch.int16), 0
        low, high = rows.aminmax(dim=1)
        low = low + 0.0  # gives zero one sign, whichever of a row's signed zeros was met first
        raw = high - low
        word = (raw.view(torch.int32) + 0xFFFF) >> 16 << 16
        span = torch.where(raw > 0, word.view(torch.float32).clamp(min=LEAST_SPAN), torch.zeros_like(raw))
        bad = (~(low.isfinite() & high.isfinite() & (low + span < torch.inf))).sum()
        # torch would compute number / tensor as a product with a reciprocal, which is rounded twice.
        factor = torch.where(raw > 0, torch.full_like(span, levels) / span, torch.zeros_like(raw))
        scaled = (rows - low.unsqueeze(1)) * factor.unsqueeze(1) + drawn(row_ids, key, width)
        codes = scaled.clamp(max=float(levels)).to(torch.uint8)
        share = 8 // bits
        # Rows past the last one fill up the last byte with zeros.
        room = codes.new_zeros(body.size(0) * share, width)
        room[:count] = codes
        body.zero_()
        for place in range(share):
            body |= room[place::share] << bits * place
        return low, (span.view(torch.int32) >> 16).to(torch.int16), bad

    @staticmethod
    def decode(body: Tensor, low: Tensor, span: Tensor, bits: int, out: Tensor) -> None:
        """Decode rows in plain PyTorch; see the module's :func:`decode`."""
        count, levels, share = out.size(0), 2**bits - 1, 8 // bits
        codes = torch.stack([body >> bits * place & levels for place in range(share)], dim=1)
        wide = (span.to(torch.int32) << 16).view(torch.float32)
        step = wide / torch.full_like(wide, levels)
        out.copy_(codes.flatten(0, 1)[:count]).mul_(step.unsqueeze(1)).add_(low.unsqueeze(1))
