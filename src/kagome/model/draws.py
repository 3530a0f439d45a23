"""Draws that do not know the mesh: dropout by counter, from what a row is and not from where it lies.

Where it sits: called by ``exact`` for every dropout of a model's forward. A number depends on (seed, epoch,
call, row id, column) alone, so any cut of the graph draws the same ones.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_WORD = 1 << 64


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD >> 1 else word


def _shift(z: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically: clear what the sign brought in.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """Scramble 64-bit words (the finaliser of splitmix64), on int64 with wrap-around."""
    z = (z ^ _shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    return z ^ _shift(z, 31)


def call_key(seed: int, epoch: int, path: str, index: int) -> int:
    """One word for one call: the run's seed, the epoch, the module's path, its index in the forward."""
    z = 0
    for word in (seed, epoch, zlib.crc32(path.encode()), index):
        z = _mix_int((z + word + 1) * _GOLDEN % _WORD)
    return _signed(z)


def _mix_int(z: int) -> int:
    z = (z ^ (z >> 30)) * _FIRST % _WORD
    z = (z ^ (z >> 27)) * _SECOND % _WORD
    return z ^ (z >> 31)


def row_keys(ids: Tensor, key: int) -> Tensor:
    """A word a row for one call, from the rows' ids.

    Shapes:
        ``ids [R]`` int64 -> ``[R]`` int64.
    """
    return mix(ids * _signed(_GOLDEN) + key)


def edge_ids(source: Tensor, target: Tensor, copy: Tensor) -> Tensor:
    """A word an edge, from its ends' original ids and which of several equal edges it is."""
    return mix(mix(source + 1) + 3 * mix(target + 2) + 7 * copy)


def uniform(keys: Tensor, columns: int) -> Tensor:
    """Uniform 32-bit integers as int64, one an entry.

    Shapes:
        ``keys [R]`` -> ``[R, columns]`` with values in [0, 2**32).
    """
    column = torch.arange(1, columns + 1, device=keys.device) * _signed(_GOLDEN)
    return _shift(mix(keys.unsqueeze(1) + column), 32)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _drop_rows(x: Any, keys: Any, limit: Any, scale: Any, out: Any) -> None:
    golden, first, second = (
        np.uint64(0x9E3779B97F4A7C15),
        np.uint64(0xBF58476D1CE4E5B9),
        np.uint64(0x94D049BB133111EB),
    )
    for i in range(x.shape[0]):
        z0 = keys[i]
        for j in range(x.shape[1]):
            z0 += golden
            z = (z0 ^ (z0 >> np.uint64(30))) * first
            z = (z ^ (z >> np.uint64(27))) * second
            z = z ^ (z >> np.uint64(31))
            out[i, j] = x[i, j] * scale if (z >> np.uint64(32)) < limit else x[i, j] * 0


def _scaled(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """``x`` with a share ``p`` of its entries zeroed and the rest scaled by 1 / (1 - p), no gradient."""
    limit, scale = round((1.0 - p) * 2**32), 1.0 / (1.0 - p)
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        out = torch.empty_like(x)
        number = np.float32 if x.dtype == torch.float32 else np.float64
        _drop_rows(x.numpy(), keys.numpy().view(np.uint64), np.uint64(limit), number(scale), out.numpy())
        return out
    return plain_scaled(x, keys, p)


def plain_scaled(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """The same as the kernel, in plain PyTorch: the reference, and the way on other devices and types."""
    limit, scale = round((1.0 - p) * 2**32), 1.0 / (1.0 - p)
    return x * (uniform(keys, x.size(1)) < limit).to(x.dtype).mul_(scale)


class _Drop(torch.autograd.Function):
    """Dropout that draws again in backward instead of keeping a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float) -> Tensor:
        ctx.keys, ctx.p = keys, p
        return _scaled(x.detach().contiguous(), keys, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _scaled(grads[0].contiguous(), ctx.keys, ctx.p), None, None


def dropout(x: Tensor, keys: Tensor, p: float, axis: int = 0) -> Tensor:
    """Dropout whose mask depends on the rows' keys and the column alone.

    Args:
        x: Any shape; ``axis`` is the rows', the rest, in order, are the columns.
        keys: A word a row, from :func:`row_keys`.
        p: Share dropped, in [0, 1].
        axis: The row axis.

    Cost:
        Keeps one word a row for backward, no mask.
    """
    if p >= 1.0:
        return x * 0.0
    rows = x.movedim(axis, 0)
    flat = rows.reshape(rows.size(0), -1) if x.numel() else rows.reshape(rows.size(0), 0)
    out: Tensor = _Drop.apply(flat, keys, p)  # type: ignore[no-untyped-call]
    return out.reshape(rows.shape).movedim(0, axis)
