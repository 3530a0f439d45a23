"""Nothing that a user sees changes by accident: loss curves, to the last digit, and names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import golden_runs
from golden_runs import DAG, EPOCHS, RUNS, curve, dag_curve, machine, read


@pytest.mark.every
@pytest.mark.parametrize("name", [*RUNS, DAG])
def test_losses_are_those_that_are_written_down(ranks: Callable[..., list], name: str) -> None:
    """Every digit on the kind of machine that wrote them; elsewhere sums of floats are rounded otherwise."""
    run = RUNS.get(name)
    found = ranks(3, dag_curve)[0] if run is None else ranks(run.ranks, curve, run)[0]
    golden = read()
    expected = golden["curves"][name]
    assert len(found) == EPOCHS + 1
    assert len(set(found)) == EPOCHS + 1
    if golden["machine"] == machine():
        assert found == expected
    values, others = ([float.fromhex(each) for each in curve] for curve in (found, expected))
    assert values == pytest.approx(others, rel=1e-7)


def test_every_curve_that_is_written_down_is_run() -> None:
    assert set(read()["curves"]) == {*golden_runs.RUNS, DAG}
