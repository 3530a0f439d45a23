"""Calls that few use, and draws by a seed of forward's own: as plain PyG on any parts, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from by_hand import ByHand, graph
from call_models import EXACT, REFUSED, SEEDED
from convolutions import double_precision
from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.config import Train
from kagome.errors import ModelError
from kagome.verify.check import check

MESHES = {"1 rank": (1, 1), "2 ranks": (2, 1), "3 ranks": (3, 1), "2 slices": (2, 2)}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", EXACT)
def test_what_is_served_is_as_in_plain_pyg(name: str, mesh: str) -> None:
    body, modules = EXACT[name]
    parts, tensor = MESHES[mesh]
    with double_precision():
        torch.manual_seed(0)
        result = check(ByHand(body, **modules), graph(), parts=parts, tensor=tensor)
    assert result.first is None, result.first
    assert result.worst < 1e-10


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_part_cannot_follow_is_refused_by_name_and_line(name: str) -> None:
    body, modules, word = REFUSED[name]
    with double_precision(), pytest.raises(ModelError, match=word) as caught:
        check(ByHand(body, **modules), graph())
    assert caught.value.hint


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_of_forwards_own_is_kept_on_one_rank(name: str) -> None:
    body, modules = SEEDED[name]
    with double_precision():
        torch.manual_seed(0)
        result = check(ByHand(body, **modules), graph(), parts=1)
    assert result.first is None, result.first


def seeded_run(channel: Channel, name: str) -> str:
    body, modules = SEEDED[name]
    data, train = graph(), Train(epochs=2, check=False)
    data.y = torch.arange(data.num_nodes) % 4
    try:
        with double_precision(), Trainer(ByHand(body, **modules), data, train=train) as trainer:
            trainer.fit()
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_of_forwards_own_is_refused_on_several_ranks(ranks: Callable[..., list], name: str) -> None:
    for said in ranks(2, seeded_run, name):
        assert "seeds torch's generator" in said
