"""What runs in backward, on two parts without the check: plain PyG's numbers, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.errors import ModelError
from kind_backward import CASES, REFUSED, SERVED, Late, Two, data
from parity import assert_equal, joined, one_rank, parity, random_owner, split, whole

BUILDS = {**{name: case.build for name, case in CASES.items()}, "late": Late}
EPOCHS = dict.fromkeys(BUILDS, 1) | {"a hook counts": 3, "late": 3}


def tried(channel: Channel, names: list[str]) -> dict[str, Any]:
    """What each case left on this rank, or said; one after the other, so that ranks must keep in step."""
    graph = data()
    owner = random_owner(graph.num_nodes, channel.size)
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = parity(channel, BUILDS[name], graph, owner, 0, EPOCHS[name])
        except ModelError as error:
            found[name] = str(error)
    return found


def test_what_goes_row_by_row_is_served(ranks: Callable[..., list]) -> None:
    left = ranks(2, tried, list(SERVED))
    for name in SERVED:
        shares = [each[name] for each in left]
        assert not any(isinstance(share, str) for share in shares), (name, shares)
        graph = data()
        assert_equal(joined(shares, graph.num_nodes), whole(SERVED[name].build, graph, epochs=EPOCHS[name]))


def test_what_looks_from_row_to_row_is_refused_on_all_ranks(ranks: Callable[..., list]) -> None:
    left = ranks(2, tried, [*REFUSED, "late"])
    for name in (*REFUSED, "late"):
        said = [each[name] for each in left]
        assert all(isinstance(text, str) and "kind_backward.py, line" in text for text in said), (name, said)
        assert all("activation checkpointing" not in text for text in said), (name, said)


@pytest.mark.parametrize(
    "name", ["a gradient less its mean", "a module's hook by the largest", "a mean by hand"]
)
def test_one_rank_refuses_nothing(name: str) -> None:
    found = one_rank(REFUSED[name].build, data(), epochs=EPOCHS[name])
    assert_equal(found, whole(REFUSED[name].build, data(), epochs=EPOCHS[name]))


class Old(Two):
    """A hook of the older kind."""

    def __init__(self) -> None:
        super().__init__(lambda model, h, edge_index: model.lin(h))
        self.lin.register_backward_hook(lambda module, back, given: None)


class Stepped(Two):
    """A hook on a step of backward."""

    def __init__(self) -> None:
        super().__init__(self.hooked)

    def hooked(self, model: Any, h: Tensor, edge_index: Tensor) -> Tensor:
        h = h * 1
        if h.grad_fn is not None:
            assert "Mul" in h.grad_fn.name()
            h.grad_fn.register_hook(lambda back, given: (back[0] / back[0].norm(), *back[1:]))
        return h


@pytest.mark.parametrize(
    ("build", "word"), [(Old, "register_backward_hook"), (Stepped, "grad_fn.register_hook")]
)
def test_hooks_of_which_nothing_is_known_are_refused(
    ranks: Callable[..., list], build: Callable[[], Two], word: str
) -> None:
    graph = data()
    with pytest.raises(ModelError, match=word):
        split(ranks, 2, build, graph, random_owner(graph.num_nodes, 2))


def test_torch_is_as_it_was_when_all_have_ended() -> None:
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    assert torch.nn.modules.module.BackwardHook is torch.utils.hooks.BackwardHook
