"""The figures of a cut, counted by hand, and the advice drawn from them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from torch import Tensor
from torch_geometric.data import Data

from graphs import cuts
from kagome.graph.partition.partition import split_all
from kagome.graph.partition.quality import HEADER, quality


@settings(max_examples=60, deadline=None)
@given(cuts())
def test_figures_are_those_of_the_parts(cut: tuple[Data, Tensor, int]) -> None:
    data, owner, parts = cut
    found = quality(data.edge_index, owner, parts)
    pieces = split_all(data, owner, parts)
    assert found.halo == tuple(piece.halo.numel() for piece in pieces)
    assert found.sent == tuple(piece.send.numel() for piece in pieces)
    assert found.vertices == tuple(piece.own.numel() for piece in pieces)
    assert found.in_edges == tuple(piece.edge_ids.numel() for piece in pieces)
    assert found.cut_edges == sum(int((piece.edge_index[0] >= piece.own.numel()).sum()) for piece in pieces)
    assert [len(row) for row in found.table()] == [len(HEADER)] * parts
    assert all(isinstance(words, str) for words in found.advice)


def test_a_cut_by_hand() -> None:
    edge_index = torch.tensor([[0, 1, 2, 0, 3], [1, 2, 3, 3, 3]])
    found = quality(edge_index, torch.tensor([0, 0, 1, 1]), 2)
    assert (found.cut_edges, found.cut, found.replication) == (2, 0.4, 0.5)
    assert (found.vertex_balance, found.edge_balance) == (1.0, 1.6)
    assert found.table() == [(0, 2, 1, 2, 0, 0.0), (1, 2, 4, 0, 2, 0.5)]
    assert (found.busiest, found.row_balance) == (2, 2.0)


def test_a_good_cut_needs_no_advice() -> None:
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    assert quality(edge_index, torch.tensor([0, 0, 1, 1]), 2).advice == ()


def test_a_dense_graph_is_told_to_use_fewer_parts() -> None:
    edge_index = torch.ones(12, 12).nonzero().t()
    advice = quality(edge_index, torch.arange(12) % 6, 6).advice
    assert len(advice) == 1
    assert "83% halo" in advice[0]


def test_empty_and_uneven_parts_are_told() -> None:
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    said = " ".join(quality(edge_index, torch.zeros(3, dtype=torch.long), 3).advice)
    assert "2 of 3 parts own no vertex" in said
    assert "3.0 times the mean number of in-edges" in said
