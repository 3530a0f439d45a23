"""Known: when rows that may be late are waited for, and what a codec lost of the epoch before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kagome.halo.compressed_exchange import CompressedExchange
from kagome.halo.epoch_rows import DRIFTED, EpochRows
from kagome.halo.staleness import StaleRows


@pytest.mark.parametrize(
    ("drift", "waits"),
    [
        (0.0, []),
        (0.01, [51]),
        (0.2, [4, 7, 10, 13]),  # three times a fifth is more than a half
        (0.3, [3, 5, 7, 9, 11, 13]),
        (DRIFTED + 0.1, list(range(2, 14))),  # late rows would be as far off as that in any epoch
    ],
)
def test_epochs_are_late_until_rows_have_moved_far(drift: float, waits: list[int]) -> None:
    known, found, last = EpochRows(), [], max([13, *waits])
    for epoch in range(1, last):
        known.moved(drift, epoch)
        known.moved(5.0, epoch)  # said again of an epoch that computes its gradient twice
        found += [epoch + 1] if known.synchronous else []
    assert found == waits


def test_a_checkpoint_knows_how_far_rows_have_moved() -> None:
    class Told:
        epoch = 3

        def take(self, kind: str, key: object, epoch: int) -> dict | None:
            return dict(states) if (kind, epoch) == ("crossing", 3) else None

    known = EpochRows()
    known.moved(0.4, 2)
    states = next(state for kind, _, state in known.state_entries(2) if kind == "crossing")
    other = EpochRows()
    other.forget(Told())
    for each in (known, other):
        each.moved(0.2, 3)
    assert known.synchronous
    assert other.synchronous


def test_drift_is_of_rows_and_not_of_gradients() -> None:
    known = EpochRows()
    for direction, drift in ((0, 0.1), (1, 1.5), (2, 0.2), (3, 2.0)):
        known.all_stale_rows["site", direction] = StaleRows("site", 1, drift=drift)
    assert known.drifts == (0.2, 1.0)


def test_a_part_without_neighbours_says_nothing_of_drift() -> None:
    # Once its 0 was among those of the mean, and others' rows looked stiller than they were.
    known = EpochRows()
    known.all_stale_rows["site", 0] = StaleRows("site", 1)
    assert known.drifts == (0.0, 0.0)


@pytest.mark.parametrize(
    ("drifts", "mean"), [((1.2, 2.0), 0.6), ((0.7, 1.0), 0.7), ((0.0, 0.0), 0.0), ((), 0.0)]
)
def test_drift_is_the_mean_over_ranks_that_have_some(drifts: tuple[float, ...], mean: float) -> None:
    way = SimpleNamespace(known=EpochRows())
    CompressedExchange.moved(way, drifts, 2)
    assert way.known.drifted == pytest.approx(mean)


def test_what_a_codec_lost_longer_ago_is_not_made_up_for() -> None:
    known, rows = EpochRows(), torch.ones(2, 3)
    known.residuals["site", 0] = rows, 4
    assert known.residual(("site", 0), 5) is rows
    assert known.residual(("site", 0), 6) is None  # epoch 5 sent rows as they are
    assert [kind for kind, *_ in known.state_entries(4)].count("residual") == 1
    assert [kind for kind, *_ in known.state_entries(5)].count("residual") == 0
