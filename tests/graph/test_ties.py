"""Tied vertex sets: a vertex lies on the part of the vertex at the other end of its first edge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kagome import Edges, Graph, Vertices
from kagome.errors import DataError
from kagome.graph.partition.sets_partition import assign_sets, extract_sets, sets_fingerprint


def ids(draw: st.DrawFn, most: int, size: int) -> Tensor:
    return torch.tensor(draw(st.lists(st.integers(0, most - 1), min_size=size, max_size=size))).long()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tied_vertex_lies_with_its_first_neighbour(data: st.DataObject) -> None:
    grid, mesh, size, parts = (data.draw(st.integers(1, most)) for most in (12, 6, 20, 4))
    up = torch.stack([data.draw(st.composite(ids)(grid, size)), data.draw(st.composite(ids)(mesh, size))])
    turned, method = data.draw(st.booleans()), data.draw(st.sampled_from(["contiguous", "random"]))
    edges = Edges("mesh", "grid", up.flip(0)) if turned else Edges("grid", "mesh", up)
    plain = assign_sets(Graph(grid=Vertices(grid), mesh=Vertices(mesh), up=edges), method, parts, 0)
    owners = assign_sets(
        Graph(grid=Vertices(grid, tied="up"), mesh=Vertices(mesh), up=edges), method, parts, 0
    )
    assert torch.equal(owners["mesh"], plain["mesh"])
    for vertex in range(grid):
        there = (up[0] == vertex).nonzero()
        expected = owners["mesh"][up[1, there[0]]] if there.numel() else plain["grid"][vertex]
        assert owners["grid"][vertex] == expected


def of_four(method: str) -> tuple[Graph, dict[str, Tensor]]:
    """Four points of a grid for each of 20 vertices of a ring, in 4 parts."""
    ring = torch.arange(20)
    across = torch.stack([ring, ring.roll(1)])
    up = torch.stack([torch.arange(80), torch.arange(80) // 4])
    graph = Graph(
        grid=Vertices(80, tied="up"),
        mesh=Vertices(20),
        up=Edges("grid", "mesh", up),
        across=Edges("mesh", "mesh", torch.cat([across, across.flip(0)], 1)),
    )
    return graph, assign_sets(graph, method, 4, 0)


def test_a_tie_leaves_no_halo() -> None:
    graph, owners = of_four("metis")
    assert owners["mesh"].unique().numel() == 4
    parts = [extract_sets(graph, owners, part, 4) for part in range(4)]
    assert all(part.edges[0].part.halo.numel() == 0 for part in parts)
    assert any(part.edges[1].part.halo.numel() for part in parts)


def test_shares_of_a_part_are_even_with_a_tie() -> None:
    _, owners = of_four("metis/2")
    for owner in owners.values():
        first, second, third, fourth = torch.bincount(owner, minlength=4).tolist()
        assert abs(first - second) <= 1
        assert abs(third - fourth) <= 1


def test_a_tie_is_a_part_of_the_fingerprint() -> None:
    up = Edges("grid", "mesh", torch.tensor([[0, 1], [0, 0]]))
    marks = {
        sets_fingerprint(Graph(grid=Vertices(2, tied=tied), mesh=Vertices(1), up=up)) for tied in (None, "up")
    }
    assert len(marks) == 2


@pytest.mark.parametrize(
    ("grid", "mesh", "text"),
    [
        ("down", None, "'down'"),
        ("across", None, "'across', from mesh to mesh"),
        ("up", "up", "mesh, which is tied by 'up'"),
    ],
)
def test_what_cannot_be_tied_is_refused(grid: str, mesh: str | None, text: str) -> None:
    edge = torch.tensor([[0], [0]])
    with pytest.raises(DataError, match=text):
        Graph(
            grid=Vertices(2, tied=grid),
            mesh=Vertices(1, tied=mesh),
            up=Edges("grid", "mesh", edge),
            across=Edges("mesh", "mesh", edge),
        )
