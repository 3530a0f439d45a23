"""Models as the fields that train one big graph write them: outputs and every gradient, on 1 to 4 ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import WORLDS, N, both, grads, graph, model_of, net_of, of_first
from torch import Tensor, nn
from torch.nn import functional

from kagome.comm.channel import Channel

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """An example as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def mesh_graph_net(channel: Channel | None) -> dict[str, Tensor]:
    """15 layers with a state an edge, and batches of four fields over one mesh."""
    simulation = example("mesh_simulation")
    torch.manual_seed(5)
    data = simulation.mesh(6)
    data.pos, data.edge_attr = data.pos.double(), data.edge_attr.double()
    model: nn.Module = simulation.MeshNet()
    model.layers = nn.ModuleList(simulation.Processor() for _ in range(15))
    model.double()
    with net_of(channel, model, data) as net:
        for step in range(2):
            x, y = (each.double() for each in simulation.fields(data, step))
            out = net(x, data.edge_index, data.edge_attr)
            loss = net.mean((out - net.place(y, axis=1)) ** 2)
            loss.backward()
        rows = net.gather(out, axis=1)
    return grads(model) | {"loss": loss.detach(), "out": of_first(channel, rows, tuple(y.shape))}


def linked(channel: Channel | None) -> dict[str, Tensor]:
    """Link prediction: encoder, scores of pairs whose ends lie on different ranks, a predictor beside it."""
    data = graph()
    torch.manual_seed(5)
    model, predictor = model_of("sage"), nn.Linear(3, 1).double()
    generator = torch.Generator().manual_seed(2)
    positive = torch.randint(0, N, (2, 40), generator=generator)
    beside = {} if channel is None else {"beside": [predictor]}
    with net_of(channel, model, data, **beside) as net:
        size, rank = (1, 0) if channel is None else (channel.size, channel.rank)
        loss = torch.zeros((), dtype=torch.float64)
        for step in range(2):
            h = net(data.x, data.edge_index)
            first, second = net.pairs(h, positive[:, rank::size])
            third, fourth = net.pairs(h, net.negatives(30, seed=1, step=step))
            loss = loss - net.mean(functional.logsigmoid(predictor(first * second)))
            loss = loss - net.mean(functional.logsigmoid(-predictor(third * fourth)))
            loss = loss + net.mean(net.read(h, torch.arange(5) if rank == 0 else torch.arange(0)) ** 2)
            loss.backward(retain_graph=step == 0)
    return grads(model) | {f"p {n}": g for n, g in grads(predictor).items()} | {"loss": loss.detach()}


def embedded(channel: Channel | None) -> dict[str, Tensor]:
    """LightGCN with BPR: an embedding of all vertices is what is learned."""
    data = graph()
    torch.manual_seed(5)

    class LightGCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(N, 6)
            self.hops = nn.ModuleList(pyg.LGConv() for _ in range(3))

        def forward(self, edge_index: Tensor) -> Tensor:
            h = self.table.weight
            out = h / 4
            for hop in self.hops:
                h = hop(h, edge_index)
                out = out + h / 4
            return out

    model = LightGCN().double()
    data.x = None
    found = {}
    with net_of(channel, model, data) as net:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        size, rank = (1, 0) if channel is None else (channel.size, channel.rank)
        for step in range(3):
            positive = torch.randint(0, N, (2, 31), generator=torch.Generator().manual_seed(step))[
                :, rank::size
            ]
            negative = net.negatives(31, seed=7, step=step)[1]
            h = net(data.edge_index)
            (user, item), other = net.pairs(h, positive), net.read(h, negative)
            score = (user * item).sum(1) - (user * other).sum(1)
            loss = -net.mean(functional.logsigmoid(score))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found[f"loss {step}"] = loss.detach()
    return found | grads(model) | {"table": model.table.weight.detach()}


class Potential(nn.Module):
    """Energy of each atom by distances to its neighbours, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, 6)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 6)) for _ in range(2)
        )
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, pos: Tensor, kind: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        distance = (pos[source] - pos[target]).square().sum(1, keepdim=True).add(0.1).sqrt()
        h = self.kinds(kind)
        for layer in self.filters:
            message = layer(distance) * h[source]
            h = h + torch.zeros_like(h).index_add(0, target, message).tanh()
        return self.energy(h).squeeze(-1)


def potential(channel: Channel | None) -> dict[str, Tensor]:
    """An interatomic potential: forces are the derivative of the energy, and the loss is on both."""
    data = graph()
    generator = torch.Generator().manual_seed(4)
    data.pos = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    data.kind = torch.randint(0, 3, (N,), generator=generator)
    wanted = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    torch.manual_seed(5)
    model = Potential().double()
    found = {}
    with net_of(channel, model, data) as net:
        force, kind = net.place(wanted), net.place(data.kind)
        for step in range(2):
            pos = net.place(data.pos * (1 + step)).clone().requires_grad_()
            energy = net.sum(net(net.place(pos), kind, data.edge_index))
            (by_pos,) = torch.autograd.grad(energy, pos, create_graph=True)
            loss = (energy - 3) ** 2 + net.mean((by_pos + force) ** 2)
            loss.backward()
            found |= {f"energy {step}": energy.detach(), f"loss {step}": loss.detach()}
        forces = net.gather(by_pos)
    return found | grads(model) | {"forces": of_first(channel, forces, (N, 3))}


@pytest.mark.every
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shape", [mesh_graph_net, linked, embedded, potential])
def test_shape(ranks: Any, world: int, shape: Any) -> None:
    both(ranks, world, shape)


def twice(channel: Channel | None, kind: str) -> dict[str, Tensor]:
    """Second derivatives through PyG's layers and a norm: a loss on the gradient by the features."""
    data, model = graph(), model_of(kind)
    with net_of(channel, model, data) as net:
        x = net.place(data.x).clone().requires_grad_()
        energy = net.sum(net(net.place(x), data.edge_index, data.edge_attr).tanh() ** 2)
        (by_x,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = net.mean(by_x**2)
        loss.backward()
        rows = net.gather(x.grad)
    return grads(model) | {"loss": loss.detach(), "by x": of_first(channel, rows, tuple(data.x.shape))}


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gatv2", "gine", "transformer"])
def test_second_derivatives(ranks: Any, world: int, kind: str) -> None:
    both(ranks, world, twice, kind)
