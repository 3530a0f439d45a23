"""Marks follow ids: what a tensor is said to hold is what its values show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_axis_rules import Watching
from torch import Tensor

from convolutions import sample_graph
from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition, split_all
from kagome.intercept.interceptor import Interceptor
from kagome.model.exact.handlers import HANDLERS
from kagome.placement.placement import ALIGNED, IDS, Placement, PlacementKind


def tagged_edges(edges: int) -> Tensor:
    """Ids that show what they are: sources leave 0 when divided by 4, targets 1, all else 2 or 3."""
    numbers = 4 * torch.randperm(2 * edges).view(2, edges)
    return numbers + torch.tensor([[0], [1]])


def shown(tensor: Tensor) -> PlacementKind | None:
    """What the entries say: all sources, all targets, a row of each, or something else."""
    left = (tensor % 4).unique().tolist()
    if left in ([0], [1]):
        return PlacementKind.TARGET if left[0] else PlacementKind.SOURCE
    if tensor.dim() == 2 and tensor.size(0) == 2 and left == [0, 1]:
        rows = {shown(tensor[0]), shown(tensor[1])}
        return PlacementKind.EDGES if rows == {PlacementKind.SOURCE, PlacementKind.TARGET} else None
    return None


Step = Callable[[Tensor], Tensor]
KEEP = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.6
KEEP[0] = True
BOTH: tuple[Step, ...] = (
    lambda x: x.clone(),
    lambda x: x.contiguous().long(),
    lambda x: x.detach(),
    lambda x: x.flip(0),
    lambda x: x + 2,
    lambda x: x * 4 + 2,
)
OF_EDGES: tuple[Step, ...] = (
    lambda x: x[0],
    lambda x: x[1],
    lambda x: x.unbind(0)[1],
    lambda x: x.unbind()[0],
    lambda x: x.unbind(-2)[0],
    lambda x: x.select(0, 1),
    lambda x: x.select(-2, 1),
    lambda x: x.split(1)[0].squeeze(0),
    lambda x: x.chunk(2, dim=1)[0],
    lambda x: x[[1, 0]],
    lambda x: x[:, KEEP[: x.size(1)]],
    lambda x: x[:, : max(1, x.size(1) - 1)],
    lambda x: x[..., 1:] if x.size(1) > 1 else x,
    lambda x: x[:, torch.arange(x.size(1)).flip(0)],
    lambda x: x.index_select(1, torch.arange(x.size(1))),
    lambda x: x.index_select(0, torch.tensor([1, 0])),
    lambda x: torch.cat([x, x], dim=1),
    lambda x: torch.cat([x, x.flip(0)], dim=1),
    lambda x: torch.cat([x, x], dim=-1),
    lambda x: torch.cat([x, x], dim=0),
    lambda x: torch.stack([x[1], x[0]]),
    lambda x: torch.stack([x[0], x[1]], dim=0),
    lambda x: torch.stack([x[0], x[0]]),
    lambda x: x.narrow(1, 0, 1),
    lambda x: x.narrow(0, 0, 1),
    lambda x: x[:, 0],
    lambda x: x[..., -1],
    lambda x: x[:, None],
    lambda x: x.sort(0).values,
    lambda x: x.sort().values,
    lambda x: x.min(dim=0).values,
    lambda x: torch.minimum(x[0], x[1]),
    lambda x: x.masked_select(torch.ones_like(x, dtype=torch.bool)),
    lambda x: x.repeat(1, 2),
    lambda x: x.unique(dim=1),
    lambda x: x.roll(1, 0),
    lambda x: x.roll(1, 1),
    lambda x: x.flip(1),
    lambda x: x.flip([0, 1]),
    lambda x: x.reshape(-1),
    lambda x: x.t(),
    lambda x: x.sort(dim=1).values,
)
OF_ENDS: tuple[Step, ...] = (
    lambda x: x[KEEP[: x.size(0)]],
    lambda x: x[1:] if x.size(0) > 1 else x,
    lambda x: x.view(-1, 1).squeeze(1),
    lambda x: x.unsqueeze(0).expand(2, -1)[0],
    lambda x: torch.cat([x, x]),
    lambda x: x[0:1],
    lambda x: x.flip(0),
    lambda x: x.unique(),
    lambda x: x.repeat(2),
    lambda x: x.index_select(0, torch.arange(x.size(0))),
    lambda x: x.sort().values,
)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.integers(2, 5), st.lists(st.integers(0, 999), min_size=1, max_size=5))
def test_a_placement_is_what_the_entries_show(edges: int, choices: list[int]) -> None:
    torch.manual_seed(edges)
    watching, x = Watching(), tagged_edges(edges)
    watching.placements.put(x, Placement(PlacementKind.EDGES))
    for choice in choices:
        before = watching.placements.get(x)
        steps = BOTH + (OF_EDGES if before is not None and before.kind is PlacementKind.EDGES else OF_ENDS)
        with watching:
            x = steps[choice % len(steps)](x)
        placement, true = watching.placements.get(x), shown(x)
        if placement is None or placement.kind not in IDS:
            # What is not known is refused where rows are read by it.
            assert x.numel() <= 1 or (
                placement is not None and placement.kind in (PlacementKind.MIXED, PlacementKind.LOCAL)
            )
            return
        if placement.both:  # both directions in one list: either row may name halo rows
            assert placement.kind is PlacementKind.EDGES
            assert all(
                watching.placements.get(row).kind is PlacementKind.SOURCE for row in unbound(watching, x)
            )
            return
        assert placement.kind is true
        if placement.kind is PlacementKind.EDGES:
            assert placement.swapped is (shown(x[0]) is PlacementKind.TARGET)


def unbound(watching: Watching, edges: Tensor) -> tuple[Tensor, Tensor]:
    with watching:
        return edges[0], edges[1]


def _relation(values: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda ends: ends[:, values == 1]


KNOWN: dict[str, tuple[Callable[[Tensor], Tensor], PlacementKind]] = {
    "row": (lambda e: e[0], PlacementKind.SOURCE),
    "column": (lambda e: e[1], PlacementKind.TARGET),
    "last row": (lambda e: e[-1], PlacementKind.TARGET),
    "of one relation": (_relation(torch.tensor([1, 0, 1])), PlacementKind.EDGES),
    "with loops": (lambda e: torch.cat([e, e], dim=1), PlacementKind.EDGES),
    "flipped twice": (lambda e: e.flip(0).flip(0), PlacementKind.EDGES),
    "flipped row": (lambda e: e.flip(0)[0], PlacementKind.TARGET),
    "stacked": (lambda e: torch.stack([e[0], e[1]]), PlacementKind.EDGES),
    "index of a gather": (lambda e: e[1].view(-1, 1).expand(-1, 4), PlacementKind.TARGET),
    "hashed": (lambda e: e[0] * 7 + e[1], PlacementKind.MIXED),
    "of targets": (lambda e: e[1] + 1, PlacementKind.LOCAL),
    "a loop": (lambda e: e[0] == e[1], PlacementKind.PAIRS),
    "mixed ends": (lambda e: torch.cat([e[0], e[1]]), PlacementKind.MIXED),
    "one way and the other": (lambda e: torch.cat([e, e.flip(0)], dim=1), PlacementKind.EDGES),
    "targets of both ways": (lambda e: torch.cat([e, e.flip(0)], dim=1)[1], PlacementKind.SOURCE),
    # Each of these was once taken for something else.
    "last edge first": (lambda e: e.flip(1)[0], PlacementKind.SOURCE),
    "both turned round": (lambda e: e.flip([0, 1])[0], PlacementKind.TARGET),
    "smaller end first": (lambda e: e.sort(dim=0).values, PlacementKind.MIXED),
    "ends of one edge": (lambda e: e[:, 0], PlacementKind.MIXED),
    "ends of the last edge": (lambda e: e[..., -1], PlacementKind.MIXED),
    "a new axis": (lambda e: e[:, None], PlacementKind.MIXED),
    "one row by narrow": (lambda e: e.narrow(0, 0, 1), PlacementKind.MIXED),
    "row from the back": (lambda e: e.unbind(-2)[0], PlacementKind.SOURCE),
    "half of the edges": (lambda e: e.chunk(2, dim=1)[0], PlacementKind.EDGES),
    "both ends of the only edge": (lambda e: e[:, :1].masked_select(e[:, :1] >= 0), PlacementKind.MIXED),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_layers_do_to_edges_is_known(name: str) -> None:
    call, kind = KNOWN[name]
    watching, ends = Watching(), tagged_edges(3)
    watching.placements.put(ends, Placement(PlacementKind.EDGES))
    with watching:
        placement = watching.placements.get(call(ends))
    assert placement is not None
    assert placement.kind is kind


def test_a_placement_ends_with_its_tensor() -> None:
    watching = Watching()
    for _ in range(20):
        watching.placements.put(torch.zeros(2, 3, dtype=torch.long), Placement(PlacementKind.EDGES))
    assert len(watching.placements._table) <= 1


def test_a_placement_can_be_taken_away() -> None:
    watching, x = Watching(), torch.zeros(2, 3)
    watching.placements.put(x, Placement(PlacementKind.ROWS))
    watching.placements.put(x, None)
    assert watching.placements.get(x) is None


# In a running interception ---------------------------------------------------------------------


def on_three(work: Callable[[Interceptor], object]) -> list[object]:
    """Run on three threads, a part each."""
    data = sample_graph(1)
    parts = split_all(data, torch.arange(30) % 3, 3)

    def body(channel: ThreadChannel) -> object:
        scope = Interceptor(parts[channel.rank], channel, handlers=HANDLERS)
        with scope.running(1, training=True, checked=True):
            return work(scope)

    return ThreadGroup(3, 20).run(body)


def whole_part() -> tuple[Interceptor, Partition]:
    part = split_all(sample_graph(1), torch.zeros(30, dtype=torch.long), 1)[0]
    return Interceptor(part, Channel(None, "cpu"), handlers=HANDLERS), part


def test_inputs_are_placed_as_what_they_are() -> None:
    scope, _ = whole_part()
    kinds = {name: scope.placements.get(value) for name, value in scope.inputs.items() if name != "num_nodes"}
    assert {name: placement and placement.kind for name, placement in kinds.items()} == {
        "edge_index": PlacementKind.EDGES,
        **dict.fromkeys(("edge_weight", "edge_attr", "edge_type"), PlacementKind.PAIRS),
        **dict.fromkeys(("x", "node_type", "pos", "normal"), PlacementKind.ROWS),
    }


def test_a_row_an_edge_and_a_row_a_vertex_are_told_apart() -> None:
    def work(scope: Interceptor) -> tuple[object, ...]:
        x, ends = scope.inputs["x"], scope.inputs["edge_index"]
        read = x[ends[0]]
        back = torch.zeros_like(x).index_add(0, ends[1], read)
        placements = [scope.placements.get(t) for t in (read, read.relu(), back, back.sum(1))]
        return tuple(placement and placement.kind for placement in placements)

    assert (
        on_three(work)
        == [(PlacementKind.PAIRS, PlacementKind.PAIRS, PlacementKind.ROWS, PlacementKind.ROWS)] * 3
    )
    assert {PlacementKind.PAIRS, PlacementKind.ROWS, PlacementKind.NUMBERS} == set(ALIGNED)


def test_reading_by_ids_reads_the_vertices_of_the_whole_graph() -> None:
    def work(scope: Interceptor) -> bool:
        ends, view = scope.inputs["edge_index"], scope.views[0]
        named = scope.placements.put(scope.ids.own().double().clone(), Placement(PlacementKind.ROWS))
        read = (named[ends[0]], named.index_select(0, ends[0]), named[ends[1]])
        with torch._C.DisableTorchFunction():
            true = (view.ids[view.edge_index[0]],) * 2 + (view.ids[view.edge_index[1]],)
        return all(bool((a == b).all()) for a, b in zip(read, true, strict=True))

    assert on_three(work) == [True] * 3


@pytest.mark.parametrize("read", ["index", "index_select", "scatter"])
def test_ids_of_which_nothing_is_known_are_refused(read: str) -> None:
    def work(scope: Interceptor) -> Tensor:
        x, ends = scope.inputs["x"], scope.inputs["edge_index"]
        mixed = (ends[0] + ends[1]) % 3
        if read == "index":
            return x[mixed]
        if read == "index_select":
            return x.index_select(0, mixed)
        return torch.zeros_like(x).index_add_(0, mixed, x[ends[1]])

    with pytest.raises(ModelError, match="rebuild the edges before training"):
        on_three(work)
