"""A pipeline refuses batches that differ between ranks, and takes those that differ by rounding alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import kagome
from dags import sgd
from kagome.comm.channel import Channel
from kagome.errors import DataError
from kagome.pipelining.dag.same_batch import APART, check_same, mark_of
from unseen import LOSS

SHAPES = [(8,), (256, 3), (64, 3, 32, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mark_tells_another_order_of_the_samples(shape, dtype):
    made = torch.Generator().manual_seed(0)
    batch = (100 * torch.randn(shape, generator=made)).to(dtype if dtype is not torch.bool else torch.float32)
    batch = batch > 0 if dtype is torch.bool else batch
    found = mark_of([batch])
    assert found.dtype == torch.float64
    assert found == mark_of([batch.clone()])
    assert (found - mark_of([batch.roll(1, 0)])).abs() > 100 * APART
    assert (found - mark_of([batch.flip(0)])).abs() > 100 * APART


@given(st.integers(0, 10**6), st.sampled_from(SHAPES))
def test_a_mark_does_not_tell_the_last_bits(seed, shape):
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    assert (mark_of([batch]) - mark_of([batch * (1 + 1e-7)])).abs() < APART / 10


@pytest.mark.parametrize(
    "batch", [torch.empty(0, 3), torch.tensor([float("nan")]), torch.zeros(4), torch.ones(())]
)
def test_a_mark_of_odd_tensors_is_a_number(batch):
    assert mark_of([batch]).isfinite()
    assert mark_of([]) == 0


def other_batches(channel: Channel) -> list[Any]:
    """Updates, predictions and losses of batches of which the last rank has another, and of one batch."""
    made = torch.Generator().manual_seed(9)
    x, y = torch.randn(8, 4, generator=made), torch.randn(8, 3, generator=made)
    last = channel.rank == channel.size - 1

    def shuffled(value: Tensor) -> Tensor:
        return value.flip(0) if last else value

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    pipe = kagome.pipeline(model, x, loss=LOSS, optimizer=sgd, channel=channel)
    found: list[Any] = []
    for wrong in (
        lambda: pipe.step(shuffled(x), y),
        lambda: pipe.step(x, shuffled(y)),
        lambda: pipe.predict(shuffled(x)),
        lambda: pipe.evaluate(x, shuffled(y)),
    ):
        try:
            wrong()
            found.append("taken")
        except DataError as error:
            found.append(str(error))
    nearly = x * (1 + 1e-7) if last else x
    return [*found, pipe.step(nearly, y), pipe.step(x, y)]


def many_of_one_number(channel: Channel) -> str:
    """Forty inputs of one number each, the same on all ranks: rounding is no difference."""
    numbers = [torch.tensor([0.1 * (place + 1)]) for place in range(40)]
    try:
        check_same(channel, numbers, "a batch")
    except DataError as error:
        return str(error)
    return "same"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equal_batches_of_many_inputs_are_taken(ranks, world):
    assert ranks(world, many_of_one_number) == ["same"] * world


@pytest.mark.parametrize("world", [2, 3, 4])
def test_other_batches_are_refused_and_nothing_is_lost(ranks, world):
    for found in ranks(world, other_batches):
        for message in found[:4]:
            assert f"another one than rank 0's on rank {world - 1} " in message
            assert "DistributedSampler" in message
        # The losses of two updates from the first weights, one after the other.
        assert found[4:] == pytest.approx(two_updates(), rel=1e-5)


def two_updates() -> list[float]:
    """The losses of plain training."""
    made = torch.Generator().manual_seed(9)
    x, y = torch.randn(8, 4, generator=made), torch.randn(8, 3, generator=made)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer, losses = sgd(model.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = LOSS(model(x), y).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
