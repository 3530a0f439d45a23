"""Batches flattened into rows, with repeated edges, as weather models after anemoi have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import WORLDS, grads
from test_vertex_sets import net_of
from torch import Tensor, nn
from torch_geometric.utils import scatter, softmax

import kagome
from kagome.comm.channel import Channel
from kagome.errors import ModelError

GRID, MESH, HEADS, WIDTH = 31, 11, 2, 3
CHANNELS = HEADS * WIDTH


def edges_of() -> dict[str, tuple[str, str, Tensor]]:
    """Edges from grid to mesh, on the mesh, and back; as many up as down, which counts do not tell apart."""
    generator = torch.Generator().manual_seed(4)

    def drawn(source: int, target: int, count: int) -> Tensor:
        return torch.stack([torch.randint(n, (count,), generator=generator) for n in (source, target)])

    return {
        "up": ("grid", "mesh", drawn(GRID, MESH, 61)),
        "across": ("mesh", "mesh", drawn(MESH, MESH, 40)),
        "down": ("mesh", "grid", drawn(MESH, GRID, 61)),
    }


SIZES = {"grid": GRID, "mesh": MESH}


def weather_graph() -> kagome.Graph:
    sets: dict[str, Any] = {name: kagome.Vertices(size) for name, size in SIZES.items()}
    for name, (source, target, edges) in edges_of().items():
        sets[name] = kagome.Edges(source, target, edges)
    return kagome.Graph(**sets)


class Trained(nn.Module):
    """Attributes and trained numbers, a row a vertex or an edge, repeated for each sample."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("given", torch.randn(rows, 2))
        self.trained = nn.Parameter(torch.randn(rows, 2))

    def forward(self, batch: int) -> Tensor:
        return torch.cat([each.repeat(batch, 1) for each in (self.given, self.trained)], dim=-1)


class Attention(pyg.MessagePassing):
    """Edge features in keys and values, and a softmax over the edges of each target."""

    def __init__(self) -> None:
        super().__init__(aggr="add", node_dim=0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, edges: Tensor, index: Tensor, size: Any) -> Any:
        return self.propagate(index, size=size, query=query, key=key, value=value, edges=edges)

    def message(
        self, query_i: Tensor, key_j: Tensor, value_j: Tensor, edges: Tensor, index: Tensor, ptr: Any, size_i: Any
    ) -> Tensor:
        alpha = (query_i * (key_j + edges)).sum(dim=-1) / WIDTH**0.5
        alpha = softmax(alpha, index, ptr, size_i)
        return (value_j + edges) * alpha.view(-1, HEADS, 1)


class Transformer(nn.Module):
    """One layer of attention, whose heads are an axis of their own for a while, as where heads are split."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(4))
        self.norm, self.conv, self.out = nn.LayerNorm(CHANNELS), Attention(), nn.Linear(2 * CHANNELS, CHANNELS)

    def forward(self, source: Tensor, target: Tensor, edges: Tensor, index: Tensor, batch: int) -> Any:
        source, skip = self.norm(source), target
        given = zip(self.maps, (self.norm(target), source, source, edges), strict=True)
        # "(batch grid) (heads vars) -> batch heads grid vars", and back to "(batch grid) heads vars"
        apart = [linear(rows).view(batch, -1, HEADS, WIDTH).transpose(1, 2) for linear, rows in given]
        query, key, value, edged = (each.transpose(1, 2).reshape(-1, HEADS, WIDTH) for each in apart)
        size = source.shape[0], target.shape[0]
        out = self.conv(query, key, value, edged, index, size)
        return skip + self.out(torch.cat([out.flatten(1), target], dim=-1)), edges


class Mlp(pyg.MessagePassing):
    """Messages of a network over both ends and the state of an edge, which is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(3 * CHANNELS, 8), nn.SiLU(), nn.Linear(8, CHANNELS))
        self.row = nn.Sequential(nn.Linear(2 * CHANNELS, 8), nn.SiLU(), nn.Linear(8, CHANNELS))

    def forward(self, source: Tensor, target: Tensor, edges: Tensor, index: Tensor, batch: int) -> Any:
        size = source.shape[0], target.shape[0]
        out, edges = self.propagate(index, size=size, x=(source, target), edges=edges)
        return target + self.row(torch.cat([target, out], dim=1)), edges

    def message(self, x_i: Tensor, x_j: Tensor, edges: Tensor) -> Tensor:
        return self.edge(torch.cat([x_i, x_j, edges], dim=1)) + edges

    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any, dim_size: Any) -> Any:
        return scatter(inputs, index, dim=0, dim_size=dim_size, reduce="sum"), inputs


