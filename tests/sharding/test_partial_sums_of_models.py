"""Models whose sums other ranks take in part give what one process gives, and send fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import F, N, graph, net_of, of_first
from test_vertex_sets import by_types
from torch import Tensor, nn
from torch_geometric.data import Data

import kagome
from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadGroup
from kagome.components.parallelize import PartOptions, parallelize
from kagome.config.parallel import LEAST_EDGES
from kagome.deferred.summed_reads import SummedReads
from kagome.graph.partition.partition import extract
from parity import TOLERANCE, Result, differences, joined, one_rank, parity, whole

ON = kagome.Parallel(partial_sums="on")
SUMS = ("gcn", "gcn-weighted", "sage", "gin", "graph-weighted", "forces")
ROWS = ("sage-max", "gat", "learned", "mixed")
"""Of ``mixed`` the maximum reads rows, which its sums then take too."""


class Layers(nn.Module):
    """Three layers of a kind, the first of which widens, with dropout between them if asked for."""

    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.dropout = kind, nn.Dropout(dropout)
        sizes = ((3, 8), (8, 8), (8, 4))
        kind = kind.replace("forces", "gcn")
        make: dict[str, Callable[[int, int], nn.Module]] = {
            "gcn": pyg.GCNConv,
            "sage": pyg.SAGEConv,
            "sage-max": lambda i, o: pyg.SAGEConv(i, o, aggr="max"),
            "gin": lambda i, o: pyg.GINConv(nn.Linear(i, o), train_eps=True),
            "graph": pyg.GraphConv,
            "learned": pyg.GraphConv,
            "gat": pyg.GATConv,
            "mixed": lambda i, o: pyg.SAGEConv(i, o, aggr=["mean", "max", "sum"]),
        }
        self.weighted = kind.endswith("weighted") or kind == "learned"
        self.convs = nn.ModuleList(make[kind.removesuffix("-weighted")](i, o) for i, o in sizes)
        self.scale = nn.Parameter(torch.ones(1)) if kind == "learned" else None

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        out = self.layers(x, edge_index, edge_weight)
        if self.kind != "forces":
            return out
        # The loss's backward runs through this derivative's, and so through that of partial sums.
        (force,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
        return torch.cat([out, force], 1)

    def layers(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        weight = edge_weight if self.scale is None else torch.sigmoid(edge_weight * self.scale)
        for conv in self.convs:
            more = (weight,) if self.weighted else ()
            x = conv(self.dropout(x), edge_index, *more).tanh()
        return x


def data_of(edges: int = 60, *, gradient: bool = True) -> Data:
    generator = torch.Generator().manual_seed(6)
    # Vertices of small numbers have most edges, at either end, and some edges occur twice.
    ends = (24 * torch.rand(2, edges, generator=generator, dtype=torch.float64) ** 2).long()
    return Data(
        x=torch.randn(24, 3, generator=generator, dtype=torch.float64).requires_grad_(gradient),
        edge_index=ends,
        edge_weight=torch.rand(edges, generator=generator, dtype=torch.float64) + 0.1,
        num_nodes=24,
    )


def owner_of(world: int, cut: str) -> Tensor:
    owner = torch.arange(24) % world
    if cut == "uneven":
        owner = torch.zeros(24, dtype=torch.int64)
        owner[24 - world + 1 :] = torch.arange(1, world)
    if cut == "empty":
        owner[owner == world - 1] = 0
    return owner


def trained(ranks: Any, world: int, kind: str, cut: str, sums: str, dropout: float = 0.0) -> Result:
    data, build = data_of(), partial(Layers, kind, dropout)
    shares = ranks(world, parity, build, data, owner_of(world, cut), 0, 2, 1, None, sums)
    return joined(shares, 24)


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", ["even", "uneven", "empty"])
@pytest.mark.parametrize("kind", [*SUMS, *ROWS])
def test_values_and_gradients_are_those_of_one_process(ranks: Any, world: int, cut: str, kind: str) -> None:
    found = trained(ranks, world, kind, cut, "on")
    expected = whole(partial(Layers, kind), data_of(), epochs=2)
    for name, error in differences(found, expected).items():
        assert error <= TOLERANCE, (name, error)
    rows = trained(ranks, world, kind, cut, "off").halo
    if world > 1 and (world, cut) != (2, "empty") and kind in SUMS:
        assert found.halo[1] < rows[1]
    if kind in ROWS:
        assert found.halo == rows
    assert trained(ranks, world, kind, cut, "auto").halo == rows  # the graph is small


@pytest.mark.some(1)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_dropout_drops_the_same(ranks: Any, world: int, kind: str) -> None:
    found = trained(ranks, world, kind, "even", "on", 0.5)
    expected = one_rank(partial(Layers, kind, 0.5), data_of(), epochs=2)
    for name, error in differences(found, expected).items():
        assert error <= TOLERANCE, (name, error)


class Energy(nn.Module):
    """Two hops, smooth, that give a number a vertex."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = pyg.GCNConv(F, 6), pyg.SAGEConv(6, 6), pyg.GraphConv(6, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.two(self.one(x, edge_index).tanh(), edge_index).tanh()
        return self.three(h, edge_index)


