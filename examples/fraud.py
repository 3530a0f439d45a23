"""Fraud in a training loop of its own: a score for each edge, class weights, average precision.

    python examples/fraud.py
    torchrun --nproc-per-node 2 examples/fraud.py

Both print the same numbers. Vertices are accounts, edges are payments between them, also several between the
same two. Messages flow along payments and against them, and each payment has a state that the layers update,
as in Multi-GNN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import BatchNorm, GINEConv

import kagome
from kagome.metrics import average_precision

ACCOUNTS, PAYMENTS, HIDDEN, LAYERS, STEPS = 300, 2400, 24, 2, 30


def made() -> Data:
    """Return payments, of which those are fraud that pass a like amount on to the next account."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(ACCOUNTS, (2, PAYMENTS), generator=generator)
    amount = torch.rand(PAYMENTS, generator=generator)
    y = torch.zeros(PAYMENTS, dtype=torch.int64)
    for chain in range(30):  # five payments in a row, of nearly one amount
        first = 5 * chain
        path = torch.randperm(20, generator=generator)[:6]  # most of them through a few accounts
        ends[:, first : first + 5] = torch.stack([path[:-1], path[1:]])
        amount[first : first + 5] = 0.9 + torch.rand(5, generator=generator) / 20
        y[first : first + 5] = 1
    order = torch.randperm(PAYMENTS, generator=generator)
    mask = torch.rand(PAYMENTS, generator=generator) < 0.7
    attr = torch.stack([amount, torch.rand(PAYMENTS, generator=generator)], dim=1).double()
    x = torch.ones(ACCOUNTS, 1, dtype=torch.float64)
    return Data(x=x, edge_index=ends[:, order], edge_attr=attr[order], y=y[order], train_mask=mask)


def mlp(fan_in: int) -> nn.Sequential:
    """Return two layers."""
    return nn.Sequential(nn.Linear(fan_in, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))


class Payments(nn.Module):
    """Messages in both directions, then the edges' states, then two classes for each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.account, self.payment = nn.Linear(1, HIDDEN), nn.Linear(2, HIDDEN)
        self.along = nn.ModuleList(GINEConv(mlp(HIDDEN)) for _ in range(LAYERS))
        self.against = nn.ModuleList(GINEConv(mlp(HIDDEN)) for _ in range(LAYERS))
        self.norms = nn.ModuleList(BatchNorm(HIDDEN) for _ in range(LAYERS))
        self.updates = nn.ModuleList(mlp(3 * HIDDEN) for _ in range(LAYERS))
        self.score = nn.Sequential(mlp(3 * HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h, e = self.account(x), self.payment(edge_attr)
        for along, against, norm, update in zip(
            self.along, self.against, self.norms, self.updates, strict=True
        ):
            h = (h + norm(along(h, edge_index, e) + against(h, edge_index.flip(0), e)).relu()) / 2
            e = e + update(torch.cat([h[edge_index.T].flatten(1), e], dim=1)) / 2
        return self.score(torch.cat([h[edge_index.T].flatten(1), e], dim=1))


def main() -> None:
    """Train on most payments, and print the average precision of the others."""
    torch.manual_seed(0)
    data, model = made(), Payments().double()
    weights = torch.tensor([1.0, 6.0], dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with kagome.shard(model, data) as net:
        y, seen = net.place(data.y, "edges"), net.place(data.train_mask, "edges")  # this rank's edges
        for _ in range(STEPS):
            out = net(data.x, data.edge_index, data.edge_attr)
            lost = cross_entropy(out[seen], y[seen], reduction="none")
            loss = net.mean(lost, weight=weights[y[seen]])  # as cross_entropy(weight=...) divides
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            out = net(data.x, data.edge_index, data.edge_attr)[~seen]
            precision = average_precision(net, out[:, 1] - out[:, 0], y[~seen])
            share = net.mean(y[~seen].double())
        if net.rank == 0:
            print(f"loss {loss.item():.4f}, average precision {precision:.4f}, by chance {share:.4f}")


if __name__ == "__main__":
    main()
