"""GPU quantization: Triton kernels that code rows to a few bits and restore them, as ``ops`` defines.

Where it sits: ``ops`` imports it for the first CUDA tensor if Triton is installed. A program handles the rows
that share a byte and writes each of their bytes once. No product is fused with a sum, and quotients are
rounded, so that the bits equal those of the loops and of plain PyTorch.

Both kernels equal plain PyTorch to the bit, in Triton's interpreter on a CPU and on a GPU
(``benchmarks/gpu/checks.py``), and compile for compute capability 9.0 without a fused product.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# Triton reads annotations, so kernel arguments have none except for compile-time constants.

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from kagome.kernels.quantize import ops as plain

COLUMNS = 128
"""Largest number of columns that a program reads at once."""
FIRST = tl.constexpr(plain.FIRST)
SECOND = tl.constexpr(plain.SECOND)
LEAST_SPAN = tl.constexpr(plain.LEAST_SPAN)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mixed(h):
    """Return 32 bits, each of which depends on all of the 32 given."""
    h = (h ^ (h >> 16)) * tl.full((1,), FIRST, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full((1,), SECOND, tl.uint32)
    return h ^ (h >> 16)


# key and high may be any number: a variant compiled for a multiple of 16 would be used once.
@triton.jit(do_not_specialize=["key", "high"])  # type: ignore[untyped-decorator,unused-ignore]
def encode_kernel(
    x,
    index,
    row_ids,
    column,
    low,
    span,
    bad,
    body,
    key,
    high,
    rows,
    width,
    PICKED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the bytes that a group of rows shares, and each row's low, span and validity."""
    # A program has the SHARE rows of one byte row of ``body``, so it is the only one that writes there.
    SHARE: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = 2**BITS - 1
    g = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, SHARE)
    i = g * SHARE + j
    real = i < rows
    place = i
    if PICKED:
        place = tl.load(index + i, mask=real, other=0)
    least = tl.full((SHARE,), float("inf"), tl.float32)
    most = tl.full((SHARE,), float("-inf"), tl.float32)
    peak = tl.zeros((SHARE,), tl.int32)
    for begin in range(0, width, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        inside = real[:, None] & (c < width)[None, :]
        v = tl.load(x + place[:, None] * width + c[None, :], mask=inside, other=0.0)
        # NaN shows in the bits of the magnitude; the extremes may ignore it.
        magnitude = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        peak = tl.maximum(peak, tl.max(magnitude, axis=1))
        least = tl.minimum(least, tl.min(tl.where(inside, v, float("inf")), axis=1))
        most = tl.maximum(most, tl.max(tl.where(inside, v, float("-inf")), axis=1))
    finite = real & (peak < 0x7F800000)
    # From here to ``bad`` the numbers are [SHARE], one for each row. Adding 0.0 gives zero one sign, as in
    # the plain codec.
    bottom = tl.where(finite, least, 0.0) + 0.0
    raw = tl.where(finite, most, 0.0) - bottom
    word = ((raw.to(tl.int32, bitcast=True) + 0xFFFF) >> 16) << 16
    wide = tl.maximum(word.to(tl.float32, bitcast=True), LEAST_SPAN)
    # ``/`` is approximate in Triton, so that bits would differ from the CPU's; ``div_rn`` rounds as IEEE 754
    # does.
    factor = tl.where(raw > 0, tl.div_rn(tl.full((SHARE,), LEVELS, tl.float32), wide), 0.0)
    wide = tl.where(raw > 0, wide, 0.0)
    tl.store(low + i, bottom, mask=real)
    tl.store(span + i, (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=real)
    sound = finite & (bottom + wide < float("inf"))
    tl.store(bad + i, tl.where(sound, 0, 1).to(tl.uint8), mask=real)

    row_id = tl.load(row_ids + i, mask=real, other=0)
    state = _mixed((row_id & 0xFFFFFFFF).to(tl.uint32)) ^ tl.full((1,), key, tl.int32).to(tl.uint32)
    state = _mixed(state + ((row_id >> 32) & 0xFFFFFFFF).to(tl.uint32))
    state = _mixed(state ^ tl.full((1,), high, tl.int32).to(tl.uint32))
    for begin in range(0, width, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        inside = real[:, None] & (c < width)[None, :]
        v = tl.load(x + place[:, None] * width + c[None, :], mask=inside, other=0.0)
        h = tl.load(column + c, mask=c < width, other=0).to(tl.uint32)[None, :] ^ state[:, None]
        h = h * tl.full((1,), FIRST, tl.uint32)[:, None]
        h = (h ^ (h >> 15)) * tl.full((1,), SECOND, tl.uint32)[:, None]
        drawn = (h >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
        value = (v - bottom[:, None]) * factor[:, None] + drawn
        q = tl.minimum(value, LEVELS * 1.0).to(tl.int32)
        # The codes do not overlap, so that a sum joins them. Rows past the last one are masked and count as
        # 0.
        byte = tl.sum(tl.where(inside, q << (j * BITS)[:, None], 0), axis=0)
        tl.store(body + g * width + c, byte.to(tl.uint8), mask=c < width)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def decode_kernel(body, low, span, out, rows, width, BITS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Restore the rows that share one byte per column."""
    SHARE: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = 2**BITS - 1
    g = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, SHARE)
    i = g * SHARE + j
    real = i < rows
    bottom = tl.load(low + i, mask=real, other=0.0)
    wide = (tl.load(span + i, mask=real, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    step = tl.div_rn(wide, tl.full((SHARE,), LEVELS, tl.float32))
    for begin in range(0, width, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        byte = tl.load(body + g * width + c, mask=c < width, other=0).to(tl.int32)
        q = (byte[None, :] >> (j * BITS)[:, None]) & LEVELS
        value = q.to(tl.float32) * step[:, None] + bottom[:, None]
        inside = real[:, None] & (c < width)[None, :]
        tl.store(out + i[:, None] * width + c[None, :], value, mask=inside)


def encode(
    x: Tensor, index: Tensor | None, row_ids: Tensor, key: int, bits: int, body: Tensor
) -> tuple[Tensor, Tensor, Tensor | int]:
    """Encode rows with the Triton kernel; see ``ops.encode``."""
    count, width = row_ids.numel(), x.size(1)
    low, span = x.new_zeros(count), x.new_zeros(count, dtype=torch.int16)
    if count == 0 or width == 0:
        return low, span, 0
    bad = torch.empty(count, dtype=torch.uint8, device=x.device)
    x, row_ids = x.contiguous(), row_ids.contiguous()
    picked = row_ids if index is None else index.contiguous()
    column = plain.columns(width, x.device)
    encode_kernel[(body.size(0),)](
        x,
        picked,
        row_ids,
        column,
        low,
        span,
        bad,
        body,
        _signed(key),
        _signed(key >> 32),
        count,
        width,
        PICKED=index is not None,
        BITS=bits,
        BLOCK=_block(width),
        enable_fp_fusion=False,
    )
    return low, span, bad.sum()


def decode(body: Tensor, low: Tensor, span: Tensor, bits: int, out: Tensor) -> None:
    """Decode rows with the Triton kernel; see ``ops.decode``."""
    count, width = out.shape
    if count and width:
        given = body.contiguous(), low.contiguous(), span.contiguous(), out, count, width
        decode_kernel[(body.size(0),)](*given, BITS=bits, BLOCK=_block(width), enable_fp_fusion=False)


def _block(width: int) -> int:
    return min(COLUMNS, int(triton.next_power_of_2(width)))


def _signed(key: int) -> int:
    """Return the lower 32 bits as a signed number, so that all keys have one type and share one kernel."""
    return ((key & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
