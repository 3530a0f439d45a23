"""The guard: which epochs run with history, by what probes find; and a run that it must slow down."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from kagome.adaptive.history import HistoryController, HistoryProbe
from kagome.adaptive.thresholds import HISTORY_FAIR, HISTORY_GOOD, OFTEN


def course(
    history: HistoryController, cosines, epochs: int, loss=lambda epoch: 1 / epoch, said=None
) -> list[str]:
    """The kinds of a run's epochs, each probe finding the next cosine."""
    found, left = [], iter(cosines)
    for epoch in range(1, epochs + 1):
        kind = history.next()
        if kind == "probe":
            history.observe(HistoryProbe(epoch, next(left, 1.0), 1.0, 0.0, history.age))
        told = history.done(kind, loss(history.epochs + 1))
        found.append(kind)
        if told.text and said is not None:
            said.append(told.text)
    return found


def test_trusted_history_is_probed_ever_less():
    found = course(HistoryController(20), [], 400)
    assert found[:2] == ["exact", "probe"]
    probes = [place for place, kind in enumerate(found) if kind == "probe"]
    gaps = [b - a - 1 for a, b in pairwise(probes)]
    assert gaps[:4] == [2, 4, 8, 16]
    assert set(gaps[4:]) == {20}
    # A probe takes rows anew as well.
    last = found[probes[-2] + 1 : probes[-1]]
    assert [place for place, kind in enumerate(last) if kind == "refresh"] == [19]
    assert found.count("exact") == 1
    assert course(HistoryController(1), [], 40)[-10:] == [*["refresh"] * 4, "probe"] * 2


def test_bad_history_is_left():
    history = HistoryController(20)
    found = course(history, [0.1] * 100, 100)
    # Careful epochs are tried first, and then no more.
    assert found[:4] == ["exact", "probe", "refresh", "probe"]
    assert "history" not in found
    assert "refresh" not in found[4:]
    assert history.exact_epochs > 85
    probes = [place for place, kind in enumerate(found) if kind == "probe"]
    assert [b - a - 1 for a, b in pairwise(probes)][:6] == [1, 2, 4, 8, 16, 20]


def test_history_that_is_not_quite_right_is_used_with_care():
    history = HistoryController(20)
    found = course(history, [0.99, 0.99, 0.9, 0.97, 0.97, 0.97], 40)
    before, after = found[: found.index("refresh")], found[found.index("refresh") :]
    assert before == ["exact", "probe", *["history"] * 2, "probe", *["history"] * 4, "probe"]
    assert history.careful
    assert set(after) == {"refresh", "probe"}
    assert [place for place, kind in enumerate(after) if kind == "probe"][:6] == [1, 4, 9, 14, 19, 24]
    assert OFTEN == 4


def test_where_errors_grow_careful_epochs_are_fewer():
    """Of a gradient that is bad after three careful epochs there are two at a time from then on."""
    history, kinds, run = HistoryController(20), [], 0
    for epoch in range(1, 200):
        kind = history.next()
        kinds.append(kind[0])
        if kind == "probe":
            history.observe(
                HistoryProbe(epoch, 0.9 if epoch < 4 else 0.2 if run > 2 else 0.99, 1.0, 0.0, history.age)
            )
        history.done(kind, 1 / epoch)
        run = run + 1 if kind == "refresh" else 0
    text = "".join(kinds)
    assert text.startswith("eprprrprrrrpeep" + "rrp" * 60)


def test_careful_history_is_taken_up_again():
    found = course(HistoryController(20), [0.1, 0.1, 0.1, 0.95, 0.95], 30)
    assert found[:14] == [
        "exact", "probe", "refresh", "probe", "exact", "exact", "probe", *["exact"] * 4, "probe", "refresh",
        "refresh",
    ]  # fmt: skip
    assert found[14] == "probe"


FAIR = (HISTORY_GOOD + HISTORY_FAIR) / 2


def test_a_probe_after_each_careful_epoch_would_cost_what_exact_epochs_do():
    """One careful epoch and its probe take the time of two exact ones."""
    history = HistoryController(20)
    found = course(history, [FAIR] * 100, 100)
    assert found[:4] == ["exact", "probe", "refresh", "probe"]
    assert set(found[4:]) == {"exact", "probe"}
    probes = [place for place, kind in enumerate(found) if kind == "probe"]
    assert [b - a - 1 for a, b in pairwise(probes)][:6] == [1, 2, 4, 8, 16, 20]


