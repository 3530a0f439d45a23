"""Several kinds of vertices: a ``HeteroData`` of papers, authors and fields in a training loop of its own.

    python examples/hetero.py
    torchrun --nproc-per-node 2 examples/hetero.py

Both print the same numbers. Fields have no features: the model learns a table for them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

import kagome

PAPERS, AUTHORS, FIELDS, CLASSES, HIDDEN, STEPS = 300, 120, 8, 4, 32, 40


def library() -> HeteroData:
    """Return papers of four classes; authors and fields each prefer one of them."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, CLASSES, (PAPERS,), generator=generator)

    def like(kinds: Tensor, count: int) -> Tensor:
        """Return edges to each paper from vertices of its class, and from some of any."""
        papers = torch.arange(PAPERS).repeat_interleave(count)
        drawn = torch.rand(papers.numel(), kinds.numel(), generator=generator)
        same = kinds[None, :] == y[papers, None]
        return torch.stack([(drawn + 0.4 * same).argmax(1), papers])

    authors, fields = torch.arange(AUTHORS) % CLASSES, torch.arange(FIELDS) % CLASSES
    data = HeteroData()
    data["paper"].x = torch.randn(PAPERS, 8, generator=generator)
    data["paper"].y = y
    data["author"].x = torch.randn(AUTHORS, 8, generator=generator)
    data["field"].num_nodes = FIELDS
    data["author", "writes", "paper"].edge_index = like(authors, 3)
    data["field", "holds", "paper"].edge_index = like(fields, 2)
    data["paper", "by", "author"].edge_index = data["author", "writes", "paper"].edge_index.flip(0)
    data["paper", "in", "field"].edge_index = data["field", "holds", "paper"].edge_index.flip(0)
    return data


class Library(nn.Module):
    """Two layers of GraphSAGE over all edge types."""

    def __init__(self, data: HeteroData) -> None:
        super().__init__()
        self.fields = nn.Embedding(FIELDS, 8)
        sizes = (8, HIDDEN)
        self.layers = nn.ModuleList(
            HeteroConv({kind: SAGEConv((size, size), HIDDEN) for kind in data.edge_types}) for size in sizes
        )
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: dict[str, Tensor], edges: dict[tuple[str, str, str], Tensor]) -> Tensor:
        h = {**x, "field": self.fields.weight}
        for layer in self.layers:
            h = {kind: rows.relu() for kind, rows in layer(h, edges).items()}
        return self.out(h["paper"])


def main() -> None:
    """Train on half of the papers, and print the loss and the accuracy on the others."""
    torch.manual_seed(0)
    data = library()
    model = Library(data)
    train = torch.arange(PAPERS) % 2 == 0
    with kagome.shard(model, data) as net:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        y, chosen = net.place(data["paper"].y, "paper"), net.place(train, "paper")
        for _ in range(STEPS):
            out = net(data.x_dict, data.edge_index_dict)  # rows of this rank's papers
            loss = net.mean(functional.cross_entropy(out[chosen], y[chosen], reduction="none"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        right = net.mean((out.argmax(1) == y)[~chosen].float())
        if net.rank == 0:
            print(f"loss {loss.item():.4f}, accuracy {right.item():.4f}")


if __name__ == "__main__":
    main()
