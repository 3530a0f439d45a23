"""Vertices told apart by their place: equal to plain PyG on any parts, or refused by name; none else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from by_hand import Body, ByHand, graph
from convolutions import double_precision
from kagome.errors import ModelError
from kagome.verify.check import check
from place_models import EXACT, PIECES, REFUSED, TWO, N


class Ends(ByHand):
    """What leaves the model went by places."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.body(self, self.first(x), edge_index, None)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (lambda m, x, e, d: x @ x.t(), "matmul|rows went"),
        (lambda m, x, e, d: torch.linalg.qr(x)[0], "qr"),
        (lambda m, x, e, d: x[:20], "size|vertices"),
    ],
)
def test_what_leaves_the_model_has_a_known_row_for_each_vertex(body: Body, word: str) -> None:
    with double_precision(), pytest.raises(ModelError, match=word):
        check(Ends(body), graph())


MESHES = {"1 rank": (1, 1), "2 ranks": (2, 1), "3 ranks": (3, 1), "2 slices": (2, 2)}


@pytest.mark.some(60)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", EXACT)
def test_places_are_those_of_the_whole_graph(name: str, mesh: str) -> None:
    body, modules = EXACT[name]
    parts, tensor = MESHES[mesh]
    with double_precision():
        torch.manual_seed(0)
        result = check(ByHand(body, **modules), graph(), parts=parts, tensor=tensor)
    assert result.first is None, result.first
    assert result.worst < 1e-10


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_part_can_follow_is_refused_by_name_and_line(name: str) -> None:
    body, modules, word = REFUSED[name]
    with double_precision(), pytest.raises(ModelError, match=word) as caught:
        check(ByHand(body, **modules), graph())
    assert "place_models.py, line" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", REFUSED)
def test_one_rank_refuses_nothing_of_it(name: str) -> None:
    body, modules, _ = REFUSED[name]
    with double_precision():
        torch.manual_seed(0)
        result = check(ByHand(body, **modules), graph(), parts=1)
    assert result.first is None, result.first


@given(
    steps=st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4),
    ends=st.tuples(st.integers(0, N - 1), st.integers(0, N - 1)).map(sorted),
    parts=st.integers(1, 4),
)
@settings(deadline=None, max_examples=25)
def test_any_of_them_one_after_the_other(steps: list[str], ends: list[int], parts: int) -> None:
    def body(m, x, e, d):
        for step in steps:
            x = PIECES[step](m, x, *ends)
        return x

    with double_precision():
        torch.manual_seed(0)
        result = check(ByHand(body, **TWO), graph(), parts=parts)
    assert result.first is None, result.first
    assert result.worst < 1e-10
