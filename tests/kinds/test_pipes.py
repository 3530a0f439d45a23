"""Pieces of a forward, one after the other, in a pipeline of exact chunks: plain PyTorch's, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn

from by_hand import ByHand, Given, graph
from cases import Case, with_targets
from compare import MESHES, Left, judged, plain, ran
from kagome.comm.channel import Channel
from place_models import PIECES, TWO, N

DRAWN = sorted(set(PIECES) - {"dropped"})


def _all(m: nn.Module, x: Tensor, e: Tensor, d: Given, steps: list[str], ends: list[int]) -> Tensor:
    for step in steps:
        x = PIECES[step](m, x, *ends)
    return x


def _case(steps: list[str], ends: list[int]) -> Case:
    body = partial(_all, steps=steps, ends=ends)
    return Case(lambda: ByHand(body, **TWO), lambda: with_targets(graph()))


def _piped(channel: Channel, steps: list[str], ends: list[int]) -> Left | str:
    return ran(channel, _case(steps, ends), MESHES["pipe, exact"][1], check=False)


@pytest.mark.slow
@given(
    steps=st.lists(st.sampled_from(DRAWN), min_size=1, max_size=4),
    ends=st.tuples(st.integers(0, N - 1), st.integers(0, N - 1)).map(sorted),
)
@settings(
    deadline=None,
    max_examples=8,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_pieces_in_a_pipeline(ranks: Callable[..., list], steps: list[str], ends: list[int]) -> None:
    found = judged(ranks(2, _piped, steps, ends), plain(_case(steps, ends)))
    assert found.word in ("equal", "refused"), found


@pytest.mark.parametrize("step", DRAWN)
@pytest.mark.some(2)
def test_each_piece_is_equal_in_a_pipeline(ranks: Callable[..., list], step: str) -> None:
    ends = [7, 19]
    assert judged(ranks(2, _piped, [step], ends), plain(_case([step], ends))).word == "equal"
