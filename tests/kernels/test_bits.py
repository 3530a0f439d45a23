"""Few-bit codes: the same bits by every way, right on the mean, near each number; what cannot be coded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from bit_cases import KEY, Case, assert_same, cases, code, same, stamp_that_draws
from kagome.kernels.quantize import cpu, ops
from kagome.kernels.quantize.ops import LEAST_SPAN, WIDTHS, ReferenceCodec, drawn, groups

each_way = pytest.mark.parametrize("way", [ReferenceCodec, cpu], ids=["plain", "loops"])
each_width = pytest.mark.parametrize("few", WIDTHS)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# The same bits by every way -----------------------------------------------------------------------


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(cases())
def test_loops_give_the_bits_of_plain(case: Case) -> None:
    x, index, row_ids, key, few = case
    one, other = (code(way, x, few, index=index, row_ids=row_ids, key=key) for way in (ReferenceCodec, cpu))
    assert_same(one, other)
    assert one.bad == 0


@each_width
@pytest.mark.parametrize("width", [1, 3, 4, 7, 15, 16, 17, 31, 128, 200])
def test_every_width_of_rows_has_its_vectors(width: int, few: int) -> None:
    x = torch.randn(100, width)  # more rows than the loops take at a time
    index = torch.randint(0, 100, (61,))
    assert_same(code(ReferenceCodec, x, few), code(cpu, x, few))
    assert_same(code(ReferenceCodec, x, few, index=index), code(cpu, x, few, index=index))


def test_loops_give_the_bits_of_plain_in_a_million_numbers() -> None:
    """Each is rounded as often as the other: what is rounded once more differs in one of a million."""
    for few in (4, 8):
        x = torch.randn(8000, 150)
        assert_same(code(ReferenceCodec, x, few), code(cpu, x, few))


@each_width
def test_any_number_of_threads_gives_the_same_bits(few: int, threads: Callable[[int], None]) -> None:
    x, index = torch.randn(3000, 100), torch.randint(0, 3000, (2501,))
    x[17, 3], x[2900, 99] = torch.inf, torch.nan
    rows = torch.arange(3000)
    found = []
    for number in (1, 2, 5):
        threads(number)
        found.append((code(cpu, x, few), code(cpu, x[20:2800], few, index=index.clamp(max=2779))))
        assert found[-1][0].bad == 2
    whole = (rows != 17) & (rows != 2900)
    for every, picked in found[1:]:
        assert same(every.restored[whole], found[0][0].restored[whole])
        assert_same(picked, found[0][1])
    assert_same(found[0][1], code(ReferenceCodec, x[20:2800], few, index=index.clamp(max=2779)))


@each_way
def test_bytes_hold_rows_from_their_low_bits_on(way: Any) -> None:
    body = torch.tensor([[0b10110001, 0b00001111], [0b00000010, 0b00000001]], dtype=torch.uint8)
    low, one = torch.zeros(10), torch.full((10,), 0x3F80, dtype=torch.int16)  # a span of 1
    out = torch.empty(10, 2)
    way.decode(body, low, one, 1, out)
    assert out[:, 0].tolist() == [1, 0, 0, 0, 1, 1, 0, 1, 0, 1]
    assert out[:, 1].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 1, 0]
    out, three = torch.empty(3, 2), torch.full((3,), 0x4040, dtype=torch.int16)
    way.decode(body[:1], low[:3], three, 2, out)
    assert out.tolist() == [[1, 3], [0, 3], [3, 0]]


@each_way
def test_views_are_read_as_they_are(way: Any) -> None:
    x = torch.randn(20, 30)
    assert_same(code(way, x.t()[:, ::2], 2), code(way, x.t()[:, ::2].contiguous(), 2))


# The mean, and how far from it --------------------------------------------------------------------


@each_way
@each_width
@pytest.mark.parametrize("over", ["row_ids", "keys"])
def test_restored_numbers_are_right_on_the_mean(way: Any, few: int, over: str) -> None:
    """Each number within five standard errors; one of two ways has other rows between those of one vertex."""
    x = torch.cat([torch.randn(4, 9), torch.rand(2, 9) * 1.001 - 7, torch.randn(2, 9) ** 5])
    draws = 3000 if over == "row_ids" else 400
    if over == "row_ids":
        coded = code(way, x.repeat(draws, 1), few)
        restored = coded.restored.view(draws, *x.shape).double()
    else:
        runs = [code(way, x, few, key=key) for key in range(draws)]
        coded, restored = runs[0], torch.stack([run.restored for run in runs]).double()
    step = coded.step[: len(x)].double()
    raw = x.amax(1) - x.amin(1)
    assert (step[:, 0] * (2**few - 1) > raw).any()  # some span was rounded up
    part = (x.double() - x.double().amin(1, keepdim=True)) / step % 1
    error = step * (part * (1 - part) / draws).sqrt()
    slack = 1e-6 * step + 1e-6 * x.abs()  # float32's own rounding
    assert ((restored.mean(0) - x).abs() <= 5 * error + slack).all()
    rounded = (part > 0.01) & (part < 0.99)
    assert (restored.std(0)[rounded] > 0).all()


@each_way
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_no_number_is_off_by_more_than_a_step(way: Any, case: Case) -> None:
    x, index, row_ids, key, few = case
    coded = code(way, x, few, index=index, row_ids=row_ids, key=key)
    wanted = x if index is None else x[index]
    off = (coded.restored.double() - wanted.double()).abs()
    # Float32 rounds the product and the sum.
    slack = 2.0**-22 * (coded.step.double() * (2**few - 1) + wanted.abs().amax(1, keepdim=True)) + 2.0**-149
    assert (off <= coded.step.double() + slack).all()


@each_way
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_spans_are_rounded_up_and_by_little(way: Any, case: Case) -> None:
    x, _, row_ids, key, few = case
    if len(x) != len(row_ids):
        row_ids = torch.arange(len(x))
    coded = code(way, x, few, row_ids=row_ids, key=key)
    low, raw = x.amin(1), x.amax(1) - x.amin(1)
    held = (coded.span.int() << 16).view(torch.float32)
    assert torch.equal(coded.low, low)
    assert (held >= raw).all()
    assert (held <= (raw.double() * (1 + 2.0**-7)).clamp(min=LEAST_SPAN)).all()
    assert torch.equal(held == 0, raw == 0)


@each_way
@each_width
def test_constant_rows_come_back_exactly(way: Any, few: int) -> None:
    each = torch.tensor([0.0, -0.0, 1.1, -3.7, 1e-41, -1e-38, 1e38, -3.4e38, 3.4e38])
    coded = code(way, each.unsqueeze(1).expand(9, 21), few)
    assert coded.bad == 0
    assert torch.equal(coded.restored, each.unsqueeze(1).expand(9, 21))
    assert not coded.span.any()
    mixed_zeros = torch.tensor([[0.0, -0.0, 0.0], [-0.0, 0.0, -0.0]])
    assert same(code(way, mixed_zeros, few).low, torch.zeros(2))


@each_way
@each_width
def test_spans_at_the_ends_of_float32(way: Any, few: int) -> None:
    low_high = [(0, 1e-45), (-1e-38, 1e-38), (0, 2.0**-118), (-1e38, 1e38), (0, 3e38), (1e38, 1.5e38)]
    x = torch.tensor(low_high, dtype=torch.float64).float()
    coded = code(way, x, few)
    assert coded.bad == 0
    assert torch.equal(coded.low, x[:, 0])
    held = coded.step[:, 0].double() * (2**few - 1)
    assert (held[:3] - LEAST_SPAN).abs().max() < 1e-6 * LEAST_SPAN  # all that are less count as this
    assert ((coded.restored - x).abs() <= coded.step * 1.00001).all()
    beyond = torch.tensor([(-3e38, 3e38), (0, 3.4e38), (-3.4e38, 0), (0, 1)])
    assert code(way, beyond, few).bad == 3  # 3.4e38 is a float32, but its span is rounded up


@each_way
@each_width
@pytest.mark.parametrize("column", [0, 2, 17, 20])
def test_the_largest_draw_does_not_carry(way: Any, few: int, column: int) -> None:
    row_ids = torch.tensor([stamp_that_draws(0xFFFFFFFF, column), stamp_that_draws(0, column)] * 8)
    draws = drawn(row_ids, 0, 21)[:, column]
    assert torch.equal(draws, torch.tensor([1 - 2.0**-24, 0.0] * 8))
    levels = 2**few - 1
    x = torch.zeros(16, 21)
    x[:, 1] = x[:, column] = levels  # a span that needs no rounding
    coded = code(way, x, few, row_ids=row_ids, key=0)
    assert torch.equal(coded.restored[:, column], x[:, column])
    assert coded.restored[:, 4:17].count_nonzero() == 0


# What cannot be coded -----------------------------------------------------------------------------


@each_way
@each_width
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("width", [1, 3, 6, 16, 21, 37])
def test_a_number_that_is_none_is_found_in_any_place(way: Any, few: int, value: float, width: int) -> None:
    x = torch.randn(2 * width + 1, width)
    good = code(way, x, few)
    spoiled = x.clone()
    spoiled[range(1, 2 * width, 2), range(width)] = torch.tensor(value).copysign(torch.tensor(value))
    coded = code(way, spoiled, few)
    assert (good.bad, coded.bad) == (0, width)
    assert torch.equal(coded.low[::2], good.low[::2])
    assert torch.equal(coded.span[::2], good.span[::2])
    assert torch.equal(coded.restored[::2], good.restored[::2])
    assert code(way, spoiled, few, index=torch.tensor([1, 0, 1, 2])).bad == 2


@each_way
@each_width
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_code(way: Any, few: int, shape: tuple[int, int]) -> None:
    coded = code(way, torch.empty(shape), few)
    assert coded.bad == 0
    assert (coded.low.shape, coded.span.shape) == ((shape[0],), (shape[0],))
    assert (coded.low.dtype, coded.span.dtype) == (torch.float32, torch.int16)
    assert coded.restored.shape == shape


def test_bytes_a_column() -> None:
    assert [groups(9, few) for few in WIDTHS] == [2, 3, 5, 9]
    assert [groups(8, few) for few in WIDTHS] == [1, 2, 4, 8]
    assert [groups(0, few) for few in WIDTHS] == [0, 0, 0, 0]


# Draws --------------------------------------------------------------------------------------------


@each_way
@each_width
def test_draws_follow_stamps_not_places(way: Any, few: int) -> None:
    x, row_ids = torch.randn(37, 19), torch.randperm(10**6)[:37] * 2**30
    whole = code(way, x, few, row_ids=row_ids)
    assert_same(whole, code(way, x, few, row_ids=row_ids))  # repeatable
    order = torch.randperm(37)
    moved = code(way, x[order], few, row_ids=row_ids[order])
    assert same(moved.restored, whole.restored[order])
    picked = code(way, x, few, index=order[:5], row_ids=row_ids[order[:5]])
    assert same(picked.restored, whole.restored[order[:5]])
    narrow = torch.cat(
        [x[:, :7], x.amin(1, True), x.amax(1, True)], dim=1
    )  # columns, not places, are drawn by
    assert same(code(way, narrow, few, row_ids=row_ids).restored[:, :7], whole.restored[:, :7])


@pytest.mark.parametrize("bit", [0, 1, 15, 31, 32, 47, 62, 63])
def test_every_bit_of_stamps_and_keys_counts(bit: int) -> None:
    row_ids = torch.arange(1000)
    other = row_ids ^ (1 << bit if bit < 63 else -(1 << 63))
    first = drawn(row_ids, KEY, 16)
    for second in (drawn(other, KEY, 16), drawn(row_ids, KEY ^ 1 << bit, 16)):
        assert (first == second).float().mean() < 0.001
        together = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
        assert abs(together) < 5 / first.numel() ** 0.5


def test_draws_are_uniform_with_24_bits() -> None:
    for key, spaced in ((0, 1), (KEY, 1), (2**63, 2**32), (1, 128)):
        u = drawn(torch.arange(4000) * spaced, key, 128).double()
        assert u.min() >= 0
        assert u.max() < 1
        n = u.numel()
        words = (u * 2**24).long()
        assert torch.equal(words.double(), u * 2**24)
        share = torch.stack([(words >> bit & 1).double().mean() for bit in range(24)])
        assert (share - 0.5).abs().max() < 5 * 0.5 / n**0.5
        for shift in (0, 8, 16):  # each byte: chi square of 255 degrees, mean 255, deviation 22.6
            count = torch.bincount((words >> shift & 255).flatten(), minlength=256).double()
            assert ((count - n / 256) ** 2 / (n / 256)).sum() < 255 + 6 * 22.6


def test_draws_of_rows_columns_and_neighbours_are_apart() -> None:
    """Largest of 128 x 127 / 2 correlations: for normal ones, 4.5 deviations in one of 18 trials."""
    for spaced in (1, 2**20):
        u = drawn(torch.arange(4000) * spaced, KEY, 128).double()
        for turned in (u, u[:128].t(), (u - 0.5).abs(), u * 256 % 1):
            apart = torch.corrcoef(turned.t())
            apart.fill_diagonal_(0)
            assert apart.abs().max() < 6 / turned.size(0) ** 0.5
        after = torch.corrcoef(torch.stack([u[:-1].flatten(), u[1:].flatten()]))[0, 1]
        assert abs(after) < 5 / u.numel() ** 0.5
        sums = u.sum(1)  # of a row: of variance 128 / 12 if its numbers are apart
        assert abs(sums.var() / (128 / 12) - 1) < 5 * (2 / 4000) ** 0.5


def test_which_way_a_device_takes() -> None:
    assert ops._module("cpu") is cpu
    assert ops._module("meta") is ReferenceCodec
