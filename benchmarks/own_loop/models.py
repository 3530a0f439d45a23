"""The models and graphs of ``main.py``: a mesh after MeshGraphNet, and a grid with a mesh after GraphCast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import kagome


class Layer(nn.Module):
    """A processor layer after MeshGraphNet: edges have a state, and then vertices are updated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.vertex = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, h: Tensor, state: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edge_index
        state = state + self.edge(torch.cat([state, h[source], h[target]], dim=-1))
        sums = torch.zeros_like(h).index_add(0, target, state)
        return h + self.vertex(torch.cat([h, sums], dim=-1)), state


class MeshNet(nn.Module):
    """Encoder, layers, decoder."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.vertices, self.edges, self.decoder = (
            nn.Linear(8, width),
            nn.Linear(4, width),
            nn.Linear(width, 3),
        )
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h, state = self.vertices(x), self.edges(edge_attr)
        for layer in self.layers:
            h, state = layer(h, state, edge_index)
        return self.decoder(h)


def triangles(side: int) -> Tensor:
    """Return the edges of a square of triangles: six a vertex."""
    place = torch.arange(side * side).view(side, side)
    pairs = [(place[:, :-1], place[:, 1:]), (place[:-1], place[1:]), (place[:-1, :-1], place[1:, 1:])]
    one = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], dim=1)
    return torch.cat([one, one.flip(0)], dim=1)


def mesh(side: int) -> Data:
    """Return a square of triangles with features and edge attributes."""
    edges = triangles(side)
    generator = torch.Generator().manual_seed(0)
    points = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    x = torch.randn(side * side, 8, generator=generator)
    return Data(
        x=x, pos=points, edge_index=edges, edge_attr=torch.randn(edges.size(1), 4, generator=generator)
    )


class Link(nn.Module):
    """Messages from one vertex set to another along edges that the module holds."""

    def __init__(self, edges: Tensor, width: int) -> None:
        super().__init__()
        self.register_buffer("edges", edges, persistent=False)
        self.edge = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.vertex = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, senders: Tensor, receivers: Tensor) -> Tensor:
        source, target = self.edges
        state = self.edge(torch.cat([senders[source], receivers[target]], dim=-1))
        sums = torch.zeros_like(receivers).index_add(0, target, state)
        return receivers + self.vertex(torch.cat([receivers, sums], dim=-1))


class WeatherNet(nn.Module):
    """Encode a grid to a mesh, layers on the mesh, decode to the grid."""

    def __init__(self, links: dict[str, Tensor], corners: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.mesh, self.read = nn.Linear(8, width), nn.Linear(4, width), nn.Linear(width, 3)
        self.register_buffer("corners", torch.randn(corners, 4))
        self.up, self.down = Link(links["up"], width), Link(links["down"], width)
        self.layers = nn.ModuleList(Link(links["across"], width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        grid = self.embed(x)
        mesh = self.up(grid, self.mesh(self.corners))
        for layer in self.layers:
            mesh = layer(mesh, mesh)
        return self.read(self.down(mesh, grid))


@dataclass(frozen=True)
class Case:
    """A model with what it is called with.

    Args:
        model: The model.
        graph: What ``kagome.shard`` is given.
        inputs: What the model takes.
        x: The rows that the wanted output is made of.
        rows: The set of these rows.
    """

    model: nn.Module
    graph: Any
    inputs: tuple[Tensor, ...]
    x: Tensor
    rows: str


def case_of(name: str, side: int, width: int, layers: int) -> Case:
    """Return the mesh, or the weather on a grid of twice the side."""
    if name == "mesh":
        data = mesh(side)
        inputs = (data.x, data.edge_index, data.edge_attr)
        return Case(MeshNet(width, layers), data, inputs, data.x, "vertices")
    long = 2 * side
    points = torch.cartesian_prod(torch.arange(long), torch.arange(long))
    # Each point of the grid and three corners of the mesh around it.
    parents = [
        ((points + torch.tensor(shift)) // 2).clamp(max=side - 1) @ torch.tensor([side, 1])
        for shift in ((0, 0), (1, 0), (0, 1))
    ]
    child = torch.arange(long * long)
    up = torch.cat([torch.stack([child, parent]) for parent in parents], dim=1).unique(dim=1)
    links = {"up": up, "across": triangles(side), "down": up.flip(0).contiguous()}
    corners = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    graph = kagome.Graph(
        grid=kagome.Vertices(long * long, pos=points.float() / 2),
        mesh=kagome.Vertices(side * side, pos=corners),
        up=kagome.Edges("grid", "mesh", links["up"]),
        across=kagome.Edges("mesh", "mesh", links["across"]),
        down=kagome.Edges("mesh", "grid", links["down"]),
    )
    x = torch.randn(long * long, 8, generator=torch.Generator().manual_seed(0))
    return Case(WeatherNet(links, side * side, width, layers), graph, (x,), x, "grid")