def forces(channel: Channel | None) -> dict[str, Tensor]:
    """A loss on a gradient, whose backward runs through the backward of partial sums."""
    data = graph()
    torch.manual_seed(5)
    model = Energy().double()
    with net_of(channel, model, data, **({} if channel is None else {"parallel": ON})) as net:
        x = net.place(data.x).clone().requires_grad_()
        energy = net(net.place(x), data.edge_index)
        (force,) = torch.autograd.grad(net.sum(energy**2), x, create_graph=True)
        loss = net.mean(force**2) + net.mean(energy)
        loss.backward()
        rows = net.gather(x.grad)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**grads, "loss": loss.detach(), "by x": of_first(channel, rows, (N, F))}


@pytest.mark.parametrize("world", [2, 4])
def test_second_derivatives(ranks: Any, world: int) -> None:
    expected = forces(None)
    for found in ranks(world, forces):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)


def sampled(channel: Channel | None, recompute: bool) -> dict[str, Tensor]:
    """Samples along a leading axis, then evaluation; layers run again in backward if asked for."""
    data = graph()
    torch.manual_seed(5)
    model = Energy().double()
    more = {} if channel is None else {"parallel": ON, "recompute": recompute}
    with net_of(channel, model, data, **more) as net:
        x = torch.stack([data.x, data.x * 2, data.x.flip(1)])
        for _ in range(2):
            net.mean(net(x, data.edge_index) ** 2).backward()
        with torch.no_grad():
            rows = net.gather(net(x, data.edge_index), axis=1)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**grads, "rows": of_first(channel, rows, (3, N, 1))}


@pytest.mark.parametrize("recompute", [False, True])
def test_leading_axes_evaluation_and_layers_that_run_again(ranks: Any, recompute: bool) -> None:
    expected = sampled(None, recompute)
    for found in ranks(3, sampled, recompute):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)


def hubs() -> Data:
    """Four vertices that all others read and that read all others: any cut has sums that save rows."""
    generator = torch.Generator().manual_seed(4)
    others, hub = torch.arange(4, 44), torch.randint(0, 4, (40,), generator=generator)
    return Data(
        x=torch.randn(44, 16, generator=generator, dtype=torch.float64),
        edge_index=torch.cat([torch.stack([others, hub]), torch.stack([hub.flip(0), others])], 1),
        y=torch.randn(44, 4, generator=generator, dtype=torch.float64),
    )


