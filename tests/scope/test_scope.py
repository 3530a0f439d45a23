"""What a part knows of its rows and constants, without an interceptor or a second rank."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data

from kagome.errors import ModelError
from kagome.graph.partition.partition import extract
from kagome.halo.comm_recorder import RecordedRows
from kagome.halo.forward_pass import ForwardPass, RunningForward
from kagome.placement.placement import Placement, PlacementKind, Placements
from kagome.placement.vertex_sets import VertexSet, VertexSets
from kagome.scope.constants import Constants
from kagome.scope.exchanges import NeighborReads, RankSums
from kagome.scope.rows import Axes, VertexIds
from kagome.sparse_ops.edge_view import in_view
from parity import alone

CPU = torch.device("cpu")
EDGES = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 0, 0, 1]])


class Part:
    """Vertices 1 and 3 of a ring of four, as the first of two parts would have them."""

    def __init__(self, *, sums_only: bool = False) -> None:
        part = extract(Data(edge_index=EDGES, num_nodes=4), torch.tensor([1, 0, 1, 0]), 0, 2)
        channel, self.placements = RecordedRows(alone()), Placements()
        self.forward = RunningForward(CPU, fast=True)
        self.views = [in_view(part, channel, CPU)]
        sets = VertexSets([VertexSet("", part.own, 4)])
        self.axes = Axes(self.placements, sets, self.forward)
        self.ids = VertexIds(sets, self.views, self.placements, part.last_vertex)
        self.constants = Constants(channel, self.forward)
        self.ranks = RankSums(channel, self.forward, self.axes, self.views, slices=False)
        self.reads = NeighborReads(
            channel, self.forward, self.views, self.ids, self.placements, self.constants, sums_only=sums_only
        )


def test_rows_are_told_by_their_placement() -> None:
    part = Part()
    x = part.placements.put(torch.zeros(2, 3), Placement(PlacementKind.ROWS))
    assert (part.axes.of(x), part.axes.of_each_vertex(x), part.axes.of(torch.zeros(2, 3))) == (0, True, None)
    turned = part.axes.like(torch.zeros(3, 2), x, 1)
    assert (part.axes.of(turned), part.axes.of_vertices(turned)) == (1, True)
    assert part.ranks.number_of(Placement(PlacementKind.ROWS), 2) == 4
    assert part.ids.row_counters(x).tolist() == part.ids.own().tolist() == [1, 3]
    assert part.ids.local_of(torch.tensor([3, 1])).tolist() == [1, 0]


def test_what_is_lost_is_refused_with_its_origin() -> None:
    part = Part()
    part.forward.path.append("convs.1")
    gone = part.axes.lost(torch.zeros(2), "topk")
    with pytest.raises(ModelError, match=r"(?s)topk.*convs\.1"):
        part.axes.refuse_lost(gone)


def test_values_of_constants_are_kept_until_they_are_written_to() -> None:
    constants, x = Part().constants, torch.ones(3)
    assert not constants.is_constant(x)
    constants.add(x)
    assert constants.is_constant(x.view(3, 1))
    assert constants.is_constant(x)
    total = constants.cache("total", x.sum())
    assert constants.cached("total") is total
    total.add_(1)
    assert constants.cached("total") is None
    constants.forget()
    assert not constants.computed


def test_a_sample_of_rows_serves_sums_alone() -> None:
    Part().reads.refuse_sample("a softmax over neighbours")
    with pytest.raises(ModelError, match="a softmax over neighbours"):
        Part(sums_only=True).reads.refuse_sample("a softmax over neighbours")


def test_a_forward_counts_its_draws_and_names_reads_by_their_arguments() -> None:
    forward, x = RunningForward(CPU, fast=True), torch.zeros(2)
    forward.path, forward.arguments = ["conv"], [{"x": (x, None)}]
    assert [forward.call(), forward.call()] == [("conv", 1), ("conv", 2)]
    assert (forward.site(x), forward.site(x.clone())) == ("conv.x", "conv")
    forward.begin(ForwardPass(2, checked=False, device=CPU, grad=False))
    assert (forward.draws, forward.where(), forward.forward_pass.epoch) == (0, "the model's forward", 2)
