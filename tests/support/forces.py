"""Models of energies and forces: a first derivative inside forward, which training differentiates again.

Where it sits: ``user_code/test_derivatives`` trains each of ``FORCES`` by plain PyG and by Kagome.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import scatter, softmax

FEATURES, WIDTH = 6, 8

Body = Callable[[], nn.Module]
"""``(h, length, edge_index) -> h``: h ``[N, WIDTH]``, length ``[E, 1]``, smooth in both."""


class Plain(nn.Module):
    """Layers that look at rows alone."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h, edge_index).tanh()
        return h


class Weighted(nn.Module):
    """A layer that takes a weight an edge."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.layer(h, edge_index, (-length.squeeze(-1)).exp())
        return out.tanh()


class Attributed(nn.Module):
    """A layer that takes features of an edge."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.basis = layer, nn.Linear(1, 4)

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.layer(h, edge_index, self.basis(length).tanh())
        return out.tanh()


class CFConv(pyg.MessagePassing):
    """SchNet's continuous filter."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.filter = nn.Sequential(nn.Linear(4, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH))
        self.inside = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("centres", torch.linspace(0, 2, 4))

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor) -> Tensor:
        smeared = (-((length - self.centres) ** 2)).exp()
        cut = 0.5 * (1 + torch.cos(length / 4))
        return h + self.propagate(edge_index, x=self.inside(h), w=self.filter(smeared) * cut)

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        return x_j * w


class EdgeMlp(pyg.MessagePassing):
    """Messages of both ends and the length between, reduced as asked."""

    def __init__(self, aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH + 1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor) -> Tensor:
        return h + self.propagate(edge_index, x=h, length=length)

    def message(self, x_i: Tensor, x_j: Tensor, length: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j, length], dim=-1))


class Attention(nn.Module):
    """Scores by length, a softmax over neighbours, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        scores = (self.query(h)[target] * self.key(h)[source]).sum(-1) - length.squeeze(-1)
        share = softmax(scores, target, num_nodes=h.size(0))
        return h + scatter(share.unsqueeze(-1) * h[source], target, 0, h.size(0), reduce="sum")


class Equivariant(nn.Module):
    """EGNN: coordinates move by what the edges say."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * WIDTH + 1, WIDTH), nn.SiLU())
        self.move, self.node = nn.Linear(WIDTH, 1), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        m = self.edge(torch.cat([h[target], h[source], length], -1))
        gained = scatter(m * self.move(m).sigmoid(), target, 0, h.size(0), reduce="sum")
        return h + self.node(torch.cat([h, gained], -1)).tanh()


class Normed(nn.Module):
    """A norm between two layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.one, self.norm, self.other = pyg.SAGEConv(WIDTH, WIDTH, bias=False), norm, CFConv()

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor) -> Tensor:
        return self.other(self.norm(self.one(h, edge_index)).tanh(), length, edge_index)


class Pairs(nn.Module):
    """Energies of edges, nothing else: a classical potential with learned numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor) -> Tensor:
        well = ((1 - (-length).exp()) ** 2) * self.depth
        return h * scatter(well, edge_index[1], 0, h.size(0), reduce="sum")


class FirstHop(nn.Module):
    """Its first layer sums features that last: such sums are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.GCNConv(FEATURES, WIDTH), CFConv()

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor, x: Tensor) -> Tensor:
        return self.two(h + self.one(x, edge_index).tanh(), length, edge_index)


