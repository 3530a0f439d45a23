"""CPU quantization: numba loops that code rows to a few bits and restore them, as ``ops`` defines.

Where it sits: ``ops`` imports it for the first CPU tensor. ``base.thread_pool`` divides rows among threads.
Rows are processed in blocks that stay in a core's own cache, so that the pass that finds a row's range and
the pass that codes it read the row from memory once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from kagome.kernels.base.jit import inlined
from kagome.kernels.base.thread_pool import array, spread, strict
from kagome.kernels.cpu.prefetch import SMALL, fetch
from kagome.kernels.quantize.ops import FIRST, LEAST_SPAN, SECOND, columns

BLOCK: Final = 16
"""Rows per block: a multiple of eight, the most rows that share a byte."""
U1: Final = np.uint32(FIRST)
U2: Final = np.uint32(SECOND)
LEAST: Final = np.float32(LEAST_SPAN)
ZERO: Final = np.float32(0)
ONE: Final = np.float32(1)
INFINITE: Final = np.float32(np.inf)
STEP: Final = np.float32(2.0**-24)
"""The distance of two draws: 24 bits, in [0, 1)."""


@inlined
def mixed(h: Any) -> Any:
    """Return 32 bits, each of which depends on all of the 32 given."""
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(16))) * U1)
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(15))) * U2)
    return np.uint32(h ^ np.uint32(h >> np.uint32(16)))


@inlined
def word_of(number: Any) -> Any:
    """Return the bits of a float32."""
    return np.float32(number).view(np.int32)


@inlined
def number_of(word: Any) -> Any:
    """Return the float32 that has these bits."""
    return np.int32(word).view(np.float32)


@inlined
def row_state(row_id: Any, keys: Any) -> Any:
    """Return the state that a row's draws begin with: its id in 64 bits, hashed with the keys."""
    word = np.uint32(mixed(np.uint32(row_id)) ^ keys[0])
    word = np.uint32(word + np.uint32(row_id >> 32))
    return mixed(np.uint32(mixed(word) ^ keys[1]))


@inlined
def width_of(raw: Any) -> Any:
    """Return a row's span, rounded up to a bfloat16; 0 where all its values are equal."""
    # Round up to the upper 16 bits: adding 0xFFFF carries into them unless the lower bits are 0.
    rounded = number_of((word_of(raw) + 0xFFFF) >> 16 << 16)
    return max(rounded, LEAST) if raw > ZERO else ZERO


@register_jitable(forceinline=True, fastmath={"nnan", "nsz"})  # type: ignore[untyped-decorator]
def ends(line: Any) -> Any:
    """Return the least and the greatest number of a row; of one with NaN, any."""
    # ``nnan`` lets the compiler make vectors of the comparisons. ``extremes`` finds NaN by itself.
    least = most = line[0]
    for c in range(line.size):
        least = line[c] if line[c] < least else least
        most = line[c] if line[c] > most else most
    return least, most


@register_jitable(forceinline=True)  # type: ignore[untyped-decorator]
def extremes(line: Any) -> Any:
    """Return the least and greatest number of a row, and infinity if one is infinite or NaN, else 1."""
    wild = 0
    for c in range(line.size):
        wild += 0 if abs(line[c]) < INFINITE else 1
    least, most = ends(line)
    return least, most, INFINITE if wild else ONE


@register_jitable(forceinline=True)  # type: ignore[untyped-decorator]
def encode_row(
    line: Any, bottom: Any, factor: Any, word: Any, column: Any, most: Any, shift: Any, out: Any
) -> None:
    """Write the codes of one of the rows that share bytes, as ``ops.drawn`` and ``ops.encode`` define."""
    for c in range(line.size):
        # Two rounds of mixing the row's word with the column's.
        h = np.uint32(np.uint32(column[c] ^ word) * U1)
        h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(15))) * U2)
        drawn = np.float32(np.float32(np.int32(h >> np.uint32(8))) * STEP)
        value = np.float32(np.float32(np.float32(line[c] - bottom) * factor) + drawn)
        code = np.uint8(np.uint8(np.int32(value if value < most else most)) << shift)
        # The first row of a byte clears what the byte held.
        out[c] = code if shift == 0 else np.uint8(out[c] | code)


