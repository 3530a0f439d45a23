"""The cut by coordinates: balanced, near in space, of points alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch_geometric.data import Data

from kagome.errors import PartitionError
from kagome.graph.partition.coordinates import cut_by_coordinates
from kagome.graph.partition.partition import partition
from kagome.graph.partition.partitioners import assign
from kagome.graph.partition.quality import quality


def grid(side: int, axes: int) -> tuple[Tensor, Tensor]:
    """Points of a grid, and the edges between neighbours, in both directions."""
    points = torch.cartesian_prod(*[torch.arange(side)] * axes).view(-1, axes)
    place = torch.arange(side**axes).view(*[side] * axes)
    pairs = []
    for axis in range(axes):
        ends = place.narrow(axis, 0, side - 1).flatten(), place.narrow(axis, 1, side - 1).flatten()
        pairs.append(torch.stack(ends))
    edges = torch.cat(pairs, dim=1)
    return points.double(), torch.cat([edges, edges.flip(0)], dim=1)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 60), axes=st.integers(1, 5), parts=st.integers(1, 7), seed=st.integers(0, 10**6))
def test_parts_are_of_one_size_and_do_not_depend_on_the_order_of_points(
    count: int, axes: int, parts: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, axes, generator=generator, dtype=torch.float64)
    owner = cut_by_coordinates(points, count, np.ones(parts))
    sizes = torch.bincount(owner, minlength=parts)
    assert int(sizes.max() - sizes.min()) <= 1
    order = torch.randperm(count, generator=generator)
    assert torch.equal(cut_by_coordinates(points[order], count, np.ones(parts)), owner[order])


@pytest.mark.parametrize(("axes", "side", "most"), [(2, 64, 0.04), (3, 16, 0.13)])
def test_parts_of_a_grid_have_short_borders(axes: int, side: int, most: float) -> None:
    points, edges = grid(side, axes)
    found = quality(edges, assign("coordinates", edges, len(points), 8, pos=points), 8)
    assert found.cut < most
    assert found.vertex_balance <= 1.01
    assert found.cut < quality(edges, assign("contiguous", edges, len(points), 8), 8).cut


def test_equal_points_and_one_axis() -> None:
    assert torch.bincount(cut_by_coordinates(torch.zeros(7, 3), 7, np.ones(3))).tolist() == [3, 2, 2]
    assert cut_by_coordinates(torch.tensor([3.0, 1.0, 2.0, 0.0]), 4, np.ones(2)).tolist() == [1, 0, 1, 0]


def test_a_partition_by_coordinates() -> None:
    points, edges = grid(6, 2)
    parts = partition(Data(pos=points, x=points, edge_index=edges), parts=4, method="coordinates")
    assert [part.own.numel() for part in parts] == [9, 9, 9, 9]


@pytest.mark.parametrize(
    ("pos", "words"),
    [
        (None, "data without pos"),
        (torch.zeros(3, 2), "[3, 2]"),
        (torch.zeros(4, 0), "[4, 0]"),
        (torch.tensor([[0.0], [1.0], [float("nan")], [2.0]]), "1 rows that are not"),
    ],
)
def test_bad_coordinates_are_refused(pos: Tensor | None, words: str) -> None:
    with pytest.raises(PartitionError) as error:
        assign("coordinates", torch.zeros(2, 0, dtype=torch.long), 4, 2, pos=pos)
    assert words in str(error.value)