LAYERS = {"transformer": Transformer, "mlp": Mlp}


class Mapper(nn.Module):
    """A layer along one edge set, whose edges and their attributes are repeated for the batch."""

    def __init__(self, kind: str, edges: Tensor, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.register_buffer("index", edges)
        self.register_buffer("increment", torch.tensor(sizes).view(2, 1))
        self.attributes, self.embed, self.layer = Trained(edges.size(1)), nn.Linear(4, CHANNELS), LAYERS[kind]()

    def forward(self, source: Tensor, target: Tensor, batch: int, times: int = 1) -> Tensor:
        index = torch.cat([self.index + i * self.increment for i in range(batch)], dim=1)
        edges = self.embed(self.attributes(batch))
        for _ in range(times):
            target, edges = self.layer(target if times > 1 else source, target, edges, index, batch)
        return target


class Weather(nn.Module):
    """Encode, process twice, decode: ``[batch, time, ensemble, grid, 3]`` to ``[batch, ensemble, grid, 3]``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rows = nn.ModuleDict({name: Trained(size) for name, size in SIZES.items()})
        self.embed = nn.ModuleDict({"grid": nn.Linear(6 + 4, CHANNELS), "mesh": nn.Linear(4, CHANNELS)})
        self.steps = nn.ModuleDict(
            {
                name: Mapper(kind, edges, (SIZES[source], SIZES[target]))
                for name, (source, target, edges) in edges_of().items()
            }
        )
        self.read = nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, ensemble, grid, fields = x.shape
        copies = batch * ensemble
        # "batch time ensemble grid vars -> (batch ensemble grid) (time vars)"
        rows = x.permute(0, 2, 3, 1, 4).reshape(batch * ensemble * grid, time * fields)
        h = self.embed["grid"](torch.cat([rows, self.rows["grid"](copies)], dim=-1))
        mesh = self.embed["mesh"](self.rows["mesh"](copies))
        hidden = self.steps["up"](h, mesh, copies)
        hidden = hidden + self.steps["across"](hidden, hidden, copies, times=2)
        out = self.read(self.steps["down"](hidden, h, copies))
        # "(batch ensemble grid) vars -> batch ensemble grid vars"
        return out.view(batch, ensemble, -1, fields) + x[:, -1]


def weather(channel: Channel | None, kind: str, batch: int, ensemble: int) -> dict[str, Tensor]:
    """Two steps of a roll-out before one backward."""
    torch.manual_seed(5)
    model = Weather(kind).double()
    generator = torch.Generator().manual_seed(9)
    first = torch.randn(batch, 2, ensemble, GRID, 3, generator=generator, dtype=torch.float64)
    area = torch.rand(GRID, 1, generator=generator, dtype=torch.float64)
    with net_of(channel, model, weather_graph()) as net:
        x = net.place(first, "grid", axis=3).clone().requires_grad_()
        x = x if channel is None else net.place(x, "grid", axis=3)
        out = net(x)
        again = net(torch.stack([x[:, 1], out], dim=1) if channel is None else net.place(torch.stack([x[:, 1], out], dim=1), "grid", axis=3))
        loss = net.mean((again - 1) ** 2, net.place(area, "grid"))
        loss.backward()
        shown = net.gather(again, "grid", axis=2)
    if channel is not None and channel.rank:
        shown = torch.zeros(0)
    return grads(model) | {"loss": loss.detach(), "out": shown}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", LAYERS)
def test_flattened_batches_are_those_of_the_whole_graph(ranks: Any, world: int, kind: str) -> None:
    expected = weather(None, kind, 2, 2)
    assert len(expected) > 30
    for rank, found in enumerate(ranks(world, weather, kind, 2, 2)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if rank and name == "out":
                continue
            torch.testing.assert_close(
                found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
