"""Values between stages as bytes: which are coded, how large they are, and by what they draw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kagome.adaptive.stage_codec import StageCodec, decoded_values
from kagome.comm.codec import Codec
from kagome.comm.exchange import Work
from kagome.errors import ModelError
from kagome.model.trace.shapes import Value


class Come(Work):
    """A message that is there."""

    def __init__(self, message: Tensor) -> None:
        self.message = message

    def wait(self) -> Tensor:
        return self.message


def value(*shape: int, kind: str = "rows", dtype: torch.dtype | None = torch.float32) -> Value:
    return Value(kind, shape, dtype, True)  # type: ignore[arg-type]


def there(
    codec: StageCodec, rows: Tensor, row_ids: Tensor, *, epoch: int = 1, backward: bool = False
) -> Tensor:
    """What a reader gets."""
    size = codec.size(value(*rows.shape[1:], dtype=rows.dtype), tuple(rows.shape))
    assert size is not None
    message = codec.encode("x", rows, row_ids, size, epoch, backward=backward, where="a test")
    assert message.shape == (size,)
    out = decoded_values(Come(message), codec.codec, tuple(rows.shape), rows.dtype).wait()
    assert (out.shape, out.dtype) == (rows.shape, rows.dtype)
    return out


@pytest.mark.parametrize("shape", [(10,), (3, 5), (2, 3, 4), (10, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_of_any_shape(shape, dtype):
    rows = torch.randn(13, *shape).to(dtype)
    found = there(StageCodec("int8", 0, 0), rows, torch.arange(13))
    # A step is a 255th of a row's span, and a bfloat16 may be rounded to it once more.
    step = (
        (rows.flatten(1).amax(1) - rows.flatten(1).amin(1)).double()
        / 255
        * (3 if dtype == torch.bfloat16 else 1.02)
    )
    assert ((found - rows).flatten(1).double().abs().amax(1) <= step + 1e-6).all()
    assert not torch.equal(found, rows)


@pytest.mark.parametrize(
    "other",
    [
        value(8, kind="edges"),
        value(8, kind="fixed"),
        value(kind="none", dtype=None),
        value(8, dtype=torch.int64),
        value(8, dtype=torch.bool),
        value(8, dtype=torch.complex64),
    ],
)
def test_what_is_no_row_of_numbers_goes_as_it_is(other):
    assert StageCodec("int8", 0, 0).size(other, (100, 8)) is None


def test_what_would_be_longer_goes_as_it_is():
    """A row has a head of 6 bytes: one number of a row is shorter without."""
    onebit, cast = StageCodec("onebit", 0, 0), StageCodec("bf16", 0, 0)
    assert onebit.size(value(), (100,)) is None
    assert onebit.size(value(1), (100, 1)) is None
    assert onebit.size(value(2), (100, 2)) == Codec("onebit").size(100, 2, torch.float32) < 800
    assert onebit.size(value(8), (0, 8)) is None
    assert cast.size(value(8, dtype=torch.bfloat16), (10, 8)) is None
    assert cast.size(value(8), (10, 8)) == 160
    assert StageCodec("fp32", 0, 0).size(value(8), (10, 8)) is None
    assert StageCodec(None, 0, 0).exact
    assert StageCodec("none", 0, 0).size(value(8), (10, 8)) is None


def test_rows_draw_by_their_vertices_whatever_the_chunks():
    codec, rows, row_ids = StageCodec("int2", 5, 1), torch.randn(20, 6), torch.randperm(1000)[:20]
    whole = there(codec, rows, row_ids)
    for chunk in (torch.arange(7), torch.tensor([19, 3, 11])):
        assert torch.equal(there(codec, rows[chunk], row_ids[chunk]), whole[chunk])


def test_draws_differ_by_epoch_seed_direction_and_for_gradients_by_stage():
    rows, row_ids = torch.randn(50, 16), torch.arange(50)

    def drawn(seed: int = 0, stage: int = 0, epoch: int = 1, backward: bool = False) -> Tensor:
        return there(StageCodec("onebit", seed, stage), rows, row_ids, epoch=epoch, backward=backward)

    assert torch.equal(drawn(), drawn())
    assert torch.equal(drawn(stage=0), drawn(stage=1))
    for other in (drawn(seed=1), drawn(epoch=2), drawn(backward=True)):
        assert not torch.equal(other, drawn())
    assert not torch.equal(drawn(stage=0, backward=True), drawn(stage=1, backward=True))


def test_for_a_block_it_may_be_another():
    codec = StageCodec("onebit", 0, 0)
    with codec.using("none"):
        assert codec.exact
        with codec.using("int8"):
            assert codec.codec.name == "int8"
    assert codec.codec.name == "onebit"


def test_what_it_loses_is_measured_now_and_then():
    codec, rows = StageCodec("int4", 0, 0), torch.randn(300, 8)
    found = {}
    for epoch in (3, 4, 11, 12):
        there(codec, rows, torch.arange(300), epoch=epoch)
        found[epoch] = codec.take_counts().errors
    assert [bool(errors) for errors in found.values()] == [True, False, True, False]
    assert found[3] == {"x (stage) forward": pytest.approx(0.1, rel=0.4)}


def test_numbers_that_are_not_finite_are_named():
    rows = torch.randn(5, 8)
    rows[3, 2] = torch.inf
    with pytest.raises(ModelError, match=r"int8(.|\n)*1 of 5 rows(.|\n)*a test"):
        there(StageCodec("int8", 0, 0), rows, torch.arange(5))
