"""Sums by an index have one order, also where ``index_add_`` has none, and that order is the CPU's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from collisions import Collisions, as_on_a_gpu
from kagome.kernels.base import reference
from kagome.kernels.base.csr import Structure
from kagome.kernels.base.ordered_sums import add_at, add_from_peers, take
from kernel_cases import CHECKS, cases


def numbers(*shape: int) -> torch.Tensor:
    """Of sizes so unlike that another order of a sum gives other bits."""
    return torch.randn(shape) * 10.0 ** torch.randint(-4, 5, shape)


@given(rows=st.integers(1, 6), index=st.lists(st.integers(0, 5), max_size=40), seed=st.integers(0, 99))
def test_a_sorted_sum_has_the_cpus_bits(rows, index, seed):
    torch.manual_seed(seed)
    places = torch.tensor([each % rows for each in index], dtype=torch.int64)
    out, added = numbers(rows, 3), numbers(len(index), 3)
    wanted = out.clone().index_add_(0, places, added)
    with as_on_a_gpu() as found:
        assert torch.equal(add_at(out, places, added), wanted)
    assert not found.sums


@given(data=st.data(), rows=st.integers(1, 8), peers=st.integers(1, 5), seed=st.integers(0, 99))
def test_sums_of_peers_have_the_cpus_bits(data, rows, peers, seed):
    torch.manual_seed(seed)
    each = [data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=rows)) for _ in range(peers)]
    index = torch.tensor([row for some in each for row in some], dtype=torch.int64)
    out, added = numbers(rows, 2), numbers(index.numel(), 2)
    wanted = out.clone().index_add_(0, index, added)
    with as_on_a_gpu() as found:
        assert torch.equal(add_from_peers(out, index, [len(some) for some in each], added), wanted)
    assert not found.twice
    assert found.sums == sum(map(bool, each))


def test_a_gradient_of_rows_read_twice_has_no_collision():
    x, index = torch.randn(3, 2, requires_grad=True), torch.tensor([0, 0, 2])
    with Collisions() as plain:
        x.index_select(0, index).sum().backward()
    assert plain.twice == [(0, 0, 2)]  # what is looked for is found
    wanted, x.grad = x.grad, None
    with as_on_a_gpu() as found:
        take(x, index).sum().backward()
    assert not found.sums
    assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_plain_kernels_have_no_collision(check, data):
    with as_on_a_gpu() as found:
        check(reference, data.draw(cases()))
    assert not found.twice


def test_second_derivatives_have_no_collision():
    torch.manual_seed(0)
    structure = Structure(torch.randint(0, 5, (30,)), torch.randint(0, 4, (30,)), 4, 5)
    with as_on_a_gpu() as found:
        x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        out = reference.sum_rows(structure.by_target, x.sin()).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.square().sum().backward()
    assert not found.twice
