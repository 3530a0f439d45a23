"""Covers: each edge is served, none is smaller, and each pair of parts has its own."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import torch
from hypothesis import given, strategies as st
from torch_geometric.data import Data

from kagome.graph.partition.covers import Ids, cover_counts, halo_cover, smallest_cover
from kagome.graph.partition.partition import extract

SENDERS, RECEIVERS = 5, 4
EDGES = st.lists(st.tuples(st.integers(0, SENDERS - 1), st.integers(0, RECEIVERS - 1)), max_size=12)
"""Edges of few vertices, some of them twice."""


def ends(edges: list[tuple[int, int]]) -> tuple[Ids, Ids]:
    table = np.array(edges, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def least_by_trial(edges: list[tuple[int, int]]) -> int:
    """The size of the smallest cover, by trying all sets of vertices."""
    every = [*range(SENDERS), *(SENDERS + r for r in range(RECEIVERS))]
    for chosen in chain.from_iterable(combinations(every, size) for size in range(len(every) + 1)):
        if all(s in chosen or SENDERS + r in chosen for s, r in edges):
            return len(chosen)
    raise AssertionError


@given(EDGES)
def test_a_cover_has_an_end_of_each_edge_and_none_is_smaller(edges: list[tuple[int, int]]) -> None:
    sender, receiver = ends(edges)
    found = smallest_cover(sender, receiver, SENDERS, RECEIVERS)
    assert (found.senders[sender] | found.receivers[receiver]).all()
    assert found.senders.sum() + found.receivers.sum() == least_by_trial(edges)
    # A receiver is taken only where it saves something, so it has an edge that no sender serves.
    for taken in np.flatnonzero(found.receivers):
        assert (~found.senders[sender[receiver == taken]]).any()


@given(EDGES)
def test_rows_are_preferred_to_sums(edges: list[tuple[int, int]]) -> None:
    # Where all senders together are a smallest cover, their rows are sent and no sum.
    sender, receiver = ends(edges)
    found = smallest_cover(sender, receiver, SENDERS, RECEIVERS)
    if least_by_trial(edges) == np.unique(sender).size:
        assert not found.receivers.any()


@given(st.integers(1, 4), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_each_peer_has_the_cover_of_its_own_edges(peers: int, edges: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    own, recv = int(generator.integers(1, 6)), tuple(generator.integers(0, 5, peers).tolist())
    source, target = generator.integers(0, own + sum(recv), edges), generator.integers(0, own, edges)
    found, begin = halo_cover(source, target, own, recv), own
    for peer, count in enumerate(recv):
        of_peer = (source >= begin) & (source < begin + count)
        alone = smallest_cover(source[of_peer] - begin, target[of_peer], count, own)
        assert found.counts[peer] == alone.senders.sum() + alone.receivers.sum() <= found.read[peer]
        assert found.read[peer] == np.unique(source[of_peer]).size
        begin += count


@given(st.integers(1, 4), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_a_cut_has_the_covers_of_its_parts(parts: int, edges: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    owner, edge_index = generator.integers(0, parts, 12), generator.integers(0, 12, (2, edges))
    rows, fewer = cover_counts(*edge_index, owner, parts)
    data = Data(edge_index=torch.from_numpy(edge_index), num_nodes=12)
    for number in range(parts):
        part = extract(data, torch.from_numpy(owner), number, parts)
        source, target = part.edge_index.numpy()
        alone = halo_cover(source, target, part.own.numel(), part.recv_counts)
        assert fewer[number].tolist() == alone.counts.tolist()
        assert rows[number].tolist() == alone.read.tolist() == list(part.recv_counts)
