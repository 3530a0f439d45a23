"""Summing: all ranks' values in the order of ranks, in one round or two, cast on the way or not."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from kagome.comm import all_reduce
from kagome.comm.all_reduce import Values
from kagome.comm.channel import Channel

WORLDS = [1, 2, 3, 4]


def value(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def seen(values: Tensor, cast: torch.dtype | None, exact: int) -> Tensor:
    """What others read of some values."""
    if cast is None:
        return values
    return torch.cat([values[:exact], values[exact:].to(cast).to(values.dtype)])


def in_order(
    size: int,
    count: int,
    dtype: torch.dtype,
    cast: torch.dtype | None = None,
    exact: int = 0,
    rounds: int = 1,
) -> Tensor:
    """The sum, one rank after the other."""
    if size == 1:
        return value(0, count, dtype)
    total = seen(value(0, count, dtype), cast, exact)
    for rank in range(1, size):
        total = total + seen(value(rank, count, dtype), cast, exact)
    return seen(total, cast, exact) if rounds == 2 and size > 2 else total


def summed(
    channel: Channel, count: int, dtype: torch.dtype, rounds: int, cast: torch.dtype | None, exact: int
) -> tuple[int, int, bytes]:
    mine = value(channel.rank, count, dtype)
    with mock.patch.object(all_reduce, "ONE_ROUND_BYTES", 2**20 if rounds == 1 else 0):
        under_way = channel.start_all_reduce(mine, action="sum", cast=cast, exact=exact)
    assert under_way.rounds == (2 if rounds == 2 and channel.size > 2 else 1)
    found = under_way.wait()
    assert torch.equal(found, in_order(channel.size, count, dtype, cast, exact, rounds))
    assert found.dtype == dtype
    assert torch.equal(mine, value(channel.rank, count, dtype))
    return channel.take_traffic().bytes["weights"], under_way.uncast, found.numpy().tobytes()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_adds_in_the_order_of_ranks_in_one_round_or_two(ranks, world, rounds, dtype):
    for count in (1, 3, 1000):  # fewer values than ranks too
        found = ranks(world, summed, count, dtype, rounds, None, 0)
        assert all(sent == uncast for sent, uncast, _ in found)
        if rounds == 1 or world <= 2:
            assert [sent for sent, _, _ in found] == [(world - 1) * count * dtype.itemsize] * world
        else:
            assert sum(sent for sent, _, _ in found) == 2 * (world - 1) * count * dtype.itemsize


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("dtype", "cast"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_values_that_are_cast_are_cast_alike_on_all_ranks(ranks, world, rounds, dtype, cast):
    for count, exact in ((1, 1), (3, 0), (5, 3), (1000, 7), (1001, 900)):
        found = ranks(world, summed, count, dtype, rounds, cast, exact)
        assert len({bits for _, _, bits in found}) == 1
        message = exact * dtype.itemsize + (count - exact) * cast.itemsize
        times = world - 1 if rounds == 1 or world <= 2 else 2 * (world - 1) / world
        assert sum(sent for sent, _, _ in found) == round(times * world * message)
        assert sum(uncast for _, uncast, _ in found) == round(times * world * count * dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.int64])
def test_values_that_would_not_be_shorter_go_as_they_are(dtype):
    values = Values.of(torch.ones(5).to(dtype), torch.bfloat16, 2)
    assert values.cast == dtype
    assert values.size(0, 5) == 5 * dtype.itemsize


@given(st.integers(0, 30), st.integers(0, 30), st.data())
def test_pieces_are_as_long_as_said_and_come_back(count, exact, data):
    whole = torch.arange(float(count)) * 1.001
    values = Values.of(whole, torch.bfloat16, exact)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    message = values.pack(whole[begin:end], begin)
    assert message.numel() == values.size(begin, end)
    shifted = torch.cat([message.new_zeros(2), message])[2:]  # pieces may lie anywhere in what came
    expected = seen(whole, torch.bfloat16, min(exact, count))[begin:end]
    for each in (message, shifted):
        assert torch.equal(values.unpack(each, begin, end), expected)


def large(channel: Channel) -> int:
    count = all_reduce.ONE_ROUND_BYTES // 8
    under_way = channel.start_all_reduce(value(channel.rank, count, torch.float32), action="large")
    assert torch.equal(under_way.wait(), in_order(channel.size, count, torch.float32))
    return under_way.rounds


def test_large_sums_of_many_ranks_take_two_rounds(ranks):
    assert [ranks(world, large)[0] for world in (2, 3)] == [1, 2]
