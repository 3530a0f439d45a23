"""A plateau: when epochs are exact, when weights are kept, and when they are put back."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from kagome.adaptive.plateau import ProgressMonitor, Verdict
from kagome.adaptive.thresholds import BACK, BEGINS, PATIENT


def course(plateau: ProgressMonitor, losses: list[float], first: int = 1) -> list[tuple[bool, str]]:
    """Of each epoch, whether it was exact, and what became of the weights."""
    found = []
    for epoch, loss in enumerate(losses, first):
        held = plateau.held
        found.append((held, plateau.observe(epoch, loss).weights))
    return found


def at(found: list[tuple[bool, str]], weights: str) -> list[int]:
    return [epoch for epoch, (_, turned) in enumerate(found, 1) if turned == weights]


def test_one_that_learns_is_left_alone():
    assert course(ProgressMonitor(), [2 / epoch for epoch in range(1, 300)]) == [(False, "step")] * 299


def test_weights_are_kept_where_history_is_tried_again_and_put_back_where_the_loss_rose():
    """GCN on Cora: 1.72 in epoch 50, and 1.95 after 14 epochs of history."""
    plateau = ProgressMonitor()
    losses = [1.946] * 40 + [1.74] + [1.76] * 9 + [1.93] * 10 + [1.70, 1.57]
    found = course(plateau, losses)
    assert [epoch for epoch, (held, _) in enumerate(found, 1) if held] == [*range(21, 42), *range(56, 63)]
    assert at(found, "keep") == [41, 62]
    assert at(found, "undo") == [50 + BACK]
    assert plateau.held_epochs == 28
    assert plateau.undone == 1


def test_one_that_stays_above_its_goal_has_its_weights_put_back():
    """It did not fall half the way back, and got no further either (1.80 for 90 epochs, from 1.73)."""
    found = course(ProgressMonitor(), [1.946] * 30 + [1.73] + [1.80] * 90)
    assert at(found, "keep")[0] == 31
    assert at(found, "undo") == [31 + BEGINS]


def test_slow_progress_is_not_undone():
    """The goal is far, but the loss falls all the time."""
    found = course(ProgressMonitor(), [1.6 - epoch / 3000 for epoch in range(300)])
    assert at(found, "keep") == [BEGINS + PATIENT]
    assert at(found, "undo") == []
    assert [epoch for epoch, (held, _) in enumerate(found, 1) if held] == [*range(21, 121)]


def test_a_slow_beginning_is_one():
    """GCNII on Squirrel: 1.611, in epoch 20 1.573, in epoch 60 1.522."""
    losses = [1.611 - 0.038 * min(epoch / 20, 1) - 0.001275 * max(epoch - 20, 0) for epoch in range(100)]
    assert course(ProgressMonitor(), losses) == [(False, "step")] * 100
    swaying = [1.611 - 0.2 * (epoch == 50) - 0.05 for epoch in range(120)]  # once below the goal
    assert not any(held for held, _ in course(ProgressMonitor(), [1.611, *swaying]))


def test_nothing_is_put_back_that_was_not_kept():
    """It learned by itself and fell back; or its weights are not known any more."""
    assert at(course(ProgressMonitor(), [1.0] * 5 + [0.85] * 5 + [0.99] * 30), "undo") == []
    plateau = ProgressMonitor()
    course(plateau, [1.0] * 30 + [0.8])
    plateau.resume(kept=False)
    assert plateau.observe(32, 1.0) == Verdict()
    found = [plateau.observe(epoch, 1.0) for epoch in range(33, 32 + BACK)]
    assert found[-1].text.startswith(f"epoch {31 + BACK}: exact epochs until the loss is below 0.81,")
    assert found[-1].weights == "step"


def test_what_is_said():
    plateau, said = ProgressMonitor(), []
    for epoch in range(1, 60):
        loss = 0.8 if epoch == 30 else 1.0
        said += [turn.text] if (turn := plateau.observe(epoch, loss)).text else []
    assert said == [
        "epoch 20: exact epochs until the loss is below 0.9, 100 at most (it is 1, in the first epoch it was "
        "1; probes say nothing there)",
        "epoch 30: history is tried again (the loss is 0.8)",
        "epoch 35: weights of a loss of 0.8 again, and exact epochs until the loss is below 0.81, 100 at "
        "most (it is 1, in the first epoch it was 1; probes say nothing there)",
    ]


def test_a_run_whose_beginning_nobody_saw_has_learned():
    """From a checkpoint of parts of the graph, or of a run without a guard: its loss hardly falls."""
    plateau = ProgressMonitor()
    plateau.resume(kept=False)
    assert course(plateau, [0.5 + 1e-3 * (epoch % 3) for epoch in range(200)]) == [(False, "step")] * 200


@pytest.mark.parametrize("loss", [0.0, -1.0])
def test_of_some_losses_no_share_says_anything(loss):
    assert course(ProgressMonitor(), [loss] * 50) == [(False, "step")] * 50


def waves(period: int, low: float) -> Callable[[int], float]:
    return lambda epoch: low if epoch // period % 2 else 1.0


@given(st.integers(1, 60), st.floats(0.3, 1.0), st.integers(1, 250))
def test_it_goes_on_from_what_another_knew(period, low, stopped):
    losses = [waves(period, low)(epoch) for epoch in range(stopped + 100)]
    whole, before = ProgressMonitor(), ProgressMonitor()
    expected = course(whole, losses)
    assert course(before, losses[:stopped]) == expected[:stopped]
    after = ProgressMonitor(json.loads(json.dumps(before.state_dict())))
    assert course(after, losses[stopped:], stopped + 1) == expected[stopped:]
    assert after.state_dict() == whole.state_dict()


@given(st.lists(st.floats(0.1, 2.0), min_size=1, max_size=400))
def test_only_a_worse_model_is_undone(losses):
    """And never for longer than it is patient, with as long between."""
    plateau, run = ProgressMonitor(), 0
    for epoch, loss in enumerate(losses, 1):
        kept, run = plateau.kept, run + 1 if plateau.held else 0
        assert run <= PATIENT
        if plateau.observe(epoch, loss).weights == "undo":
            assert kept is not None
            assert min(losses[max(epoch - BACK, 0) : epoch]) > kept
            assert plateau.held
