"""A weather model after GraphCast: a grid and a mesh, whose edges the model holds in buffers.

    python examples/weather.py
    torchrun --nproc-per-node 2 examples/weather.py

Both print the same numbers. Points of the grid send to the mesh, the mesh exchanges messages with itself, and
sends back. A roll-out of two steps precedes each backward; the loss is weighted by the area of a grid point.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import kagome

LATITUDES, LONGITUDES, EVERY, HIDDEN, STEPS, BATCH = 8, 16, 3, 16, 100, 4


class Interaction(MessagePassing):
    """Messages from one set to another along edges with attributes; both are buffers."""

    def __init__(self, edges: Tensor, attr: Tensor) -> None:
        super().__init__(aggr="sum")
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("attr", attr, persistent=False)
        self.state = nn.Linear(attr.size(1), HIDDEN)
        self.edge = nn.Sequential(nn.Linear(3 * HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.row = nn.Sequential(nn.Linear(2 * HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, senders: Tensor, receivers: Tensor) -> Tensor:
        state = self.state(self.attr).expand(receivers.size(0), -1, -1)
        total = self.propagate(self.edges, x=(senders, receivers), state=state)
        return receivers + self.row(torch.cat([receivers, total], dim=-1))

    def message(self, x_j: Tensor, x_i: Tensor, state: Tensor) -> Tensor:
        return self.edge(torch.cat([state, x_j, x_i], dim=-1))


class Weather(nn.Module):
    """Encode grid to mesh, process on the mesh, decode to the grid: ``[batch, grid, 1]`` to the next step."""

    def __init__(self, graph: kagome.Graph) -> None:
        super().__init__()
        self.embed, self.read = nn.Linear(3, HIDDEN), nn.Linear(HIDDEN, 1)
        self.mesh = nn.Parameter(torch.randn(graph.vertices["mesh"].count, HIDDEN) / HIDDEN)
        self.steps = nn.ModuleDict(
            {name: Interaction(each.index, each.attr) for name, each in graph.edges.items()}  # type: ignore[arg-type]
        )

    def forward(self, x: Tensor, static: Tensor) -> Tensor:
        grid = self.embed(torch.cat([x, static.expand(x.size(0), -1, -1)], dim=-1))
        mesh = self.steps["up"](grid, self.mesh.expand(x.size(0), -1, -1))
        mesh = self.steps["across"](mesh, mesh)
        return x + self.read(self.steps["down"](mesh, grid))


def sphere() -> tuple[kagome.Graph, Tensor]:
    """Return a grid of latitudes and longitudes, a mesh of fewer points, and the area of each grid point."""
    latitude = (torch.arange(LATITUDES) + 0.5) / LATITUDES * torch.pi - torch.pi / 2
    longitude = torch.arange(LONGITUDES) / LONGITUDES * 2 * torch.pi
    lat, lon = (each.flatten() for each in torch.meshgrid(latitude, longitude, indexing="ij"))
    pos = torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], dim=1)
    coarse = pos[::EVERY]

    def nearest(source: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return edges from the nearest sources to each target, with length and direction."""
        away, chosen = torch.cdist(target, source).topk(count, dim=1, largest=False)
        ends = torch.stack([chosen.flatten(), torch.arange(target.size(0)).repeat_interleave(count)])
        (x, y, z), (u, v, w) = source[ends[0]].T, target[ends[1]].T
        return ends, torch.stack([away.flatten(), u * y - v * x, z - w], dim=1)  # eastward, northward

    up, across, down = nearest(pos, coarse, 5), nearest(coarse, coarse, 6), nearest(coarse, pos, 3)
    graph = kagome.Graph(
        grid=kagome.Vertices(pos.size(0), pos=pos),
        mesh=kagome.Vertices(coarse.size(0), pos=coarse),
        up=kagome.Edges("grid", "mesh", *up),
        across=kagome.Edges("mesh", "mesh", *across),
        down=kagome.Edges("mesh", "grid", *down),
    )
    return graph, lat.cos().unsqueeze(1)


def states(pos: Tensor, step: int) -> Tensor:
    """Return three states of a wave that turns around the axis: ``[3, batch, grid, 1]``."""
    phase = torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(step)) * 6.28
    angle = torch.atan2(pos[:, 1], pos[:, 0])
    return torch.stack([torch.sin(angle + phase - 0.3 * turn) * (1 - pos[:, 2] ** 2) for turn in range(3)])[
        ..., None
    ]


def main() -> None:
    """Train, and print the loss and how much of the change in two steps is explained."""
    torch.manual_seed(0)
    graph, area = sphere()
    pos = graph.vertices["grid"].pos
    assert pos is not None
    model = Weather(graph)
    with kagome.shard(model, graph, parallel=kagome.Parallel(partitioner="coordinates")) as net:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        weight = net.place(area, "grid")
        for step in range(STEPS):
            truth = net.place(states(pos, step), "grid", axis=2)  # this rank's points of the grid
            state, loss = truth[0], torch.zeros(())
            for turn in (1, 2):
                state = net(net.place(state, "grid", axis=1), pos[:, :2])
                loss = loss + net.mean((state - truth[turn]) ** 2, weight)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        still = net.mean((truth[0] - truth[1]) ** 2, weight) + net.mean((truth[0] - truth[2]) ** 2, weight)
        if net.rank == 0:
            print(f"loss {loss.item():.5f}, explained {1 - loss.item() / still.item():.4f}")


if __name__ == "__main__":
    main()
