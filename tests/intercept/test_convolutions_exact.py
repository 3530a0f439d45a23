"""Every convolution of PyG, in every variant, split over real ranks: the whole graph's outputs and gradients.

Two ranks train two epochs with features that need no gradient (constant rows travel once, normalisation is
remembered); three ranks train one epoch with features that need one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch_geometric.data import Data

from convolutions import ConvCase, sample_graph, splits
from parity import Result, assert_equal, case_build, one_rank, random_owner, split, whole


def label(case: ConvCase) -> str:
    return f"{case.name}-{case.variant}".replace(" ", "_")


def graph_of(case: ConvCase, *, x_grad: bool) -> Data:
    data = sample_graph(seed=1, groups_of_four=case.needs_groups_of_four)
    assert case.build is not None
    data.x.requires_grad_(x_grad or not list(case.build().parameters()))
    return data


def expected(case: ConvCase, data: Data, epochs: int) -> Result:
    """Plain PyG; where that draws other numbers than Kagome, Kagome on one rank."""
    run = one_rank if case.random else whole
    return run(case_build(case), data, epochs=epochs)


@pytest.mark.some(70)
@pytest.mark.parametrize(
    ("case", "world", "epochs"),
    [pytest.param(case, *world, id=f"{world[0]}-ranks-{label(case)}") for case, world in splits()],
)
def test_split_is_whole(ranks: Callable[..., list], world: int, epochs: int, case: ConvCase) -> None:
    data = graph_of(case, x_grad=world == 3)
    found = split(
        ranks, world, case_build(case), data, random_owner(data.num_nodes, world, seed=world), epochs=epochs
    )
    target = expected(case, data, epochs)
    assert_equal(found, target)
    assert [name for name, grad in target.grads.items() if grad is not None] or target.x_grad is not None