def learned(channel: Channel, settings: dict[str, Any]) -> tuple[list[float], int]:
    """The losses of five steps, and the halo bytes that this rank has sent."""
    data, losses = hubs(), []
    torch.manual_seed(5)
    model = pyg.GCN(16, 16, num_layers=3, out_channels=4).double()
    cut = kagome.Parallel(guard=False, **settings)
    with kagome.shard(model, data, parallel=cut, log=str) as net:
        y, optimizer = net.place(data.y), torch.optim.Adam(net.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            loss = net.mean((net(data.x, data.edge_index) - y) ** 2)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, net.traffic.bytes["halo"]


def rows_and_sums(ranks: Any, world: int, settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses with rows and with sums, which have fewer bytes; all ranks have the same losses."""
    found = [ranks(world, learned, {**settings, "partial_sums": each}) for each in ("off", "on")]
    rows, sums = (sum(sent for _, sent in each) for each in found)
    assert sums < 0.8 * rows
    for each in found:
        assert all(losses == each[0][0] for losses, _ in each)
    return found[0][0][0], found[1][0][0]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_age": 1}, {"max_age": 1, "sync_every": 2, "smoothing": 0.5}],
    ids=lambda settings: "-".join(settings),
)
def test_late_sums_are_sums_of_late_rows(ranks: Any, settings: dict[str, Any]) -> None:
    rows, sums = rows_and_sums(ranks, 3, settings)
    torch.testing.assert_close(sums, rows, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "settings",
    [{"codec": "bf16"}, {"codec": "int8"}, {"codec": "int8", "error_feedback": True}],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_codecs_round_sums_as_they_round_rows(ranks: Any, settings: dict[str, Any]) -> None:
    exact = ranks(2, learned, {})[0][0]
    for found in rows_and_sums(ranks, 2, settings):
        assert 0 < max(abs(a - b) for a, b in zip(found, exact, strict=True)) < 0.05


def by_sums(channel: Channel | None, kind: str) -> dict[str, Tensor]:
    return by_types(channel, kind, "", partial_sums="on")


@pytest.mark.some(1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["to_hetero", "sage"])
def test_several_vertex_sets(ranks: Any, world: int, kind: str) -> None:
    expected = by_types(None, kind)
    for rank, found in enumerate(ranks(world, by_sums, kind)):
        for name, value in expected.items():
            if not (rank and name.startswith("out")):
                torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)


def large(channel: Any, setting: str) -> int:
    """The partial sums of a graph of so many edges that ``auto`` looks for them."""
    generator = torch.Generator().manual_seed(2)
    ends = (40_000 * torch.rand(2, LEAST_EDGES, generator=generator) ** 3).long()
    data = Data(x=torch.randn(40_000, 2, generator=generator), edge_index=ends, num_nodes=40_000)
    part = extract(data, torch.arange(40_000) % 2, channel.rank, 2)
    model = pyg.GCN(2, 4, 2)
    options = PartOptions(partial_sums="off" if setting == "off" else "auto")
    with parallelize(model, part, channel, options) as net:
        net.forward(1, training=True).sum().backward()
        summed = net.scope.deferral.summed
        return 0 if summed is None else sum(structure.edges for structure in summed.structures())


def test_auto_looks_for_sums_in_large_graphs() -> None:
    assert all(count > 0 for count in ThreadGroup(2).run(lambda channel: large(channel, "auto")))
    assert ThreadGroup(2).run(lambda channel: large(channel, "off")) == [0, 0]


def test_a_check_sends_sums_if_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    given, of = [], SummedReads.of

    def noted(self: SummedReads, edges: Any, weight: Tensor | None) -> Any:
        given.append(of(self, edges, weight))
        return given[-1]

    monkeypatch.setattr(SummedReads, "of", noted)
    data = kagome.load("sbm:vertices=60,degree=4,features=6,classes=3,communities=3")
    model = pyg.GCN(6, 8, num_layers=2, out_channels=3, dropout=0.5)
    assert kagome.check(model, data, parts=3).first is None
    assert not given
    assert kagome.check(model, data, parts=3, partial_sums=True).first is None
    assert any(each is not None for each in given)
