"""Counter-based dropout: draws depend on which row it is, not on where the row is stored or on the mesh.

Where it sits: called by ``handlers`` for every dropout in a model's forward, and by
``model.operators.sample_dropout`` in a pipeline of independent samples. A number depends on (seed, epoch,
call, row id, column) alone, so that every partition of the graph draws the same numbers. The rounding of
encoded rows has a hash of its own in ``kernels.quantize.ops``: it makes 32 bits a number, on three backends.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from kagome.kernels.base.jit import PlainFirst, inlined
from kagome.kernels.base.thread_pool import compiled, spread
from kagome.model.exact.scope import Args, Func, Kwargs, argument

# The constants of splitmix64: the increment 2^64 / golden ratio, and the two factors of its finaliser.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_WORD = 1 << 64


DROPOUTS: Final = tuple(
    f"{kind}dropout{place}" for kind in ("", "feature_", "alpha_", "feature_alpha_") for place in ("", "_")
)
"""Names of torch's dropout calls."""
DRAWS: Final = (
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "binomial"),
    *("rand_like", "randn_like", "randint_like", "rrelu", "rrelu_", "_standard_gamma", "_sample_dirichlet"),
    *("bernoulli_", "normal_", "uniform_", "exponential_", "cauchy_", "geometric_", "log_normal_", "random_"),
)
"""Names of torch calls that draw from torch's generator, or from a generator passed to them."""


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD >> 1 else word


