"""Moves out of the part with most rows to send or to read: it has fewer, and the bounds hold."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from graphs import cuts
from kagome.graph.partition.quality import quality
from kagome.graph.structure import traffic


def relieved(
    edge_index: Tensor, owner: Tensor, parts: int, slack: float
) -> tuple[Tensor, NDArray[np.float64]]:
    source, target = edge_index.contiguous().numpy()
    weight = np.bincount(target, minlength=owner.numel()).astype(np.float64)
    loads = [np.bincount(owner, minlength=parts).max(), np.bincount(owner, weight, minlength=parts).max()]
    bounds = np.array([[slack * most] * parts for most in loads])
    moved = owner.clone()
    lists = traffic.lists(source, target, owner.numel()), traffic.lists(target, source, owner.numel())
    traffic.relieve(*lists, weight, moved.numpy(), bounds, 4)
    return moved, bounds


@settings(max_examples=150, deadline=None)
@given(cuts())
def test_the_busiest_part_has_no_more_rows_and_all_stay_within_their_bounds(
    cut: tuple[Data, Tensor, int],
) -> None:
    data, owner, parts = cut
    before = quality(data.edge_index, owner, parts)
    moved, bounds = relieved(data.edge_index, owner, parts, 1.3)
    after = quality(data.edge_index, moved, parts)
    assert after.busiest <= before.busiest
    assert max(after.vertices) <= bounds[0, 0]
    assert max(after.in_edges) <= bounds[1, 0]
    assert all(now or not then for now, then in zip(after.vertices, before.vertices, strict=True))


def test_a_vertex_that_only_another_part_reads_goes_there() -> None:
    # 0 is read by all vertices of part 1, and reads none: its row crosses for as long as it is on part 0.
    edge_index = torch.tensor([[0, 0, 0, 1, 4], [3, 4, 5, 2, 5]])
    owner = torch.tensor([0, 0, 0, 1, 1, 1])
    moved, _ = relieved(edge_index, owner, 2, 1.4)
    assert moved.tolist() == [1, 0, 0, 1, 1, 1]
    assert quality(edge_index, moved, 2).busiest == 0


def test_no_move_beyond_the_bounds() -> None:
    edge_index = torch.tensor([[0, 0, 0, 1, 4], [3, 4, 5, 2, 5]])
    owner = torch.tensor([0, 0, 0, 1, 1, 1])
    assert torch.equal(relieved(edge_index, owner, 2, 1.0)[0], owner)


def test_lists_hold_each_reader_once() -> None:
    source, target = np.array([2, 0, 0, 1, 0, 2]), np.array([1, 2, 1, 1, 2, 0])
    start, ends = traffic.lists(source, target, 3)
    assert start.tolist() == [0, 2, 2, 4]  # without the loop of 1 and the second edge from 0 to 2
    assert ends.tolist() == [1, 2, 0, 1]
