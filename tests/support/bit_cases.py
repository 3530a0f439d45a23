"""Few-bit codes for tests: rows to code, and what came of them.

Where it sits: ``test_bits`` tries plain PyTorch and the loops on them, ``test_gpu_bits_interpreted`` Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kagome.kernels.quantize.ops import FIRST, SECOND, WIDTHS, columns, groups

Case = tuple[Tensor, Tensor | None, Tensor, int, int]
KEY = 0x0123_4567_89AB_CDEF


@dataclass
class Coded:
    """Rows, coded and restored; ``step`` is what a code more makes."""

    body: Tensor
    low: Tensor
    span: Tensor
    bad: int
    restored: Tensor
    step: Tensor


def code(
    way: Any,
    x: Tensor,
    few: int,
    *,
    index: Tensor | None = None,
    row_ids: Tensor | None = None,
    key: int = KEY,
) -> Coded:
    count = x.size(0) if index is None else index.numel()
    row_ids = torch.arange(count) if row_ids is None else row_ids
    body = torch.full((groups(count, few), x.size(1)), 0xA5, dtype=torch.uint8)  # whatever was there before
    low, span, bad = way.encode(x, index, row_ids, key, few, body)
    restored = torch.full((count, x.size(1)), torch.nan)
    way.decode(body, low, span, few, restored)
    step = (span.int() << 16).view(torch.float32) / (2**few - 1)
    return Coded(body, low, span, bad, restored, step.unsqueeze(1))


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit: zeros have signs."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def unmixed(word: int) -> int:
    """What ``bits._mixed`` makes that word of."""
    word ^= word >> 16
    word = word * pow(SECOND, -1, 2**32) % 2**32
    word ^= word >> 15 ^ word >> 30
    word = word * pow(FIRST, -1, 2**32) % 2**32
    return word ^ word >> 16


def stamp_that_draws(word: int, column: int) -> int:
    """The row id by which that column draws that word, its upper 24 bits, where the key is zero."""
    word = word * pow(SECOND, -1, 2**32) % 2**32
    word ^= word >> 15 ^ word >> 30
    word = word * pow(FIRST, -1, 2**32) % 2**32
    return unmixed(unmixed(unmixed(word ^ int(columns(column + 1, torch.device("cpu"))[column]))))


def assert_same(one: Coded, other: Coded) -> None:
    for name in ("body", "low", "span", "restored"):
        assert same(getattr(one, name), getattr(other, name)), name
    assert one.bad == other.bad


STAMPS = st.integers(-(2**63), 2**63 - 1)
KEYS = st.integers(0, 2**64 - 1)
KINDS = ("normal", "constant", "zeros", "denormal", "tiny", "huge", "shifted", "spiky")


def row_of(kind: str, width: int, draw: torch.Generator) -> Tensor:
    x = torch.randn(width, generator=draw)
    return {
        "normal": x,
        "constant": x[:1].expand(width) if width else x,
        "zeros": torch.zeros(width).copysign(x),
        "denormal": x * 1e-41,
        "tiny": x * 1e-37,
        "huge": x.clamp(-3, 3) * 3e37,
        "shifted": x * 1e-4 + 1000,
        "spiky": x**9,
    }[kind]


@st.composite
def cases(draw: Any, most: int = 40) -> Case:
    """Rows, which of them are picked, their ids, a key, a number of bits."""
    width, few = draw(st.integers(1, most)), draw(st.sampled_from(WIDTHS))
    kinds = draw(st.lists(st.sampled_from(KINDS), max_size=most))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.stack([row_of(kind, width, random) for kind in kinds]) if kinds else torch.empty(0, width)
    index, count = None, len(kinds)
    if kinds and draw(st.booleans()):
        count = draw(st.integers(0, most))
        index = torch.randint(0, len(kinds), (count,), generator=random)
    row_ids = torch.tensor(draw(st.lists(STAMPS, min_size=count, max_size=count)), dtype=torch.int64)
    return x, index, row_ids, draw(KEYS), few
