"""Dropout by counter: a number depends on seed, epoch, call, row and column, and on nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from scipy.stats import binom
from torch import Tensor

from convolutions import sample_graph
from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.graph.partition.partition import split_all
from kagome.intercept.interceptor import Interceptor
from kagome.model.exact.dropout import _scaled, call_key, dropout, edge_ids, plain_scaled, row_keys, uniform
from kagome.model.exact.handlers import HANDLERS
from kagome.sparse_ops.edge_view import pair_ids

KEY = call_key(0, 1, "convs.0", 1)


def keys_of(ids: Tensor, key: int = KEY) -> Tensor:
    return row_keys(ids, key)


def mask(x: Tensor) -> Tensor:
    return x != 0


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 9),
    columns=st.integers(0, 9),
    p=st.floats(0, 0.999),
    first=st.integers(-(2**63), 2**63 - 1),
)
def test_the_kernel_gives_the_bits_of_the_plain_path(
    dtype: torch.dtype, rows: int, columns: int, p: float, first: int
) -> None:
    x = torch.randn(rows, columns, dtype=torch.float64).to(dtype)
    ids = torch.arange(rows)
    assert torch.equal(bits(_scaled(x, ids, first, p)), bits(plain_scaled(x, ids, first, p)))


def test_a_kept_entry_is_scaled_and_a_dropped_one_is_zero() -> None:
    x = torch.rand(50, 8, dtype=torch.float64) + 1
    out = dropout(x, torch.arange(50), KEY, 0.25)
    kept = mask(out)
    torch.testing.assert_close(out[kept], x[kept] / 0.75, rtol=1e-15, atol=0)
    assert 0 < kept.sum() < kept.numel()


def test_a_row_keeps_its_mask_in_any_order_and_any_part() -> None:
    ids = torch.arange(100)
    whole = dropout(torch.ones(100, 16), ids, KEY, 0.5)
    order = torch.randperm(100)
    assert torch.equal(dropout(torch.ones(100, 16), order, KEY, 0.5), whole[order])
    for part in (ids[ids % 3 == 1], ids[:0], ids[7:8]):
        assert torch.equal(dropout(torch.ones(len(part), 16), part, KEY, 0.5), whole[part])


def test_a_column_keeps_its_mask_whatever_the_width() -> None:
    ids = torch.arange(40)
    wide = dropout(torch.ones(40, 16), ids, KEY, 0.5)
    assert torch.equal(dropout(torch.ones(40, 4), ids, KEY, 0.5), wide[:, :4])
    assert torch.equal(dropout(torch.ones(40, 4, 4), ids, KEY, 0.5).view(40, 16), wide)
    assert torch.equal(dropout(torch.ones(16, 40), ids, KEY, 0.5, axis=1), wide.t())
    assert torch.equal(dropout(torch.ones(40), ids, KEY, 0.5), wide[:, 0])


@pytest.mark.parametrize(
    "other",
    [(1, 1, "convs.0", 1), (0, 2, "convs.0", 1), (0, 1, "convs.1", 1), (0, 1, "convs.0", 2)],
    ids=["seed", "epoch", "module", "call"],
)
def test_another_call_draws_other_numbers(other: tuple[int, int, str, int]) -> None:
    ids = torch.arange(2000)
    here, there = (mask(dropout(torch.ones(2000, 8), ids, k, 0.5)) for k in (KEY, call_key(*other)))
    # Independent masks agree in half of 16,000 entries, within five standard deviations.
    assert abs(float((here == there).double().mean()) - 0.5) < 5 * math.sqrt(0.25 / 16_000)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_kept_is_the_one_asked_for(p: float) -> None:
    kept = mask(dropout(torch.ones(20_000, 20), torch.arange(20_000), KEY, p)).double()
    error = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(float(kept.mean()) - (1 - p)) < 5 * error
    for along, count in ((0, 20_000), (1, 20)):
        # Of so many rows (columns) not one may lie where one in a million such runs would have one.
        dropped, rare = count - kept.sum(along), 1e-6 / kept.size(1 - along)
        assert float(dropped.max()) <= binom.isf(rare, count, p)
        assert float(dropped.min()) >= binom.ppf(rare, count, p)


def test_neighbouring_rows_and_columns_are_independent() -> None:
    kept = mask(dropout(torch.ones(20_000, 20), torch.arange(20_000), KEY, 0.5)).double() - 0.5
    for shifted in (kept[1:] * kept[:-1], kept[:, 1:] * kept[:, :-1]):
        assert abs(float(shifted.mean())) < 5 * 0.25 / math.sqrt(shifted.numel())


def test_numbers_are_uniform_over_32_bits() -> None:
    numbers = uniform(keys_of(torch.arange(10_000)), 10).double() / 2**32
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    counts = torch.histc(numbers, 16, 0, 1)
    assert float(((counts - 6250) ** 2 / 6250).sum()) < 50  # chi square, 15 degrees: 1 in 80,000


def test_the_gradient_goes_through_the_same_mask() -> None:
    x = torch.randn(60, 5, dtype=torch.float64, requires_grad=True)
    out = dropout(x, torch.arange(60), KEY, 0.3)
    weight = torch.rand(60, 5, dtype=torch.float64) + 0.5
    (out * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(mask(x.grad), mask(out))
    torch.testing.assert_close(x.grad, mask(out) * weight / 0.7, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_none_and_all_are_dropped_at_the_ends(dtype: torch.dtype) -> None:
    x = torch.randn(9, 3).to(dtype)
    ids = torch.arange(9)
    assert torch.equal(dropout(x, ids, KEY, 0.0), x)
    assert torch.equal(dropout(x, ids, KEY, 1.0), torch.zeros_like(x))
    grown = x.clone().requires_grad_()
    dropout(grown, ids, KEY, 1.0).sum().backward()
    assert grown.grad is not None
    assert not grown.grad.any()


def test_of_equal_edges_each_has_its_own_number_in_any_part() -> None:
    source, target = torch.tensor([[4, 4, 1, 4, 1, 2], [7, 7, 7, 7, 4, 7]])
    copy = pair_ids(source, target)
    assert copy.tolist() == [0, 1, 0, 2, 0, 0]
    assert edge_ids(source, target, copy).unique().numel() == 6
    # Which copy an edge is depends on the edges with the same ends alone, in their order.
    kept = torch.tensor([0, 1, 3])
    assert torch.equal(
        edge_ids(source[kept], target[kept], pair_ids(source[kept], target[kept])),
        edge_ids(source, target, copy)[kept],
    )


def test_an_edge_and_its_reverse_differ() -> None:
    a, b, none = torch.tensor([3]), torch.tensor([8]), torch.tensor([0])
    assert edge_ids(a, b, none) != edge_ids(b, a, none)


# Under interception ---------------------------------------------------------------------------------


def drawn(parts: int, call: Callable[[Interceptor], Tensor], seed: int = 0, epoch: int = 1) -> dict:
    """Original edge or vertex -> what was drawn for it, over all parts."""
    data = sample_graph(1)
    owner = torch.randint(0, parts, (30,), generator=torch.Generator().manual_seed(9))
    pieces = split_all(data, owner, parts)

    def work(channel: ThreadChannel) -> list[tuple[int, Tensor]]:
        piece = pieces[channel.rank]
        scope = Interceptor(piece, channel, seed=seed, handlers=HANDLERS)
        with scope.running(epoch, training=True, checked=True):
            out = call(scope)
        ids = piece.own if out.size(0) == piece.own.numel() else piece.edge_ids
        assert out.size(0) == ids.numel()
        return list(zip(ids.tolist(), out, strict=True))

    return {key: value for rows in ThreadGroup(parts, 20).run(work) for key, value in rows}


def of_vertices(scope: Interceptor) -> Tensor:
    return torch.nn.functional.dropout(torch.ones_like(scope.inputs["x"]), 0.5, True)


def of_edges(scope: Interceptor) -> Tensor:
    read = scope.inputs["x"][scope.inputs["edge_index"][0]]
    return torch.nn.functional.dropout(torch.ones_like(read), 0.5, True)


def of_given_rows(scope: Interceptor) -> Tensor:
    return torch.rand_like(scope.inputs["x"])


@pytest.mark.parametrize("call", [of_vertices, of_edges, of_given_rows])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_any_split_draws_what_one_part_draws(parts: int, call: Callable[[Interceptor], Tensor]) -> None:
    one, many = drawn(1, call), drawn(parts, call)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[key], many[key]) for key in one)
    again, later = drawn(1, call, seed=1), drawn(1, call, epoch=2)
    assert any(not torch.equal(one[key], again[key]) for key in one)
    assert any(not torch.equal(one[key], later[key]) for key in one)


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: torch.dropout(x, 0.5, False),
        lambda x: torch.dropout(x, p=0.5, train=False),
    ],
)
def test_nothing_is_dropped_outside_of_training_whatever_the_argument_s_name(
    drop: Callable[[Tensor], Tensor],
) -> None:
    found = drawn(2, lambda scope: drop(torch.ones_like(scope.inputs["x"])))
    assert all(bool(row.eq(1).all()) for row in found.values())


def test_equal_edges_are_dropped_apart() -> None:
    ends = sample_graph(1).edge_index.t().tolist()
    numbers = drawn(3, of_edges)
    twins = [(a, b) for a in range(120) for b in range(a) if ends[a] == ends[b]]
    assert twins
    assert any(not torch.equal(numbers[a], numbers[b]) for a, b in twins)


@pytest.mark.parametrize("begin", [0, 3, 16, 17])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_some_columns_are_drawn_as_in_the_whole_row(begin: int, kind: torch.dtype) -> None:
    x, ids = torch.ones(40, 37, dtype=kind), torch.arange(40) * 7
    whole = dropout(x, ids, 5, 0.4)
    some = dropout(x[:, begin : begin + 9], ids, 5, 0.4, 0, begin)
    assert torch.equal(some, whole[:, begin : begin + 9])


# Draws of no row ------------------------------------------------------------------------------------

WEIGHT = torch.linspace(0.1, 0.9, 12).view(3, 4)

SHARED: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn((3, 2), dtype=torch.float64),
    "rand_like": lambda: torch.rand_like(WEIGHT),
    "randint": lambda: torch.randint(9, (30,)),
    "randint_like": lambda: torch.randint_like(WEIGHT, 1000),
    "randperm": lambda: torch.randperm(20),
    "normal": lambda: torch.normal(WEIGHT, 0.1),
    "normal of a size": lambda: torch.normal(0.0, 1.0, (3,), device="cpu"),
    "bernoulli": lambda: torch.bernoulli(WEIGHT.expand(9, 3, 4)),
    "multinomial": lambda: WEIGHT.view(-1).multinomial(12),
    "poisson": lambda: torch.poisson(WEIGHT * 100),
    "in place": lambda: torch.empty(5).uniform_(),
    "out": lambda: torch.rand(3, out=torch.empty(3)),
    "gumbel_softmax": lambda: F.gumbel_softmax(WEIGHT),
    "rrelu": lambda: F.rrelu(-WEIGHT, training=True),
    "beta": lambda: torch.distributions.Beta(WEIGHT, 1.0).sample(),
    "normal of a distribution": lambda: torch.distributions.Normal(0.0, WEIGHT).sample(),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_is_no_row_s_is_the_same_wherever_it_is_drawn(name: str) -> None:
    call = SHARED[name]

    def found(count: int, seed: int = 0, epoch: int = 1, before: int = 0) -> Tensor:
        pieces = split_all(sample_graph(1), torch.arange(30) % count, count)
        each = []
        for rank, piece in enumerate(pieces):
            scope = Interceptor(piece, Channel(None, "cpu"), seed=seed, handlers=HANDLERS)
            torch.manual_seed(rank)
            with scope.running(epoch, training=True):
                scope.forward.draws = before
                each.append(call())
        assert torch.get_rng_state().equal(torch.random.manual_seed(rank).get_state())
        assert all(torch.equal(other, each[0]) for other in each)
        return each[0]

    one = found(1)
    assert torch.equal(found(3), one)
    for other in (found(1, seed=1), found(1, epoch=2), found(1, before=1)):
        assert not torch.equal(other, one)


def test_a_generator_of_the_user_s_is_left_to_the_user() -> None:
    scope = Interceptor(
        split_all(sample_graph(1), torch.zeros(30, dtype=torch.long), 1)[0],
        Channel(None, "cpu"),
        handlers=HANDLERS,
    )
    wanted = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    with scope.running(1, training=True):
        assert torch.equal(torch.randperm(50, generator=torch.Generator().manual_seed(3)), wanted)
