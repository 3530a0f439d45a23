"""Numbers of rows that a user's forward asks for are the whole graph's, whatever Python does with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_id_values import graph
from torch import Tensor, nn
from torch_geometric import utils

from by_hand import ByHand
from kagome.placement.placement import Placement, PlacementKind
from kagome.placement.symbolic_size import Shown, SymbolicSize, behind
from outcomes import outcome
from parity import assert_equal, random_owner, whole
from value_models import C, N

MODELS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "one over the rows": lambda m, x, e: m.c(x, e) + x.sum(0) * (1.0 / x.size(0)),
    "half the rows": lambda m, x, e: m.c(x, e) * (0.5 * x.size(0)),
    "one over a shape": lambda m, x, e: m.c(x, e) + x.sum(0) * (1.0 / x.shape[0]),
    "a root by numpy": lambda m, x, e: m.c(x, e) / np.sqrt(x.size(0)),
    "a root by math": lambda m, x, e: m.c(x, e) / math.sqrt(x.shape[0]),
    "an int": lambda m, x, e: m.c(x, e) * float(int(x.size(0))),
    "one over the edges": lambda m, x, e: m.c(x, e) * (1.0 / e.size(1)),
    "the mean degree": lambda m, x, e: m.c(x, e) * (1.0 * e.size(1) / x.size(0)),
    "a text": lambda m, x, e: m.c(x, e) * float(f"{x.size(0)}"),
    "the largest": lambda m, x, e: m.c(x, e) * max(x.size(0), 2) + min(x.shape),
    "a product of the shape": lambda m, x, e: m.c(x, e) / (1.0 + x.shape.numel()),
    "a table of all": lambda m, x, e: m.c(x + torch.tensor([0.1] * x.size(0), dtype=x.dtype)[:, None], e),
    "rows": lambda m, x, e: m.c(x + x.new_ones(x.size(0), 1) * torch.ones(x.shape, dtype=x.dtype), e),
    "viewed": lambda m, x, e: m.c(x.view(x.size(0), 2, -1).flip(1).reshape(x.shape), e),
    "columns and rows": lambda m, x, e: m.c(x.reshape(*x.shape[:1], -1), e) + x.size(-1),
    "loops": lambda m, x, e: m.c(x, utils.add_self_loops(e, num_nodes=x.size(0))[0]),
    "degrees": lambda m, x, e: m.c(x, e) * utils.degree(e[1], x.size(0), dtype=x.dtype)[:, None],
    "scattered": lambda m, x, e: m.c(x, e) + utils.scatter(x[e[0]], e[1], 0, dim_size=x.size(0)),
    "split in half": lambda m, x, e: m.c(torch.cat([x[: x.size(0) // 2] * 2, x[x.size(0) // 2 :]]), e),
}


@pytest.mark.parametrize("name", MODELS)
def test_they_are_those_of_the_whole_graph(name: str) -> None:
    def build() -> nn.Module:
        return ByHand(lambda m, x, e, d: MODELS[name](m, x, e), **C)

    expected = whole(build, graph())
    for world in (1, 2, 3):
        found = outcome(build, graph(), random_owner(N, world, seed=world), world)
        assert not isinstance(found, str), found
        assert_equal(found, expected)


def test_what_is_shown_is_the_whole_graph_s_and_what_lies_behind_it_is_not() -> None:
    count = SymbolicSize(4, Placement(PlacementKind.ROWS), lambda: 10)
    shown = Shown.of(count)
    assert (1.0 / shown, 0.5 * shown, f"{shown}", list(range(shown))[-1]) == (0.1, 5.0, "10", 9)
    assert (shown + 1, shown // 3, shown % 3, -shown) == (11, 3, 1, -10)
    assert shown == 10
    assert behind(shown) is count
    assert type(shown * 3) is Shown
    assert int.__int__(behind(shown * 3)) == 12
    found = behind((shown, [2, shown], slice(None, shown), {"n": 1}))
    assert found[0] is count
    assert found[1][1] is count
    assert found[2].stop is count
    assert type(behind(torch.Size([3, shown]))) is torch.Size
