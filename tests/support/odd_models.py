"""Models as users write them: own layers, own normalisation, shortcuts, shared layers, rows mixed by hand.

Where it sits: the parity tests train each of ``ODD_MODELS`` whole and split; those of ``MUST_BE_REFUSED``
cannot be split and must be found out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops, degree, scatter, softmax

HIDDEN = 8
TABLE_ROWS = 10_000
"""More rows than any test graph has vertices."""


class TutorialConv(pyg.MessagePassing):
    """The GCN layer of PyG's tutorial on message passing networks."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        row, col = edge_index
        deg = degree(col, x.size(0), dtype=x.dtype)
        deg_inv_sqrt = deg.pow(-0.5)
        deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return self.propagate(edge_index, x=x, norm=norm) + self.bias

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class EdgeScoreConv(pyg.MessagePassing):
    """Scores from ``edge_updater``, a softmax in ``message``, and the row itself in ``update``."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(in_channels, out_channels)
        self.score = nn.Linear(2 * out_channels, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        scores = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, scores=scores)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.leaky_relu(self.score(torch.cat([x_i, x_j - x_i], dim=-1)), 0.2)

    def message(self, x_j: Tensor, scores: Tensor, index: Tensor, size_i: int | None) -> Tensor:
        return x_j * softmax(scores, index, num_nodes=size_i)

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return inputs + x


class ScatterConv(nn.Module):
    """A layer by hand: no MessagePassing, a gather and a scatter."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(in_channels, out_channels), nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        return self.own(x) + self.other(scatter(x[row], col, dim=0, dim_size=x.size(0), reduce="mean"))


class TwoLayers(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class EdgeUpdates(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.convs = nn.ModuleList([EdgeScoreConv(in_channels, HIDDEN), EdgeScoreConv(HIDDEN, HIDDEN)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(HIDDEN), pyg.BatchNorm(HIDDEN)])
        self.jump = pyg.JumpingKnowledge("cat")
        self.last = nn.Linear(2 * HIDDEN, out_channels)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        xs = []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(norm(conv(x, edge_index)).relu(), p=self.dropout, training=self.training)
            xs.append(x)
        return self.last(self.jump(xs))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "graph_norm": lambda: pyg.GraphNorm(HIDDEN),
    "pair_norm": lambda: pyg.PairNorm(),
    "pair_norm_each_row": lambda: pyg.PairNorm(scale_individually=True),
    "mean_subtraction_norm": lambda: pyg.MeanSubtractionNorm(),
    "diff_group_norm": lambda: pyg.DiffGroupNorm(HIDDEN, groups=3),
    "instance_norm": lambda: pyg.InstanceNorm(HIDDEN),
    "instance_norm_tracked": lambda: pyg.InstanceNorm(HIDDEN, affine=True, track_running_stats=True),
    "layer_norm_of_the_graph": lambda: pyg.LayerNorm(HIDDEN, mode="graph"),
    "graph_size_norm": lambda: pyg.GraphSizeNorm(),
}


class Normed(nn.Module):
    """A conv before each norm, and one at the end."""

    def __init__(self, in_channels: int, out_channels: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            pyg.GraphConv(HIDDEN if i else in_channels, HIDDEN) for i in range(len(names))
        )
        self.norms = nn.ModuleList(NORMS[name]() for name in names)
        self.last = pyg.GCNConv(HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, edge_index)).tanh()
        return self.last(x, edge_index)


