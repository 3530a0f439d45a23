"""Partial sums against forwards that were written to break them: what one process gives, or an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import C, F, N
from torch import Tensor, nn
from torch_geometric.data import Data

from parity import TOLERANCE, differences, joined, parity, whole


def hubs(kind: str = "hubs") -> Data:
    """Few vertices with most edges at either end, repeated edges and self-loops."""
    generator = torch.Generator().manual_seed(8)
    ends = (N * torch.rand(2, 120, generator=generator, dtype=torch.float64) ** 2.5).long()
    ends = torch.cat([ends, ends[:, :7], torch.arange(5).expand(2, 5)], 1)
    if kind == "directed":
        ends[1] = ends[1] % 3
    count = ends.size(1)
    return Data(
        x=torch.randn(N, F, generator=generator, dtype=torch.float64).requires_grad_(),
        edge_index=ends,
        weight=torch.rand(count, generator=generator, dtype=torch.float64) + 0.2,
        other=torch.rand(count, generator=generator, dtype=torch.float64) + 0.2,
        wide=torch.rand(count, 2, generator=generator, dtype=torch.float64) + 0.2,
        number=torch.randint(0, 4, (count,), generator=generator),
        single=torch.rand(count, generator=generator, dtype=torch.float32),
        num_nodes=N,
    )


class Net(nn.Module):
    """Layers that read the same edges in ways that a kind names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.begin = nn.Linear(F, 6)
        self.one, self.two, self.three = pyg.GraphConv(6, 6), pyg.SAGEConv(6, 6), pyg.GCNConv(6, 6)
        self.gat, self.max = pyg.GATConv(6, 6), pyg.SAGEConv(6, 6, aggr="max")
        self.fresh = pyg.GCNConv(6, 6, cached=True)
        self.cheb = pyg.ChebConv(6, 6, K=3)
        self.appnp, self.sg = pyg.APPNP(3, 0.1), pyg.SGConv(6, 6, K=2)
        self.lg, self.tag = pyg.LGConv(), pyg.TAGConv(6, 6, K=2)
        self.arma = pyg.ARMAConv(6, 6, num_stacks=2, act=nn.ReLU())
        self.rgcn, self.dir = pyg.RGCNConv(6, 6, 3), pyg.DirGNNConv(pyg.SAGEConv(6, 6))
        self.learn = nn.Parameter(torch.tensor(0.3))
        self.leave = nn.Linear(6, C)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        weight: Tensor,
        other: Tensor,
        wide: Tensor,
        number: Tensor,
        single: Tensor,
    ) -> Tensor:
        h, kind = self.begin(x).tanh(), self.kind
        if kind == "plain":
            h = self.two(self.three(self.one(h, edge_index, weight).tanh(), edge_index, weight), edge_index)
        elif kind == "detach":
            for each in (edge_index.detach(), edge_index[:, :], edge_index.contiguous()):
                h = self.two(self.one(h, each, weight).tanh(), each)
        elif kind.startswith("views"):
            # A list of edges that lives for one layer, then one of edges the other way round.
            for _ in range(4):
                for back in (False, True):
                    each = (edge_index.flip(0) if back else edge_index).detach()
                    h = self.lg.propagate(each, x=h, edge_weight=None) if "P" in kind else self.lg(h, each)
                    h = h.tanh()
        elif kind == "types":
            h = self.one(h, edge_index, number).tanh()
            h = self.one(h, edge_index, single).tanh()
        elif kind == "clone":
            for _ in range(3):
                h = self.two(self.one(h, edge_index.clone(), weight).tanh(), edge_index)
        elif kind == "flip":
            for _ in range(3):
                h = self.two(self.one(h, edge_index.flip(0), weight).tanh(), edge_index)
                h = self.one(h, edge_index[[1, 0]], weight)
                h = self.two(h, torch.stack([edge_index[0], edge_index[1]]))
        elif kind == "two weights":
            h = self.one(self.one(self.one(h, edge_index, weight), edge_index, other), edge_index)
            h = self.one(h.tanh(), edge_index, wide[:, 0])
            h = self.one(h, edge_index, wide[:, 1].contiguous())
            h = self.one(h, edge_index, wide.prod(1))
        elif kind == "computed":
            h = self.one(h, edge_index, (weight * 2).exp())
            h = self.one(h, edge_index, weight * other)
            h = self.three(h, edge_index, weight.sqrt())
            h = self.one(h, edge_index, weight - weight)
        elif kind == "mask":
            h = self.one(h, edge_index, weight * (other > 0.6))
            h = self.three(h, edge_index, (other > 0.5).double())
            h = self.two(h, edge_index[:, other > 0.6])
        elif kind == "learned":
            h = self.one(h, edge_index, weight)
            h = self.one(h.tanh(), edge_index, weight * self.learn)
            h = self.one(h, edge_index, weight)
            h = self.three(h, edge_index, torch.sigmoid(other * self.learn))
        elif kind == "both":
            a, b, c = self.two(h, edge_index), self.gat(h, edge_index), self.max(h, edge_index)
            h = self.two(a + b * c, edge_index) + self.max(a, edge_index)
        elif kind == "mp":
            row, col = edge_index
            out = torch.zeros_like(h).index_add(0, col, h[row] * weight[:, None])
            h = out.tanh() + torch.zeros_like(h).scatter_add(0, row[:, None].expand(-1, 6), h[col])
            h = pyg.SumAggregation()(h[row], col, dim_size=h.size(0))
        elif kind == "cached":
            h = self.fresh(self.fresh(h, edge_index, weight), edge_index)
        elif kind == "cheb":
            h = self.cheb(h, edge_index, weight)
        elif kind == "hops":
            h = self.tag(self.sg(self.appnp(h, edge_index, weight), edge_index, weight), edge_index)
            h = self.arma(self.lg(h, edge_index), edge_index, weight)
        elif kind == "relations":
            kinds = (weight * 10).long() % 3
            h = self.rgcn(h, edge_index, kinds)
            h = self.dir(h, edge_index)
        elif kind == "leading":
            h = torch.stack([h, h * 2], 0)
            h = self.two(self.one(h, edge_index, weight).tanh(), edge_index).sum(0)
        elif kind == "jk":
            a = self.one(h, edge_index, weight)
            b = self.two(a, edge_index)
            h = torch.stack([a, b, self.three(b, edge_index)]).amax(0)
        return self.leave(h)


KINDS = (
    *("plain", "views", "viewsP", "types", "detach", "clone", "flip", "two weights", "computed", "mask"),
    *("learned", "both", "mp", "cached", "cheb", "hops", "relations", "leading", "jk"),
)
CUTS = {
    "2": torch.arange(N) % 2,
    "3": torch.arange(N) % 3,
    "empty": torch.where(torch.arange(N) < 2, 1, 0),
    "4": torch.arange(N) * 4 // N,
}


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("graph", ["hubs", "directed"])
@pytest.mark.parametrize("kind", KINDS)
def test_forwards_that_are_hard_for_sums(ranks: Any, kind: str, graph: str, cut: str) -> None:
    data, build, owner = hubs(graph), partial(Net, kind), CUTS[cut]
    world = 3 if cut == "empty" else int(owner.max()) + 1
    found = joined(ranks(world, parity, build, data, owner, 0, 3, 1, None, "on"), N)
    for name, error in differences(found, whole(build, data, epochs=3)).items():
        assert error <= TOLERANCE, (name, error)