@cache
def _encode(bits: int) -> Callable[..., int]:
    share, levels = 8 // bits, np.float32(2**bits - 1)

    @strict
    def loop(
        begin: int,
        end: int,
        ahead: int,
        x: Any,
        index: Any,
        row_ids: Any,
        keys: Any,
        column: Any,
        low: Any,
        span: Any,
        body: Any,
        place: Any,
        state: Any,
        found: Any,
    ) -> int:
        least, most, peak, factor = found[0], found[1], found[2], found[3]
        last, bad = low.size - 1, 0
        for first in range(begin * share, end * share, BLOCK):
            size = min(BLOCK, end * share - first)
            real = min(size, last + 1 - first)
            for k in range(2 * BLOCK):
                i = min(first + k, last)
                # The second half of ``place`` names the rows of the next block, for the prefetch below.
                place[k] = index[i] if index.size else i
            for k in range(real):
                least[k], most[k], peak[k] = extremes(x[place[k]])
            for k in range(real):  # a separate loop, so that the compiler vectorizes it
                # The row's part of ``ops.drawn``; the columns' part is in ``encode_columns``.
                state[k] = row_state(row_ids[first + k], keys)
            for k in range(real):
                finite = peak[k] < np.inf
                bottom = np.float32(least[k] + ZERO)
                raw = np.float32(most[k] - bottom) if finite else ZERO
                wide = width_of(raw)
                bad += not finite or np.float32(bottom + wide) == np.inf
                factor[k] = np.float32(levels / wide) if raw > ZERO else ZERO
                least[k] = low[first + k] = bottom
                span[first + k] = np.int16(word_of(wide) >> 16)
            for k in range(real, size):  # rows past the last one leave zeros in the byte
                least[k] = factor[k] = ZERO
            for k in range(0, size, share):
                g = (first + k) // share
                for j in range(k, k + share):
                    # The row of the next block, while this one is coded: few requests can be pending at once.
                    fetch(x, place, j, ahead, 0)
                    shift = np.uint8((j - k) * bits)
                    encode_row(x[place[j]], least[j], factor[j], state[j], column, levels, shift, body[g])
        return bad

    return loop


@cache
def _decode(bits: int) -> Callable[..., None]:
    share, levels, mask = 8 // bits, np.float32(2**bits - 1), np.uint8(2**bits - 1)

    @strict
    def loop(begin: int, end: int, body: Any, low: Any, span: Any, out: Any) -> None:
        width, count = out.shape[1], low.size
        for g in range(begin, end):
            for j in range(min(share, count - g * share)):
                i = g * share + j
                wide = number_of(np.int32(span[i]) << 16)
                bottom, step, shift = low[i], np.float32(wide / levels), np.uint8(j * bits)
                # One row after another: memory is written faster than with eight rows at once.
                for c in range(width):
                    q = np.float32(np.int32(np.uint8(body[g, c] >> shift) & mask))
                    out[i, c] = np.float32(np.float32(q * step) + bottom)

    return loop


def encode(
    x: Tensor, index: Tensor | None, row_ids: Tensor, key: int, bits: int, body: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Encode rows with numba loops; see ``ops.encode``."""
    assert body.is_contiguous()
    rows = array(x)
    count, width = row_ids.numel(), x.size(1)
    low, span = torch.empty(count), torch.empty(count, dtype=torch.int16)
    if count == 0 or width == 0:
        return low.zero_(), span.zero_(), 0
    picked = np.empty(0, dtype=np.int64) if index is None else array(index)
    keys = np.array([key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF], dtype=np.uint32)
    ahead = BLOCK if rows.nbytes > SMALL else 0
    # An empty ``picked`` stands for all rows, since a compiled loop takes one type for each argument.
    given = ahead, rows, picked, array(row_ids), keys, _words(width), low.numpy(), span.numpy(), body.numpy()
    loop, bad = _encode(bits), []

    def work(begin: int, end: int) -> None:
        place, state = np.empty(2 * BLOCK, np.int64), np.empty(BLOCK, np.uint32)
        bad.append(loop(begin, end, *given, place, state, np.empty((4, BLOCK), np.float32)))

    # Threads divide the rows of ``body``, so that no two of them write to one byte.
    spread(work, body.size(0), width * 8 // bits)
    return low, span, sum(bad)


def decode(body: Tensor, low: Tensor, span: Tensor, bits: int, out: Tensor) -> None:
    """Decode rows with numba loops; see ``ops.decode``."""
    given, loop = (array(body), array(low), array(span), out.numpy()), _decode(bits)
    spread(lambda a, b: loop(a, b, *given), body.size(0), out.size(1) * 8 // bits)


@cache  # a model has only a few widths
def _words(width: int) -> Any:
    return columns(width, torch.device("cpu")).numpy().astype(np.uint32)
