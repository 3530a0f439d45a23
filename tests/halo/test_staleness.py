"""A line gives an epoch what came in the one before, never what is too old, and fresh rows when asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kagome.comm.exchange import Work
from kagome.errors import CommError
from kagome.halo.staleness import SAMPLE, StaleRows


class Begun(Work):
    """Rows under way, which may lie in another rank's memory; it counts the waits and what is given back."""

    def __init__(self, rows: Tensor, *, lends: bool = False) -> None:
        self.rows, self.lends, self.waits, self.returned = rows, lends, 0, 0

    def wait(self) -> Tensor:
        self.waits += 1
        return self.rows

    @contextmanager
    def borrow(self) -> Iterator[Tensor]:
        self.lent = self.lends
        yield self.wait()
        self.returned += 1
        if self.lends:
            self.rows.fill_(torch.nan)  # the sender packs other rows there


def sent(epoch: float, count: int = 3, width: int = 2) -> Begun:
    """What peers send in an epoch: its number, everywhere."""
    return Begun(torch.full((count, width), float(epoch), dtype=torch.float64))


def epochs_of(stale_rows: StaleRows, epochs, synchronous=()) -> tuple[list[float], dict[int, Begun]]:
    """Run stale rows through epochs: of which epoch the rows were that each was given."""
    begun, found = {}, []
    for epoch in epochs:
        begun[epoch] = sent(epoch)
        rows = stale_rows.receive(begun[epoch], epoch, synchronous=epoch in synchronous)
        assert rows.shape == (3, 2)
        found.append(float(rows[0, 0]))
    return found, begun


def test_the_first_epoch_waits_and_later_ones_read_the_last():
    stale_rows = StaleRows("conv1.x", 1)
    found, begun = epochs_of(stale_rows, range(1, 6))
    assert found == [1, 1, 2, 3, 4]
    assert [begun[epoch].waits for epoch in range(1, 6)] == [1, 1, 1, 1, 0]
    assert stale_rows.in_flight is not None
    assert stale_rows.in_flight[1] == 5


def lent(epoch: float) -> Begun:
    return Begun(sent(epoch).rows, lends=True)


def test_one_copy_of_the_rows_is_kept_and_none_once_they_are_read():
    stale_rows = StaleRows("conv1.x", 1)
    for epoch in range(1, 5):
        with stale_rows.reading(lent(epoch), epoch, synchronous=False) as rows:
            assert float(rows[0, 0]) == max(epoch - 1, 1)
            assert stale_rows.rows is rows
        # The first epoch's rows are those of the second; later ones are in transit when they have been read.
        assert (stale_rows.rows is None) == (epoch > 1)
    stale_rows.settle()
    assert float(stale_rows.rows[0, 0]) == 4


def test_what_is_lent_is_given_back_once_read_and_not_before():
    stale_rows, begun = StaleRows("conv1.x", 1), {}
    for epoch in range(1, 6):
        begun[epoch] = lent(epoch)
        with stale_rows.reading(begun[epoch], epoch, synchronous=epoch == 4) as rows:
            assert float(rows[0, 0]) == [1, 1, 2, 4, 4][epoch - 1]
        stale_rows.settle()  # an evaluation: rows stay where they lie
        assert [begun[each].returned for each in sorted(begun)] == [1] * (epoch - 1) + [0]
    stale_rows.forget()
    assert begun[5].returned == 1
    assert stale_rows.rows is None


def test_who_keeps_rows_or_saves_them_has_a_copy():
    stale_rows = StaleRows("conv1.x", 1)
    kept = [stale_rows.receive(lent(epoch), epoch, synchronous=False) for epoch in range(1, 5)]
    assert [float(rows[0, 0]) for rows in kept] == [1, 1, 2, 3]
    state = stale_rows.state_dict()
    assert float(state["rows"][0, 0]) == 4
    stale_rows.forget()
    assert float(state["rows"][0, 0]) == 4
    other = StaleRows("conv1.x", 1)
    other.load_state_dict(state)
    assert epochs_of(other, [5])[0] == [4]


@pytest.mark.parametrize("limit", [1, 2])
def test_epochs_that_wait_drop_what_will_be_too_old(limit):
    stale_rows, begun = StaleRows("conv1.x", limit), [lent(1), lent(2)]
    for epoch, work in enumerate(begun, 1):
        stale_rows.receive(work, epoch, synchronous=False)
    for epoch in (3, 4):
        stale_rows.expire(epoch)
        assert (stale_rows.rows is None) == (epoch + 1 - 2 > limit)
    assert [work.returned for work in begun] == [1, 1]
    assert epochs_of(stale_rows, [5, 6])[0] == [5, 5]