def test_between_good_and_fair_careful_epochs_stay_as_many():
    found = course(HistoryController(20), [FAIR, HISTORY_GOOD] + [FAIR] * 100, 40)
    assert found[:4] == ["exact", "probe", "refresh", "probe"]
    assert found[4:] == ["refresh", "refresh", "probe"] * 12


def test_exact_epochs_grow_in_number_until_careful_ones_are_fair():
    """History is good after exact epochs, and bad after two careful ones: each try is followed by more."""
    history, kinds, run = HistoryController(20), [], 0
    for epoch in range(1, 120):
        kind = history.next()
        kinds.append(kind[0])
        if kind == "probe":
            cosine = 0.9 if epoch == 2 else 0.2 if run == 2 and epoch < 70 else 0.99
            history.observe(HistoryProbe(epoch, cosine, 1.0, 0.0, history.age))
        history.done(kind, 1 / epoch)
        run = run + 1 if kind == "refresh" else 0
    text = "".join(kinds)
    tries = "".join(f"rrp{'e' * rest}p" for rest in (2, 4, 8, 16, 20))
    assert text.startswith("eprp" + tries + "rrp" * 10)


def test_what_is_said():
    history = HistoryController(20)
    assert history.observe(HistoryProbe(2, 0.99, 1.0, 0.1, 1)) == ""
    assert "one epoch old" in history.observe(HistoryProbe(3, 0.9, 1.0, 0.1, 1))
    assert "exact epochs come next" in history.observe(HistoryProbe(5, 0.2, 0.4, 0.5, 3))
    assert "history is used again" in history.observe(HistoryProbe(9, 0.95, 1.0, 0.1, 1))


def test_the_summary_has_every_probe():
    history = HistoryController(20)
    assert history.facts() == {}
    assert history.final_notes(stages=True) == ()
    course(history, [0.99, 0.9, 0.2], 20)
    told = history.facts()["history"]
    assert [probe["cosine"] for probe in told["probes"]][:3] == [0.99, 0.9, 0.2]
    assert told["careful_from"] == told["probes"][1]["epoch"] == 5
    assert told["exact_epochs"] == 2
    assert "lowest cosine 0.20 in epoch 7" in history.final_notes(stages=True)[0]
    assert "--parallel.graph" not in history.final_notes(stages=True)[0]
    course(history, [0.2] * 20, 80)
    assert "most of 100 epochs: parts of the graph (--parallel.graph)" in history.final_notes(stages=True)[0]
    assert "--parallel.graph" not in history.final_notes(stages=False)[0]


def test_unwatched_history_is_only_refreshed():
    found = course(HistoryController(3, watch=False), [], 10)
    assert found == ["exact", *["history", "history", "refresh"] * 3]


@given(st.lists(st.floats(0.7, 1), max_size=40), st.integers(1, 60), st.integers(1, 20))
def test_a_guard_goes_on_from_what_another_knew(cosines, at, period):
    """At any epoch, by way of a checkpoint's plain values."""
    whole, before = HistoryController(period), HistoryController(period)
    expected = course(whole, cosines, at + 40)
    assert course(before, cosines, at) == expected[:at]
    after = HistoryController(period, state=json.loads(json.dumps(before.state_dict())))
    assert course(after, cosines[len(before.found) :], 40) == expected[at:]
    assert [found.cosine for found in after.found] == [found.cosine for found in whole.found]
    assert after.exact_epochs == whole.exact_epochs
    assert after.careful is whole.careful


def test_a_model_that_has_learned_nothing_has_exact_epochs():
    """On a first plateau gradients are those of a constant: probes agree, and history holds a model there."""
    history, said = HistoryController(20), []
    found = course(history, [], 60, lambda epoch: 1.946 - 1e-3 * (epoch % 3) if epoch < 35 else 1.7, said)
    assert found[:20] == course(HistoryController(20), [], 20)
    assert set(found[20:35]) == {"exact"}
    assert found[35] == "probe"
    assert "exact" not in found[35:]
    assert history.plateau.held_epochs == 15
    assert history.exact_epochs == 0
    assert said[0].startswith(
        "epoch 20: exact epochs until the loss is below 1.751, 100 at most (it is 1.944,"
    )
    assert said[1] == "epoch 35: history is tried again (the loss is 1.7)"
    assert history.facts()["history"]["plateau_epochs"] == 15
    (note,) = history.final_notes(stages=True)
    assert "0 exact epochs for want of trust, 15 before the loss fell; " in note


