"""A user's whole path: an own layer, a model around it, training on one rank or several.

The layer scores each edge in ``edge_update`` and weighs messages by a softmax of its own. The model has a
batch norm, dropout, and a jump from every layer to the last. None of it knows of ranks.

Run:  python examples/own_model.py
      torchrun --nproc-per-node 3 examples/own_model.py      (prints the same accuracy)
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import kagome
from kagome.config import Train


def softmax_by_target(score: Tensor, target: Tensor, num_targets: int) -> Tensor:
    """A softmax over the in-edges of each vertex."""
    top = score.new_full((num_targets,), -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
    weight = (score - top[target]).exp()
    total = score.new_zeros(num_targets).scatter_add(0, target, weight)
    return weight / total[target]


class ScoredConv(MessagePassing):
    """Messages weighed by how well both ends of an edge go together."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="add")
        self.own, self.other = nn.Linear(in_channels, out_channels), nn.Linear(in_channels, out_channels)
        self.score = nn.Linear(2 * out_channels, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        near = self.other(x)
        weight = self.edge_updater(edge_index, near=near)
        return self.own(x) + self.propagate(edge_index, near=near, weight=weight)

    def edge_update(self, near_i: Tensor, near_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        score = self.score(torch.cat([near_i, near_j], dim=1).tanh()).squeeze(1)
        return softmax_by_target(score, index, size_i)

    def message(self, near_j: Tensor, weight: Tensor) -> Tensor:
        return weight.unsqueeze(1) * near_j


class JumpingNet(nn.Module):
    """Three layers; the last one reads them all."""

    def __init__(self, in_channels: int, hidden: int, out_channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(ScoredConv(width, hidden) for width in (in_channels, hidden, hidden))
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in range(3))
        self.last = nn.Linear(3 * hidden, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        seen = []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(norm(conv(x, edge_index)).relu(), 0.3, self.training)
            seen.append(x)
        return self.last(torch.cat(seen, dim=1))


def main() -> None:
    torch.manual_seed(0)
    data = kagome.load("digits")
    model = JumpingNet(data.num_features, 32, 10)
    with kagome.Trainer(model, data, train=Train(epochs=int(os.environ.get("EPOCHS", "40")))) as trainer:
        trainer.fit()
        accuracy = trainer.evaluate("test")
    if trainer.mesh.rank == 0:
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
