"""Feature slices under a codec: right on the mean, one's own exact, bytes to the formula, repeatable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.comm.codec import Codec
from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.config import CodecName, Parallel
from kagome.feature_parallel.all_to_all import AllToAll, SliceCut, even
from kagome.halo.block_exchange import BlockLayout
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.halo.forward_pass import ForwardPass

COUNTS = {2: (9, 7), 3: (8, 0, 5), 4: (5, 3, 1, 7)}
WIDTH = 38
"""Which neither 3 nor 4 divides, and of which each quarter is wide enough for a header."""


def turned(
    channel: ThreadChannel | Channel, rows: Tensor, codec: CodecName, epoch: int
) -> tuple[Tensor, ...]:
    """Rows apart, together again, and the gradient of a weighted sum of what came back."""
    way = AllToAll(
        COUNTS[channel.size], CompressedExchange(channel, Parallel(codec=codec, tensor=channel.size), seed=3)
    )
    mine = rows.split(COUNTS[channel.size])[channel.rank].clone().requires_grad_()
    forward_pass = ForwardPass(epoch, checked=True, device=torch.device("cpu"), grad=True)
    cut = even(rows.size(1), channel.size)
    part = way.split(mine, cut, forward_pass, "site")
    back = way.gather(part, cut, forward_pass, "site")
    (back.sum(1) @ torch.arange(1.0, 1.0 + back.size(0)) + forward_pass.token).backward()
    assert mine.grad is not None
    return part.detach(), back.detach(), mine.grad


def all_turned(size: int, rows: Tensor, codec: CodecName, epoch: int = 1) -> list[tuple[Tensor, ...]]:
    return ThreadGroup(size).run(lambda channel: turned(channel, rows, codec, epoch))


@pytest.mark.some(2)
@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("codec", ["onebit", "int4", "int8"])
def test_what_comes_is_right_on_the_mean(size: int, codec: CodecName) -> None:
    torch.manual_seed(size)
    rows, cut = torch.randn(sum(COUNTS[size]), WIDTH), even(WIDTH, size)
    times, total, gone = 300, torch.zeros(size, *rows.shape), torch.zeros_like(rows)
    for epoch in range(1, times + 1):
        found = all_turned(size, rows, codec, epoch)
        gone += torch.cat([back for _, back, _ in found])
        for rank, (part, _, _) in enumerate(found):
            total[rank, :, cut.of(rank)] += part
    span = float(rows.max() - rows.min()) / (2 ** (Codec(codec).bits or 0) - 1)
    # A draw is off by half a step at most on the mean square; two in a row on the way back.
    room = 5 * span / 2 / times**0.5
    for rank in range(size):
        here = cut.of(rank)
        assert float((total[rank, :, here] / times - rows[:, here]).abs().max()) < room
    assert float((gone / times - rows).abs().max()) < 2 * room


@pytest.mark.parametrize("size", COUNTS)
def test_one_s_own_columns_of_own_rows_stay_as_they_are(size: int) -> None:
    rows, cut = torch.randn(sum(COUNTS[size]), WIDTH), even(WIDTH, size)
    first = 0
    for rank, (part, back, _) in enumerate(all_turned(size, rows, "onebit")):
        mine = slice(first, first + COUNTS[size][rank])
        assert torch.equal(part[mine], rows[mine, cut.of(rank)])
        assert torch.equal(back[:, cut.of(rank)], rows[mine, cut.of(rank)])
        first = mine.stop
    others = all_turned(size, rows, "onebit")[0][0][COUNTS[size][0] :]
    assert all(row.unique().numel() <= 2 for row in others), "one bit has two numbers a row"


@pytest.mark.parametrize("size", COUNTS)
def test_a_run_repeats_and_epochs_differ(size: int) -> None:
    rows = torch.randn(sum(COUNTS[size]), WIDTH)
    first, again, next_one = (all_turned(size, rows, "int2", epoch) for epoch in (1, 1, 2))
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert any(not torch.equal(a[0], b[0]) for a, b in zip(first, next_one, strict=True))


@pytest.mark.parametrize("size", COUNTS)
def test_a_constant_gradient_is_exact(size: int) -> None:
    """Of what lies behind ``turned`` each row of the gradient is constant: few bits hold it whole."""
    rows = torch.randn(sum(COUNTS[size]), WIDTH)
    for rank, (_, _, grad) in enumerate(all_turned(size, rows, "onebit")):
        expected = torch.arange(1.0, 1.0 + COUNTS[size][rank]).unsqueeze(1).expand(-1, WIDTH)
        assert torch.equal(grad, expected)


def test_columns_of_a_row_draw_apart() -> None:
    rows, mine = torch.randn(sum(COUNTS[3]), 8).repeat(1, 3), COUNTS[3][0]
    _, one, other = (part[:mine] for part, _, _ in all_turned(3, rows, "onebit"))
    assert not torch.equal(one, other), "the same numbers, for two peers"


def test_rows_too_narrow_for_a_header_and_one_s_own_go_uncoded() -> None:
    names = [
        codec.name
        for codec in BlockLayout.of(Codec("onebit"), [(4, 1), (4, 1), (4, 8)], 0, torch.float32).codecs
    ]
    assert names == ["none", "none", "onebit"]


def counted(channel: Channel, codec: CodecName) -> tuple[int, int]:
    """Bytes sent there and back, both ways, and those that were spared, before codecs."""
    compressed_exchange = CompressedExchange(channel, Parallel(codec=codec, tensor=channel.size), seed=3)
    way, counts = AllToAll(COUNTS[channel.size], compressed_exchange), COUNTS[channel.size]
    mine = torch.randn(counts[channel.rank], WIDTH, requires_grad=True)
    forward_pass, cut = (
        ForwardPass(1, checked=False, device=torch.device("cpu"), grad=True),
        even(WIDTH, channel.size),
    )
    channel.take_traffic()
    back = way.gather(way.split(mine, cut, forward_pass, "site"), cut, forward_pass, "site")
    (back.square().sum() + forward_pass.token).backward()
    return channel.take_traffic().bytes["transpose"], compressed_exchange.take_counts().sliced


def expected(counts: tuple[int, ...], cut: SliceCut, rank: int, codec: CodecName) -> int:
    """Own rows in the peers' columns and the peers' rows in own ones, each twice."""
    size = Codec(codec).size
    others = [peer for peer in range(len(counts)) if peer != rank]
    split = sum(size(counts[rank], cut.taken(peer), torch.float32) for peer in others)
    gather = sum(size(counts[peer], cut.taken(rank), torch.float32) for peer in others)
    return 2 * (split + gather)


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("codec", ["none", "onebit", "bf16"])
def test_bytes_are_those_of_the_codec_s_blocks(
    ranks: Callable[..., list], size: int, codec: CodecName
) -> None:
    counts, cut = COUNTS[size], even(WIDTH, size)
    for rank, (sent, uncoded) in enumerate(ranks(size, counted, codec)):
        assert sent == expected(counts, cut, rank, codec)
        assert uncoded == expected(counts, cut, rank, "none")
