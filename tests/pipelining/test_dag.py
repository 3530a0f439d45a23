"""Stages that form a DAG give plain training's outputs, losses and gradients, whatever the plan."""

from __future__ import annotations

from collections import Counter

import pytest

from dags import plain, plan_of, same, trained
from kagome.pipelining.dag.sample_layout import SampleLayout

TOP = "join act layers.0 act#2 layers.1 act#3 out"
ONE, TWO = "towers.0 towers.1 towers.1.0#2 towers.1.1#2", "towers.2 towers.2.0#2 towers.2.1#2"
PLANS = {
    "towers on a rank each": (
        "multimodal",
        plan_of(
            8,
            ("reads.0 towers.0", 1, 2),
            ("reads.1 towers.1", 1, 4, 2),
            ("reads.2 towers.2", 1, 1, 2),
            ("joint norm head", 1, 2),
        ),
    ),
    "tables apart": (
        "dlrm",
        plan_of(
            8,
            ("bottom", 1, 4),
            ("tables.0 tables.1 tables.2 tables.3", 1, 2, 2),
            ("tables.4 tables.5 tables.6 tables.7", 1, 1),
            ("top", 1, 2),
        ),
    ),
    "shared towers, 2 replicas": ("uno", plan_of(8, (ONE, 1, 2), (TWO, 1, 4), (TOP, 2, 8))),
    "uneven shares": ("uno", plan_of(9, (ONE, 2, 3), (TWO, 1, 9), (TOP, 1, 3, 2))),
    "relations": (
        "gnn",
        plan_of(
            8,
            ("convs.0.0", 1, 2),
            ("convs.0.1 convs.0.2 norms.0 convs.1.0", 1, 4),
            ("convs.1.1 convs.1.2", 1, 4, 2),
            ("norms.1 jump head", 1, 2),
        ),
    ),
    "odd": (
        "odd",
        plan_of(
            8,
            ("first relu", 1, 2),
            ("right drop left", 1, 4),
            ("table turned", 1, 2, 2),
            ("norm relu#2 out", 1, 8),
        ),
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_gradients_are_plain_trainings(ranks, case):
    name, plan = PLANS[case]
    found = ranks(4, trained, name, plan, plan.batch)
    same(found, plain(name, plan.batch))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("odd drop", PLANS["odd"][1]),
        ("noisy", plan_of(8, ("read", 1, 2), ("attention drop out", 2, 4))),
        ("encoder", plan_of(8, ("read", 1, 2), ("layer out", 2, 4))),
        (
            "odd drop",
            plan_of(8, ("first relu right drop left table", 2, 8), ("turned norm relu#2 out", 1, 4)),
        ),
    ],
)
def test_dropout_does_not_know_the_plan(ranks, name, plan):
    alone = ranks(1, trained, name, None)[0]
    assert alone["losses"][0] != pytest.approx(plain(name)["losses"][0], abs=1e-6), "other draws"
    same(ranks(plan.devices, trained, name, plan), alone)


@pytest.mark.parametrize(("world", "name"), [(1, "dlrm"), (2, "gnn"), (3, "uno")])
def test_a_plain_plan_for_any_ranks(ranks, world, name):
    found = ranks(world, trained, name, None, 12)
    assert [rank["stage"] for rank in found] == list(range(world))
    same(found, plain(name, 12))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("odd drop", PLANS["odd"][1]),
        ("noisy", plan_of(8, ("read", 1, 2), ("attention drop out", 2, 4))),
        ("encoder", plan_of(8, ("read", 1, 1), ("layer out", 1, 2))),
    ],
)
def test_zero_bubble_and_dropout(ranks, name, plan):
    """Masks, tied weights, integers that cross, on 4, 3 and 2 ranks: as on one rank with whole backwards."""
    alone = ranks(1, trained, name, None)[0]
    found = ranks(plan.devices, trained, name, plan, 8, 2, "zero-bubble")
    same(found, alone)
    for line in found[0]["program"].splitlines():
        kinds = Counter(word[1] for word in line.split() if word[1] in "FBIW")
        assert kinds["F"] == kinds["I"] == kinds["W"] > 0
        assert not kinds["B"]


@pytest.mark.some(2)
@pytest.mark.parametrize("case", PLANS)
def test_zero_bubble_has_plain_trainings_gradients(ranks, case):
    name, plan = PLANS[case]
    same(ranks(4, trained, name, plan, plan.batch, 2, "zero-bubble"), plain(name, plan.batch))


@pytest.mark.some(2)
@pytest.mark.parametrize(("world", "name"), [(2, "dlrm"), (4, "uno"), (4, "multimodal")])
def test_a_plan_that_was_searched_for(ranks, world, name):
    """On costs measured here: all ranks have work, and gradients are plain training's."""
    found = ranks(world, trained, name, "auto", 16)
    assert {rank["stage"] for rank in found} == set(range(len(found[0]["program"].splitlines())))
    same(found, plain(name, 16))


def test_branches_run_at_the_same_time(ranks):
    name, plan = PLANS["shared towers, 2 replicas"]
    found = ranks(4, trained, name, plan, 8, 1)
    lines = found[0]["program"].splitlines()
    assert lines == found[3]["program"].splitlines()
    starts = []
    for rank, result in enumerate(found):
        line = lines[result["stage"]].split()
        done = [span.name for span in result["spans"] if span.epoch == 1 and span.name[0].isdigit()]
        assert done == line, "the spans are the program, in its order"
        starts.append({span.name: span.start for span in result["spans"] if span.epoch == 1})
        assert all(span.duration >= 0 for span in result["spans"])
        assert ("RECV_F" in " ".join(line)) == (rank > 1), "towers wait for nobody"
    # Each tower is at work between its first forward and its first backward, and these times overlap.
    assert starts[0]["0F0"] < starts[1]["1B0"]
    assert starts[1]["1F0"] < starts[0]["0B0"]


def test_every_sample_crosses_once():
    """Whatever the sizes and replicas, both ends agree on each message, and a micro-batch comes whole."""
    for sizes, devices in [((4, 8), (2, 3)), ((6, 3), (2, 3)), ((2, 8), (1, 4)), ((12, 4), (5, 3))]:
        layout = SampleLayout(24, sizes, devices)
        for one, other in ((0, 1), (1, 0)):
            come = {rank: [] for rank in layout.ranks(other)}
            for rank in layout.ranks(one):
                for unit in range(24 // min(sizes)):
                    for peer, samples in layout.shared(rank, other, unit):
                        assert (rank, samples) in list(layout.shared(peer, one, unit))
                        come[peer] += samples
            for rank, samples in come.items():
                mine = [
                    sample
                    for chunk in range(layout.chunks(other))
                    for sample in layout.samples(other, chunk, layout.seat(rank)[1])
                ]
                assert sorted(samples) == mine
            assert sorted(sample for samples in come.values() for sample in samples) == list(range(24))
