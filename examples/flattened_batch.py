"""A batch of PyG's ``DataLoader``: samples over one mesh, flattened into rows, with repeated edges.

    python examples/flattened_batch.py
    torchrun --nproc-per-node 2 examples/flattened_batch.py

Both print the same numbers. The model is that of a loop without Kagome: it takes ``[4 * N, 2]`` and the edges
of four copies of the mesh. Each layer sends one message to a peer, not four.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv

import kagome

SIDE, HIDDEN, LAYERS, SAMPLES, BATCH, EPOCHS = 12, 32, 3, 24, 4, 12


def mesh() -> Data:
    """Return a square of triangles, with edges in both directions and their length and direction."""
    place = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
    pairs = [(place[:, :-1], place[:, 1:]), (place[:-1], place[1:]), (place[:-1, :-1], place[1:, 1:])]
    one = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], dim=1)
    edges = torch.cat([one, one.flip(0)], dim=1)
    points = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)) / SIDE
    offset = points[edges[1]] - points[edges[0]]
    return Data(
        pos=points, edge_index=edges, edge_attr=torch.cat([offset, offset.norm(dim=1, keepdim=True)], 1)
    )


def samples(data: Data) -> list[Data]:
    """Return heat and conductivity at each vertex, and how much heat it gains in a short time."""
    generator, found = torch.Generator().manual_seed(0), []
    source, target = data.edge_index
    conductivity = 0.5 + data.pos[:, 0]
    for _ in range(SAMPLES):
        centre, width = torch.rand(2, 1, 2, generator=generator)
        heat = torch.exp(-8 * ((data.pos - centre) / (0.5 + width)).square().sum(-1))
        flow = (heat[source] - heat[target]) * conductivity[source]
        y = torch.zeros_like(heat).index_add(0, target, 10 * flow)
        x = torch.stack([heat, conductivity], dim=1)
        found.append(Data(x=x, y=y, edge_index=data.edge_index, edge_attr=data.edge_attr))
    return found


class Net(nn.Module):
    """Messages with attributes of edges; nothing in it knows of samples or ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, 1)
        self.convs = nn.ModuleList(
            GINEConv(
                nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN)), edge_dim=3
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h = self.first(x)
        for conv in self.convs:
            h = h + conv(h, edge_index, edge_attr)
        return self.last(h).squeeze(1)


def main() -> None:
    """Train, and print the loss and how much of the variance is explained."""
    torch.manual_seed(0)
    data, model = mesh(), Net()
    # Shuffled alike on all ranks.
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(samples(data), BATCH, shuffle=True, generator=order)
    with kagome.shard(model, data) as net:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(EPOCHS):
            for batch in loader:
                # This rank's vertices of each sample, flattened as the model's rows are.
                y = net.place(batch.y.view(batch.num_graphs, -1), axis=1).flatten()
                out = net(batch.x, batch.edge_index, batch.edge_attr)
                loss = net.mean((out - y) ** 2)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        rows = net.gather(out)  # [4 * N] on rank 0, in the order of the batch
    if rows is not None:
        explained = 1 - ((rows - batch.y) ** 2).mean() / batch.y.var(correction=0)
        print(f"loss {loss.item():.5f}, R2 {explained.item():.4f}")


if __name__ == "__main__":
    main()
