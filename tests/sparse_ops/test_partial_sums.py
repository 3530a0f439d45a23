"""Partial sums: what is asked for serves each edge once, and ranks agree on sums, weights and numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch_geometric.data import Data

from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadGroup
from kagome.graph.partition.partition import extract
from kagome.halo.forward_pass import ForwardPass
from kagome.kernels.base.csr import Structure
from kagome.sparse_ops.edge_sum import neighbor_sum
from kagome.sparse_ops.edge_view import in_view
from kagome.sparse_ops.factored_weights import factors_of
from kagome.sparse_ops.partial_sums import SUMS_BEGIN, Ids, sum_tables, wanted

CPU, N, F = torch.device("cpu"), 20, 3


# What one part asks for --------------------------------------------------------------------------


def halo_of(seed: int, peers: int, edges: int) -> tuple[Ids, Ids, int, tuple[int, ...]]:
    """Edges of a part: own rows first, then halo rows by peer."""
    generator = np.random.default_rng(seed)
    own, counts = int(generator.integers(1, 6)), tuple(generator.integers(0, 5, peers).tolist())
    source = generator.integers(0, own + sum(counts), edges)
    return source, generator.integers(0, own, edges), own, counts


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 40), st.sampled_from([0.0, 0.3, 1.0]))
def test_each_edge_is_summed_once(seed: int, peers: int, edges: int, least: float) -> None:
    source, target, own, counts = halo_of(seed, peers, edges)
    asked = wanted(source, target, own, counts, least)
    begins = np.cumsum(counts) - np.array(counts)
    message_begins = np.cumsum(asked.recv_counts) - np.array(asked.recv_counts)
    peer = np.repeat(np.arange(peers), asked.edge_counts)
    # The rows that each row of a message is made of, as the peers will add them up.
    made: list[list[int]] = [[] for _ in range(sum(asked.recv_counts))]
    for at, row in zip(message_begins[peer] + asked.place, own + begins[peer] + asked.row, strict=True):
        made[at].append(int(row))
    assert all(made)  # nothing is sent for nothing
    read = [(int(t), [int(s)] if s < own else made[s - own]) for s, t in
            zip(np.concatenate([asked.source, own + asked.arrived]),
                np.concatenate([target[asked.rest], asked.target]), strict=True)]  # fmt: skip
    found = sorted((t, row) for t, rows in read for row in rows)
    assert found == sorted(zip(target.tolist(), source.tolist(), strict=True))
    # An edge that is summed elsewhere carries its own weight, and its ends are those of the edge.
    assert (source[asked.edges] == own + begins[peer] + asked.row).all()
    assert sorted([*asked.edges[asked.summed], *np.flatnonzero(asked.rest)]) == list(range(edges))


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 40))
def test_no_more_is_sent_than_rows_and_a_threshold_sends_rows(seed: int, peers: int, edges: int) -> None:
    source, target, own, counts = halo_of(seed, peers, edges)
    peer = np.repeat(np.arange(peers), counts)[np.unique(source[source >= own]) - own]
    read = np.bincount(peer, minlength=peers)
    found = np.array(wanted(source, target, own, counts).recv_counts)
    assert (found <= read).all()
    rows = wanted(source, target, own, counts, 1.0)
    assert rows.recv_counts == tuple(read)
    assert rows.target.size == 0
    assert rows.rows == read.sum()
    assert not rows.summed.any()
    for least in (0.2, 0.5):
        some = np.array(wanted(source, target, own, counts, least).recv_counts)
        assert (some == np.where(read - found > least * read, found, read)).all()


# Ranks -------------------------------------------------------------------------------------------


def graph(edges: int = 140) -> tuple[Data, Tensor]:
    """A graph, and a weight for each of its edges."""
    generator = torch.Generator().manual_seed(4)
    edge_index = torch.randint(0, N, (2, edges), generator=generator)
    weight = torch.rand(edges, generator=generator, dtype=torch.float64)
    return Data(edge_index=edge_index, num_nodes=N), weight


def owner_of(world: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(world)
    owner = torch.randint(0, world, (N,), generator=generator)
    if kind == "empty":
        owner[owner == world - 1] = 0
    if kind == "uneven":
        owner[:] = 0
        owner[: world - 1] = torch.arange(1, world)
    return owner


def rooted(edge_index: Tensor) -> tuple[Tensor, Tensor]:
    """The edges with a loop at each vertex, and GCN's weights, which are products."""
    loops = torch.arange(N).repeat(2, 1)
    edge_index = torch.cat([edge_index[:, edge_index[0] != edge_index[1]], loops], 1)
    root = torch.bincount(edge_index[1], minlength=N).double().rsqrt()
    return edge_index, root[edge_index[0]] * root[edge_index[1]]


