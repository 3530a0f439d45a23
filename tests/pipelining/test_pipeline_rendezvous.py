"""Pipelines under nccl's order have gloo's losses, and none waits for ever: see ``rendezvous_group``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dags
import pipelines
from dags import plan_of
from kagome.comm.channel import Channel
from kagome.comm.mesh import open_mesh
from rendezvous_group import under_rules

CHUNKED = {
    "two stages a rank": ("gcnii", {"pipe": 2, "chunks": 4, "stages_per_rank": 2}),
    "two stages a rank, exact": (
        "jumping",
        {"pipe": 2, "chunks": 3, "stages_per_rank": 2, "cross_chunk": "exact"},
    ),
    "dropped": ("sage", {"pipe": 4, "chunks": 5, "cross_chunk": "drop"}),
    "history": ("gcn", {"pipe": 4, "chunks": 4}),
    "parts, history, codecs": ("sage", {"pipe": 2, "graph": 2, "chunks": 3, "codec_stage": "bf16"}),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("case", CHUNKED)
def test_chunks(ranks, case):
    name, parallel = CHUNKED[case]
    world = parallel["pipe"] * parallel.get("graph", 1)
    expected = ranks(world, pipelines.trained, name, parallel, 3)
    found = ranks(world, under_rules, pipelines.trained, name, parallel, 3, spoils=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, dict), mine
        torch.testing.assert_close(mine["losses"], theirs["losses"], rtol=0, atol=1e-9)
        torch.testing.assert_close(mine["weights"], theirs["weights"], rtol=0, atol=1e-8)


def dag(channel: Channel, *args: Any) -> dict[str, Any]:
    with open_mesh(timeout=60) as mesh:
        return dags.trained(mesh.world, *args)


TOP = "join act layers.0 act#2 layers.1 act#3 out"
ONE, TWO = "towers.0 towers.1 towers.1.0#2 towers.1.1#2", "towers.2 towers.2.0#2 towers.2.1#2"
DAGS = {
    "shared towers, 2 replicas": ("uno", plan_of(8, (ONE, 1, 2), (TWO, 1, 4), (TOP, 2, 8))),
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
    "searched": ("uno", "auto"),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("case", DAGS)
def test_dags(ranks, case):
    name, plan = DAGS[case]
    found = ranks(4, under_rules, dag, name, plan, 8, spoils=True)
    dags.same(found, dags.plain(name, 8))
