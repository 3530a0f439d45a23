"""What a layer did to rows is done to others without its Python, unless anything else has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_propagate_cache import VERTICES, WIDTH, assert_same, gradients, graph, rows
from torch import Tensor, nn
from torch.func import functional_call

from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions, parallelize
from kagome.graph.partition.partition import extract
from kagome.intercept.interceptor import Interceptor
from kagome.placement.placement import Placement, PlacementKind
from kagome.replay.layer_calls import TRIES, Learned


@contextmanager
def intercepted(layer: nn.Module, *, learns: bool = True) -> Iterator[Interceptor]:
    data = graph()
    part = extract(data, torch.zeros(VERTICES, dtype=torch.long), 0, 1)
    net = parallelize(layer, part, Channel(None, "cpu"), PartOptions())
    net.scope.layer_replay.on = learns
    with net:
        yield net.scope


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Learned]:
    """Grows with each call that is made again from notes."""
    found: list[Learned] = []
    inner = Learned.replay

    def replay(self: Learned, *given: Any) -> Any:
        found.append(self)
        return inner(self, *given)

    monkeypatch.setattr(Learned, "replay", replay)
    return found


def run(
    scope: Interceptor, epoch: int, layer: nn.Module, *, training: bool = True
) -> tuple[Tensor, list[Tensor]]:
    x = scope.placements.put(rows(epoch), Placement(PlacementKind.ROWS))
    with scope.running(epoch, training=training):
        out = layer(x, scope.inputs["edge_index"])
    return out.detach(), gradients(layer, out, x)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, WIDTH)
    )


class Twice(nn.Module):
    """A layer that reads two tensors of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.Linear(WIDTH, WIDTH), pyg.GCN2Conv(WIDTH, 0.1, 0.5, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, self.first(x), edge_index)


LEARNED: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: pyg.GCNConv(WIDTH, WIDTH),
    "GCN, narrower": lambda: pyg.GCNConv(WIDTH, 3),
    "GCN without a bias": lambda: pyg.GCNConv(WIDTH, WIDTH, bias=False),
    "GCN that caches": lambda: pyg.GCNConv(WIDTH, WIDTH, cached=True),
    "GCNII": Twice,
    "SAGE": lambda: pyg.SAGEConv(WIDTH, 8),
    "SAGE, narrower, projected": lambda: pyg.SAGEConv(WIDTH, 3, project=True, normalize=True),
    "GIN around statistics and dropout": lambda: pyg.GINConv(perceptron(), train_eps=True),
    "GraphConv": lambda: pyg.GraphConv(WIDTH, 8),
    "GatedGraph": lambda: pyg.GatedGraphConv(WIDTH, 2),
    "SSG": lambda: pyg.SSGConv(WIDTH, WIDTH, alpha=0.1),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "GAT": lambda: pyg.GATConv(WIDTH, 4, heads=2, dropout=0.3),
    "GEN": lambda: pyg.GENConv(WIDTH, WIDTH, aggr="softmax"),
    "TAG": lambda: pyg.TAGConv(WIDTH, WIDTH),
    "APPNP": lambda: pyg.APPNP(2, 0.1, dropout=0.3),
}


@pytest.mark.parametrize("name", LEARNED | OTHERS)
def test_what_is_made_again_is_what_the_layer_would_give(name: str, replays: list[Learned]) -> None:
    layer = (LEARNED | OTHERS)[name]().double()
    twin = deepcopy(layer)
    with intercepted(layer) as scope, intercepted(twin, learns=False) as plain:
        for epoch in range(1, 8):
            with torch.no_grad():
                for parameter in (*layer.parameters(), *twin.parameters()):
                    parameter.mul_(1.05)
            assert_same(run(scope, epoch, layer), run(plain, epoch, twin))
            assert scope.forward.draws == plain.forward.draws
        for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        layer.eval(), twin.eval()
        with torch.no_grad():
            for epoch in range(8, 13):
                args = (rows(epoch),)
                found = []
                for which, module in ((scope, layer), (plain, twin)):
                    x = which.placements.put(args[0].detach(), Placement(PlacementKind.ROWS))
                    with which.running(epoch, training=False):
                        found.append(module(x, which.inputs["edge_index"]))
                torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    assert bool(replays) or name in OTHERS


