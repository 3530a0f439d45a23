"""A layer's propagate runs once; its sum is put off again for other rows, unless anything else changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions, parallelize
from kagome.graph.partition.partition import extract
from kagome.intercept.interceptor import Interceptor
from kagome.placement.placement import Placement, PlacementKind

VERTICES, EDGES, WIDTH = 40, 300, 6


def graph() -> Data:
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(0, VERTICES, (2, EDGES), generator=generator)
    weight = torch.rand(EDGES, generator=generator, dtype=torch.float64)
    x = torch.randn(VERTICES, WIDTH, generator=generator, dtype=torch.float64)
    return Data(x=x, edge_index=edge_index, edge_weight=weight, y=torch.zeros(VERTICES, dtype=torch.long))


@contextmanager
def watched(layer: nn.Module) -> Iterator[tuple[Interceptor, list[Any]]]:
    """An interception of a layer on one rank, and a list that grows with each propagate that runs."""
    data = graph()
    part = extract(data, torch.zeros(VERTICES, dtype=torch.long), 0, 1)
    net = parallelize(layer, part, Channel(None, "cpu"), PartOptions())
    scope = net.scope
    ran: list[Any] = []
    learn = scope.propagate_cache.learn
    scope.propagate_cache.learn = lambda *given: (ran.append(given[0]), learn(*given))  # type: ignore[method-assign]
    with net:
        yield scope, ran


def rows(seed: int, *, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VERTICES, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(grad)


def ours(scope: Interceptor, epoch: int, layer: nn.Module, *given: Any) -> tuple[Tensor, list[Tensor]]:
    x = given[0].detach().requires_grad_(given[0].requires_grad)
    scope.placements.put(x, Placement(PlacementKind.ROWS))
    with scope.running(epoch, training=True):
        out = layer(x, scope.inputs["edge_index"], *(scope.inputs[name] for name in given[1:]))
    return out.detach(), gradients(layer, out, x)


def theirs(layer: nn.Module, *given: Any) -> tuple[Tensor, list[Tensor]]:
    x, data = given[0].detach().requires_grad_(given[0].requires_grad), graph()
    out = layer(x, data.edge_index, *(data[name] for name in given[1:]))
    return out.detach(), gradients(layer, out, x)


def gradients(layer: nn.Module, out: Tensor, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    if out.requires_grad:
        out.square().sum().backward()
    found = [None if p.grad is None else p.grad.clone() for p in (*layer.parameters(), x)]
    return [grad for grad in found if grad is not None]


def assert_same(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    assert len(found[1]) == len(expected[1])
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "GCN": (lambda: pyg.GCNConv(WIDTH, WIDTH), ()),
    "GCN, weights": (lambda: pyg.GCNConv(WIDTH, WIDTH), ("edge_weight",)),
    "SAGE": (lambda: pyg.SAGEConv(WIDTH, 8), ()),
    "GraphConv, weights": (lambda: pyg.GraphConv(WIDTH, 8), ("edge_weight",)),
    "GIN": (lambda: pyg.GINConv(nn.Linear(WIDTH, WIDTH)), ()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_sum_is_put_off_again_for_other_rows_and_weights(name: str) -> None:
    build, more = LAYERS[name]
    layer = build().double()
    twin = deepcopy(layer)
    with watched(layer) as (scope, ran):
        for epoch in range(1, 5):
            with torch.no_grad():
                for parameter in (*layer.parameters(), *twin.parameters()):
                    parameter.mul_(1.1)
            given = (rows(epoch), *more)
            assert_same(ours(scope, epoch, layer, *given), theirs(twin, *given))
        assert 1 <= len(ran) <= 2  # the second finds weights of edges that last since the first


def again(layer: nn.Module, change: Callable[[Any], None]) -> None:
    """Two like calls, something that changes, and a call that must see it."""
    with watched(layer) as (scope, ran):
        for epoch in (1, 2, 3):
            ours(scope, epoch, layer, rows(epoch))
        before = len(ran)
        assert before < 3
        change(layer)
        found = ours(scope, 4, layer, rows(4))
        assert len(ran) == before + 1
    assert_same(found, theirs(layer, rows(4)))


def test_a_hook_that_is_put_on_later_is_called() -> None:
    def put_on(layer: Any) -> None:
        layer.register_message_forward_hook(lambda _layer, _given, out: 2 * out)

    again(pyg.SAGEConv(WIDTH, 8).double(), put_on)


def test_a_message_that_is_replaced_is_sent() -> None:
    def replaced(layer: Any) -> None:
        layer.message = lambda x_j: 3 * x_j

    again(pyg.SAGEConv(WIDTH, 8).double(), replaced)


def test_another_setting_runs_it_again() -> None:
    def other(layer: Any) -> None:
        layer.flow_of_mine = "changed"

    again(pyg.SAGEConv(WIDTH, 8).double(), other)


def test_another_aggregation_is_taken() -> None:
    def summed(layer: Any) -> None:
        layer.aggr_module = pyg.aggr.SumAggregation()

    again(pyg.SAGEConv(WIDTH, 8).double(), summed)


def test_without_fast_paths_nothing_is_put_off() -> None:
    """A layer further on may end fast paths when others have been learned."""
    layer = pyg.SAGEConv(WIDTH, 8).double()
    twin = deepcopy(layer)
    with watched(layer) as (scope, ran):
        for epoch in (1, 2, 3):
            ours(scope, epoch, layer, rows(epoch))
        before = len(ran)
        scope.forward.fast = False
        for epoch in (4, 5):
            assert_same(ours(scope, epoch, layer, rows(epoch)), theirs(twin, rows(epoch)))
        assert len(ran) == before + 2


class Counting(pyg.SAGEConv):
    """A layer of a user's whose message is another each time, which torch does not show."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 8)
        self.calls = [0]

    def message(self, x_j: Tensor) -> Tensor:
        self.calls[0] += 1
        return x_j * self.calls[0]


