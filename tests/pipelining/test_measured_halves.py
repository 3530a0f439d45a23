"""The operators of a model are measured with their backward in two halves, where the schedule may need it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kagome
from dags import sgd
from kagome.comm.channel import Channel
from kagome.errors import ModelError
from kagome.model.operators.graph import branches_of
from kagome.model.operators.samples import inputs_of
from kagome.profile.operators import measured
from unseen import LOSS


class Once(torch.autograd.Function):
    """A user's function whose backward frees what it needs, and so runs once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.held = x, weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.held
        del ctx.held
        return gradient * weight, gradient * x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, 3), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Once.apply(x, self.weight.expand_as(x))
        return found


def twice(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, 3), *more)


def test_halves_are_measured_at_the_same_sizes_and_leave_the_model_as_it_was() -> None:
    model, x = twice(), torch.randn(4, 4)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    branches = branches_of(model, x)
    found = measured(model, branches, inputs_of(model, x), (1, 4), repeats=1, halves=True)
    for one in found.operators:
        assert [size for size, _ in one.first_half] == [size for size, _ in one.second_half] == [1, 4]
    by_step = {one.name.split(".")[-1]: one for one in found.operators}
    assert all(second > 0 for _, second in by_step["3"].second_half)
    assert all(first > 0 for _, first in by_step["3"].first_half)
    assert all(weight.grad is None for weight in model.parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
    alone = measured(model, branches, inputs_of(model, x), (1, 4), repeats=1)
    assert all(one.first_half == one.second_half == () for one in alone.operators)


def with_once(channel: Channel, schedule: Any) -> Any:
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    try:
        pipe = kagome.pipeline(
            twice(Scaled()),
            x,
            loss=LOSS,
            plan="auto",
            schedule=schedule,
            optimizer=sgd,
            channel=channel,
        )
        return pipe.plan.schedule, pipe.step(x, y)
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("world", [1, 2])
def test_auto_keeps_to_kfkb_where_a_backward_cannot_be_done_in_two(ranks, world):
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    loss = float(LOSS(twice(Scaled())(x), y).mean().detach())
    for found in ranks(world, with_once, "auto"):
        assert found == ("kfkb", pytest.approx(loss, rel=1e-6))


def test_zero_bubble_that_was_asked_for_is_refused(ranks):
    for found in ranks(2, with_once, "zero-bubble"):
        assert "no attribute 'held'" in found