def summed(channel: Channel, world: int, kind: str, weights: str) -> dict[str, Any]:
    """A sum with partial sums on this rank, and the gradient of its rows."""
    (data, weight), owner = graph(), owner_of(world, kind)
    if weights == "factored":
        data.edge_index, weight = rooted(data.edge_index)
    part = extract(data, owner, channel.rank, channel.size)
    view = in_view(part, channel, CPU)
    source, target = view.edge_index
    edges = Structure(source, target, view.rows.own, view.rows.own + view.rows.halo)
    tables = sum_tables(edges, view.rows)
    assert tables is not None
    mine = None if weights == "none" else weight[part.edge_ids]
    factor = None
    if weights == "factored":
        assert mine is not None
        factor = factors_of(mine, edges)
        assert factor.numel() == edges.num_sources
    sums = tables.weighted(mine, factor, source)
    forward_pass = ForwardPass(1, checked=True, device=CPU, grad=True)
    x = torch.randn(N, F, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    by = torch.randn(N, F, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    own = x[part.own].requires_grad_()
    out = neighbor_sum(
        own,
        sums.edges,
        weight=sums.weight,
        factor=sums.factor,
        scale=None if factor is None else factor[: edges.own],
        halo_work=sums.exchange.halo_work(own, forward_pass, "sum"),
        forward_pass=forward_pass,
    )
    ((out * by[part.own]).sum() + forward_pass.token).backward()
    return {
        "own": part.own,
        "out": out.detach(),
        "grad": own.grad,
        "sent": tables.exchange.send_counts,
        "read": tables.exchange.recv_counts,
        "rows": view.rows.recv_counts,
        "numbers": tables.exchange.row_ids,
        "crossing": tables.crossing,
    }


@pytest.mark.some(1, each="weights")
@pytest.mark.parametrize(
    ("world", "kind"), [*product((2, 3, 4), ("random", "uneven")), (3, "empty"), (4, "empty")]
)
@pytest.mark.parametrize("weights", ["none", "any", "factored"])
def test_sums_and_gradients_are_those_of_the_whole_graph(world: int, kind: str, weights: str) -> None:
    data, weight = graph()
    edge_index = data.edge_index
    if weights == "factored":
        edge_index, weight = rooted(edge_index)
    weight = torch.ones_like(weight) if weights == "none" else weight
    matrix = torch.zeros(N, N, dtype=torch.float64)
    matrix.index_put_((edge_index[1], edge_index[0]), weight, accumulate=True)
    x = torch.randn(N, F, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    by = torch.randn(N, F, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = ThreadGroup(world).run(lambda channel: summed(channel, world, kind, weights))
    for each in found:
        torch.testing.assert_close(each["out"], (matrix @ x)[each["own"]], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(each["grad"], (matrix.T @ by)[each["own"]], rtol=1e-12, atol=1e-12)
    for p in range(world):
        for q in range(world):
            assert found[p]["sent"][q] == found[q]["read"][p] <= found[q]["rows"][p]
    before, after = (sum(sum(each[name]) for each in found) for name in ("rows", "read"))
    assert after < before
    assert all(each["crossing"] == (before, after) for each in found)
    numbers_agree(found, world)


def numbers_agree(found: list[dict[str, Any]], world: int) -> None:
    """A codec's draws of a sum depend on its number, the same on both sides and no other sum's."""
    sums = []
    for rank, each in enumerate(found):
        sent = each["numbers"][0].split(list(each["sent"]))
        for peer in range(world):
            assert sent[peer].equal(found[peer]["numbers"][1].split(list(found[peer]["read"]))[rank])
        sums += each["numbers"][0][each["numbers"][0] >= SUMS_BEGIN].tolist()
    assert len(sums) == len(set(sums)) > 0


def test_ranks_that_no_sum_saves_anything_keep_rows(ranks: Callable[..., list]) -> None:
    assert ranks(2, without_sums) == [True, True]


def without_sums(channel: Channel) -> bool:
    # Each vertex reads one of the other part: a sum of one row saves nothing.
    data = Data(edge_index=torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1]]), num_nodes=4)
    view = in_view(extract(data, torch.tensor([0, 0, 1, 1]), channel.rank, 2), channel, CPU)
    source, target = view.edge_index
    return sum_tables(Structure(source, target, 2, 4), view.rows) is None