@pytest.mark.parametrize("smoothing", [0.0, 0.4])
def test_drift_goes_on_from_a_state_with_and_without_rows(smoothing):
    """The sample of rows that were dropped is in the state; checkpoints of before have the rows alone."""
    one = StaleRows("conv1.x", 1, smoothing)
    epochs_of(one, [1, 2, 3])
    state = one.state_dict()
    older = {name: value for name, value in state.items() if name != "sample"}
    found = []
    for each in (state, older, {**state, "rows": None}):
        other = StaleRows("conv1.x", 1, smoothing)
        other.load_state_dict(each)
        other.receive(sent(6), 6, synchronous=True)
        found.append(other.drift)
    assert found == [pytest.approx(0.5)] * 3


def test_age_counts_from_the_epoch_in_which_rows_were_sent():
    stale_rows = StaleRows("conv1.x", 1)
    epochs_of(stale_rows, [1])
    assert stale_rows.oldest == 0
    epochs_of(stale_rows, [2])
    assert (stale_rows.oldest, stale_rows.epoch) == (1, 1)
    epochs_of(stale_rows, range(3, 6))
    assert stale_rows.oldest == 1
    assert stale_rows.epoch == 4


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_row_that_is_too_old_is_never_given_out(limit):
    stale_rows = StaleRows("conv1.x, forward", limit)
    with pytest.raises(CommError, match="no rows yet"):
        stale_rows.read(1)
    epochs_of(stale_rows, [3])
    assert float(stale_rows.read(3 + limit)[0, 0]) == 3
    with pytest.raises(CommError, match=f"got rows {limit + 1} epochs old") as raised:
        stale_rows.read(4 + limit)
    assert f"conv1.x, forward, epoch {4 + limit}" in str(raised.value)
    assert stale_rows.oldest == limit


@pytest.mark.parametrize("limit", [1, 3])
def test_after_a_gap_longer_than_the_limit_it_waits(limit):
    stale_rows = StaleRows("conv1.x", limit)
    found, _ = epochs_of(stale_rows, [1, 2, 2 + limit])  # within the limit
    assert found == [1, 1, 2]
    stale_rows = StaleRows("conv1.x", limit)
    found, begun = epochs_of(stale_rows, [1, 2, 3 + limit, 4 + limit])
    assert found == [1, 1, 3 + limit, 3 + limit]
    assert begun[2].waits == 1  # taken, and thrown away
    assert stale_rows.oldest == 1


def test_synchronous_epochs_give_fresh_rows_and_drop_what_was_under_way():
    stale_rows = StaleRows("conv1.x", 1)
    found, begun = epochs_of(stale_rows, range(1, 9), synchronous={3, 4, 7})
    assert found == [1, 1, 3, 4, 4, 5, 7, 7]
    assert all(begun[epoch].waits == 1 for epoch in range(1, 8))


def test_an_epoch_that_runs_twice_does_not_read_itself():
    """A forward that begins again without fast paths may send other rows by the same site."""
    stale_rows = StaleRows("conv1.x", 1)
    first, again = sent(1.0), sent(1.5)
    assert float(stale_rows.receive(first, 1, synchronous=False)[0, 0]) == 1
    assert float(stale_rows.receive(again, 1, synchronous=False)[0, 0]) == 1.5
    assert epochs_of(stale_rows, [2])[0] == [1.5]


def test_an_earlier_epoch_reads_nothing_of_a_later_one():
    """Epochs go back where a run resumes from an older checkpoint."""
    stale_rows = StaleRows("conv1.x", 1)
    epochs_of(stale_rows, range(1, 6))
    assert epochs_of(stale_rows, [2, 3])[0] == [2, 2]


def test_smoothing_is_a_moving_average_corrected_for_its_beginning():
    share, stale_rows = 0.7, StaleRows("conv1.x", 1, 0.7)
    rows = [torch.randn(4, 3, dtype=torch.float64) for _ in range(8)]
    for epoch in range(1, 8):
        got = stale_rows.receive(Begun(rows[epoch]), epoch, synchronous=False)
        known = range(1, max(epoch, 2))  # epochs that have been heard of
        weights = [share ** (known[-1] - e) for e in known]
        expected = sum(w * rows[e] for w, e in zip(weights, known, strict=True)) / sum(weights)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert stale_rows.oldest == 1


