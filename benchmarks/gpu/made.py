"""Graphs and models of the steps: made graphs of three shapes, and networks as PyG's users write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data

EDGE_COLUMNS = 8
"""Columns of the edge features that TransformerConv and MeshGraphNet read."""


def edges(kind: str, vertices: int, count: int, device: str = "cpu") -> Tensor:
    """An edge list.

    Args:
        kind: ``uniform``; ``near``, where most neighbours are close, as METIS leaves them; or ``power``, a
            Kronecker graph, whose largest hub has a thousand times the mean degree or more.
        vertices: Number of vertices; of ``power`` the next power of two below it is used.
        count: Number of edges.
        device: Where it is drawn.

    Shapes:
        ``[2, count]``, int64.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    if kind == "uniform":
        return torch.randint(0, vertices, (2, count), device=device, generator=generator)
    if kind == "near":
        target = torch.randint(0, vertices, (count,), device=device, generator=generator)
        away = (torch.randn(count, device=device, generator=generator) * 2000).long()
        return torch.stack([(target + away) % vertices, target])
    ends = torch.zeros(2, count, dtype=torch.int64, device=device)
    for _ in range(int(math.log2(vertices))):
        drawn = torch.rand(count, device=device, generator=generator)
        ends[0] = ends[0] * 2 + (drawn > 0.76)
        ends[1] = ends[1] * 2 + (((drawn > 0.57) & (drawn <= 0.76)) | (drawn > 0.95))
    return ends


def dataset(
    vertices: int, count: int, columns: int, classes: int, kind: str = "power", edge: bool = False
) -> Data:
    """A made data set; with ``edge``, also edge features."""
    generator = torch.Generator().manual_seed(1)
    masks = {
        f"{part}_mask": torch.arange(vertices) % 3 == k for k, part in enumerate(("train", "val", "test"))
    }
    data = Data(
        x=torch.randn(vertices, columns, generator=generator),
        edge_index=edges(kind, vertices, count),
        y=torch.randint(0, classes, (vertices,), generator=generator),
        **masks,
    )
    if edge:
        data.edge_attr = torch.randn(count, EDGE_COLUMNS, generator=generator)
    return data


class Stack(nn.Module):
    """Convolutions with ReLU and dropout between them."""

    def __init__(self, make: Callable[[int, int], nn.Module], widths: list[int], dropout: float) -> None:
        super().__init__()
        self.convs = nn.ModuleList(make(a, b) for a, b in pairwise(widths))
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = nn.functional.dropout(torch.relu(conv(x, edge_index)), self.dropout, self.training)
        return self.convs[-1](x, edge_index)


class EdgeStack(Stack):
    """The same of convolutions that read edge features."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = torch.relu(conv(x, edge_index, edge_attr))
            x = nn.functional.dropout(x, self.dropout, self.training)
        return self.convs[-1](x, edge_index, edge_attr)


def mlp(fan_in: int, hidden: int, fan_out: int | None = None) -> nn.Module:
    """MeshGraphNet's block: two layers and a norm."""
    return nn.Sequential(
        nn.Linear(fan_in, hidden),
        nn.SiLU(),
        nn.Linear(hidden, fan_out or hidden),
        nn.LayerNorm(fan_out or hidden),
    )


class MeshLayer(nn.Module):
    """An edge update from both ends, then a vertex update from the sum of edges; both residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.edge, self.vertex = mlp(3 * hidden, hidden), mlp(2 * hidden, hidden)

    def forward(self, x: Tensor, edge_index: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edge_index
        state = state + self.edge(torch.cat([x[source], x[target], state], dim=-1))
        total = torch.zeros_like(x).index_add_(0, target, state)
        return x + self.vertex(torch.cat([x, total], dim=-1)), state


class MeshGraphNet(nn.Module):
    """Encode, process, decode."""

    def __init__(self, columns: int, hidden: int, classes: int, layers: int) -> None:
        super().__init__()
        self.encode, self.encode_edge = mlp(columns, hidden), mlp(EDGE_COLUMNS, hidden)
        self.layers = nn.ModuleList(MeshLayer(hidden) for _ in range(layers))
        self.decode = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x, state = self.encode(x), self.encode_edge(edge_attr)
        for layer in self.layers:
            x, state = layer(x, edge_index, state)
        return self.decode(x)


def _heads(kind: type[nn.Module], **more: object) -> Callable[[int, int], nn.Module]:
    def make(fan_in: int, fan_out: int) -> nn.Module:
        heads = 8 if fan_out % 8 == 0 else 1
        return kind(fan_in, fan_out // heads, heads=heads, **more)

    return make


MAKERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCN": pyg.GCNConv,
    "SAGE": pyg.SAGEConv,
    "GIN": lambda a, b: pyg.GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))),
    "GAT": _heads(pyg.GATConv),
    "GATv2": _heads(pyg.GATv2Conv),
    "Transformer": _heads(pyg.TransformerConv, edge_dim=EDGE_COLUMNS),
}
NAMES = (*MAKERS, "MeshGraphNet")


def reads_edges(name: str) -> bool:
    """Whether a model reads edge features."""
    return name in ("Transformer", "MeshGraphNet")


def model(
    name: str, columns: int, hidden: int, classes: int, layers: int = 3, dropout: float = 0.5
) -> nn.Module:
    """A network with the weights of seed 3."""
    torch.manual_seed(3)
    if name == "MeshGraphNet":
        return MeshGraphNet(columns, hidden, classes, layers)
    widths = [columns, *[hidden] * (layers - 1), classes]
    return (EdgeStack if reads_edges(name) else Stack)(MAKERS[name], widths, dropout)
