"""A mesh simulation in a training loop of its own: a network after MeshGraphNet learns how heat spreads.

    python examples/mesh_simulation.py
    torchrun --nproc-per-node 2 examples/mesh_simulation.py

Both print the same numbers. Each step takes a batch of four fields over one mesh, ``[4, N, 2]``; every edge
has a state that each layer updates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import kagome

SIDE, HIDDEN, LAYERS, BATCH, STEPS = 12, 32, 3, 4, 60


def mesh(side: int = SIDE) -> Data:
    """Return a square of triangles, with edges in both directions and their length and direction."""
    place = torch.arange(side * side).view(side, side)
    pairs = [(place[:, :-1], place[:, 1:]), (place[:-1], place[1:]), (place[:-1, :-1], place[1:, 1:])]
    one = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], dim=1)
    edges = torch.cat([one, one.flip(0)], dim=1)
    points = torch.cartesian_prod(torch.arange(side), torch.arange(side)) / side
    offset = points[edges[1]] - points[edges[0]]
    return Data(
        pos=points, edge_index=edges, edge_attr=torch.cat([offset, offset.norm(dim=1, keepdim=True)], 1)
    )


def mlp(fan_in: int, fan_out: int) -> nn.Sequential:
    """Return two layers with a smooth step between them."""
    return nn.Sequential(nn.Linear(fan_in, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, fan_out))


class Processor(nn.Module):
    """One step of messages: edges first, then vertices."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.vertex = mlp(3 * HIDDEN, HIDDEN), mlp(2 * HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, h: Tensor, state: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edge_index
        state = state + self.edge(torch.cat([state, h[:, source], h[:, target]], dim=-1))
        sums = torch.zeros_like(h).index_add(1, target, state)
        return h + self.norm(self.vertex(torch.cat([h, sums], dim=-1))), state


class MeshNet(nn.Module):
    """Encoder, processor layers with a state an edge, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.vertices, self.edges, self.decoder = mlp(2, HIDDEN), mlp(3, HIDDEN), mlp(HIDDEN, 1)
        self.layers = nn.ModuleList(Processor() for _ in range(LAYERS))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h, state = self.vertices(x), self.edges(edge_attr).expand(x.size(0), -1, -1)
        for layer in self.layers:
            h, state = layer(h, state, edge_index)
        return self.decoder(h).squeeze(-1)


def fields(data: Data, step: int) -> tuple[Tensor, Tensor]:
    """Return a batch of fields with their conductivity, and how much each vertex gains in a short time."""
    generator = torch.Generator().manual_seed(step)
    centre, width = torch.rand(2, BATCH, 1, 2, generator=generator)
    heat = torch.exp(-8 * ((data.pos - centre) / (0.5 + width)).square().sum(-1))
    conductivity = (0.5 + data.pos[:, 0]).expand_as(heat)
    source, target = data.edge_index
    flow = (heat[:, source] - heat[:, target]) * conductivity[:, source]
    return torch.stack([heat, conductivity], dim=-1), torch.zeros_like(heat).index_add(1, target, 10 * flow)


def main() -> None:
    """Train, and print the loss and how much of the variance is explained."""
    torch.manual_seed(0)
    data, model = mesh(), MeshNet()
    with kagome.shard(model, data) as net:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for step in range(STEPS):
            x, y = fields(data, step)
            y = net.place(y, axis=1)  # this rank's vertices of each field
            out = net(x, data.edge_index, data.edge_attr)
            loss = net.mean((out - y) ** 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        explained = 1 - loss.detach() / net.mean((y - net.mean(y)) ** 2)
        if net.rank == 0:
            print(f"loss {loss.item():.5f}, R2 {explained.item():.4f}")


if __name__ == "__main__":
    main()
