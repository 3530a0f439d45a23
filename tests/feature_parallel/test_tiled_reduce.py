"""Sums chunk by chunk: the same numbers, within the bound, no row sent twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_sliced_reduce import MODELS, V, graph, sent
from torch import Tensor
from torch_geometric.data import Data

from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.errors import ConfigError
from kagome.feature_parallel.all_to_all import AllToAll
from kagome.feature_parallel.edge_layout import EdgeLayout, TensorGroup
from kagome.feature_parallel.tiled_reduce import (
    DestinationChunk,
    TileBound,
    WorkingMemory,
    chunks_of,
    cut_in,
    largest,
    travelling,
)
from kagome.kernels.base.csr import Structure
from parity import assert_equal, joined, parity, whole

BOUND = 5_000
"""Bytes: of 61 rows and 400 edges some tenths."""


def edge_layout(edges: Tensor, rows: int) -> EdgeLayout:
    """A graph of one rank."""
    found: list[EdgeLayout] = []

    def work(channel: ThreadChannel) -> None:
        structure = Structure(edges[0], edges[1], rows, rows)
        rows_of, edges_of = AllToAll((rows,), channel), AllToAll((edges.size(1),), channel)
        found.append(EdgeLayout(rows_of, rows_of, edges_of, structure, TensorGroup(0, 1, 1)))

    ThreadGroup(1).run(work)
    return found[0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(0, 90), st.integers(1, 5), st.integers(0, 2), st.integers(0, 10_000))
def test_chunks_take_each_edge_once_and_bring_each_row_once(
    rows: int, edges: int, width: int, heads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, rows, (2, edges), generator=generator)
    graph, room = edge_layout(ends, rows), WorkingMemory(heads=heads)
    whole_cost = largest(chunks_of(graph, width, 8, room, 1 << 40), width, 8, room)
    try:
        chunks = chunks_of(graph, width, 8, room, whole_cost // 2)
    except ConfigError:
        assert largest(cut_in(graph, rows), width, 8, room) > whole_cost // 2
        return
    assert largest(chunks, width, 8, room) <= whole_cost // 2
    assert [chunk.begin for chunk in chunks] == [0, *(chunk.end for chunk in chunks[:-1])]
    assert chunks[-1].end == rows
    assert sorted(torch.cat([chunk.edges for chunk in chunks]).tolist()) == list(range(edges))
    brought: set[int] = set()
    for chunk in chunks:
        new = set(chunk.brings.all.tolist())
        assert not new & brought
        brought |= new
        assert set(chunk.reads.tolist()) <= brought
        source, target = chunk.structure.source, chunk.structure.target
        assert torch.equal(chunk.reads[source], ends[0][chunk.edges])
        assert torch.equal(target + chunk.begin, ends[1][chunk.edges])


NAMES = [
    "gcn", "sage", "gin", "gat2", "gcn2", "appnp", "decoupled gcn", "decoupled deep gcn", "decoupled sage",
    "decoupled gat", "decoupled rgcn", "pna", "largest", "softmax",
]  # fmt: skip


@pytest.mark.parametrize(("name", "size"), [(name, 2 + place % 2) for place, name in enumerate(NAMES)])
def test_models_are_whole_within_a_bound(ranks: Callable[..., list], name: str, size: int) -> None:
    data, owner = graph(), torch.arange(V) * size // V
    shares = ranks(size, parity, MODELS[name], data, owner, 0, 2, size, BOUND)
    assert_equal(joined(shares, V), whole(MODELS[name], data, epochs=2))


@pytest.mark.parametrize("name", ["decoupled gcn", "decoupled gat"])
def test_no_row_is_sent_twice(ranks: Callable[..., list], name: str) -> None:
    """Chunk by chunk a row crosses once, as it does all at once."""
    free, bound = (
        sum(each[1]["transpose"] for each in ranks(3, sent, name, 2, limit)) for limit in (None, BOUND)
    )
    assert bound == free


def test_a_bound_that_one_vertex_does_not_fit_is_refused() -> None:
    edges = torch.stack([torch.arange(50), torch.zeros(50, dtype=torch.long)])
    with pytest.raises(ConfigError, match=r"GiB for the in-edges of one vertex, with 4 columns"):
        chunks_of(edge_layout(edges, 50), 4, 8, WorkingMemory(), 1000)


def test_all_ranks_refuse_alike(ranks: Callable[..., list]) -> None:
    """Of 7 columns one rank takes 3 and others 2: a bound that is too small for 3 is so for all."""
    data, owner = graph(), torch.arange(V) * 3 // V
    most = [ranks(3, refused, data, owner, limit) for limit in (1_000, 1_600, 2_000, 2_400, 20_000)]
    assert all(len(set(each)) == 1 for each in most)
    assert (most[0][0], most[-1][0]) == (True, False)


def refused(channel: Channel, data: Data, owner: Tensor, limit: int) -> bool:
    try:
        parity(channel, MODELS["largest"], data, owner, 0, 1, 3, limit)
    except ConfigError:
        return True
    return False


def test_what_a_chunk_needs_is_what_it_holds() -> None:
    edges = torch.randint(0, 20, (2, 60), generator=torch.Generator().manual_seed(0))
    (chunk,) = chunks_of(edge_layout(edges, 20), 3, 8, WorkingMemory(heads=2), 1 << 30)
    assert isinstance(chunk, DestinationChunk)
    rows = (max(chunk.reads.numel(), 20) + 20) * 3 * 8
    assert chunk.working(3, 8, WorkingMemory(heads=2)) == rows + 60 * (8 + 2 * 16) + 16 * 20
    assert travelling(chunk.brings, None, 3, 8) == 2 * chunk.brings.all.numel() * 3 * 8
    assert largest((chunk,), 3, 8, WorkingMemory(heads=2)) == chunk.working(3, 8, WorkingMemory(heads=2))
    assert TileBound(1, torch.device("cpu")).gauge.peak == 0


def test_there_are_hardly_more_chunks_than_need_be() -> None:
    generator = torch.Generator().manual_seed(1)
    given = edge_layout(torch.randint(0, 500, (2, 6000), generator=generator), 500)
    for bound in (20_000, 27_000, 40_000, 61_000, 90_000):
        found = chunks_of(given, 4, 8, WorkingMemory(heads=1), bound)
        assert largest(found, 4, 8, WorkingMemory(heads=1)) <= bound
        fewer = len(found) - max(len(found) // 8, 1) - 1
        assert fewer < 1 or largest(cut_in(given, fewer), 4, 8, WorkingMemory(heads=1)) > bound
