"""``embedding_bag`` by numbers that vertices hold: the whole graph's on any parts, or refused by its name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from by_hand import ByHand, graph
from outcomes import outcome
from parity import assert_equal, random_owner, whole
from place_models import N, parameter

WORDS = {"t": lambda: nn.EmbeddingBag(9, 8)}


def numbers(d: Any, k: int = 3) -> torch.Tensor:
    """Some numbers from 0 to 8 that each vertex holds."""
    return torch.stack([(d.node_type * (i + 2) + d.group) % 9 for i in range(k)], dim=1)


EXACT = {
    "a mean": (lambda m, x, e, d: x + m.t(numbers(d)), WORDS),
    "a sum": (
        lambda m, x, e, d: x + F.embedding_bag(numbers(d), m.p.w, mode="sum"),
        {"p": parameter(9, 8)},
    ),
    "a maximum": (
        lambda m, x, e, d: x + F.embedding_bag(numbers(d, 1), m.p.w, mode="max"),
        {"p": parameter(9, 8)},
    ),
    "weighed": (
        lambda m, x, e, d: (
            x + F.embedding_bag(numbers(d), m.p.w, mode="sum", per_sample_weights=x[:, :3].contiguous())
        ),
        {"p": parameter(9, 8)},
    ),
    "a row of a table of all": (lambda m, x, e, d: x + m.t(numbers(d)), {"t": lambda: nn.EmbeddingBag(N, 8)}),
    "shared by all": (lambda m, x, e, d: x + m.t(torch.tensor([[0, 1], [2, 3]])).sum(0), WORDS),
}
REFUSED = {
    "bags by offsets": (
        lambda m, x, e, d: (
            x + F.embedding_bag(torch.arange(2 * N) % 9, m.t.weight, 2 * torch.arange(x.size(0)))
        ),
        WORDS,
        "bags of which each ends where",
    ),
    "rows of vertices": (
        lambda m, x, e, d: x + F.embedding_bag(numbers(d), x),
        {},
        "one that reads rows of vertices by numbers",
    ),
    "sources by offsets": (
        lambda m, x, e, d: x + F.embedding_bag(e[0], x, torch.arange(x.size(0))),
        {},
        "one that reads rows of vertices by numbers",
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_bags_of_each_vertex_are_those_of_the_whole_graph(name: str) -> None:
    body, modules = EXACT[name]
    build = partial(ByHand, body, **modules)
    for world in (1, 2, 3):
        found = outcome(build, graph(), random_owner(N, world, seed=world), world)
        assert not isinstance(found, str), found
        assert_equal(found, whole(build, graph()))


@pytest.mark.parametrize("name", REFUSED)
def test_other_bags_are_refused_by_name_and_one_rank_runs_them(name: str) -> None:
    body, modules, words = REFUSED[name]
    build = partial(ByHand, body, **modules)
    assert_equal(outcome(build, graph(), random_owner(N, 1), 1), whole(build, graph()))
    found = outcome(build, graph(), random_owner(N, 2), 2)
    assert isinstance(found, str)
    assert "F.embedding_bag to sum rows of a table" in found
    assert words in found
    assert "test_embedding_bag.py, line" in found


def test_distances_to_anchors_are_served_and_those_among_all_name_their_call() -> None:
    build = partial(
        ByHand, lambda m, x, e, d: torch.cdist(x, m.a.w) @ m.b.w, a=parameter(5, 8), b=parameter(5, 8)
    )
    for world in (1, 2, 3):
        found = outcome(build, graph(), random_owner(N, world, seed=world), world)
        assert not isinstance(found, str), found
        assert_equal(found, whole(build, graph()))
    pairs = partial(ByHand, lambda m, x, e, d: torch.cdist(x, x).softmax(1) @ x)
    said = outcome(pairs, graph(), random_owner(N, 2), 2)
    assert isinstance(said, str)
    assert "rows that went through cdist (test_embedding_bag.py, line" in said
    assert "which gives a value for each pair of rows" in said
    assert "F.scaled_dot_product_attention" in said
