"""An interatomic potential in a training loop of its own: energies and forces of graphs that change.

    python examples/potential.py
    torchrun --nproc-per-node 2 examples/potential.py

Both print the same numbers. Forces are the derivative of the energy by the positions, and the loss is on
both. Each step takes another arrangement of atoms, which is a graph of its own: a new ``kagome.shard`` of the
same model, cut along a curve through the positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import kagome

ATOMS, CUTOFF, HIDDEN, STEPS = 60, 1.6, 16, 30


def energy_of(pos: Tensor, edge_index: Tensor) -> Tensor:
    """Return the energy that is to be learned: a well for each pair of near atoms."""
    distance = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=1)
    return (((distance - 1) ** 2 - 0.3) * (1 - distance / CUTOFF) ** 2).sum()


def made(step: int) -> Data:
    """Return an arrangement of atoms with its energy and forces; there are two, which come in turn."""
    generator = torch.Generator().manual_seed(step % 2)
    side = torch.arange(4, dtype=torch.float64)
    pos = torch.cartesian_prod(side, side, side)[:ATOMS]
    pos = pos + torch.randn(ATOMS, 3, generator=generator, dtype=torch.float64) / 10
    edges = (torch.cdist(pos, pos).fill_diagonal_(CUTOFF) < CUTOFF).nonzero().t().contiguous()
    at = pos.clone().requires_grad_()
    energy = energy_of(at, edges)
    (slope,) = torch.autograd.grad(energy, at)
    return Data(pos=pos, edge_index=edges, energy=energy.detach(), force=-slope)


class Potential(nn.Module):
    """The energy of each atom, by the distances to its neighbours and theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(HIDDEN))
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(8, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN)) for _ in range(2)
        )
        self.energy = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1))

    def forward(self, pos: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        distance = (pos[source] - pos[target]).norm(dim=1, keepdim=True)
        waves = torch.cat([torch.cos(k * torch.pi * distance / CUTOFF) for k in range(8)], dim=1)
        h = self.first.expand(pos.size(0), -1)
        for layer in self.filters:
            message = layer(waves) * (1 - distance / CUTOFF) ** 2 * h[source]
            h = h + torch.zeros_like(h).index_add(0, target, message)
        return self.energy(h).squeeze(-1)


def main() -> None:
    """Train, and print the errors of energy and forces."""
    torch.manual_seed(0)
    model = Potential().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    parallel = kagome.Parallel(partitioner="coordinates")
    for step in range(STEPS):
        data = made(step)
        with kagome.shard(model, data, parallel=parallel) as net:
            pos = net.place(data.pos).clone().requires_grad_()
            energy = net.sum(net(net.place(pos), data.edge_index))
            (slope,) = torch.autograd.grad(energy, pos, create_graph=True)
            of_force = net.mean((-slope - net.place(data.force)) ** 2)
            of_energy = ((energy - data.energy) / ATOMS) ** 2
            (of_energy + of_force).backward()
            optimizer.step()
            optimizer.zero_grad()
            rank = net.rank
    if rank == 0:
        print(f"energy an atom off by {of_energy.item() ** 0.5:.4f}, forces by {of_force.item() ** 0.5:.4f}")


if __name__ == "__main__":
    main()
