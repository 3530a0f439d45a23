"""A model before it is trained: what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from kagome.components.model_setup import input_notes, refused_input, unlike
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition, split_all


def part_of(x: torch.dtype, weight: torch.dtype) -> Partition:
    data = Data(
        x=torch.rand(4, 3, dtype=x),
        edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]),
        edge_weight=torch.rand(3, dtype=weight),
        y=torch.rand(4, dtype=torch.float64),
    )
    return split_all(data, torch.zeros(4, dtype=torch.int64), 1)[0]


NAMES = ("x", "edge_index", "edge_weight", "y")


def test_inputs_of_the_weights_type_need_no_word() -> None:
    assert unlike(GCN(3, 4, 2), part_of(torch.float32, torch.float32), NAMES) == ""
    assert unlike(GCN(3, 4, 2).double(), part_of(torch.float64, torch.float64), NAMES) == ""


def test_what_has_no_weights_is_given_any_type() -> None:
    assert unlike(nn.ReLU(), part_of(torch.float64, torch.float32), NAMES) == ""


def test_features_from_numpy_are_named_with_the_way_out() -> None:
    # Once this ended in torch's own error about m1 and m2, from within a layer.
    part = part_of(torch.float64, torch.float64)
    assert unlike(GCN(3, 4, 2), part, NAMES) == (
        "data.x is float64, data.edge_weight is float64 and the weights are float32: "
        "data.x = data.x.to(torch.float32), data.edge_weight = data.edge_weight.to(torch.float32)"
    )
    assert "edge_weight" not in unlike(GCN(3, 4, 2), part, ("x", "edge_index"))


@pytest.mark.parametrize("x", [torch.float32, torch.float64])
def test_either_type_of_a_mixed_model_will_do(x: torch.dtype) -> None:
    mixed = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    assert unlike(mixed, part_of(x, torch.float32), NAMES) == ""


@pytest.mark.parametrize("x", [torch.float64, torch.int64, torch.float16])
def test_a_forward_that_fails_for_a_type_says_the_cure(x: torch.dtype) -> None:
    part, model = part_of(torch.float32, torch.float32), GCN(3, 4, 2)
    part.nodes["x"] = part.nodes["x"].to(x)
    with pytest.raises(RuntimeError) as caught:
        model(part.nodes["x"], part.edge_index)
    told = refused_input(model, part, NAMES, caught.value)
    assert isinstance(told, ModelError)
    assert told.hint == "data.x = data.x.to(torch.float32)"
    other = RuntimeError("something else")
    assert refused_input(model, part, NAMES, other) is other


def test_what_forward_gets_and_what_nobody_uses_is_said() -> None:
    part = replace(part_of(torch.float32, torch.float32), shared={"u": 3.0, "name": "text"})
    part.nodes["age"] = torch.ones(4)

    class Mine(nn.Module):
        def forward(self, features, edges, edge_weight=None, *, u=None, absent=None):
            return features

    (said,) = input_notes(Mine(), part, {"y"})
    assert said == (
        "forward gets x (a row a vertex), edge_index, edge_weight (a row an edge), "
        "u (the same on all ranks); not used of the data: name, age"
    )


def test_an_attribute_that_cannot_be_given_is_refused_where_forward_asks_for_it() -> None:
    part = replace(part_of(torch.float32, torch.float32), refused={"other": "data.other is a dict"})

    class Mine(nn.Module):
        def forward(self, x, edge_index, other=None):
            return x

    with pytest.raises(
        ModelError,
        match=r"given attributes of the data by name; got one that it cannot be given: data\.other is a dict",
    ):
        input_notes(Mine(), part, {"y"})
    assert "not given to any model: data.other is a dict" in input_notes(GCN(3, 4, 2), part, {"y"})[0]
