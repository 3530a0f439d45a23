"""Memory knobs: the cheapest one that makes a cut fit, none where none is needed, and a run with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

import kagome
from kagome.autoplan import plan as planning
from kagome.autoplan.plan import chosen
from kagome.cli.app import _builder
from kagome.comm.channel import Channel
from kagome.config import Data as Source, Model, Parallel, Report, Run, Train
from kagome.errors import PlanError
from kagome.planner.candidates import WORTH, Candidate, Plans, ranked
from kagome.planner.cluster import Cluster
from kagome.planner.memory_knobs import ROUNDED, eased

MEMORY, RATE = 100.0, 50.0
CLUSTER = Cluster("four", 1, 4, MEMORY, 1.0, 1e9, 1e9, to_host=RATE, host_memory=600.0)
NO_HOST = replace(CLUSTER, to_host=0.0, host_memory=0.0)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[Candidate], list[Candidate]]:
    """Some cuts, and some of them with layers that run again."""
    size = st.integers(1, 300).map(float)
    plain, again = [], []
    for number in range(draw(st.integers(1, 6))):
        ranks = draw(st.sampled_from([1, 2, 4]))
        # Slices say what the fullest rank holds, parts say it of each.
        count = draw(st.sampled_from([1, ranks]))
        held = tuple(draw(size) for _ in range(count))
        moved = tuple(draw(st.floats(0, bytes_)) for bytes_ in held)
        pipe = draw(st.booleans())
        inner = tuple(bytes_ * draw(st.floats(0, 1)) for bytes_ in moved)
        settings = {"graph": ranks, "chunks": number + 1}
        exact, seconds = draw(st.booleans()), draw(st.integers(1, 30)) / 2
        one = Candidate(settings, exact, seconds, seconds / 2, seconds / 2, {"halo": 1}, max(held))
        every = {"held": held if count == ranks else (), "moved": moved}
        plain.append(replace(one, **every, inner=inner if pipe else ()))
        if not pipe and draw(st.booleans()):
            less = tuple(draw(st.floats(0, bytes_)) for bytes_ in held)
            took = draw(st.integers(1, 40)) / 2
            twin = replace(one, epoch_seconds=took, compute_seconds=took / 2, exposed_seconds=took / 2)
            every = {"held": less if count == ranks else (), "moved": (0.0,) * count, "inner": inner}
            again.append(replace(twin, memory_bytes=max(less), **every))
    return plain, again


def every_way(plain: list[Candidate], again: list[Candidate], cluster: Cluster) -> list[tuple[float, bool]]:
    """Weighed seconds of all cuts with and without knobs, and whether they fit: the definition, one by one."""
    twins = {one.name: one for one in again}
    found = []
    for one in plain:
        twin, weight = twins.get(one.name), 1.0 if one.exact else WORTH
        found.append((one.epoch_seconds * weight, max(one.held or (one.memory_bytes,)) <= MEMORY))
        if twin is not None:
            seconds = max(one.epoch_seconds, twin.epoch_seconds)
            found.append((seconds * weight, max(twin.held or (twin.memory_bytes,)) <= MEMORY))
        back = one.inner or (twin.inner if twin else ())
        host = ROUNDED * max(one.moved) * min(one.ranks, cluster.devices) <= cluster.host_memory
        if cluster.to_host and back and host:
            each = zip(one.held or (one.memory_bytes,), one.moved, back, strict=True)
            fits = all(held - moved + inner <= MEMORY for held, moved, inner in each)
            found.append(((one.epoch_seconds + 2 * max(one.moved) / RATE) * weight, fits))
    return found


@given(cuts(), st.sampled_from([CLUSTER, NO_HOST]))
def test_the_plan_is_the_fastest_of_all_that_fit(
    made: tuple[list[Candidate], list[Candidate]], cluster: Cluster
) -> None:
    plain, again = made
    asked: list[int] = []

    def recomputed() -> list[Candidate]:
        asked.append(1)
        return again

    found = eased(plain, recomputed, cluster)
    ways = [seconds for seconds, fits in every_way(plain, again, cluster) if fits]
    assert found[: len(plain)] == plain, "cuts themselves stay as they are"
    assert len(asked) <= 1
    if not ways:
        with pytest.raises(PlanError, match="which needs least"):
            ranked(found, cluster)
        return
    best = ranked(found, cluster).fitting[0]
    assert best.lacks(cluster) is None
    assert best.epoch_seconds * (1.0 if best.exact else WORTH) == pytest.approx(min(ways), rel=1e-12)


@given(cuts())
def test_no_knob_where_none_is_needed(made: tuple[list[Candidate], list[Candidate]]) -> None:
    plain, again = made
    fitting = {one.name for one in plain if one.lacks(CLUSTER) is None}
    for one in eased(plain, lambda: again, CLUSTER)[len(plain) :]:
        alone = {name: value for name, value in one.settings.items() if name != "activations"}
        (cut,) = [each for each in plain if each.settings == alone]
        assert cut.name not in fitting
        assert one.epoch_seconds >= cut.epoch_seconds
        assert one.compute_seconds + one.exposed_seconds == pytest.approx(one.epoch_seconds)
        assert one.exact == cut.exact
        assert one.knob
    if len(fitting) == len(plain):
        eased(plain, lambda: pytest.fail("measured for nothing"), CLUSTER)


def test_a_plan_says_why_it_has_a_knob_and_what_that_costs() -> None:
    cluster = replace(CLUSTER, memory=1.9 * 2**30, to_host=1e9, host_memory=1e12)
    gib = 2.0**30
    cut = Candidate({"graph": 2}, True, 1.0, 0.9, 0.1, {"halo": 1}, 2.4 * gib, moved=(1.5 * gib,))
    slow = Candidate({"graph": 4}, True, 5.0, 4.9, 0.1, {"halo": 1}, 1.0 * gib)
    twin = replace(cut, epoch_seconds=1.031, memory_bytes=1.2 * gib, inner=(0.1 * gib,))
    best = ranked(eased([cut, slow], lambda: [twin], cluster), cluster)
    assert best.fitting[0].settings == {"graph": 2, "activations": "recompute"}
    said = "without activations=recompute it needs 2.4 GiB a rank, there are 1.9; that costs 31 ms an epoch"
    assert best.fitting[0].reason.endswith(said)
    assert best.refused[0][0].name == "graph=2"
    # A link that copies faster than layers run again.
    found = ranked(eased([cut, slow], lambda: [twin], replace(cluster, to_host=1e12)), cluster).fitting[0]
    assert found.settings == {"graph": 2, "activations": "host"}
    assert "3 GiB of host memory a rank at most" in found.reason
    # Nothing is measured for a cut that would be slower than one that fits.
    eased([cut, replace(slow, epoch_seconds=0.5)], lambda: pytest.fail("measured"), cluster)
