"""The built-in models with branches: what they give, and the operators that they are made of."""

from __future__ import annotations

import pytest
import torch

from kagome.model.examples import EXAMPLES, RelationalGNN, Uno
from kagome.model.operators.graph import branches_of
from kagome.profile.operators import measure

SHAPES = {"multimodal": (3, 10), "dlrm": (3,), "uno": (3,), "gnn": (3, 5)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_value_a_sample_and_branches_that_do_not_read_each_other(name):
    example = EXAMPLES[name]
    model = example.build()
    inputs, target = example.batch(3)
    out = model(**inputs)
    assert out.shape == SHAPES[name]
    assert example.loss(out, target).shape == (3,)
    branches = branches_of(model, inputs)
    reads = {operator: branches.reads(operator) for operator in branches.operators}
    begins = [operator for operator, read in reads.items() if not read]
    joins = [operator for operator, read in reads.items() if len(read) > 2]
    assert len(begins) >= 3
    assert joins
    assert sum(map(len, branches.operators.values())) == len(branches.owner)


def test_sizes_are_arguments():
    model = Uno((8, 4), (0, 1, 1), width=6, tower=2, layers=1)
    assert model(torch.randn(2, 16), torch.rand(2, 1)).shape == (2,)
    gnn = RelationalGNN(4, 2, width=6, layers=3, classes=2)
    assert gnn(torch.randn(2, 5, 4), torch.ones(2, 2, 5, 5)).shape == (2, 2)


def test_operators_measured():
    model = Uno((8, 4), (0, 1, 1), width=6, tower=1, layers=1)
    model.join.weight.grad = torch.ones_like(model.join.weight)
    graph = measure(model, (torch.randn(3, 16), torch.rand(3, 1)), (1, 4), repeats=1)
    assert [operator.name for operator in graph.operators][:3] == ["towers.0.0", "towers.0.1", "towers.1.0"]
    join = graph.by_name["join"]
    assert join.reads == ("towers.0.1", "towers.1.1", "towers.1.1#2")
    assert join.weights == 4 * (19 * 6 + 6)
    assert join.output == 4 * 6
    assert join.kept == 4 * 19  # what it multiplies with its weights
    assert [size for size, _ in join.forward] == [size for size, _ in join.backward] == [1, 4]
    assert all(seconds > 0 for _, seconds in join.forward)
    assert graph.by_name["towers.1.0#2"].weights == graph.by_name["towers.1.0"].weights == 4 * (4 * 6 + 6)
    assert bool((model.join.weight.grad == 1).all())
    assert model.out.weight.grad is None
