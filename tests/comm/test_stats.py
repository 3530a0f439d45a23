"""Traffic: exchanges that share the wire are under way once."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kagome.comm.stats import Traffic


def test_late_rows_of_six_sites_hide_no_more_than_an_epoch() -> None:
    """A second of computing, two on the wire: half of it is hidden, not eleven twelfths."""
    traffic = Traffic()
    for epoch in range(3):
        for site in range(6):
            begun = 2.0 * epoch + site / 6
            traffic.ended("halo", begun, begun + 2.0)
            traffic.waited["halo"] += 1 / 6
    assert traffic.under_way["halo"] == pytest.approx(2 * 3 + 5 / 6)
    assert 1 - traffic.waited["halo"] / traffic.under_way["halo"] == pytest.approx(0.5, abs=0.07)


def test_counts_begin_anew_and_what_was_counted_is_not_counted_again() -> None:
    traffic = Traffic()
    traffic.ended("halo", 1.0, 3.0)
    traffic.ended("weights", 2.0, 3.0)
    assert traffic.take().under_way["halo"] == 2.0
    traffic.ended("halo", 1.5, 4.0)
    assert traffic.take().under_way == {**Traffic().under_way, "halo": 1.0}
    assert traffic.take() == Traffic()


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=8))
def test_never_more_than_the_time_that_passes(times: list[tuple[float, float]]) -> None:
    traffic, spans = Traffic(), sorted((sorted(each) for each in times), key=lambda span: span[1])
    for begun, ended in spans:
        traffic.ended("stage", begun, ended)
    passed = max((span[1] for span in spans), default=0.0) - min((span[0] for span in spans), default=0.0)
    assert 0 <= traffic.under_way["stage"] <= passed + 1e-9
