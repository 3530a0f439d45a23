"""Blocks as users write them, run again in backward: what they find, and what is refused."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.utils import degree, dropout_edge, scatter

from convolutions import sample_graph
from kagome.errors import ModelError
from kagome.recompute.checkpoint import layers_of
from parity import random_owner
from twice import FAN_IN, FAN_OUT, Build, Ranks, assert_same, both, on_one_rank, train, zoo


class Block(nn.Module):
    """Norms with running statistics, dropout, a draw of torch's and one of Python's, a read by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = pyg.GATv2Conv(width, width // 2, heads=2, dropout=0.3)
        self.norm, self.graph_norm = nn.BatchNorm1d(width), pyg.GraphNorm(width)
        self.calls, self.scale = 0, 0.0
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        near = scatter(x[row], col, 0, x.size(0), "mean")
        self.calls += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.scale = 0.5 * self.scale + float(torch.rand(())) + random.random()
        x = F.dropout(self.norm(self.conv(x, edge_index)), 0.4, self.training) + near * self.scale
        return self.graph_norm(x * (1 + self.average)).relu() / self.calls


class Blocks(nn.Module):
    """Own blocks in a list between two layers outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(FAN_IN, 8), pyg.GCNConv(8, FAN_OUT)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        for block in self.blocks:
            x = x + block(x, edge_index)
        return self.last(x, edge_index)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_block_finds_what_it_found(ranks: Ranks, world: int) -> None:
    once, twice = both(ranks, world, Blocks, epochs=3)
    assert_same(once, twice)
    # Running statistics have moved once an epoch, not twice.
    assert int(twice[0].buffers["blocks.0.norm.num_batches_tracked"]) == 3


def test_inputs_may_come_back_as_other_tensors(ranks: Ranks) -> None:
    assert_same(*both(ranks, 2, Blocks, away=True))


class InData(nn.Module):
    """A layer that takes a ``Data`` and writes its result into it."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.conv, self.norm = pyg.GINConv(nn.Linear(fan_in, fan_out)), nn.BatchNorm1d(fan_out)

    def forward(self, data: Data) -> Data:
        data.x = self.norm(self.conv(data.x, data.edge_index)).tanh()
        return data


class ThroughData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(InData(FAN_IN, 8), InData(8, 8), InData(8, FAN_OUT))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        data = Data(x=x * 2, edge_index=edge_index)
        self.layers(data)
        return data.x


class ThroughLists(nn.Module):
    """Layers that are given lists and named tensors, and give several, one of them a message."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv = pyg.GraphConv(width, width)
            self.gate = nn.Linear(width, width)

        def forward(self, rows: list[Tensor], *, edges: dict[str, Tensor], message: Tensor) -> Any:
            x = self.conv(rows[-1], edges["index"]) + scatter(message, edges["index"][1], 0, len(rows[0]))
            rows.append(x.tanh())
            return rows, self.gate(x)[edges["index"][0]]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FAN_IN, 8), pyg.GCNConv(16, FAN_OUT, cached=True)
        self.layers = nn.ModuleList(self.Layer(8) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = [self.first(x)]
        message = rows[0][edge_index[0]]
        for layer in self.layers:
            rows, message = layer(rows, edges={"index": edge_index}, message=message)
        pooled = scatter(message, edge_index[1], 0, x.size(0))
        return self.last(torch.cat([rows[-1], pooled], -1), edge_index)


class Cached(nn.Module):
    """Caches on the module, filled from weights that are computed: not known to be the same for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            pyg.GCNConv(a, b, cached=True) for a, b in ((FAN_IN, 8), (8, 8), (8, FAN_OUT))
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        size = degree(edge_index[1], x.size(0))
        for conv in self.convs:
            x = conv(x, edge_index, edge_weight.sqrt() / (1 + size[edge_index[0]])).tanh()
        return x


class Twice(nn.Module):
    """One layer used three times, its input detached once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = pyg.TransformerConv(FAN_IN, FAN_IN), nn.Linear(FAN_IN, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        x = self.conv(x, edge_index) + self.conv(x.detach(), edge_index)
        return self.last(x)


class Normed(nn.Module):
    """Weights that a hook computes from buffers which move in each forward."""

    def __init__(self) -> None:
        super().__init__()
        spectral = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.convs = nn.ModuleList(
            [pyg.GINConv(spectral), pyg.GINConv(nn.utils.weight_norm(nn.Linear(8, 8)))]
        )
        self.first, self.last = nn.Linear(FAN_IN, 8), nn.Linear(8, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return self.last(x)


class Sided(nn.Module):
    """A block that reads both ways along edges some of which are dropped, and attends to all vertices."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.cheb = pyg.GraphConv(8, 8, flow="target_to_source"), pyg.ChebConv(8, 8, 2)
            self.gps = pyg.GPSConv(8, pyg.SAGEConv(8, 8), heads=2, norm="batch_norm", dropout=0.3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            kept = dropout_edge(edge_index, p=0.3, training=self.training)[0]
            x = x + self.out(x, edge_index) + self.cheb(x, kept) + self.cheb(x, edge_index.flip(0))
            return self.gps(x, edge_index) - x.amax(0)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FAN_IN, 8), nn.Linear(8, FAN_OUT)
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.last(x)


@pytest.mark.some(9)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("build", [ThroughData, ThroughLists, Cached, Twice, Normed, Sided])
def test_what_layers_are_given_and_keep(ranks: Ranks, build: Build, world: int) -> None:
    assert_same(*both(ranks, world, build, epochs=3))


def test_layers_are_what_a_list_holds() -> None:
    deep, gcn = zoo("deepgcn", layers=4), zoo("gcn", layers=3)
    assert layers_of(deep) == list(deep.blocks)
    assert layers_of(gcn) == list(gcn.convs)
    assert layers_of(nn.Sequential(gcn)) == list(gcn.convs)
    assert layers_of(nn.ModuleDict({"one": gcn, "two": deep})) == [gcn, deep]
    assert layers_of(nn.ModuleList([nn.ModuleList(gcn.convs[:1]), nn.ModuleList(gcn.convs[1:])])) == list(
        gcn.convs
    )
    mine = Blocks()
    assert layers_of(mine) == [mine.first, mine.last, *mine.blocks]
    assert layers_of(nn.Linear(2, 2)) == []
    plain = pyg.Sequential(
        "x, e", [(pyg.GCNConv(2, 2), "x, e -> x"), nn.ReLU(), (pyg.GCNConv(2, 2), "x, e -> x")]
    )
    assert [type(layer) for layer in layers_of(plain)] == [pyg.GCNConv] * 2
    shared = pyg.GCNConv(2, 2)
    assert layers_of(nn.ModuleList([shared, shared])) == [shared]


# Refused ------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """The user's own checkpoint, inside a layer that runs again or around it."""

    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.reentrant = inside, reentrant
        self.conv = pyg.DeepGCNLayer(
            pyg.SAGEConv(FAN_IN, FAN_IN), nn.LayerNorm(FAN_IN), nn.ReLU(), ckpt_grad=inside and reentrant
        )
        if inside and not reentrant:
            conv = self.conv.conv
            self.conv.conv = _Inside(conv)
        self.layers = nn.ModuleList([self.conv, pyg.SAGEConv(FAN_IN, FAN_IN)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        if self.inside:
            return self.conv(x, edge_index)
        return checkpoint(self.conv, x, edge_index, use_reentrant=self.reentrant)


class _Inside(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return checkpoint(self.conv, x, edge_index, use_reentrant=False)


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_the_users_own_checkpoint_is_still_refused_on_one_rank(
    ranks: Ranks, inside: bool, reentrant: bool
) -> None:
    """It runs there as plain PyG runs it, without Kagome's own way."""
    build = partial(Checkpointed, inside, reentrant)
    data = sample_graph(1)
    with pytest.raises(ModelError, match="activation checkpointing") as caught:
        ranks(1, train, build, data, random_owner(30, 1), True)
    assert "torch.utils.checkpoint" in caught.value.hint
    assert "--model.recompute" in caught.value.hint


class Overwritten(nn.Module):
    """A layer's input is written to after it has run."""

    def __init__(self, grad: bool) -> None:
        super().__init__()
        self.grad, self.conv = grad, pyg.SAGEConv(FAN_IN, FAN_IN)
        self.lin = nn.Linear(FAN_IN, FAN_IN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x) if self.grad else x * 2
        out = self.conv(x, edge_index)
        x += 1
        return out


def test_inputs_that_are_written_to_are_refused() -> None:
    for grad, kind, words in (
        (False, ModelError, "to stay as it is"),
        (True, RuntimeError, "inplace operation"),
    ):
        model = Overwritten(grad).double()
        with on_one_rank(model) as net:
            scope = net.scope
            with scope.running(1, training=True):
                out = model(scope.inputs["x"], scope.inputs["edge_index"])
            with pytest.raises(kind, match=words):
                out.square().sum().backward()


class Written(pyg.SAGEConv):
    """An attribute that is no buffer is written to in place."""

    def __init__(self) -> None:
        super().__init__(FAN_IN, FAN_IN)
        self.memory = torch.zeros(FAN_IN, dtype=torch.float64)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.memory.add_(x.detach().mean(0))
        return super().forward(x * self.memory, edge_index)


def test_attributes_that_are_written_to_are_refused() -> None:
    model = Written().double()
    with on_one_rank(model) as net:
        scope = net.scope
        with scope.running(1, training=True):
            out = model(scope.inputs["x"], scope.inputs["edge_index"])
        with pytest.raises(ModelError, match="'memory'") as caught:
            out.square().sum().backward()
        assert "register_buffer" in caught.value.hint


class Fickle(nn.Module):
    """Reads other rows each time it runs, by a count that is no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.runs = pyg.SAGEConv(FAN_IN, FAN_IN), []

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.runs.append(True)
        x = x * self.conv.lin_r.weight.sum()
        x = x - x.mean(0) if len(self.runs) % 2 else x - x.amax(0)
        return self.conv(x, edge_index)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Fickle()])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layers[0](x, edge_index)


def test_a_layer_that_does_otherwise_the_second_time_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ModelError, match=r"greatest .* and total forward .* the first time"):
        ranks(2, train, Listed, sample_graph(1), random_owner(30, 2), True)