class CentredByHand(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(in_channels, HIDDEN), pyg.SAGEConv(HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        x = x - x.mean(dim=0)
        x = x / x.std(dim=0)
        return self.second(x.relu(), edge_index)


class VirtualNode(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.second = pyg.GCNConv(in_channels, HIDDEN), pyg.GCNConv(HIDDEN, out_channels)
        self.all_rows = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        x = x + self.all_rows(pyg.global_mean_pool(x, batch=None))
        return self.second(x, edge_index)


class ResidualJump(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.embed = nn.Linear(in_channels, HIDDEN)
        self.convs = nn.ModuleList(pyg.GATv2Conv(HIDDEN, HIDDEN // 2, heads=2) for _ in range(3))
        self.jump = pyg.JumpingKnowledge("lstm", channels=HIDDEN, num_layers=3)
        self.last = nn.Linear(HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.embed(x)
        xs = []
        for conv in self.convs:
            x = x + conv(x, edge_index).relu()
            xs.append(x)
        return self.last(self.jump(xs))


class UnusedBranch(nn.Module):
    """``aside`` is computed and thrown away: its site has no backward pass and its weights no gradient."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.aside = pyg.GCNConv(in_channels, HIDDEN), pyg.GATConv(in_channels, HIDDEN)
        self.last = pyg.SAGEConv(HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x, edge_index).relu()
        self.aside(x, edge_index)
        return self.last(h, edge_index)


class SharedConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.embed = nn.Linear(in_channels, HIDDEN)
        self.conv, self.norm = pyg.GCNConv(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.last = nn.Linear(HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(2):
            x = self.norm(self.conv(x, edge_index)).relu()
        return self.last(x)


def sequential(in_channels: int, out_channels: int) -> nn.Module:
    return pyg.Sequential(
        "x, edge_index",
        [
            (pyg.GCNConv(in_channels, HIDDEN), "x, edge_index -> x1"),
            nn.ReLU(),
            (pyg.GraphConv(HIDDEN, HIDDEN), "x1, edge_index -> x2"),
            (lambda a, b: a + b, "x1, x2 -> x"),
            nn.Linear(HIDDEN, out_channels),
        ],
    )


class VertexTable(nn.Module):
    """A learned row a vertex, looked up by row number."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.table = nn.Embedding(TABLE_ROWS, HIDDEN)
        self.embed, self.conv = nn.Linear(in_channels, HIDDEN), pyg.GCNConv(HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.embed(x) + self.table(torch.arange(x.size(0), device=x.device))
        return self.conv(x.relu(), edge_index)


class BestHalf(nn.Module):
    """Keeps the half of all vertices with the best score, as top-k pooling does, and blanks the others."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(in_channels, HIDDEN), pyg.SAGEConv(HIDDEN, out_channels)
        self.score = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        score = self.score(x).squeeze(-1)
        best = score.topk(x.size(0) // 2).indices
        gate = torch.zeros_like(score).index_copy(0, best, score[best].tanh())
        return self.second(x * gate.unsqueeze(-1), edge_index)


class RankedRows(nn.Module):
    """Adds each vertex its rank among all vertices."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(in_channels + 1, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rank = x[:, 0].argsort(stable=True).argsort(stable=True).to(x.dtype) / x.size(0)
        return self.conv(torch.cat([x, rank.unsqueeze(-1)], dim=-1), edge_index)


class BothWays(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.embed, self.last = nn.Linear(in_channels, HIDDEN), nn.Linear(HIDDEN, out_channels)
        self.layers = nn.ModuleList(
            pyg.DeepGCNLayer(pyg.DirGNNConv(conv), nn.LayerNorm(HIDDEN), nn.ReLU(), block="res+")
            for conv in (pyg.SAGEConv(HIDDEN, HIDDEN), pyg.GCNConv(HIDDEN, HIDDEN))
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.last(x)


def _normed(*names: str) -> Callable[[int, int], nn.Module]:
    return lambda fan_in, fan_out: Normed(fan_in, fan_out, names)


ODD_MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "tutorial_gcn": lambda i, o: TwoLayers(TutorialConv(i, HIDDEN), TutorialConv(HIDDEN, o)),
    "edge_updates": EdgeUpdates,
    "edge_updates_dropout": lambda i, o: EdgeUpdates(i, o, dropout=0.4),
    "scatter_by_hand": lambda i, o: TwoLayers(ScatterConv(i, HIDDEN), ScatterConv(HIDDEN, o)),
    "all_norms": _normed(*NORMS),
    **{name: _normed(name) for name in NORMS},
    "centred_by_hand": CentredByHand,
    "virtual_node": VirtualNode,
    "residual_jump_lstm": ResidualJump,
    "unused_branch": UnusedBranch,
    "shared_conv": SharedConv,
    "sequential": sequential,
    "vertex_table": VertexTable,
    "best_half": BestHalf,
    "ranked_rows": RankedRows,
    "both_ways": BothWays,
}
"""Name -> ``build(in_channels, out_channels)``; each module's forward takes ``(x, edge_index)``."""

MUST_BE_REFUSED: frozenset[str] = frozenset({"best_half", "ranked_rows"})
"""What they compute depends on which rows lie together or in which order: no split can keep it."""
