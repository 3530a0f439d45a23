"""Link prediction in a training loop of its own, after OGB's scripts: many updates an epoch, hits@K and MRR.

    python examples/link_prediction.py
    torchrun --nproc-per-node 2 examples/link_prediction.py

Both print the same numbers. Each update takes a batch of pairs whose ends may lie on different ranks, and as
many random pairs as negatives.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import kagome
from kagome.metrics import hits_at, mean_reciprocal_rank

SIZE, NEIGHBOURS, HIDDEN, BATCH, EPOCHS = 400, 8, 32, 250, 12


def made() -> tuple[Data, Tensor, Tensor]:
    """Return points that are linked to near ones, and the links to train on and to predict."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(SIZE, 2, generator=generator)
    near = torch.cdist(points, points).fill_diagonal_(2).topk(NEIGHBOURS, largest=False).indices
    links = torch.stack([torch.arange(SIZE).repeat_interleave(NEIGHBOURS), near.flatten()])
    links = links.sort(dim=0).values.unique(dim=1)
    links = links[:, torch.randperm(links.size(1), generator=generator)]
    train, test = links.split([links.size(1) * 4 // 5, links.size(1) - links.size(1) * 4 // 5], dim=1)
    x = torch.cat([points, torch.sin(points * 9)], 1) + torch.randn(SIZE, 4, generator=generator) / 10
    return Data(x=x, edge_index=torch.cat([train, train.flip(0)], dim=1)), train, test


class Predictor(nn.Module):
    """The score of a pair by the product of the rows of its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.layers(one * other).squeeze(-1)


def main() -> None:
    """Train, and print how well the links that were left out are found."""
    torch.manual_seed(0)
    data, train, test = made()
    model = GraphSAGE(4, HIDDEN, num_layers=2)
    predictor = Predictor()
    optimizer = torch.optim.Adam([*model.parameters(), *predictor.parameters()], lr=0.01)
    with kagome.shard(model, data, beside=[predictor]) as net:
        own = slice(net.rank, None, net.ranks)  # this rank's share of a list that all ranks have
        for epoch in range(EPOCHS):
            order = torch.randperm(train.size(1), generator=torch.Generator().manual_seed(epoch))
            for batch in order.split(BATCH):
                h = net(data.x, data.edge_index)
                positive = predictor(*net.pairs(h, train[:, batch[own]]))
                negative = predictor(*net.pairs(h, net.negatives(batch.numel(), step=net.step)))
                loss = -net.mean(logsigmoid(positive)) - net.mean(logsigmoid(-negative))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            h = net(data.x, data.edge_index)
            one, other = net.pairs(h, test[:, own])
            positive = predictor(one, other)
            negative = predictor(*net.pairs(h, net.negatives(2000, seed=1)))
            # 20 other ends for each pair.
            ends = torch.randint(SIZE, (test.size(1), 20), generator=torch.Generator().manual_seed(1))[own]
            others = net.read(h, ends.flatten()).view(*ends.shape, -1)
            ranked = predictor(one.unsqueeze(1), others)
            hits, mrr = hits_at(net, positive, negative, 20), mean_reciprocal_rank(net, positive, ranked)
        if net.rank == 0:
            print(f"loss {loss.item():.4f}, hits@20 {hits:.4f}, MRR {mrr:.4f}")


if __name__ == "__main__":
    main()
