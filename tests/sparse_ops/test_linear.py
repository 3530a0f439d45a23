"""Dense: the products of F.linear, whatever part of whatever weight is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kagome.sparse_ops import linear as dense

WEIGHTS = {
    "its own": lambda: torch.randn(5, 7),
    "columns of a wider one": lambda: torch.randn(5, 20)[:, 3:10],
    "rows of a taller one": lambda: torch.randn(9, 7)[2:7],
    "transposed": lambda: torch.randn(7, 5).t(),
    "columns of a transposed one": lambda: torch.randn(20, 5).t()[:, 3:10],
    "every other column": lambda: torch.randn(5, 14)[:, ::2],
    "expanded": lambda: torch.randn(1, 7).expand(5, 7),
}


def given(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.detach().requires_grad_(), weight.detach().requires_grad_()


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("sliced", [False, True])
def test_products_and_gradients_are_those_of_linear(name, sliced):
    torch.manual_seed(0)
    weight, x = WEIGHTS[name](), torch.randn(200, 14)[:, 4:11] if sliced else torch.randn(200, 7)
    found = []
    for linear in (dense.linear, functional.linear):
        rows, weights = given(x, weight)
        out = linear(rows, weights)
        out.square().sum().backward()
        found.append((out.detach(), rows.grad, weights.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_library_is_given_no_part_of_a_weight(name, monkeypatch):
    """It has no fast code for one: a PNA epoch took 100 seconds instead of 5."""
    seen: list[Tensor] = []
    do = torch.ops.mkldnn._linear_pointwise

    def noting(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
        seen.append(weight)
        return do(x, weight, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noting)
    rows, weight = given(torch.randn(200, 7), WEIGHTS[name]())
    dense.linear(rows, weight).sum().backward()
    assert len(seen) == 3  # rows, their gradient, the weight's
    assert all(one.is_contiguous() or one.t().is_contiguous() for one in seen)


@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_can_be_differentiated_with_a_bias_or_without(bias):
    torch.manual_seed(0)
    x, weight = torch.randn(200, 7), torch.randn(5, 7)
    more = torch.randn(5) if bias else None
    found = []
    for linear in (dense.linear, functional.linear):
        rows, weights = given(x, weight)
        out = linear(rows, weights, more)
        one, two = torch.autograd.grad(out.square().sum(), (rows, weights), create_graph=True)
        (one.square().sum() + two.square().sum()).backward()
        found.append((one.detach(), two.detach(), rows.grad, weights.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-2)