def test_synchronous_rows_are_not_smoothed_but_count_for_later():
    stale_rows = StaleRows("conv1.x", 1, 0.5)
    rows = {epoch: torch.randn(2, 2, dtype=torch.float64) for epoch in range(1, 5)}
    assert torch.equal(stale_rows.receive(Begun(rows[1]), 1, synchronous=False), rows[1])
    stale_rows.receive(Begun(rows[2]), 2, synchronous=False)
    assert torch.equal(stale_rows.receive(Begun(rows[3]), 3, synchronous=True), rows[3])
    late = stale_rows.receive(Begun(rows[4]), 4, synchronous=False)
    expected = (0.25 * rows[1] + 0.5 * rows[2] + rows[3]) / 1.75
    torch.testing.assert_close(late, expected, rtol=0, atol=1e-15)


def test_what_was_forgotten_is_not_read_nor_left_under_way():
    stale_rows = StaleRows("conv1.x", 1, 0.5)
    _, begun = epochs_of(stale_rows, range(1, 4))
    stale_rows.forget()
    assert begun[3].waits == 1
    assert stale_rows.rows is None
    assert stale_rows.in_flight is None
    assert stale_rows.drift is None
    with pytest.raises(CommError):
        stale_rows.read(3)
    assert epochs_of(stale_rows, [4, 5])[0] == [4, 4]  # nothing of before is in the average either


def test_settling_changes_nothing_that_is_read():
    one, other = StaleRows("conv1.x", 1, 0.3), StaleRows("conv1.x", 1, 0.3)
    for epoch in range(1, 6):
        rows = torch.randn(3, 2, dtype=torch.float64)
        read = [stale_rows.receive(Begun(rows), epoch, synchronous=epoch == 4) for stale_rows in (one, other)]
        assert torch.equal(*read)
        one.settle()
        assert one.in_flight is None
        one.settle()
    assert one.epoch == 5
    assert other.epoch == 4


def test_drift_is_how_far_rows_moved_within_an_epoch():
    stale_rows = StaleRows("conv1.x", 1)
    epochs_of(stale_rows, [1])
    assert stale_rows.drift is None
    stale_rows.settle()
    for epoch, moved in [(2, 0.5), (3, 1 / 3), (4, 0.25)]:
        stale_rows.receive(sent(epoch), epoch, synchronous=True)
        assert stale_rows.drift == pytest.approx(moved)
    stale_rows.receive(Begun(torch.zeros(3, 2, dtype=torch.float64)), 5, synchronous=True)
    assert stale_rows.drift == 0.0  # of no length


def test_drift_is_that_of_the_mean_which_dropout_moves_least():
    stale_rows, rows = StaleRows("conv1.x", 1), torch.randn(6, 3, dtype=torch.float64)
    stale_rows.receive(Begun(rows), 1, synchronous=True)
    stale_rows.receive(Begun(rows.flip(0)), 2, synchronous=True)
    assert stale_rows.drift == pytest.approx(0, abs=1e-12)
    stale_rows.receive(Begun(1.25 * rows), 3, synchronous=True)
    assert stale_rows.drift == pytest.approx(0.2)


def test_drift_is_measured_on_a_sample_of_many_rows():
    stale_rows, count = StaleRows("conv1.x", 1), 3 * SAMPLE
    first = torch.ones(count, 1)
    second = first.clone()
    second[1::3] = second[2::3] = 7.0  # rows between those that are looked at
    stale_rows.receive(Begun(first), 1, synchronous=True)
    stale_rows.receive(Begun(second), 2, synchronous=True)
    assert stale_rows.drift == 0.0
    stale_rows.receive(Begun(2 * second), 3, synchronous=True)
    assert stale_rows.drift == pytest.approx(0.5)


def test_shapes_that_change_do_not_fit():
    stale_rows, like = StaleRows("conv1.x", 1, 0.5), torch.empty(0, dtype=torch.float64)
    assert stale_rows.fits(3, 2, like)
    epochs_of(stale_rows, [1, 2])
    assert stale_rows.fits(3, 2, like)
    assert not stale_rows.fits(4, 2, like)
    assert not stale_rows.fits(3, 1, like)
    assert not stale_rows.fits(3, 2, like.float())
    stale_rows.forget()
    rows = stale_rows.receive(sent(3, count=4, width=1), 3, synchronous=False)
    assert rows.shape == (4, 1)
    assert float(rows[0]) == 3


def test_no_rows_at_all():
    stale_rows = StaleRows("conv1.x", 1, 0.5)
    for epoch in range(1, 4):
        assert stale_rows.receive(sent(epoch, count=0), epoch, synchronous=False).shape == (0, 2)
    assert stale_rows.oldest == 1
