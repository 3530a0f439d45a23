"""Late rows in plans: never within a host, where they hide nothing; between hosts their gain holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from kagome.autoplan import plan as planning
from kagome.autoplan.plan import chosen
from kagome.cli.app import _builder
from kagome.config import Data as Source, Parallel, Run
from kagome.config.commands import PlanCommand
from kagome.planner.candidates import Plans, parts, ranked
from kagome.planner.cluster import Cluster
from kagome.planner.cost_model import CostRates, Load, passes
from kagome.records.units import seconds_text

RATES = CostRates(0.0, 1e-5, 1e-6, 0.0, 0.0, 1.0, 0, 64.0, 64.0, (1e4,))
ONE = Cluster("test", 1, 2, 4e6, 1.0, 1e6, 1e6, 0.0)


@given(
    st.integers(2, 8),
    st.floats(1e4, 1e12),
    st.floats(0.0, 1.0),
    st.booleans(),
    st.floats(0.0, 1e6),
)
def test_late_rows_are_never_proposed_among_ranks_of_one_host(
    size: int, inside: float, meanwhile: float, bits: bool, rows: float
) -> None:
    """However slow its memory, they hide nothing there, and are a pass more; the reason has both numbers."""
    rates = replace(RATES, meanwhile=meanwhile, coded=(4.0, 4.0), coding=1e-9)
    host = replace(ONE, devices=size, memory=1e12, inside=inside, between=inside)
    loads = [Load(50, 400, rows, rows, 1e6)]
    plain, late = (parts(size, loads, rates, host, 0.0, onebit=bits, late=old) for old in (False, True))
    assert late.epoch_seconds >= plain.epoch_seconds
    if rows >= 1:
        comes = late.exposed_seconds - plain.exposed_seconds
        assert comes == pytest.approx((8.0 if bits else 128.0) * rows / inside / 2, rel=1e-6, abs=1e-9)
    found = ranked([late, plain], host)
    assert [one.name for one in found.fitting] == [plain.name]
    ((left, why),) = found.refused
    assert left == late
    assert f"{seconds_text(late.epoch_seconds)} an epoch, {seconds_text(plain.epoch_seconds)} with" in why
    apart = replace(host, hosts=size, devices=1)
    assert parts(size, loads, rates, apart, 0.0, onebit=bits, late=True).exposed_seconds <= (
        parts(size, loads, rates, apart, 0.0, onebit=bits).exposed_seconds
    )


def test_rows_of_one_host_pass_memory_more_often_if_late_or_sampled() -> None:
    assert passes() == 2.0
    assert passes(late=True) == 3.0
    assert all(passes(late=late, share=share) > passes() for late in (False, True) for share in (0.01, 0.5))
    assert passes(late=True, share=0.2) == pytest.approx(4.0)


SLOW_LINKS = """
name = "two hosts on slow links"
hosts = 2
devices = {devices}
memory = 8e9
speed = 1.0
inside = 4e9
between = {between}
"""


@pytest.mark.parametrize(
    ("devices", "between", "best"),
    [(1, 2e6, "graph=2 max_age=1"), (1, 1e12, "graph=2"), (2, 2e6, "graph=4 max_age=1")],
)
def test_a_cluster_file_of_slow_links_keeps_what_late_rows_gain(
    tmp_path: Path, devices: int, between: float, best: str
) -> None:
    """Between hosts rows travel while ranks compute; on fast links exact rows are as fast and come first."""
    file = tmp_path / "cluster.toml"
    file.write_text(SLOW_LINKS.format(devices=devices, between=between))
    cluster = Cluster.load(file)
    rates, loads = replace(RATES, row=1e-3), {2: [Load(500, 400, 3e3, 3e3, 1e6)]}
    loads |= {1: [Load(1e5, 800, 0, 0, 1e6)], 4: [Load(250, 200, 2e3, 2e3, 1e6)]}
    made = [
        parts(number, loads[number], rates, cluster, 0.0, late=old)
        for number in (1, 2, 4)
        for old in (False, True)
        if number <= cluster.size and not (number == 1 and old)
    ]
    found = ranked(made, cluster)
    assert found.fitting[0].name == best
    near = {one.name for one, _ in found.refused}
    assert near == ({"graph=2 max_age=1"} if devices == 2 else set())


def test_a_run_by_the_planner_says_why_it_takes_exact_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``plan="auto"`` with late rows allowed."""
    loads = [Load(50, 400, 20, 20, 1e6), Load(60, 500, 30, 30, 2e6)]
    asked: list[PlanCommand] = []

    def made_up(command: PlanCommand, *_: object, **__: object) -> Plans:
        asked.append(command)
        return ranked([parts(2, loads, RATES, ONE, 0.0, late=old) for old in (True, False)], ONE)

    monkeypatch.setattr(planning, "planned", made_up)
    settings = Run(data=Source(name="sbm:vertices=60"), parallel=Parallel(plan="auto", allow=("stale",)))
    found, _ = chosen(settings, 2, _builder(settings.model, settings.train))
    assert asked[0].allow == ("stale",)
    assert (found.parallel.graph, found.parallel.max_age) == (2, 0)
    said = capsys.readouterr().err
    assert "kagome: graph=2: " in said
    assert "graph=2 max_age=1 is not taken: late rows gain nothing among ranks of one host" in said
