"""Values of ids, counts and orders of edges, writes by place: plain PyG's on any parts, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from by_hand import ByHand, graph
from outcomes import outcome
from parity import assert_equal, random_owner, whole
from place_models import N
from value_models import EXACT, REFUSED, weighed


def built(table: dict[str, tuple], name: str) -> nn.Module:
    return ByHand(table[name][0], **table[name][1])


@pytest.mark.some(20)
@pytest.mark.parametrize("name", EXACT)
def test_they_are_those_of_the_whole_graph(name: str) -> None:
    build = partial(built, EXACT, name)
    expected = whole(build, graph())
    for world in (1, 2, 3):
        found = outcome(build, graph(), random_owner(N, world, seed=world), world)
        assert not isinstance(found, str), found
        assert_equal(found, expected)


@pytest.mark.parametrize("name", ["weights by bincount", "sizes of groups", "a layer a kind of edge"])
def test_a_part_without_edges_counts_as_the_others_do(name: str) -> None:
    data = graph()
    owner = torch.ones(N, dtype=torch.long)
    owner[data.edge_index[1]] = 0
    build = partial(built, EXACT, name)
    assert_equal(outcome(build, data, owner, 2), whole(build, data))


@pytest.mark.some(20)
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_part_can_follow_is_refused_and_one_rank_runs_it(name: str) -> None:
    build = partial(built, REFUSED, name)
    assert_equal(outcome(build, graph(), random_owner(N, 1), 1), whole(build, graph()))
    found = outcome(build, graph(), random_owner(N, 2), 2)
    assert isinstance(found, str)
    assert REFUSED[name][2] in found
    assert "value_models.py, line" in found


STEPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "modulo": lambda ids, k: ids % (k + 2),
    "plus": lambda ids, k: ids + k,
    "times": lambda ids, k: ids * k,
    "halved": lambda ids, k: ids // 2,
    "float": lambda ids, k: ids.double() / (k + 1),
    "compared": lambda ids, k: (ids > k).long(),
    "clamped": lambda ids, k: ids.clamp(k, 2 * k + 1),
    "centred": lambda ids, k: ids - ids.double().mean(),
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, N)), min_size=1, max_size=4),
    end=st.integers(0, 1),
    world=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_whatever_is_made_of_them(steps: list[tuple[str, int]], end: int, world: int, seed: int) -> None:
    def body(m, x, e, d):
        ids = e[end]
        for name, number in steps:
            ids = STEPS[name](ids, number)
        return weighed(x, e, torch.tanh(ids.to(x.dtype) / 10))

    build = partial(ByHand, body)
    found = outcome(build, graph(), random_owner(N, world, seed=seed), world)
    assert not isinstance(found, str), found
    assert_equal(found, whole(build, graph()))


def test_a_loop_over_rows_in_python_goes_over_those_of_the_whole_graph() -> None:
    def body(m, x, e, d):
        return torch.stack([x[i] * (i + 1) for i in range(x.size(0))])

    def build() -> nn.Module:
        return ByHand(body)

    assert_equal(outcome(build, graph(), random_owner(N, 2), 2), whole(build, graph()))