def test_a_model_that_falls_back_has_exact_epochs_until_it_is_further():
    """GCN on Cora had learned a little in exact epochs, and lost it in 15 of history."""

    def loss(epoch: int) -> float:
        return (
            1.0 if epoch < 30 else 0.89 if epoch < 40 else 0.96 if epoch < 60 else 0.83 if epoch < 70 else 0.8
        )

    history, said = HistoryController(20), []
    found = course(history, [], 120, loss, said)
    exact = [place + 1 for place, kind in enumerate(found) if kind == "exact"]
    assert exact == [1, *range(21, 31), *range(45, 71)]
    assert [line.split(":")[0] for line in said] == ["epoch 20", "epoch 30", "epoch 44", "epoch 70"]
    assert "below 0.81," in said[2]
    assert history.plateau.held_epochs == len(exact) - 1
    assert history.facts()["history"]["undone"] == 1
    assert "before the loss fell, weights of before put back once; " in history.final_notes(stages=True)[0]


@pytest.mark.parametrize("share", [0.94, 0.85])
def test_a_loss_that_sways_is_no_plateau(share):
    """It is half the way back and more, but not five epochs in a row."""

    def loss(epoch: int) -> float:
        return 1.0 if epoch < 3 or epoch % 5 else 0.89 if epoch % 10 else share

    assert course(HistoryController(20), [], 200, loss).count("exact") == 1


def test_one_that_never_learns_has_exact_epochs_half_the_time():
    history = HistoryController(20)
    found = course(history, [], 420, lambda epoch: 1.946)
    assert [set(found[at : at + 100]) == {"exact"} for at in (20, 120, 220, 320)] == [
        True,
        False,
        True,
        False,
    ]
    assert history.plateau.held_epochs == 200
    assert history.facts()["history"]["exact_epochs"] == 0
    assert "most of 420" not in history.final_notes(stages=True)[0]


def test_what_a_guard_does_not_know_holds_nothing_up():
    """Losses below 0, of which no share says anything; and where nobody is to watch."""
    for history, loss in ((HistoryController(20), -1.0), (HistoryController(20, watch=False), 1.0)):
        assert course(history, [], 60, lambda epoch, loss=loss: loss).count("exact") == 1


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_guard_on_a_plateau_goes_on_from_what_another_knew(at, learns):
    def loss(epoch: int) -> float:
        return 1.0 if epoch < learns else 0.5

    whole, before = HistoryController(20), HistoryController(20)
    expected = course(whole, [], at + 60, loss)
    assert course(before, [], at, loss) == expected[:at]
    after = HistoryController(20, state=json.loads(json.dumps(before.state_dict())))
    assert course(after, [], 60, loss) == expected[at:]
    assert after.state_dict() == whole.state_dict() | {"found": after.state_dict()["found"]}


def test_a_guard_that_does_not_watch_is_not_careful_for_ever():
    before = HistoryController(20)
    course(before, [0.9, 0.5], 9)
    assert before.careful
    after = HistoryController(5, watch=False, state=before.state_dict())
    assert set(course(after, [], 20)[1:]) == {"history", "refresh"}


def test_a_run_that_goes_on_with_other_chunks_begins_exactly():
    history = HistoryController(20)
    course(history, [], 7)
    history.resume(rows=True, kept=True)
    assert history.next() != "exact"
    history.resume(rows=False, kept=True)
    assert history.next() == "exact"


@given(st.lists(st.floats(-1, 1), max_size=60), st.integers(1, 30))
def test_rows_are_never_older_than_a_period(cosines, period):
    history = HistoryController(period)
    left = iter(cosines)
    for epoch in range(1, 200):
        assert history.age <= max(period, 1)
        kind = history.next()
        if kind == "probe":
            history.observe(HistoryProbe(epoch, next(left, 1.0), 1.0, 0.0, history.age))
        history.done(kind, 1 / epoch)