def _shift(z: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically: clear the copies of the sign bit.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """Scramble 64-bit words (the finaliser of splitmix64), on int64 with wrap-around."""
    # Products of int64 wrap around as those of uint64 do, so signed numbers give the same bits.
    z = (z ^ _shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    return z ^ _shift(z, 31)


# [Note: counters in place of a generator] torch's generator is a sequence: a number depends on how many were
# drawn before it. On a part others were drawn before, since a part has other rows, so no two numbers of parts
# and whole would be equal. Here a number is a hash of what it is for:
#
#     (seed, epoch, module path, call) ──> key of the call ─┐
#     id of the vertex, or ids of the edge's ends ──────────┼──> hash ──> the number
#     column ───────────────────────────────────────────────┘
#
# Any rank can compute it for any row, in any order, and again in backward without having kept the mask.


def call_key(seed: int, epoch: int, path: str, index: int) -> int:
    """Return one word for a call, from the seed, the epoch, the module's path and the call's index."""
    # Each word is mixed in before the next is added: (1, 2) and (2, 1) have different keys.
    z = 0
    for word in (seed, epoch, zlib.crc32(path.encode()), index):
        z = _mix_int((z + word + 1) * _GOLDEN % _WORD)
    return _signed(z)


def _mix_int(z: int) -> int:
    z = (z ^ (z >> 30)) * _FIRST % _WORD
    z = (z ^ (z >> 27)) * _SECOND % _WORD
    return z ^ (z >> 31)


def row_keys(ids: Tensor, key: int) -> Tensor:
    """Return a word for each row in one call, from the rows' ids.

    Shapes:
        ``ids [R]`` int64 -> ``[R]`` int64.
    """
    return mix(ids * _signed(_GOLDEN) + key)


def edge_ids(source: Tensor, target: Tensor, copy: Tensor) -> Tensor:
    """Return a word for each edge, from its ends' original ids and its index among equal edges."""
    # Different factors for the ends, so that an edge and its reverse draw different numbers.
    return mix(mix(source + 1) + 3 * mix(target + 2) + 7 * copy)


def uniform(keys: Tensor, columns: int, first: int = 0) -> Tensor:
    """Return uniform 32-bit integers as int64; each depends on its key and its column alone.

    One word serves two columns. Of 16 columns, the first 8 take the upper halves of 8 words and the others
    the lower halves, so that a loop writes whole vectors.

    Shapes:
        ``keys [R]`` -> ``[R, columns]`` with values in [0, 2**32).
    """
    # column    0 1 .. 7    8 9 .. 15    16 ..
    # word      0 1 .. 7    0 1 ..  7     8 ..
    # half      upper       lower        upper
    column = torch.arange(first, first + columns, device=keys.device)
    word = column // 16 * 8 + column % 8
    mixed = mix(keys.unsqueeze(1) + (word + 1) * _signed(_GOLDEN))
    return torch.where(column % 16 < 8, _shift(mixed, 32), mixed & (2**32 - 1))


@inlined
def _mixed(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def _drop_rows(
    low: int, high: int, x: Any, ids: Any, key: Any, limit: Any, scale: Any, begin: int, out: Any
) -> None:
    # As ``uniform`` for whole blocks of 16 columns, 8 words each; column by column for the rest, or for all
    # where ``x`` does not begin at column 0.
    golden, half, mask = np.uint64(0x9E3779B97F4A7C15), np.uint64(32), np.uint64(0xFFFFFFFF)
    columns, none = x.shape[1], scale * 0
    whole = columns // 16 * 16 if begin == 0 else 0
    for i in range(low, high):
        row = _mixed(ids[i] * golden + key)
        for block in range(0, whole, 16):
            start = row + np.uint64(block // 2) * golden
            for j in range(8):
                z = _mixed(start + np.uint64(j + 1) * golden)
                first, second = z >> half, z & mask
                out[i, block + j] = x[i, block + j] * (scale if first < limit else none)
                out[i, block + 8 + j] = x[i, block + 8 + j] * (scale if second < limit else none)
        for j in range(whole, columns):
            at = begin + j
            z = _mixed(row + np.uint64(at // 16 * 8 + at % 8 + 1) * golden)
            number = z >> half if at % 16 < 8 else z & mask
            out[i, j] = x[i, j] * (scale if number < limit else none)


_PLAIN_FIRST: Final = PlainFirst(_drop_rows, 1 << 26)
"""Plain PyTorch needs about a second for so many entries, and gives the same bits."""


@cache
def _on_gpu() -> Callable[..., Any] | None:
    """Return the Triton kernel of dropout; None without Triton."""
    if find_spec("triton") is None:
        return None
    drop: Callable[..., Any] = import_module("kagome.kernels.triton.dropout").drop
    return drop


def _scaled(x: Tensor, ids: Tensor, key: int, p: float, first: int = 0) -> Tensor:
    """Return ``x`` with a share ``p`` of entries zeroed, the rest scaled by 1 / (1 - p); no gradient."""
    # An entry stays if its number of 32 bits is below ``limit``. All three versions compare integers, so
    # masks are equal on CPU and GPU to the bit.
    limit, scale = round((1.0 - p) * 2**32), 1.0 / (1.0 - p)
    if x.device.type == "cuda" and x.is_floating_point() and (drop := _on_gpu()) is not None:
        dropped: Tensor = drop(x, ids, key, limit, scale, first)
        return dropped
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return plain_scaled(x, ids, key, p, first)
    # It is not compiled before that is worth it.
    if _PLAIN_FIRST.takes(x.numel()):
        return plain_scaled(x, ids, key, p, first)
    out = torch.empty_like(x)
    number = np.float32 if x.dtype == torch.float32 else np.float64
    source, words, result = x.numpy(), ids.contiguous().numpy().view(np.uint64), out.numpy()
    word, most, factor = np.uint64(key % _WORD), np.uint64(limit), number(scale)

    def rows(low: int, high: int) -> None:
        _drop_rows(low, high, source, words, word, most, factor, first, result)

    # The width stands for the work in a row: its entries, and the row's own hash.
    spread(rows, x.size(0), x.size(1) + 8)
    return out


def plain_scaled(x: Tensor, ids: Tensor, key: int, p: float, first: int = 0) -> Tensor:
    """Compute the kernel's result in plain PyTorch: the reference, also used on other devices and types."""
    limit, scale = round((1.0 - p) * 2**32), 1.0 / (1.0 - p)
    return x * (uniform(row_keys(ids, key), x.size(1), first) < limit).to(x.dtype).mul_(scale)


class _Drop(torch.autograd.Function):
    """Dropout that draws its numbers again in backward instead of keeping a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, key: int, p: float, first: int) -> Tensor:
        ctx.given = ids, key, p, first
        return _scaled(x.detach().contiguous(), ids, key, p, first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Dropout is its own transpose. Applied as a function, backward can be differentiated again.
        return _Drop.apply(grads[0], *ctx.given), None, None, None, None  # type: ignore[no-untyped-call]


def dropout(x: Tensor, ids: Tensor, key: int, p: float, axis: int = 0, first: int = 0) -> Tensor:
    """Apply dropout whose mask depends on the rows' ids, the call and the column alone.

    Args:
        x: Any shape; ``axis`` is the row axis, and the other axes, in order, are the columns.
        ids: A word for each row: a vertex's original id, or :func:`edge_ids`.
        key: Word of the call, from :func:`call_key`.
        p: Share dropped, in [0, 1].
        axis: The row axis.
        first: Number of the first column, if x holds only some of the columns.

    Cost:
        Keeps no mask for backward, which draws the numbers again.
    """
    # The scale would be infinite. As in torch, the result keeps its place in the graph of autograd.
    if p >= 1.0:
        return x * 0.0
    if axis == 0 and x.dim() == 2:
        plain: Tensor = _Drop.apply(x, ids, key, p, first)  # type: ignore[no-untyped-call]
        return plain
    rows = x.movedim(axis, 0)
    flat = rows.reshape(rows.size(0), -1) if x.numel() else rows.reshape(rows.size(0), 0)
    out: Tensor = _Drop.apply(flat, ids, key, p, first)  # type: ignore[no-untyped-call]
    return out.reshape(rows.shape).movedim(0, axis)


def call_of(name: str, func: Func, args: Args, kwargs: Kwargs) -> tuple[Tensor, float, bool, bool]:
    """Return the arguments of one of torch's :data:`DROPOUTS`, however they are named.

    Returns:
        The tensor, the share dropped, whether anything is dropped, whether the result is written in place.
    """
    return (
        args[0] if args else kwargs["input"],
        # F.dropout(input, p, training, inplace) in Python; torch.dropout(input, p, train) below it, which has
        # ``dropout_`` for in-place.
        float(argument(args, kwargs, 1, "p", 0.5)),
        bool(argument(args, kwargs, 2, "training" if isinstance(func, FunctionType) else "train", True)),
        name.endswith("_") or bool(argument(args, kwargs, 3, "inplace", False)),
    )


def channels(x: Tensor) -> Tensor:
    """Return a one for each channel ``x[i, j]``, which feature dropout drops as a whole."""
    return x.new_ones(*x.shape[:2], *[1] * (x.dim() - 2))


def of_torch(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of :data:`DRAWS` draws by itself, and from torch's own generator."""
    return not isinstance(func, FunctionType) and kwargs.get("generator") is None


def seeded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], key: int) -> Any:
    """Run one of torch's own draws with a generator that is seeded here.

    Args:
        func: One of :data:`DRAWS`.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        key: Seed of the generator, from :func:`call_key`.
    """
    # A generator must be on the device where the numbers are drawn.
    given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    device = kwargs.get("device") if given is None else given.device
    generator = torch.Generator(device or torch.get_default_device()).manual_seed(key)
    return func(*args, **kwargs, generator=generator)