def changed(layer: nn.Module, change: Callable[[Any], None], replays: list[Learned]) -> None:
    """Calls until one is made again, a change, and a call that must see it."""
    layer = layer.double()
    with intercepted(layer) as scope:
        for epoch in range(1, 5):
            run(scope, epoch, layer)
        before = len(replays)
        assert before
        change(layer)
        found = run(scope, 5, layer)
        assert len(replays) == before
        with intercepted(twin := deepcopy_of(layer), learns=False) as plain:
            assert_same(found, run(plain, 5, twin))


def deepcopy_of(layer: nn.Module) -> nn.Module:
    """A copy without the interception's hooks, which know another scope."""
    twin = deepcopy(layer)
    for module in twin.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        for name in ("forward", "propagate", "edge_updater"):
            vars(module).pop(name, None)
    return twin


def test_another_weight_is_taken(replays: list[Learned]) -> None:
    def replace(layer: Any) -> None:
        layer.lin_l.weight = nn.Parameter(2 * layer.lin_l.weight.detach())

    changed(pyg.SAGEConv(WIDTH, 8), replace, replays)


def test_a_setting_of_a_module_inside_is_seen(replays: list[Learned]) -> None:
    def less(layer: Any) -> None:
        layer.nn[1].p = 0.1

    changed(pyg.GINConv(nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5))), less, replays)


class Twice(nn.Module):
    """Two calls of one layer in a forward, the second with what is changed between them."""

    def __init__(self, between: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.conv = pyg.GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))
        self.between = between

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = self.conv(x, edge_index)
        return self.between(self.conv)(first, edge_index) + first


def fast_weights(conv: nn.Module) -> Callable[..., Tensor]:
    fast = {name: weight * 0.5 for name, weight in conv.named_parameters()}
    return lambda *given: functional_call(conv, fast, given)


def less_dropout(conv: Any) -> Callable[..., Tensor]:
    def call(*given: Tensor) -> Tensor:
        conv.nn[1].p = 0.1
        out: Tensor = conv(*given)
        conv.nn[1].p = 0.5
        return out

    return call


@pytest.mark.parametrize("between", [fast_weights, less_dropout])
def test_a_change_between_two_calls_of_one_forward_is_seen(
    between: Callable[[nn.Module], Any], replays: list[Learned]
) -> None:
    model = Twice(between).double()
    twin = deepcopy(model)
    with intercepted(model) as scope, intercepted(twin, learns=False) as plain:
        for epoch in range(1, 8):
            assert_same(run(scope, epoch, model), run(plain, epoch, twin))
    assert replays


def test_another_module_inside_is_taken(replays: list[Learned]) -> None:
    def replace(layer: Any) -> None:
        layer.nn = nn.Linear(WIDTH, 8).double()

    changed(pyg.GINConv(nn.Linear(WIDTH, 8)), replace, replays)


def test_a_hook_inside_is_called(replays: list[Learned]) -> None:
    layer = pyg.SAGEConv(WIDTH, 8).double()
    seen: list[Tensor] = []
    with intercepted(layer) as scope:
        for epoch in range(1, 5):
            run(scope, epoch, layer)
        assert replays
        layer.lin_l.register_forward_hook(lambda _layer, _given, out: seen.append(out))
        run(scope, 5, layer)
        run(scope, 6, layer)
    assert len(seen) == 2


def test_a_hook_of_the_users_on_the_layer_is_called_each_time(replays: list[Learned]) -> None:
    layer = pyg.SAGEConv(WIDTH, 8).double()
    layer.register_forward_hook(lambda _layer, _given, out: 2 * out)
    twin = deepcopy(layer)
    with intercepted(layer) as scope, intercepted(twin, learns=False) as plain:
        for epoch in range(1, 6):
            assert_same(run(scope, epoch, layer), run(plain, epoch, twin))
            found = layer.forward.known  # type: ignore[attr-defined]
            assert found((scope.inputs["x"], scope.inputs["edge_index"]), {}) is None
    assert replays


