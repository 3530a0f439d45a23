"""Stages that form a DAG give plain training's outputs, losses and gradients, whatever the plan."""

from __future__ import annotations

import pytest
from dags import plain, plan_of, same, trained

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
