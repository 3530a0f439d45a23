"""Stages and exact chunks give the curve, the weights and the gradients of one rank, whatever the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipelines import MODELS, rotated, same, trained

EXACT = {"cross_chunk": "exact"}


@pytest.fixture(scope="module")
def one_rank(ranks):
    """Training on one rank, each kind made once."""
    made: dict[tuple, dict] = {}

    def get(*key: Any) -> dict[str, Any]:
        if key not in made:
            made[key] = ranks(1, trained, key[0], {}, *key[1:])[0]
            assert made[key]["engine"] == "GraphEngine"
        return made[key]

    return get


@pytest.mark.some(3)
@pytest.mark.parametrize(("name", "pipe"), rotated(MODELS, [2, 4, 3]))
def test_one_chunk_through_stages(ranks, one_rank, name, pipe):
    found = ranks(pipe, trained, name, {"pipe": pipe, "chunks": 1})
    assert [rank["stage"] for rank in found] == list(range(pipe))
    same(found, one_rank(name))


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "pipe", "chunks"), rotated(MODELS, [(1, 4), (2, 2), (3, 4), (2, 4)]))
def test_exact_chunks_through_stages(ranks, one_rank, name, pipe, chunks):
    same(ranks(pipe, trained, name, {"pipe": pipe, "chunks": chunks, **EXACT}), one_rank(name))


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "pipe", "chunks"), rotated(MODELS, [(2, 3), (1, 3), (2, 1), (2, 3)]))
def test_parts_and_exact_chunks(ranks, one_rank, name, pipe, chunks):
    found = ranks(2 * pipe, trained, name, {"pipe": pipe, "graph": 2, "chunks": chunks, **EXACT})
    assert [(rank["stage"], rank["part"]) for rank in found] == [(s, p) for s in range(pipe) for p in (0, 1)]
    same(found, one_rank(name))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "mesh"),
    rotated(
        MODELS,
        [{"pipe": 2, "chunks": 1}, {"pipe": 2, "graph": 2, "chunks": 3, **EXACT}, {"chunks": 4, **EXACT}],
    ),
)
def test_the_gradient_itself(ranks, one_rank, name, mesh):
    """SGD with rate 1: weights after one epoch differ by exactly the gradient."""
    world = mesh.get("pipe", 1) * mesh.get("graph", 1)
    alone = one_rank(name, 1, 0.4, True)
    for rank in ranks(world, trained, name, mesh, 1, 0.4, True):
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-10)


def test_dropout_is_on(one_rank):
    """Without this, draws that know the mesh would pass."""
    for name in MODELS:
        assert abs(one_rank(name)["losses"][0] - one_rank(name, 4, 0.0)["losses"][0]) > 1e-4
