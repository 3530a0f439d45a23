"""Codecs: sizes to the byte, what comes back, from wherever a message begins, and what is refused."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kagome.comm import codec as comm_codec
from kagome.comm.codec import BITS, FINER, SEGMENTS, Codec, UnreadRefusals
from kagome.config import CodecName
from kagome.errors import ModelError

FEW: tuple[CodecName, ...] = ("onebit", "int2", "int4", "int8")
SHORT: tuple[CodecName, ...] = ("fp32", "bf16", "fp16")
ALL: tuple[CodecName, ...] = (*FEW, *SHORT, "none")
TYPES = (torch.float32, torch.float64, torch.bfloat16)
KEY = 77


def message_of(
    codec: Codec,
    rows: Tensor,
    *,
    index: Tensor | None = None,
    row_ids: Tensor | None = None,
    key: int = KEY,
    begin: int = 0,
) -> Tensor:
    """A message that begins there in a larger buffer; nothing beside it may be written."""
    count = rows.size(0) if index is None else index.numel()
    row_ids = torch.arange(count) if row_ids is None else row_ids
    size = codec.size(count, rows.size(1), rows.dtype)
    buffer = torch.full((begin + size + 9,), 0x5A, dtype=torch.uint8)
    message = buffer[begin : begin + size]
    codec.encode(rows, index, row_ids, key, message, where="a test")
    assert (buffer[:begin] == 0x5A).all()
    assert (buffer[begin + size :] == 0x5A).all()
    return message


def restored(codec: Codec, message: Tensor, like: Tensor) -> Tensor:
    return codec.decode(message, torch.full_like(like, torch.nan))


# Sizes --------------------------------------------------------------------------------------------


@given(st.integers(1, 1000), st.integers(1, 500), st.sampled_from(TYPES))
def test_sizes_are_the_header_and_the_codes(rows: int, width: int, dtype: torch.dtype) -> None:
    for name, few in (("onebit", 1), ("int2", 2), ("int4", 4), ("int8", 8)):
        assert Codec(name).size(rows, width, dtype) == 6 * rows + -(-rows * few // 8) * width
    for name, item in (("fp32", 4), ("bf16", 2), ("fp16", 2), ("none", dtype.itemsize)):
        assert Codec(name).size(rows, width, dtype) == rows * width * item


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_no_bytes(name: CodecName) -> None:
    codec = Codec(name)
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert codec.size(*shape, torch.float32) == 0
        nothing = message_of(codec, torch.empty(shape))
        assert restored(codec, nothing, torch.empty(shape)).shape == shape


def test_one_bit_is_23_times_fewer_bytes_and_more() -> None:
    for width, times in ((128, 23), (256, 26)):
        for rows in (8, 1000):
            message = message_of(Codec("onebit"), torch.randn(rows, width))
            assert message.numel() * times <= rows * width * 4


@settings(deadline=None)
@given(
    st.integers(0, 3000),
    st.integers(1, 300),
    st.sampled_from(ALL),
    st.sampled_from(TYPES),
    st.integers(1, 9999),
)
def test_sheets_have_all_rows_and_the_bytes_of_one(
    rows: int, width: int, name: CodecName, dtype: torch.dtype, least: int
) -> None:
    with mock.patch.object(comm_codec, "LEAST_SEGMENT", least):
        found = Codec(name).segments(rows, width, dtype)
    assert 1 <= len(found) <= SEGMENTS
    assert sum(found) == rows
    assert all(count > 0 for count in found) or rows == 0
    sizes = [Codec(name).size(count, width, dtype) for count in found]
    assert sum(sizes) == Codec(name).size(rows, width, dtype)
    assert len(found) == 1 or sum(sizes) >= 2 * least


@pytest.mark.parametrize("name", ALL)
def test_sheets_restore_what_one_does(name: CodecName) -> None:
    rows, codec, row_ids = torch.randn(200, 9), Codec(name), torch.arange(200) * 7
    whole = restored(codec, message_of(codec, rows, row_ids=row_ids), rows)
    with mock.patch.object(comm_codec, "LEAST_SEGMENT", 64):
        counts = codec.segments(200, 9, torch.float32)
    assert len(counts) == SEGMENTS
    cut = (each.split(counts) for each in (rows, row_ids, whole))
    for some, row_id, expected in zip(*cut, strict=True):
        assert torch.equal(restored(codec, message_of(codec, some, row_ids=row_id), some), expected)


def test_names() -> None:
    assert [Codec(name).bits for name in ALL] == [1, 2, 4, 8, None, None, None, None]
    assert [name for name in ALL if Codec(name).exact] == ["none"]
    sizes = [Codec(name).size(800, 64, torch.float32) for name in FINER]
    assert sizes == sorted(sizes)
    assert set(FINER) == set(ALL) - {"fp32", "fp16"}


# There and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ALL)
def test_rows_come_back_in_their_own_type(name: CodecName, dtype: torch.dtype) -> None:
    rows, codec = torch.randn(37, 21).to(dtype), Codec(name)
    found = restored(codec, message_of(codec, rows), rows)
    assert found.dtype == dtype
    if name in FEW:
        few = BITS[name]
        single = rows.float()
        step = (single.amax(1, True) - single.amin(1, True)) * (1 + 2.0**-7) / (2**few - 1)
        slack = 2.0**-7 * single.abs().max() if dtype == torch.bfloat16 else 1e-5
        assert ((found.float() - single).abs() <= step + slack).all()
        plain = restored(codec, message_of(codec, single), single)
        assert torch.equal(found, plain.to(dtype))  # only the type differs
        assert 1 < found[0].unique().numel() <= 2**few
    else:
        cast = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(name, dtype)
        assert torch.equal(found, rows.to(cast).to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ALL)
def test_picked_rows_are_those_rows(name: CodecName, dtype: torch.dtype) -> None:
    rows, codec = torch.randn(40, 13).to(dtype), Codec(name)
    index, row_ids = torch.randint(0, 40, (29,)), torch.randint(0, 2**62, (29,))
    found = message_of(codec, rows, index=index, row_ids=row_ids)
    assert torch.equal(found, message_of(codec, rows[index], row_ids=row_ids))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("begin", [1, 2, 3, 5, 6, 8])
def test_a_message_may_begin_anywhere(name: CodecName, begin: int) -> None:
    codec = Codec(name)
    for dtype in TYPES:
        rows = torch.randn(11, 7).to(dtype)
        message = message_of(codec, rows, begin=begin)
        assert message.storage_offset() == begin
        assert torch.equal(message, message_of(codec, rows))
        assert torch.equal(restored(codec, message, rows), restored(codec, message.clone(), rows))


@pytest.mark.parametrize("name", FEW)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_row_s_draws_follow_its_stamp(name: CodecName, data: st.DataObject) -> None:
    """Whatever rows it travels with, and wherever among them."""
    codec, width = Codec(name), 17
    count = data.draw(st.integers(1, 30))
    order = data.draw(st.permutations(range(count)))
    kept = order[: data.draw(st.integers(1, count))]
    row_ids = torch.tensor(data.draw(st.lists(st.integers(0, 2**62), min_size=count, max_size=count)))
    rows = torch.randn(count, width)
    whole = restored(codec, message_of(codec, rows, row_ids=row_ids), rows)
    part = message_of(codec, rows, index=torch.tensor(kept), row_ids=row_ids[kept])
    assert torch.equal(restored(codec, part, rows[kept]), whole[kept])


@pytest.mark.parametrize("name", FEW)
def test_messages_repeat_and_change_with_the_key(name: CodecName) -> None:
    rows, codec = torch.randn(64, 32), Codec(name)
    first = message_of(codec, rows)
    assert torch.equal(first, message_of(codec, rows))
    for key in (KEY + 1, KEY + 2**40):
        other = message_of(codec, rows, key=key)
        assert torch.equal(first[: 6 * 64], other[: 6 * 64])  # the header draws nothing
        assert (first != other)[6 * 64 :].float().mean() > 0.1


@pytest.mark.parametrize("name", FEW)
def test_messages_are_right_on_the_mean(name: CodecName) -> None:
    codec, draws = Codec(name), 600
    rows = torch.cat([torch.randn(3, 8), torch.rand(3, 8) * 1.001 + 5])
    found = torch.stack(
        [restored(codec, message_of(codec, rows, key=key), rows).double() for key in range(draws)]
    )
    # A number between two codes is off by at most half a step's deviation.
    step = (rows.amax(1, True) - rows.amin(1, True)) * (1 + 2.0**-7) / (2 ** BITS[name] - 1)
    error = step.double() / 2 / draws**0.5
    assert ((found.mean(0) - rows).abs() <= 5 * error + 1e-6).all()


@pytest.mark.parametrize("name", FEW)
def test_constant_rows_come_back_exactly(name: CodecName) -> None:
    rows, codec = torch.tensor([0.1, -7.3, 0.0, 1e38]).unsqueeze(1).expand(4, 9), Codec(name)
    assert torch.equal(restored(codec, message_of(codec, rows), rows), rows)


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [*FEW, *SHORT])
def test_numbers_that_are_none_are_refused_wherever(
    name: CodecName, value: float, dtype: torch.dtype
) -> None:
    for row, column in ((0, 0), (4, 10), (2, 5), (0, 10), (4, 0)):
        rows = torch.randn(5, 11).to(dtype)
        rows[row, column] = rows[1, 1] = value
        with pytest.raises(ModelError) as caught:
            message_of(Codec(name), rows)
        for word in (f"codec {name}", "2 of 5 rows", "a test", "bf16"):
            assert word in str(caught.value)
        index = torch.tensor([3, row, 3])
        with pytest.raises(ModelError, match="1 of 3 rows"):
            message_of(Codec(name), rows, index=index)
        message_of(Codec(name), rows, index=torch.tensor([3, 3]))  # what is not sent is nobody's concern


@pytest.mark.parametrize("name", FEW)
def test_numbers_too_large_are_refused(name: CodecName) -> None:
    wide = torch.tensor([[-3e38, 3e38], [0, 3.4e38], [-1e38, 1e38], [0, 1]])
    with pytest.raises(ModelError, match="2 of 4 rows"):
        message_of(Codec(name), wide)
    rows = wide[2:]
    assert torch.equal(restored(Codec(name), message_of(Codec(name), rows), rows)[:, 0], rows[:, 0])
    with pytest.raises(ModelError, match="1 of 2 rows"):
        message_of(Codec(name), torch.tensor([[1e300, 0], [1, 2]], dtype=torch.float64))


@pytest.mark.parametrize("name", FEW)
def test_a_finite_row_never_comes_back_infinite(name: CodecName) -> None:
    """A span is rounded up: above the greatest number of a row there must be room for it."""
    high = torch.tensor([[1e38, 3.4028e38], [0, 1]])
    with pytest.raises(ModelError, match="1 of 2 rows"):
        message_of(Codec(name), high)
    low = -high  # where room is above
    assert restored(Codec(name), message_of(Codec(name), low), low).isfinite().all()


def test_casts_make_no_infinity_of_a_finite_number() -> None:
    for name, row in (("bf16", [3.4e38, 1.0]), ("fp32", [1e300, 1.0])):
        with pytest.raises(ModelError, match="1 of 1 rows"):
            message_of(Codec(name), torch.tensor([row], dtype=torch.float64))


def test_fp16_is_refused_where_it_overflows() -> None:
    rows = torch.tensor([[65504.0, 1], [70000, 1], [-1e9, 70000]])
    with pytest.raises(ModelError, match="2 of 3 rows"):
        message_of(Codec("fp16"), rows)
    assert torch.equal(restored(Codec("fp16"), message_of(Codec("fp16"), rows[:1]), rows[:1]), rows[:1])
    assert restored(Codec("bf16"), message_of(Codec("bf16"), rows), rows).isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_a_device_encodes_while_the_host_goes_on(name):
    """To read a tensor of the meta device raises: nothing reads one before the end of the pass."""
    codec, later, meta = Codec(name), UnreadRefusals(), torch.device("meta")
    rows, row_ids = torch.empty(20, 6, device=meta), torch.empty(20, dtype=torch.int64, device=meta)
    message = torch.empty(codec.size(20, 6, rows.dtype), dtype=torch.uint8, device=meta)
    codec.encode(rows, None, row_ids, KEY, message, where="a test", later=later)
    assert len(later._found) == (name != "none")
    if name != "none":
        with pytest.raises(RuntimeError, match="meta"):
            codec.encode(rows, None, row_ids, KEY, message, where="a test")


def test_what_a_device_refused_is_raised_at_the_end_of_the_pass():
    later = UnreadRefusals()
    later.check()
    for bad in (0, 3, 2):
        later.add(torch.tensor(bad), lambda bad: ModelError("none", f"{bad} rows"))
    with pytest.raises(ModelError, match="got 3 rows"):
        later.check()
    later.check()  # once