class Counting(pyg.SAGEConv):
    """A layer of a user's that does another thing each time, which torch does not show."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 8)
        self.calls = [0]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.calls[0] += 1
        return super().forward(x, edge_index) * self.calls[0]


def test_a_layer_of_the_users_runs_each_time() -> None:
    layer = Counting().double()
    with intercepted(layer) as scope:
        for epoch in range(1, 7):
            run(scope, epoch, layer)
    assert layer.calls == [6]


def test_a_number_that_python_reads_from_rows_is_not_learned() -> None:
    """Statistics without a momentum divide by how many batches there were, which Python reads."""
    layer = pyg.GINConv(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, momentum=None))).double()
    twin = deepcopy(layer)
    with intercepted(layer) as scope, intercepted(twin, learns=False) as plain:
        for epoch in range(1, TRIES + 4):
            assert_same(run(scope, epoch, layer), run(plain, epoch, twin))
        assert {layer for layer, *_ in scope.layer_replay._learned} == {id(layer.nn[0])}
    for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_same_rows_twice_and_two_tensors_are_two_calls() -> None:
    conv = pyg.GraphConv(WIDTH, 8).double()
    twin = deepcopy(conv)

    class Net(nn.Module):
        def __init__(self, conv: nn.Module) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv((x, x), edge_index) + self.conv((x, x.clone()), edge_index)

    with intercepted(Net(conv)) as scope, intercepted(Net(twin), learns=False) as plain:
        net, other = Net(conv), Net(twin)
        for epoch in range(1, 8):
            assert_same(run(scope, epoch, net), run(plain, epoch, other))


def test_without_the_module_s_call_it_gives_the_same(replays: list[Learned]) -> None:
    """As a stage of a pipeline calls it: no hook runs, sums are computed, layers end as they began."""
    layer = pyg.SAGEConv(WIDTH, 8).double()
    with intercepted(layer) as scope:
        for epoch in range(1, 5):
            run(scope, epoch, layer)
        before = len(replays)
        x = scope.placements.put(rows(5), Placement(PlacementKind.ROWS))
        found = []
        for call in (lambda: layer.forward.known((x, scope.inputs["edge_index"]), {}), None):  # type: ignore[attr-defined]
            with scope.running(5, training=True):
                out = call() if call is not None else layer(x, scope.inputs["edge_index"])
                assert scope.forward.layers == 0
            found.append((out.detach(), gradients(layer, out, x)))
            x.grad = None
        assert len(replays) == before + 2
        assert_same(*found)


def test_a_hook_on_all_modules_is_called(replays: list[Learned]) -> None:
    layer, seen = pyg.SAGEConv(WIDTH, 8).double(), []
    with intercepted(layer) as scope:
        for epoch in range(1, 5):
            run(scope, epoch, layer)
        before = len(replays)
        hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
        try:
            run(scope, 5, layer)
        finally:
            hook.remove()
    assert before
    assert len(replays) == before
    assert layer.lin_l in seen


def test_a_copy_of_a_watched_layer_has_its_own_weights() -> None:
    layer = nn.Linear(WIDTH, 8).double()
    with intercepted(layer):
        twin = deepcopy(layer)
        with torch.no_grad():
            twin.weight.zero_()
            twin.bias.zero_()
        assert not twin.forward(rows(1)).any()
        assert layer.forward(rows(1)).any()


def test_rows_that_lie_otherwise_are_another_call(replays: list[Learned]) -> None:
    layer = pyg.SAGEConv(WIDTH, 8).double()
    twin = deepcopy(layer)
    with intercepted(layer) as scope, intercepted(twin, learns=False) as plain:
        for epoch in range(1, 5):
            run(scope, epoch, layer)
        before, found = len(replays), []
        for which, module in ((scope, layer), (plain, twin)):
            x = rows(5).detach().t().contiguous().t().requires_grad_()
            which.placements.put(x, Placement(PlacementKind.ROWS))
            with which.running(5, training=True):
                out = module(x, which.inputs["edge_index"])
            found.append((out.detach(), gradients(module, out, x)))
        assert before
        assert len(replays) == before
    assert_same(*found)
