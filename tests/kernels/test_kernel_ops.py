from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from kagome.kernels import ops
from kagome.kernels.base import reference, thread_pool
from kagome.kernels.base.csr import Structure
from kagome.kernels.cpu import dispatch
from kernel_cases import CHECKS, attention, cases


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("way", [reference, dispatch], ids=["torch", "numba"])
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_way_gives_what_autograd_gives(check, way, data):
    check(way, data.draw(cases()))


@pytest.mark.parametrize("width", [5, 8, 16])
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_attention_that_is_not_stored_gives_what_autograd_gives(width, data):
    attention(data.draw(cases()), width)  # with 3 heads weights are stored, as with 5 columns
    assert ops.fuses_attention(torch.zeros(2, 8, width)) == (width != 5)


def large(rows: int = 3000, edges: int = 60000) -> Structure:
    """With a few rows that have most of the edges."""
    skew = torch.rand(edges) ** 4
    source = torch.randint(0, rows, (edges,))
    return Structure(source, (skew * rows).long().clamp(max=rows - 500), rows, rows)


def results(s: Structure, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    heads = x.view(s.num_sources, 8, -1)
    att = heads[0]
    alpha = ops.softmax_sum(s.by_target, heads[..., 0], heads[..., 1], 0.2)
    best, ties = ops.extreme_rows(s.by_target, x, 1.0)
    return [
        ops.sum_rows(s.by_target, x),
        ops.sum_rows(s.by_target, x, w[:, 0], s.degree.clamp(min=1).reciprocal()),
        ops.sum_rows(s.by_source, heads, w),
        ops.dot_edges(s.by_target, heads, heads),
        alpha,
        *ops.softmax_sum_back(s, heads[..., 0], heads[..., 1], 0.2, alpha, w),
        ops.attention_sum(s.by_target, heads[..., 0], heads[..., 1], 0.2, heads),
        *ops.attention_sum_back(s, heads[..., 0], heads[..., 1], 0.2, heads, heads),
        *ops.leaky_dots_back(s, heads, heads, att, 0.2, w),
        ops.extreme_back(s.by_source, x, best, ties, x),
        *ops.join_edges_back(s, heads, heads, 0.2, ops.join_edges(s, heads, heads, None)),
        *ops.column_softmax(s.by_target, x, x),
    ]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_any_number_of_threads_gives_the_same_bits(threads):
    s = large()
    x, w = torch.randn(s.num_sources, 64), torch.randn(s.edges, 8)
    found = []
    for number in (1, 2, 5):
        threads(number)
        found.append(results(s, x, w))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)


def test_large_rows_agree_with_plain(threads):
    threads(3)
    s = large()
    x, w = torch.randn(s.num_sources, 64, dtype=torch.float64), torch.randn(s.edges, 8, dtype=torch.float64)
    heads = x.view(s.num_sources, 8, 8)
    pairs = [
        (
            way.sum_rows(s.by_target, heads, w),
            way.softmax_edges(s.by_target, w),
            way.leaky_dots_back(s, heads, heads, heads[0], 0.2, w)[2],
        )
        for way in (dispatch, reference)
    ]
    for one, two in zip(*pairs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


def test_several_python_threads_may_call_at_once(threads):
    threads(2)
    s = large(edges=20000)
    x, w = torch.randn(s.num_sources, 64), torch.randn(s.edges, 8)
    wanted = results(s, x, w)
    with ThreadPoolExecutor(4) as ranks:
        for found in ranks.map(lambda _: results(s, x, w), range(8)):
            assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_a_number_that_is_none_shows_in_the_result():
    s = Structure(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), 2, 3)
    x = torch.tensor([[1.0, torch.nan], [torch.nan, 5.0], [2.0, 3.0]])
    for way in (dispatch, reference):
        best, _ = way.extreme_rows(s.by_target, x, 1.0)
        assert torch.equal(best.isnan(), torch.tensor([[True, True], [False, False]]))
        alpha = way.softmax_edges(s.by_target, x)
        assert torch.equal(alpha.isnan(), torch.tensor([[True, True], [True, True], [False, False]]))
        out, _, _ = way.column_softmax(s.by_target, x, x)
        assert torch.equal(out.isnan(), torch.tensor([[True, True], [False, False]]))


def test_views_and_tensors_that_need_a_gradient_are_read_as_they_are():
    s = large(rows=600, edges=2000)
    x = torch.randn(32, s.num_sources, dtype=torch.float64, requires_grad=True).t()
    into = torch.zeros(16, s.own, dtype=torch.float64).t()
    out = ops.sum_rows(s.by_target, x[:, ::2], into=into)
    assert out is into
    torch.testing.assert_close(out, reference.sum_rows(s.by_target, x.detach()[:, ::2]))


def test_no_columns_and_no_heads():
    s = large(rows=600, edges=100)
    for way in (dispatch, reference):
        assert way.sum_rows(s.by_target, torch.empty(s.num_sources, 0)).shape == (s.own, 0)
        assert way.sum_rows(s.by_target, torch.empty(s.num_sources, 0, 4), torch.empty(100, 0)).shape == (
            s.own,
            0,
            4,
        )
        assert way.softmax_edges(s.by_target, torch.empty(100, 0)).shape == (100, 0)
        assert way.extreme_rows(s.by_target, torch.empty(s.num_sources, 0), 1.0)[0].shape == (s.own, 0)
        assert (
            way.dot_edges(s.by_target, torch.empty(s.own, 2, 0), torch.empty(s.num_sources, 2, 0)).abs().sum()
            == 0
        )


def test_what_is_done_how():
    assert ops.backend_of(torch.zeros(1)) == ops.backend_of(torch.zeros(1, dtype=torch.float64)) == "numba"
    assert ops.backend_of(torch.zeros(1, dtype=torch.bfloat16)) == "torch"
    s = large(rows=600, edges=2000)
    x = torch.randn(s.num_sources, 8)
    half = ops.sum_rows(s.by_target, x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, ops.sum_rows(s.by_target, x.bfloat16().float()).bfloat16())


def test_an_error_in_a_piece_is_raised(threads):
    threads(3)
    done = []

    def work(k: int) -> None:
        if k == 5:
            raise ZeroDivisionError
        done.append(k)

    with pytest.raises(ZeroDivisionError):
        thread_pool.each(work, 8)
    thread_pool.each(done.append, 100)
    assert set(done) >= set(range(100))


def test_cuts_balance_edges_not_rows():
    degree = torch.tensor([1000] + [1] * 1000)
    pointer = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)]).numpy()
    cuts = thread_pool.cuts_of(pointer[:-1], pointer[1:], 3 * thread_pool.PIECE // 3001 + 1)
    assert cuts.size == 4
    assert cuts[0] == 0
    assert cuts[-1] == 1001
    assert cuts[1] == 1
    assert abs(int(cuts[2]) - 500) < 10
