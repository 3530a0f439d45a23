"""A partition holds every vertex and every in-edge once, and all ranks agree on who sends what to whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch_geometric.data import Data

from graphs import cuts
from kagome.errors import PartitionError
from kagome.graph.partition.partition import Partition, extract, fingerprint, partition, split_all

Cut = tuple[Data, Tensor, int]
several = settings(max_examples=150, deadline=None)


def original(piece: Partition) -> Tensor:
    """The edges of a part in ids of the whole graph."""
    rows = torch.cat([piece.own, piece.halo])
    return torch.stack([rows[piece.edge_index[0]], piece.own[piece.edge_index[1]]])


@several
@given(cuts())
def test_own_rows_are_sorted_and_all_there(cut: Cut) -> None:
    data, owner, parts = cut
    pieces = split_all(data, owner, parts)
    for piece in pieces:
        assert piece.own.tolist() == sorted(piece.own.tolist())
        assert (owner[piece.own] == piece.part).all()
    assert sorted(v for piece in pieces for v in piece.own.tolist()) == list(range(data.num_nodes))


@several
@given(cuts())
def test_every_edge_is_with_its_target_once_in_the_order_of_the_graph(cut: Cut) -> None:
    data, owner, parts = cut
    pieces = split_all(data, owner, parts)
    assert sorted(e for piece in pieces for e in piece.edge_ids.tolist()) == list(
        range(data.edge_index.size(1))
    )
    for piece in pieces:
        assert torch.equal(original(piece), data.edge_index[:, piece.edge_ids])
        assert piece.edge_ids.tolist() == sorted(piece.edge_ids.tolist())


@several
@given(cuts())
def test_the_halo_is_what_is_read_and_no_more(cut: Cut) -> None:
    data, owner, parts = cut
    for piece in split_all(data, owner, parts):
        needed = {
            s for s, t in data.edge_index.t().tolist() if owner[t] == piece.part and owner[s] != piece.part
        }
        assert piece.halo.tolist() == sorted(needed, key=lambda v: (int(owner[v]), v))
        assert list(piece.recv_counts) == [int((owner[piece.halo] == q).sum()) for q in range(parts)]
        n = piece.own.numel()
        assert set(piece.edge_index[0][piece.edge_index[0] >= n].tolist()) == set(range(n, n + len(needed)))


@several
@given(cuts())
def test_what_one_sends_the_other_receives(cut: Cut) -> None:
    data, owner, parts = cut
    pieces = split_all(data, owner, parts)
    for sender in pieces:
        assert sender.send_counts[sender.part] == sender.recv_counts[sender.part] == 0
        for reader, rows in zip(pieces, sender.send.split(sender.send_counts), strict=True):
            there = reader.halo.split(reader.recv_counts)[sender.part]
            assert torch.equal(sender.own[rows], there)


@several
@given(cuts())
def test_attributes_follow_their_rows_and_edges(cut: Cut) -> None:
    data, owner, parts = cut
    for piece in split_all(data, owner, parts):
        assert set(piece.nodes) == {"x", "y", "train_mask"}
        assert set(piece.edges) == {"edge_weight", "edge_attr"}
        assert torch.equal(piece.nodes["x"][:, 0], piece.own * 10.0)
        assert torch.equal(piece.nodes["y"], piece.own % 3)
        assert torch.equal(piece.edges["edge_weight"], piece.edge_ids.double())
        assert torch.equal(piece.edges["edge_attr"][:, 0], piece.edge_ids * 2)


@several
@given(cuts())
def test_each_part_knows_the_size_of_the_whole(cut: Cut) -> None:
    data, owner, parts = cut
    touched = data.edge_index.flatten().tolist()
    for piece in split_all(data, owner, parts):
        assert (piece.num_nodes, piece.num_edges) == (data.num_nodes, data.edge_index.size(1))
        assert piece.last_vertex == max(touched, default=-1)
        assert piece.num_parts == parts == len(piece.send_counts) == len(piece.recv_counts)


def small() -> Data:
    return Data(
        x=torch.ones(4, 2),
        y=torch.zeros(4, dtype=torch.long),
        edge_index=torch.tensor([[0, 1, 2, 0], [1, 2, 3, 3]]),
        train_mask=torch.ones(4, dtype=torch.bool),
    )


def test_one_part_is_the_graph() -> None:
    (piece,) = partition(small(), parts=1)
    assert piece.own.tolist() == [0, 1, 2, 3]
    assert piece.halo.numel() == piece.send.numel() == 0
    assert original(piece).tolist() == [[0, 1, 2, 0], [1, 2, 3, 3]]


def test_a_cut_by_hand() -> None:
    first, second = split_all(small(), torch.tensor([0, 1, 1, 0]), 2)
    assert (first.own.tolist(), first.halo.tolist(), first.send.tolist()) == ([0, 3], [2], [0])
    assert (second.own.tolist(), second.halo.tolist(), second.send.tolist()) == ([1, 2], [0], [1])
    assert (first.send_counts, first.recv_counts) == ((0, 1), (0, 1))
    assert first.edge_index.tolist() == [[2, 0], [1, 1]]
    assert second.edge_index.tolist() == [[2, 0], [0, 1]]


def test_more_parts_than_vertices() -> None:
    pieces = partition(small(), parts=6)
    assert sorted(piece.own.numel() for piece in pieces) == [0, 0, 1, 1, 1, 1]
    empty = next(piece for piece in pieces if not piece.own.numel())
    assert empty.nodes["x"].shape == (0, 2)
    assert empty.edge_index.shape == (2, 0)
    assert empty.edge_index.stride() == torch.empty(2, 0).stride()  # a stride of 0 says: one row, repeated


def test_a_part_or_an_owner_that_does_not_fit() -> None:
    with pytest.raises(PartitionError, match="a part from 0 to 1; got part 2"):
        extract(small(), torch.zeros(4, dtype=torch.long), 2, 2)
    with pytest.raises(PartitionError, match="4 vertices; got 3"):
        extract(small(), torch.zeros(3, dtype=torch.long), 0, 2)
    with pytest.raises(PartitionError, match="owners from 0 to 1; got owners from 0 to 2"):
        extract(small(), torch.tensor([0, 1, 2, 0]), 0, 2)


def test_the_fingerprint_knows_graph_method_seed_and_parts() -> None:
    base = fingerprint(small(), "metis", 0, 2)
    changed = []
    for name, place in (("x", (3, 1)), ("y", (2,)), ("train_mask", (0,)), ("edge_index", (0, 3))):
        data = small()
        value = data[name].clone()
        value[place] = value[place] + 1 if value.dtype != torch.bool else False
        data[name] = value
        changed.append(fingerprint(data, "metis", 0, 2))
    changed += [fingerprint(small(), *cut) for cut in (("random", 0, 2), ("metis", 1, 2), ("metis", 0, 3))]
    assert len({base, *changed}) == 8
    assert base == fingerprint(small(), "metis", 0, 2)
