"""Loops that code rows to a few bits and restore them: see ``bits`` for what they compute.

Where it sits: ``bits`` imports it when the first tensor on a CPU comes; ``crew`` shares rows among threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from kagome.kernels.bits import FIRST, GOLDEN, LEAST_SPAN, SECOND
from kagome.kernels.crew import array, inlined, spread, strict

U1: Final = np.uint32(FIRST)
U2: Final = np.uint32(SECOND)
STEP: Final = np.uint32(GOLDEN)
UNIT: Final = np.float32(2.0**-24)
LEAST: Final = np.float32(LEAST_SPAN)
INFINITE: Final = np.int32(0x7F800000)
SIGN: Final = np.int32(0x7FFFFFFF)


@inlined
def mixed(h: Any) -> Any:
    """32 bits, each of which depends on all of the 32 given."""
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(16))) * U1)
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(15))) * U2)
    return np.uint32(h ^ np.uint32(h >> np.uint32(16)))


@inlined
def ordered(word: Any) -> Any:
    """A float's bits as an integer with the same order: whole numbers' extremes need no float rules."""
    return np.int32(word ^ np.int32(np.int32(word >> np.int32(31)) & SIGN))


@strict
def _survey(
    begin: int,
    end: int,
    words: Any,
    pick: Any,
    stamps: Any,
    keys: Any,
    levels: Any,
    low: Any,
    span: Any,
    span_words: Any,
    factor: Any,
    state: Any,
) -> int:
    """What there is to know of each row before it is coded: its low, its span, where its draws begin."""
    bad = 0
    for i in range(begin, end):
        row = words[pick[i] if pick.size else i]
        least, most = INFINITE, np.int32(-INFINITE)
        for c in range(row.size):
            word = ordered(row[c])
            least = min(least, word)
            most = max(most, word)
        # The bits of a NaN lie beyond those of infinity, on either side.
        if most >= INFINITE or least <= np.int32(-INFINITE - 1):
            bad += 1
            most = least = np.int32(0)
        # Back to floats: the map is its own inverse.
        span_words[i] = ordered(least)
        low[i] = span[i]
        span_words[i] = ordered(most)
        span[i] = np.float32(span[i] - low[i])
        factor[i] = np.float32(0)
        if span[i] > np.float32(0):
            span_words[i] = ((span_words[i] + 0xFFFF) >> 16) << 16
            span[i] = max(span[i], LEAST)
            if span_words[i] >= INFINITE:
                bad += 1
            factor[i] = np.float32(levels / span[i])
        stamp = stamps[i]
        word = np.uint32(np.uint32(mixed(np.uint32(stamp)) ^ keys[0]) + np.uint32(stamp >> 32))
        state[i] = mixed(np.uint32(mixed(word) ^ keys[1]))
    return bad


@inlined
def coded(x: Any, c: int, low: Any, factor: Any, state: Any, levels: Any) -> Any:
    """The code of one number."""
    h = np.uint32(state + np.uint32(np.uint32(c) * STEP))
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(16))) * U1)
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(15))) * U2)
    h = np.uint32(h ^ np.uint32(h >> np.uint32(16)))
    u = np.float32(np.float32(np.int32(h >> np.uint32(8))) * UNIT)
    t = np.float32(np.float32(np.float32(x - low) * factor) + u)
    return np.int32(min(t, levels))


@cache
def _encode(bits: int) -> Callable[..., None]:
    share, levels = 8 // bits, np.float32(2**bits - 1)

    @strict
    def loop(begin: int, end: int, x: Any, pick: Any, low: Any, factor: Any, state: Any, body: Any) -> None:
        for g in range(begin, end):
            out = body[g]
            for j in range(min(share, low.size - g * share)):
                i = g * share + j
                row, bottom, scale, word = x[pick[i] if pick.size else i], low[i], factor[i], state[i]
                shift = np.int32(j * bits)
                if j == 0:
                    for c in range(row.size):
                        out[c] = np.uint8(coded(row[c], c, bottom, scale, word, levels))
                else:
                    for c in range(row.size):
                        out[c] |= np.uint8(coded(row[c], c, bottom, scale, word, levels) << shift)

    return loop


@cache
def _decode(bits: int) -> Callable[..., None]:
    share, levels = 8 // bits, np.float32(2**bits - 1)
    mask = np.uint8(2**bits - 1)

    @strict
    def loop(begin: int, end: int, body: Any, low: Any, span: Any, out: Any) -> None:
        width, count = out.shape[1], low.size
        for g in range(begin, end):
            for j in range(share):
                i = g * share + j
                if i >= count:
                    break
                bottom, step, shift = low[i], np.float32(span[i] / levels), np.uint8(j * bits)
                for c in range(width):
                    q = np.float32(np.int32(np.uint8(body[g, c] >> shift) & mask))
                    out[i, c] = np.float32(np.float32(q * step) + bottom)

    return loop


def encode(
    x: Tensor, pick: Tensor | None, stamps: Tensor, key: int, bits: int, body: Tensor
) -> tuple[Tensor, Tensor, int]:
    """See ``bits.encode``."""
    rows = array(x)
    count = stamps.numel()
    low, span = torch.empty(count), torch.empty(count)
    if count == 0 or x.size(1) == 0:
        return low.zero_(), span.zero_().to(torch.int16), 0
    picked = np.empty(0, dtype=np.int64) if pick is None else array(pick)
    keys = np.array([key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF], dtype=np.uint32)
    one, bad, width = span.numpy(), [], x.size(1)
    factor, state = np.empty(count, dtype=np.float32), np.empty(count, dtype=np.uint32)
    known = low.numpy(), one, one.view(np.int32), factor, state
    given = rows.view(np.int32), picked, array(stamps), keys, np.float32(2**bits - 1), *known
    spread(lambda a, b: bad.append(_survey(a, b, *given)), count, width)
    loop, packed = _encode(bits), body.numpy()
    spread(
        lambda a, b: loop(a, b, rows, picked, low.numpy(), factor, state, packed),
        body.size(0),
        width * 8 // bits,
    )
    return low, (span.view(torch.int32) >> 16).to(torch.int16), sum(bad)


def decode(body: Tensor, low: Tensor, span: Tensor, bits: int, out: Tensor) -> None:
    """See ``bits.decode``."""
    whole = (span.to(torch.int32) << 16).view(torch.float32)
    given = array(body), array(low), array(whole), out.numpy()
    loop = _decode(bits)
    spread(lambda a, b: loop(a, b, *given), body.size(0), out.size(1) * 8 // bits)
