"""Models as users write them, split in every awkward way: equal to the whole, or found out before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from by_hand import mean_of_bytes
from convolutions import double_precision, sample_graph
from kagome.errors import ModelError
from kagome.graph.partition.partition import split_all
from kagome.verify.check import check
from odd_models import MUST_BE_REFUSED, ODD_MODELS
from parity import TOLERANCE, assert_equal, odd, one_rank, random_owner, seeded, split, whole, worst

FAN_IN, FAN_OUT = 6, 4
SPLITTABLE = [name for name in ODD_MODELS if name not in MUST_BE_REFUSED]


def three_vertices() -> Data:
    ends = torch.tensor([[0, 1, 2, 2, 1, 0], [1, 2, 0, 2, 0, 1]])
    generator = torch.Generator().manual_seed(2)
    return Data(x=2 * torch.rand(3, FAN_IN, generator=generator, dtype=torch.float64) - 1, edge_index=ends)


def one_empty(data: Data) -> Tensor:
    return random_owner(data.num_nodes, 2, seed=1) * 2  # parts 0 and 2 of 3


def no_in_edges(data: Data) -> Tensor:
    """Part 1 owns just the vertices that no edge ends at."""
    owner = torch.ones(data.num_nodes, dtype=torch.long)
    owner[data.edge_index[1]] = 0
    return owner


def all_on_the_last(data: Data) -> Tensor:
    return torch.full((data.num_nodes,), 2)


SPLITS: dict[str, tuple[int, Callable[[], Data], Callable[[Data], Tensor]]] = {
    "one rank": (1, partial(sample_graph, 1), lambda data: random_owner(data.num_nodes, 1)),
    "two ranks": (2, partial(sample_graph, 1), lambda data: random_owner(data.num_nodes, 2)),
    "no in-edges": (2, partial(sample_graph, 1), no_in_edges),
    "three ranks": (3, partial(sample_graph, 1), lambda data: random_owner(data.num_nodes, 3)),
    "one part empty": (3, partial(sample_graph, 1), one_empty),
    "all on the last rank": (3, partial(sample_graph, 1), all_on_the_last),
    "four ranks": (4, partial(sample_graph, 1), lambda data: random_owner(data.num_nodes, 4)),
    "three vertices on four ranks": (4, three_vertices, lambda data: torch.tensor([3, 0, 1])),
}


def test_the_splits_are_what_their_names_say() -> None:
    owners = {name: owner(graph()) for name, (_, graph, owner) in SPLITS.items()}
    parts = {name: split_all(graph(), owners[name], world) for name, (world, graph, _) in SPLITS.items()}
    assert parts["no in-edges"][1].own.numel() > 2
    assert parts["no in-edges"][1].edge_index.numel() == 0
    assert sum(parts["no in-edges"][1].send_counts) > 0
    assert [part.own.numel() > 0 for part in parts["one part empty"]] == [True, False, True]
    assert [part.own.numel() for part in parts["all on the last rank"]] == [0, 0, 30]
    assert [part.own.numel() for part in parts["three vertices on four ranks"]] == [1, 1, 0, 1]
    for name in ("two ranks", "three ranks", "four ranks"):
        assert all(sum(part.send_counts) for part in parts[name])


@pytest.mark.some(28)
@pytest.mark.parametrize(
    ("cut", "name"),  # each model in half of the cuts
    [
        (cut, name)
        for row, name in enumerate(SPLITTABLE)
        for column, cut in enumerate(SPLITS)
        if (row + column) % 2 == 0
    ],
)
def test_split_is_whole(ranks: Callable[..., list], cut: str, name: str) -> None:
    world, graph, owner = SPLITS[cut]
    data = graph()
    data.x.requires_grad_(cut in ("three ranks", "three vertices on four ranks"))
    build = partial(odd, name, FAN_IN, FAN_OUT)
    expected = one_rank(build, data) if "dropout" in name else whole(build, data)
    found = split(ranks, world, build, data, owner(data))
    assert expected.out.isfinite().all()
    assert_equal(found, expected)


@pytest.mark.parametrize("name", SPLITTABLE)
def test_a_second_epoch_is_as_exact(ranks: Callable[..., list], name: str) -> None:
    data = sample_graph(1)
    build = partial(odd, name, FAN_IN, FAN_OUT)
    expected = (one_rank if "dropout" in name else whole)(build, data, epochs=2)
    assert_equal(split(ranks, 2, build, data, random_owner(30, 2, seed=5), epochs=2), expected)


class MeanThroughMemory(nn.Module):
    """Takes the mean of all rows where no torch call shows it."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.embed, self.conv = nn.Linear(in_channels, 8), pyg.GCNConv(8, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.embed(x)
        return self.conv(x - mean_of_bytes(x), edge_index)


def test_the_comparison_finds_what_a_split_changes(ranks: Callable[..., list]) -> None:
    data, build = sample_graph(1), partial(MeanThroughMemory, FAN_IN, FAN_OUT)
    found = split(ranks, 2, build, data, random_owner(30, 2))
    assert worst(found, whole(build, data)) > 1e6 * TOLERANCE


def test_the_check_names_the_first_layer_that_differs() -> None:
    with double_precision():
        result = check(seeded(partial(MeanThroughMemory, FAN_IN, FAN_OUT), 0), sample_graph(1))
    assert result.first is not None
    assert (result.first.name, result.first.kind) == ("conv.lin", "output")


@pytest.mark.parametrize(
    ("name", "layer", "call"), [("best_half", "BestHalf", "topk"), ("ranked_rows", "RankedRows", "argsort")]
)
def test_an_order_of_all_vertices_is_refused(name: str, layer: str, call: str) -> None:
    with double_precision():
        model = seeded(partial(odd, name, FAN_IN, FAN_OUT), 0)
    with pytest.raises(ModelError, match=call) as caught:
        check(model, sample_graph(1))
    assert caught.value.where.startswith(f"{layer}; odd_models.py, line ")


def test_all_that_must_be_refused_is_tried_here() -> None:
    assert {"best_half", "ranked_rows"} == MUST_BE_REFUSED


@pytest.mark.parametrize("name", SPLITTABLE)
def test_the_check_lets_through_what_can_be_split(name: str) -> None:
    with double_precision():
        model = seeded(partial(odd, name, FAN_IN, FAN_OUT), 0)
    result = check(model, sample_graph(1))
    assert result.first is None, result.first
    assert result.worst < TOLERANCE