class ColumnSoftmax(nn.Module):
    """A softmax a column: GENConv's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = pyg.GENConv(WIDTH, WIDTH, aggr="softmax", learn_t=True, norm="layer")

    def forward(self, h: Tensor, length: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(h, edge_index)


def _mlp(fan_in: int = WIDTH, fan_out: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(fan_in, fan_out), nn.SiLU(), nn.Linear(fan_out, fan_out))


W = WIDTH
BODIES: dict[str, Body] = {
    "gcn": lambda: Weighted(pyg.GCNConv(W, W)),
    "gcn, two": lambda: Plain(pyg.GCNConv(W, W), pyg.GCNConv(W, W)),
    "graph_conv": lambda: Weighted(pyg.GraphConv(W, W)),
    "graph_conv_max": lambda: Weighted(pyg.GraphConv(W, W, aggr="max")),
    "leconv": lambda: Weighted(pyg.LEConv(W, W)),
    "sage": lambda: Plain(pyg.SAGEConv(W, W), pyg.SAGEConv(W, W, aggr="max")),
    "sage_lstm_like_min": lambda: Plain(pyg.SAGEConv(W, W, aggr="min")),
    "gat": lambda: Plain(pyg.GATConv(W, W // 2, heads=2), pyg.GATConv(W, W)),
    "gat_edges": lambda: Attributed(pyg.GATConv(W, W, edge_dim=4)),
    "gatv2": lambda: Plain(pyg.GATv2Conv(W, W // 2, heads=2), pyg.GATv2Conv(W, W)),
    "gatv2_edges": lambda: Attributed(pyg.GATv2Conv(W, W, edge_dim=4)),
    "gin": lambda: Plain(pyg.GINConv(_mlp(), train_eps=True)),
    "gine": lambda: Attributed(pyg.GINEConv(_mlp(), edge_dim=4)),
    "pna": lambda: Attributed(
        pyg.PNAConv(W, W, ["mean", "max", "std"], ["identity", "amplification"], torch.arange(9), edge_dim=4)
    ),
    "nnconv": lambda: Attributed(pyg.NNConv(W, W, _mlp(4, W * W))),
    "transformer": lambda: Attributed(pyg.TransformerConv(W, W // 2, heads=2, edge_dim=4, beta=True)),
    "transformer_plain": lambda: Plain(pyg.TransformerConv(W, W)),
    "tag": lambda: Weighted(pyg.TAGConv(W, W, K=2)),
    "arma": lambda: Weighted(pyg.ARMAConv(W, W)),
    "cheb": lambda: Plain(pyg.ChebConv(W, W, K=3)),
    "appnp": lambda: Plain(pyg.APPNP(3, 0.2)),
    "edge_conv": lambda: Plain(pyg.EdgeConv(_mlp(2 * W, W))),
    "edge_conv_sum": lambda: Plain(pyg.EdgeConv(_mlp(2 * W, W), aggr="add")),
    "cgconv": lambda: Attributed(pyg.CGConv(W, 4)),
    "gated": lambda: Plain(pyg.ResGatedGraphConv(W, W)),
    "film": lambda: Plain(pyg.FiLMConv(W, W)),
    "gps_free": lambda: Plain(pyg.GatedGraphConv(W, 2)),
    "cfconv": CFConv,
    "edge_mlp": lambda: EdgeMlp("add"),
    "edge_mlp_mean": lambda: EdgeMlp("mean"),
    "edge_mlp_max": lambda: EdgeMlp("max"),
    "edge_mlp_min": lambda: EdgeMlp("min"),
    "attention": Attention,
    "egnn": Equivariant,
    "layer_norm": lambda: Normed(nn.LayerNorm(W)),
    "batch_norm": lambda: Normed(nn.BatchNorm1d(W)),
    "pyg_batch_norm": lambda: Normed(pyg.BatchNorm(W)),
    "graph_norm": lambda: Normed(pyg.GraphNorm(W)),
    "pair_norm": lambda: Normed(pyg.PairNorm()),
    "pairs": Pairs,
    "first_hop": FirstHop,
    "column_softmax": ColumnSoftmax,
}


class Forces(nn.Module):
    """An energy a vertex, and the derivative of their sum by the positions.

    Args:
        body: What makes rows of rows and lengths.
        how: ``clone``: the positions are a leaf made inside forward; ``input``: the input is made one;
            ``rows``: seeded by ones a vertex instead of summed; ``edges``: by the vectors along edges.
        dropout: Of the rows before the body.
    """

    def __init__(self, body: Body, how: str = "clone", dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.body = nn.Linear(FEATURES + 3, WIDTH), body()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 1))
        self.how, self.dropout = how, dropout

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        pos = pos.requires_grad_() if self.how == "input" else pos.detach().clone().requires_grad_()
        with torch.enable_grad():
            source, target = edge_index
            along = pos[source] - pos[target]
            length = (along.pow(2).sum(-1, keepdim=True) + 0.1).sqrt()
            h = self.embed(torch.cat([x, pos.sin()], -1)).tanh()
            h = F.dropout(h, self.dropout, self.training)
            more = (x,) if isinstance(self.body, FirstHop) else ()
            energy = self.head(self.body(h, length, edge_index, *more))
            if self.how == "rows":
                ones = torch.ones_like(energy)
                force = -torch.autograd.grad(energy, pos, grad_outputs=ones, create_graph=True)[0]
            elif self.how == "edges":
                push = torch.autograd.grad(energy.sum(), along, create_graph=True)[0]
                force = -scatter(push, source, 0, x.size(0), reduce="sum")
            else:
                force = -torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
        return torch.cat([energy, force], -1)


def build(name: str, how: str = "clone", dropout: float = 0.0) -> nn.Module:
    """A model of the table."""
    return Forces(BODIES[name], how, dropout)
