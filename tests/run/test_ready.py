"""A model before it is trained: what is said of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from kagome.graph.partition import Partition, split_all
from kagome.run.ready import unlike


def part_of(x: torch.dtype, weight: torch.dtype) -> Partition:
    data = Data(
        x=torch.rand(4, 3, dtype=x),
        edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]),
        edge_weight=torch.rand(3, dtype=weight),
        y=torch.rand(4, dtype=torch.float64),
    )
    return split_all(data, torch.zeros(4, dtype=torch.int64), 1)[0]


def test_inputs_of_the_weights_type_need_no_word() -> None:
    assert unlike(GCN(3, 4, 2), part_of(torch.float32, torch.float32)) == ()
    assert unlike(GCN(3, 4, 2).double(), part_of(torch.float64, torch.float64)) == ()


def test_what_has_no_weights_is_given_any_type() -> None:
    assert unlike(nn.ReLU(), part_of(torch.float64, torch.float32)) == ()


def test_features_from_numpy_are_named_with_the_way_out() -> None:
    # Once this ended in torch's own error about m1 and m2, from within a layer.
    said = unlike(GCN(3, 4, 2), part_of(torch.float64, torch.float64))
    assert said == (
        "data.x is float64 and the weights are float32: if forward fails for that, "
        "data.x = data.x.to(torch.float32)",
        "data.edge_weight is float64 and the weights are float32: if forward fails for that, "
        "data.edge_weight = data.edge_weight.to(torch.float32)",
    )


@pytest.mark.parametrize("x", [torch.float32, torch.float64])
def test_either_type_of_a_mixed_model_will_do(x: torch.dtype) -> None:
    mixed = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    assert unlike(mixed, part_of(x, torch.float32)) == ()
