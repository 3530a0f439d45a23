"""Triton kernel of counter-based dropout: draws, mask and scale in one pass over the numbers.

Where it sits: ``model.exact.dropout`` calls it for CUDA tensors. It computes the same 64-bit words as that
module's plain version and its numba loop, so a mask does not depend on the device. Plain PyTorch keeps a
dozen int64 tensors of the same size in turn, some 300 bytes per number; the kernel reads and writes each
number once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# Triton reads annotations, so kernel arguments have none except for compile-time constants.

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

TILE = 1024
"""Numbers that a program computes."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mixed(z):
    # The finaliser of splitmix64, as in ``model.exact.dropout.mix``. The constants are tensors of uint64,
    # because as Python ints they exceed int64.
    z = (z ^ (z >> 30)) * tl.full((1,), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((1,), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


# Triton compiles a variant for integers that are 1 or multiples of 16. key and limit may be any number, so
# such a variant would only cost its compilation.
@triton.jit(do_not_specialize=["key", "limit"])  # type: ignore[untyped-decorator,unused-ignore]
def drop_kernel(
    x,
    ids,
    out,
    key,
    limit,
    rows,
    columns,
    first,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``out = x * SCALE`` where the number that is drawn for the entry is below ``limit``, else ``x * 0``."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    golden = tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
    word = tl.full((1,), key, tl.int64).to(tl.uint64, bitcast=True)
    row = _mixed(tl.load(ids + r, mask=r < rows, other=0).to(tl.uint64, bitcast=True) * golden + word)
    # Column numbers of the whole row. A word serves two columns: of 16 columns, the first 8 take the upper
    # halves of 8 words and the others the lower halves.
    at = (c + first).to(tl.int64)
    number = (at // 16 * 8 + at % 8 + 1).to(tl.uint64)
    mixed = _mixed(row[:, None] + (number * golden)[None, :])
    drawn = tl.where((at % 16 < 8)[None, :], mixed >> 32, mixed & 0xFFFFFFFF).to(tl.int64)
    place = r[:, None] * columns + c[None, :]
    v = tl.load(x + place, mask=inside, other=0)
    scale = tl.full((1, 1), SCALE, WIDE)
    factor = tl.where(drawn < limit, scale, scale * 0).to(v.dtype)  # rounded as the plain version rounds it
    tl.store(out + place, (v.to(WIDE) * factor.to(WIDE)).to(v.dtype), mask=inside)


def drop(x: Tensor, ids: Tensor, key: int, limit: int, scale: float, first: int) -> Tensor:
    """Compute ``model.exact.dropout.plain_scaled`` with the kernel.

    Args:
        x: Contiguous rows.
        ids: A word for each row.
        key: The word of the call, signed.
        limit: Entries whose number in [0, 2^32) is below it are kept.
        scale: The factor of entries that are kept.
        first: The number of the first column.
    """
    out = torch.empty_like(x)
    rows, columns = x.shape
    if x.numel():
        block = min(128, int(triton.next_power_of_2(columns)))
        several = TILE // block
        drop_kernel[(triton.cdiv(rows, several), triton.cdiv(columns, block))](
            x,
            ids.contiguous(),
            out,
            key,
            limit,
            rows,
            columns,
            first,
            SCALE=scale,
            WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
            ROWS=several,
            BLOCK=block,
            num_warps=4,
        )
    return out