def test_a_layer_of_the_users_runs_each_time() -> None:
    layer = Counting().double()
    with watched(layer) as (scope, ran):
        found = [ours(scope, epoch, layer, rows(7)) for epoch in (1, 2, 3)]
        assert len(ran) == 3
    layer.calls[0] = 0
    for one in found:
        assert_same(one, theirs(layer, rows(7)))


def test_rows_without_gradient_and_evaluation_are_other_calls() -> None:
    layer = pyg.SAGEConv(WIDTH, 8).double()
    twin = deepcopy(layer)
    with watched(layer) as (scope, _):
        for epoch, grad in enumerate((True, False, False, True, True), 1):
            given = rows(epoch, grad=grad)
            assert_same(ours(scope, epoch, layer, given), theirs(twin, given))
        layer.eval()
        twin.eval()
        with torch.no_grad():
            assert_same(ours(scope, 6, layer, rows(6)), theirs(twin, rows(6)))


def test_training_and_evaluation_by_turns_each_know_their_last_call() -> None:
    """A run evaluates after each epoch: neither call may end what the other has learned."""
    layer = pyg.GCNConv(WIDTH, WIDTH).double()
    twin = deepcopy(layer)
    with watched(layer) as (scope, ran):
        for epoch in range(1, 6):
            for each in (layer, twin):
                each.train()
            assert_same(ours(scope, epoch, layer, rows(epoch)), theirs(twin, rows(epoch)))
            for each in (layer, twin):
                each.eval()
            with torch.no_grad():
                assert_same(ours(scope, epoch, layer, rows(epoch)), theirs(twin, rows(epoch)))
        assert len(ran) <= 4


def test_one_layer_reads_features_and_then_hidden_rows() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv(WIDTH, WIDTH)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(self.conv(x, edge_index).relu(), edge_index)

    model = Twice().double()
    expected = theirs(model, graph().x)
    with watched(model) as (scope, _):
        for epoch in (1, 2, 3):
            with scope.running(epoch, training=True):
                out = model(scope.inputs["x"], scope.inputs["edge_index"])
            assert_same((out.detach(), gradients(model, out, scope.inputs["x"])), expected)
