"""A sample graph, and wrappers that give every layer the same signature.

Where it sits: read by ``convolutions.py`` only; tests import from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

F, D, R, C = 6, 3, 3, 4
"""Columns of x, columns of edge_attr (and of pos), edge types, columns of most outputs."""


@contextmanager
def double_precision() -> Iterator[None]:
    """New tensors are float64 inside; some layers make theirs in ``forward``, so run them inside too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def sample_graph(seed: int, groups_of_four: bool = False, vertices: int = 30) -> Data:
    """A directed graph with self-loops, duplicate edges and isolated vertices, 4 edges a vertex.

    With ``groups_of_four`` edges 4i to 4i + 3 all end at vertex i, as ``MeshCNNConv`` wants them.
    """
    g = torch.Generator().manual_seed(seed)
    edges = 4 * vertices

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    # Isolated are one in the middle and the last, which catches who takes N to be the largest end + 1.
    ends = torch.randint(2, vertices - 1, (2, edges), generator=g)
    if groups_of_four:
        ends[1] = torch.arange(vertices).repeat_interleave(4)
    else:
        loops, again, copied = torch.randperm(edges, generator=g)[: 3 * (edges // 10)].chunk(3)
        ends[1, loops] = ends[0, loops]
        ends[:, again] = ends[:, copied]
        # PyG's median fails where row 0 has no incoming edge; so 0 has one in, and none out.
        ends[1, copied[0]] = ends[1, again[0]] = 0
    return Data(
        x=2 * rand(vertices, F) - 1,
        edge_index=ends,
        edge_weight=rand(edges) + 0.1,
        edge_attr=0.98 * rand(edges, D) + 0.01,
        edge_type=torch.randint(R, (edges,), generator=g),
        node_type=torch.randint(2, (vertices,), generator=g),
        pos=rand(vertices, D),
        normal=nn.functional.normalize(rand(vertices, D) - 0.5, dim=1),
    )


class Plain(nn.Module):
    """``conv(x, edge_index)``, and nothing else even where the class could take more."""

    def __init__(self, conv: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.second = conv, second
        if isinstance(conv, pyg.RGATConv):
            # PyG leaves l2 as the allocator found it: reset_parameters drops the tensor that it fills.
            nn.init.constant_(conv.l2, 1 / conv.out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


class Weighted(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_weight=edge_weight)


class Featured(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_attr=edge_attr)


class Typed(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_type)


class TypedFeatured(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor, edge_attr: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_type=edge_type, edge_attr=edge_attr)


class Heat(Plain):
    def forward(
        self, x: Tensor, edge_index: Tensor, node_type: Tensor, edge_type: Tensor, edge_attr: Tensor
    ) -> Tensor:
        return self.conv(x, edge_index, node_type, edge_type, edge_attr)


class Signed(Plain):
    """Edges of type 0 are positive, all others negative; a second layer reads both halves of the first."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        ends = edge_index[:, edge_type == 0], edge_index[:, edge_type != 0]
        x = self.conv(x, *ends)
        return x if self.second is None else self.second(x, *ends)


class Positioned(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        return self.conv(x, pos, edge_index)


class Oriented(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor, normal: Tensor) -> Tensor:
        return self.conv(x, pos, normal, edge_index)


class First(Plain):
    """Layers that also take the first layer's rows; these differ from x so that mixing them up shows."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x.tanh(), x, edge_index)


class FirstWeighted(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.conv(x.tanh(), x, edge_index, edge_weight)


class History(Plain):
    """DNAConv reads all earlier layers' rows: [N, layers, F]."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(torch.stack([x, x.tanh(), x * x], dim=1), edge_index)


class HistoryWeighted(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.conv(torch.stack([x, x.tanh()], dim=1), edge_index, edge_weight)


class SortedByTarget(Plain):
    """Aggregations that read neighbours in order want edges sorted by target, as their docs say."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index[:, edge_index[1].argsort(stable=True)])


class SumOfNeighbours(pyg.MessagePassing):
    """The base class used as it comes: its own message, and sum."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


def mlp(*widths: int, norm: bool = False) -> nn.Sequential:
    """Linear, (BatchNorm), ReLU, Linear, ... without a last activation."""
    steps: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        steps += [nn.Linear(fan_in, fan_out), *([nn.BatchNorm1d(fan_out)] if norm else []), nn.ReLU()]
    return nn.Sequential(*steps[:-1])
