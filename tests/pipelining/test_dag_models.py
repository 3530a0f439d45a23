"""Modules of many kinds give plain training's numbers in a pipeline, or are refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kagome
from dags import sgd
from kagome.comm.channel import Channel
from kagome.errors import ConfigError
from unseen import LOSS, MODELS, piped, plain

EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}


@pytest.mark.some(1)
@pytest.mark.parametrize(("world", "schedule"), [(1, "auto"), (2, "auto"), (2, "zero-bubble")])
def test_gradients_are_plain_trainings(ranks, world, schedule):
    found = ranks(world, piped, list(MODELS), schedule)
    for name in MODELS:
        losses, gradients, scores, state = plain(name)
        seen = set()
        for rank in found:
            assert not isinstance(rank[name], str), f"{name}: {rank[name]}"
            assert rank[name][0] == pytest.approx(losses, rel=0, abs=1e-10), name
            torch.testing.assert_close(rank[name][2], scores, **EXACT, msg=name)
            torch.testing.assert_close(rank[name][3], state, **EXACT, msg=name)
            for key, gradient in rank[name][1].items():
                torch.testing.assert_close(gradient, gradients[key], **EXACT, msg=f"{name}: {key}")
                seen.add(key)
        assert seen >= {key for key, gradient in gradients.items() if gradient is not None}, name


def under_autocast(channel: Channel, schedule: Any, *on: bool) -> Any:
    """Two updates and a prediction in one block each: of the pipeline, of both updates, of predictions."""
    torch.manual_seed(channel.rank)  # rank 0's weights count
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = batch()
    blocks = [torch.autocast("cpu", dtype=torch.bfloat16, enabled=each) for each in on]
    try:
        with blocks[0]:
            pipe = kagome.pipeline(model, x, loss=LOSS, optimizer=sgd, schedule=schedule, channel=channel)
        with blocks[1]:
            losses = [pipe.step(x, y) for _ in range(3)]
        with blocks[2]:
            return losses, pipe.predict(x).float()
    except ConfigError as error:
        return str(error)


def batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(9)
    return torch.randn(8, 4, generator=made), torch.randn(8, 3, generator=made)


@pytest.mark.parametrize("schedule", ["auto", "zero-bubble"])
def test_autocast_around_the_calls_trains_as_plain_does(ranks, schedule):
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), batch()
    optimizer, losses = sgd(model.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = LOSS(model(x), y).mean()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(x).float()
    assert losses[0] - losses[2] > 0.02
    for found in ranks(2, under_autocast, schedule, True, True, True):
        assert found[0] == pytest.approx(losses, abs=5e-3)
        torch.testing.assert_close(found[1], scores, rtol=0, atol=3e-2)


@pytest.mark.parametrize("on", [(True, False, False), (False, True, False), (True, True, False)])
def test_autocast_that_the_model_was_not_looked_at_under_is_refused(ranks, on):
    for found in ranks(2, under_autocast, "auto", *on):
        assert "under the same torch.autocast, or all under none" in found
