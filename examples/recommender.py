"""A recommender in a training loop of its own: LightGCN with a ranking loss (BPR), and recall@20.

    python examples/recommender.py
    torchrun --nproc-per-node 2 examples/recommender.py

Both print the same numbers. Users and items are the vertices of one graph, users first. What is learned is a
row for each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch_geometric.data import Data
from torch_geometric.nn import LGConv

import kagome
from kagome.metrics import recall_at

USERS, ITEMS, TASTES, HIDDEN, LAYERS, BATCH, EPOCHS = 200, 150, 5, 16, 3, 500, 8


def made() -> tuple[Data, Tensor, Tensor]:
    """Return users who like items of their taste, and the pairs to train on and to predict."""
    generator = torch.Generator().manual_seed(0)
    tastes = torch.randint(TASTES, (USERS + ITEMS,), generator=generator)
    alike = tastes[:USERS].unsqueeze(1) == tastes[USERS:]
    likes = torch.rand(USERS, ITEMS, generator=generator) < 0.01 + 0.35 * alike
    pairs = likes.nonzero().t() + torch.tensor([[0], [USERS]])
    pairs = pairs[:, torch.randperm(pairs.size(1), generator=generator)]
    cut = pairs.size(1) * 4 // 5
    train, test = pairs[:, :cut], pairs[:, cut:]
    return Data(edge_index=torch.cat([train, train.flip(0)], dim=1), num_nodes=USERS + ITEMS), train, test


class LightGCN(nn.Module):
    """The mean of each row, and of those of its neighbours at 1, 2 and 3 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(USERS + ITEMS, HIDDEN)
        self.layers = nn.ModuleList(LGConv() for _ in range(LAYERS))
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, edge_index: Tensor) -> Tensor:
        h = self.table.weight
        out = h
        for layer in self.layers:
            h = layer(h, edge_index)
            out = out + h
        return out / (LAYERS + 1)


def main() -> None:
    """Train, and print which share of the items that were left out are among each user's 20 best."""
    torch.manual_seed(0)
    data, train, test = made()
    model = LightGCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with kagome.shard(model, data) as net:
        own = slice(net.rank, None, net.ranks)  # this rank's share of a list that all ranks have
        for epoch in range(EPOCHS):
            generator = torch.Generator().manual_seed(epoch)
            for batch in torch.randperm(train.size(1), generator=generator).split(BATCH):
                other = USERS + torch.randint(ITEMS, batch.shape, generator=generator)
                h = net(data.edge_index)
                user, item = net.pairs(h, train[:, batch[own]])
                gap = (user * (item - net.read(h, other[own]))).sum(1)
                loss = -net.mean(logsigmoid(gap))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            items = USERS + torch.arange(ITEMS)
            found = recall_at(net, net(data.edge_index), test, 20, items=items, known=train)
        if net.rank == 0:
            print(f"loss {loss.item():.4f}, recall@20 {found:.4f}")


if __name__ == "__main__":
    main()
