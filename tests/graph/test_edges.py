"""The passes over edge lists find what sorting and sets find, compiled and in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch_geometric.data import Data

from graphs import cuts
from kagome.graph.structure import edges, kernels

several = settings(max_examples=60, deadline=None)


def plain(loop: Callable[..., Any]) -> Callable[..., Any]:
    return loop.py_func  # type: ignore[attr-defined, no-any-return]


@several
@given(cuts())
def test_who_reads_whom(cut: tuple[Data, Tensor, int]) -> None:
    data, owner, parts = cut
    source, target = data.edge_index.numpy()
    owners = owner.int().numpy()
    readers, in_edges, crossing = edges.read_by(source, target, owners, parts)
    pairs = {(s, int(owner[t])) for s, t in data.edge_index.t().tolist() if owner[s] != owner[t]}
    assert pairs == {(v, q) for v in range(owner.numel()) for q in range(parts) if readers[v, 0] >> q & 1}
    assert crossing == sum(bool(owner[s] != owner[t]) for s, t in data.edge_index.t().tolist())
    assert in_edges.tolist() == [int((owner[data.edge_index[1]] == q).sum()) for q in range(parts)]
    assert edges.halo_counts(readers, parts).tolist() == [sum(q == p for _, q in pairs) for p in range(parts)]
    again = plain(edges.read_by)(source, target, owners, parts)
    assert np.array_equal(again[0], readers)


@pytest.mark.parametrize("parts", [64, 65, 130])
def test_more_parts_than_bits_in_a_word(parts: int) -> None:
    owners = np.arange(parts, dtype=np.int32)
    source = np.zeros(parts - 1, np.int64)
    target = np.arange(1, parts, dtype=np.int64)  # vertex 0 is read by all others
    for loop in (edges.read_by, plain(edges.read_by)):
        readers, _, cut = loop(source, target, owners, parts)
        assert cut == parts - 1
        assert edges.halo_counts(readers, parts).tolist() == [0] + [1] * (parts - 1)
        for part in range(1, parts):
            halo, counts = edges.halo_of(readers, owners, part, parts)
            assert (halo.tolist(), counts.tolist()) == ([0], [1] + [0] * (parts - 1))
        send, counts = edges.sent_by(readers, np.array([0]), parts)
        assert (send.tolist(), counts.tolist()) == ([0] * (parts - 1), [0] + [1] * (parts - 1))


numbers = st.lists(st.integers(0, 20), max_size=30).map(lambda values: np.array(sorted(values), np.int64))


@several
@given(numbers, numbers)
def test_shared_and_squeezed(one: Any, other: Any) -> None:
    for loop in (edges.shared, plain(edges.shared)):
        assert loop(one, other) == (len({*one.tolist()}), len({*one.tolist()} & {*other.tolist()}))
    for loop in (edges.squeeze, plain(edges.squeeze)):
        values = one.copy()
        assert values[: loop(values)].tolist() == sorted({*one.tolist()})


@several
@given(cuts())
def test_simple_lists(cut: tuple[Data, Tensor, int]) -> None:
    data = cut[0]
    indptr, indices = kernels.adjacency(*data.edge_index.numpy(), data.num_nodes)
    edges.sort_rows(indptr, indices)
    wanted: list[set[int]] = [set() for _ in range(data.num_nodes)]
    for s, t in data.edge_index.t().tolist():
        if s != t:
            wanted[s].add(t)
            wanted[t].add(s)
    for loop in (edges.simple, plain(edges.simple)):
        start, short = loop(indptr, indices)
        assert [short[start[v] : start[v + 1]].tolist() for v in range(data.num_nodes)] == [
            sorted(row) for row in wanted
        ]


@several
@given(st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)).filter(lambda pair: pair[0] < pair[1])))
def test_both_ways(pairs: set[tuple[int, int]]) -> None:
    keys = np.array(sorted(low * 9 + high for low, high in pairs), np.int64)
    found = edges.both_ways(keys, 9)
    assert list(zip(*found.tolist(), strict=True)) == sorted(pairs | {(t, s) for s, t in pairs})


@several
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40), st.lists(st.floats(0, 1), max_size=30))
def test_intervals_are_those_of_a_search(widths: list[float], shares: list[float]) -> None:
    reach = np.concatenate([[0.0], np.cumsum(widths)])
    at = np.concatenate([np.array(shares) * reach[-1], reach])  # also exactly on the ends
    wanted = np.minimum(np.searchsorted(reach, at, side="right") - 1, len(widths) - 1)
    assert edges.interval(reach, edges.guide(reach), at).tolist() == wanted.tolist()
