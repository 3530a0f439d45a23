"""Undo: a model that history throws back has the weights of before, and the optimizer's state."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from kagome.adaptive import plateau
from kagome.adaptive.rollback import KIND, Rollback
from kagome.comm.channel import Channel
from kagome.halo.resumed_rows import NOTHING
from pipelines import data, model, told

HISTORY = {"cross_chunk": "history", "history_epochs": 4}


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def steps(mine: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    found = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = mine(torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("before", [0, 3])
def test_what_was_kept_is_put_back(before):
    """Weights, buffers, the optimizer's state, also where it had none yet: the same steps again, twice."""
    mine = small()
    optimizer = torch.optim.Adam(mine.parameters(), lr=0.1)
    rollback = Rollback(mine, mine.parameters(), mine.buffers())
    assert rollback.tensors == []
    steps(mine, optimizer, range(before))
    assert rollback.apply("keep", optimizer)
    expected = steps(mine, optimizer, range(10, 14))
    assert rollback.apply("step", optimizer)
    for _ in range(2):
        assert not rollback.apply("undo", optimizer)
        assert steps(mine, optimizer, range(10, 14)) == expected


def test_without_anything_kept_a_step_follows():
    mine = small()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    weights = deepcopy(mine.state_dict())
    assert Rollback(mine, mine.parameters(), mine.buffers()).apply("undo", optimizer)
    torch.testing.assert_close(mine.state_dict(), weights, rtol=0, atol=0)


class Remembered:
    """What a checkpoint would give back."""

    epoch = 5

    def __init__(self, entries: dict[Any, Any]) -> None:
        self.entries = entries

    def take(self, kind: str, key: Any, epoch: int) -> Any:
        return self.entries.get((kind, key))


def test_it_goes_by_way_of_a_checkpoint_whole_or_not_at_all():
    mine = small()
    optimizer = torch.optim.Adam(mine.parameters(), lr=0.1)
    steps(mine, optimizer, range(3))
    rollback, other = (Rollback(mine, mine.parameters(), mine.buffers()) for _ in range(2))
    rollback.keep(optimizer)
    expected = steps(mine, optimizer, range(10, 14))
    entries = {(kind, key): state for kind, key, state in rollback.state_entries()}
    assert other.restore(Remembered(entries), 4)
    assert not other.apply("undo", optimizer)
    assert steps(mine, optimizer, range(10, 14)) == expected
    del entries[KIND, "0.weight"]
    assert not other.restore(Remembered(entries), 4)
    assert not other.restore(NOTHING, 4)
    assert other.apply("undo", optimizer)
    assert Rollback(mine, [], []).restore(
        NOTHING, 4
    )  # a stage without weights: it must not speak for the others


# Runs whose loss rises ---------------------------------------------------------------------------------


def climbs(
    channel: Channel,
    kind: str,
    parallel: dict[str, Any],
    epochs: int,
    out: str | None = None,
    resume: str | None = None,
    save_rows: bool = True,
) -> Any:
    """Adam goes uphill; after two epochs there are two exact ones, and so on."""
    with mock.patch.multiple(plateau, LEARNS=0.01, BEGINS=2, PATIENT=2):
        return told(
            model(kind, 0.0, seed=1),
            data(validated=True),
            epochs,
            parallel,
            optimizer=lambda given: torch.optim.Adam(given, lr=0.01, maximize=True),
            out=out,
            resume=resume,
            train={"save_rows": save_rows},
        )


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["gcnii", "normed"])
@pytest.mark.parametrize(
    "parallel", [{"chunks": 3}, {"pipe": 2, "chunks": 3}, {"pipe": 2, "graph": 2, "chunks": 2}]
)
def test_an_epoch_runs_again_with_the_weights_of_before(ranks, tmp_path, kind, parallel):
    """Epochs 3 and 4 are exact, weights are kept in the latter, and put back in epoch 6.

    So epoch 7 has the loss of epoch 4, and the step that follows leads to the loss of epoch 5, whose gradient
    was computed twice, once exactly.
    """
    world = parallel.get("pipe", 1) * parallel.get("graph", 1)
    parallel = {**parallel, **HISTORY}
    found = ranks(world, climbs, kind, parallel, 9)
    for rank in found:
        losses = rank["losses"]
        assert losses[3] < losses[4]
        assert losses[6:8] == pytest.approx(losses[3:5], abs=1e-12)
        assert any("weights of a loss of" in note for note in rank["notes"])
    folder = str(tmp_path / "run")
    ranks(world, climbs, kind, parallel, 5, folder)
    for rank in ranks(world, climbs, kind, parallel, 9, folder, folder):
        assert rank["losses"] == pytest.approx(found[0]["losses"], abs=1e-12)
        torch.testing.assert_close(rank["weights"], found[0]["weights"], rtol=0, atol=1e-11)


def test_a_run_that_does_not_know_them_goes_on_without(ranks, tmp_path):
    folder, parallel = str(tmp_path / "run"), {"pipe": 2, "chunks": 3, **HISTORY}
    ranks(2, climbs, "gcnii", parallel, 5, folder, None, False)
    (found,) = ranks(1, climbs, "gcnii", {"chunks": 3, **HISTORY}, 9, folder, folder)
    assert found["losses"][6] > found["losses"][3]
    assert not any("weights of a loss of" in note for note in found["notes"])
