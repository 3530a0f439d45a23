"""Models of a graph that is given as a sparse matrix, with the values that it holds, as users write them.

Where it sits: ``test_adjacency`` trains each of them in plain PyG and by Kagome.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter, spmm, to_edge_index

from edge_models import FAN_IN, FAN_OUT, NODES


def weighted(layout: str = "csr", kind: str = "normalised") -> tuple[Data, Data]:
    """A graph given as a matrix: as a user hands it to plain PyG, and as it is handed to Kagome.

    Args:
        layout: ``csr``, ``csc`` or ``coo``.
        kind: ``normalised`` (weights, with self-loops), ``simple`` (weights, none) or ``ones``.
    """
    draw = torch.Generator().manual_seed(3)
    dense = (torch.rand(NODES, NODES, generator=draw, dtype=torch.float64) < 0.12).double()
    dense.fill_diagonal_(1.0 if kind == "normalised" else 0.0)
    if kind != "ones":
        dense = dense * (torch.rand(NODES, NODES, generator=draw, dtype=torch.float64) + 0.5)
        dense = dense / dense.sum(1, keepdim=True).clamp(min=1)
    matrix = {"csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc, "coo": dense.to_sparse_coo}[layout]()
    x = torch.rand(NODES, FAN_IN, generator=draw, dtype=torch.float64) * 2 - 1
    y = torch.arange(NODES) % FAN_OUT
    return Data(x=x, edge_index=matrix, adj_t=matrix, num_nodes=NODES), Data(x=x, y=y, adj_t=matrix)


class Adjacent(nn.Module):
    """A function of rows and the matrix.

    Args:
        function: ``(self, x, adj_t)`` to rows of 8 columns.
        held: What the module keeps.
    """

    def __init__(self, function: Callable[..., Tensor], **held: object) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and "plain" not in name:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.first, self.last = nn.Linear(FAN_IN, 8), nn.Linear(8, FAN_OUT)

    def forward(self, x: Tensor, adj_t: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x), adj_t).relu())


class AsEdges(Adjacent):
    """The same, which calls the matrix ``edge_index``, as PyG's layers do."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index)


class WithWeights(nn.Module):
    """A model that takes weights of edges, if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GraphConv(FAN_IN, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.conv(x, edge_index, edge_weight)


class FromData(Adjacent):
    """A model of one ``Data``."""

    def forward(self, data: Data) -> Tensor:
        return super().forward(data.x, data.adj_t)


class Fused(pyg.MessagePassing):
    """A user's layer with a product of its own."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, adj_t: Tensor) -> Tensor:
        return self.propagate(adj_t, x=self.lin(x), edge_weight=None)

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j

    def message_and_aggregate(self, adj_t: Tensor, x: Tensor) -> Tensor:
        return spmm(adj_t, x, reduce=self.aggr)


class Unfused(pyg.MessagePassing):
    """A user's layer whose messages take the weights that PyG finds in the matrix."""

    def __init__(self, aggr: str = "add") -> None:
        super().__init__(aggr=aggr)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, adj_t: Tensor) -> Tensor:
        return self.propagate(adj_t, x=self.lin(x), edge_weight=None)

    def message(self, x_i: Tensor, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return (x_i - x_j).relu() * edge_weight.view(-1, 1)


def _layered(make: Callable[[], nn.Module], kind: type[Adjacent] = Adjacent) -> Callable[[], nn.Module]:
    return lambda: kind(lambda m, x, a: m.conv(x, a), conv=make())


def _handed(how: Callable[[Tensor, Tensor], Tensor], **held: Tensor) -> Callable[[], nn.Module]:
    return lambda: Adjacent(lambda m, x, a: how(x, a), **held)


def _scattered(x: Tensor, adj_t: Tensor) -> Tensor:
    (target, source), values = to_edge_index(adj_t)
    return scatter(x[source] * values.view(-1, 1), target, dim=0, dim_size=x.size(0), reduce="sum")


def _appnp() -> nn.Module:
    return pyg.APPNP(3, 0.1, normalize=False)


def _fixed() -> Tensor:
    return weighted()[1].adj_t


_still = {"normalize": False}
ADJACENCIES: dict[str, Callable[[], nn.Module]] = {
    "gcn": _layered(lambda: pyg.GCNConv(8, 8, **_still)),
    "gcn, of edges by name": _layered(lambda: pyg.GCNConv(8, 8, **_still), AsEdges),
    "gcn that normalises": _layered(lambda: pyg.GCNConv(8, 8)),
    "gcn of data": _layered(lambda: pyg.GCNConv(8, 8, **_still), FromData),
    "gcnii": lambda: Adjacent(lambda m, x, a: m.conv(x, x, a), conv=pyg.GCN2Conv(8, 0.1, **_still)),
    "sage": _layered(lambda: pyg.SAGEConv(8, 8)),
    "sage of sums": _layered(lambda: pyg.SAGEConv(8, 8, aggr="sum")),
    "sage, of edges by name": _layered(lambda: pyg.SAGEConv(8, 8), AsEdges),
    "the largest": _layered(lambda: pyg.SAGEConv(8, 8, aggr="max")),
    "gin": _layered(lambda: pyg.GINConv(nn.Linear(8, 8))),
    "graph": _layered(lambda: pyg.GraphConv(8, 8)),
    "tag": _layered(lambda: pyg.TAGConv(8, 8, **_still)),
    "appnp": _layered(_appnp),
    "gat": _layered(lambda: pyg.GATConv(8, 8, add_self_loops=False)),
    "gatv2": _layered(lambda: pyg.GATv2Conv(8, 8, add_self_loops=False)),
    "gat with loops": _layered(lambda: pyg.GATConv(8, 8)),
    "a fused layer": _layered(Fused),
    "an unfused layer": _layered(Unfused),
    "an unfused mean": _layered(lambda: Unfused("mean")),
    "with weights": WithWeights,
    "a product": _handed(lambda x, a: a @ x),
    "a product of a column": _handed(lambda x, a: x + (a @ x[:, 0]).view(-1, 1)),
    "matmul": _handed(lambda x, a: torch.matmul(a, x)),
    "mm": _handed(lambda x, a: a.mm(x)),
    "sparse.mm": _handed(lambda x, a: torch.sparse.mm(a, x)),
    "spmm": _handed(lambda x, a: spmm(a, x)),
    "spmm of means": _handed(lambda x, a: spmm(a, x, "mean")),
    "spmm of largest": _handed(lambda x, a: spmm(a, x, "max")),
    "two hops": _handed(lambda x, a: a @ (a @ x).relu() + x),
    "powers": _handed(lambda x, a: torch.stack([x, a @ x, a @ (a @ x)]).mean(0)),
    "the other way": _handed(lambda x, a: a.t() @ x),
    "its edges": _handed(_scattered),
    "its values": _handed(lambda x, a: x * a.values().mean()),
    "dense": _handed(lambda x, a: a.to_dense() @ x),
    "degrees": _handed(lambda x, a: x / a.sum(dim=1, keepdim=True).to_dense().clamp(min=1)),
    "sizes": _handed(lambda x, a: a @ x / a.size(0) * a.shape[1]),
    "a buffer": lambda: Adjacent(lambda m, x, a: m.held @ x, held=_fixed()),
    "a plain attribute": lambda: Adjacent(lambda m, x, a: m.plain @ x, plain=_fixed()),
    "a buffer in a layer": lambda: Adjacent(
        lambda m, x, a: m.conv(x, m.held), held=_fixed(), conv=pyg.GCNConv(8, 8, **_still)
    ),
}
"""Models of a graph that is given as a sparse matrix."""
