"""Models that hold a table of the edges, or speak of edges by their place in the list, as users write them.

Where it sits: ``test_edge_order`` trains each of them in plain PyG and by Kagome. All are built for
one graph, :func:`graph`, whose edges come
shuffled, sorted and duplicated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter, softmax, spmm, to_dense_adj, to_edge_index, to_undirected

NODES, EDGES, FAN_IN, FAN_OUT, D = 30, 120, 6, 4, 3
ORDERS = ("shuffled", "by source", "by target", "duplicate")


def graph(order: str = "shuffled", seed: int = 1) -> Data:
    """A directed graph of 120 edges with weights and attributes, its edges in that order.

    Args:
        order: One of ``ORDERS``.
        seed: Of the draws.
    """
    draw = torch.Generator().manual_seed(seed)
    ends = torch.randint(NODES, (2, EDGES), generator=draw)
    if order == "duplicate":
        ends[:, EDGES // 2 :] = ends[:, : EDGES // 2]
    if order in ("by source", "by target"):
        major = int(order == "by target")
        ends = ends[:, (ends[major] * NODES + ends[1 - major]).argsort()]
    x = torch.rand(NODES, FAN_IN, generator=draw, dtype=torch.float64) * 2 - 1
    weight = torch.rand(EDGES, generator=draw, dtype=torch.float64) + 0.5
    attr = torch.rand(EDGES, D, generator=draw, dtype=torch.float64) - 0.5
    return Data(
        x=x,
        edge_index=ends,
        edge_weight=weight,
        edge_attr=attr,
        e_id=torch.arange(EDGES),
        pair=torch.randperm(EDGES, generator=draw),
    )


def table(*shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    """A number an edge that differs from edge to edge."""
    size = 1
    for one in shape:
        size *= one
    return torch.linspace(low, high, size, dtype=torch.float64).view(*shape)


class Weights(nn.Module):
    """Two layers whose messages are multiplied by what ``weight_of`` makes of the model's table.

    Args:
        held: The table: a Parameter, or a tensor that is kept as a buffer.
        weight_of: Of the table and the edges, a number an edge.
        layer: A layer that takes weights.
    """

    def __init__(
        self,
        held: Tensor,
        weight_of: Callable[..., Tensor] = lambda held, edge_index: held,
        layer: type[nn.Module] = pyg.GraphConv,
    ) -> None:
        super().__init__()
        if isinstance(held, nn.Parameter):
            self.held = held
        else:
            self.register_buffer("held", held)
        self.weight_of = weight_of
        self.first, self.second = layer(FAN_IN, 8), layer(8, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = self.weight_of(self.held, edge_index)
        return self.second(self.first(x, edge_index, weight).relu(), edge_index, weight)


class Call(nn.Module):
    """Two layers around a function of rows, edges and the module itself.

    Args:
        function: ``(self, x, edge_index)`` to rows of 8 columns.
        held: Tensors that the module keeps: Parameters, buffers, or plain attributes by the name ``plain_*``.
    """

    def __init__(self, function: Callable[..., Tensor], **held: object) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and "plain" not in name:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.first, self.last = nn.Linear(FAN_IN, 8), nn.Linear(8, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x), edge_index).relu())


def summed(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    """Weighted sums by hand."""
    weight = weight.view(-1, 1) if weight.dim() == 1 else weight
    return x + scatter(x[edge_index[0]] * weight, edge_index[1], dim=0, dim_size=x.size(0), reduce="sum")


def _attended(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    share = softmax(m.logit, edge_index[1], num_nodes=x.size(0))
    return summed(x, edge_index, share)


class InMessage(pyg.MessagePassing):
    """A table that ``message`` reads."""

    def __init__(self, held: Tensor) -> None:
        super().__init__(aggr="mean")
        self.held, self.lin = nn.Parameter(held), nn.Linear(FAN_IN, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.held.view(-1, 1)


class Attributes(nn.Module):
    """Layers that are given attributes which the model keeps."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.attr = nn.Parameter(table(EDGES, D))
        self.first, self.second = layer(FAN_IN, 8), layer(8, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, self.attr).relu(), edge_index, self.attr)


class ByAttribute(nn.Module):
    """A table in the model that is read by an attribute of the edges: ids of edges in the data."""

    def __init__(self, name: str, made: Callable[[], nn.Module | nn.Parameter]) -> None:
        super().__init__()
        self.name, self.held = name, made()
        self.conv = pyg.GraphConv(FAN_IN, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor, e_id: Tensor, pair: Tensor) -> Tensor:
        ids = {"e_id": e_id, "pair": pair}[self.name]
        weight = self.held(ids).squeeze(-1) if isinstance(self.held, nn.Module) else self.held[ids]
        return self.conv(x, edge_index, weight)


class Alike(nn.Module):
    """The attributes of each edge and of its partner, which an attribute of the data names."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.conv = nn.Linear(D, 1), pyg.GraphConv(FAN_IN, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, pair: Tensor) -> Tensor:
        known = self.map(edge_attr)
        return self.conv(x, edge_index, (known + known[pair]).squeeze(-1))


def _mine(how: Callable[[Call, Tensor], Tensor], **held: object) -> Callable[[], nn.Module]:
    def function(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
        return summed(x, edge_index, how(m, edge_index))

    return lambda: Call(function, **{name: copy.deepcopy(value) for name, value in held.items()})


def _prefix(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    one = summed(m.a(x), edge_index[:, :50], torch.ones(1, dtype=x.dtype))
    return one + summed(m.b(x), edge_index[:, 50:], torch.ones(1, dtype=x.dtype))


def _last_ones(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    return summed(x, edge_index[:, -40:], torch.ones(1, dtype=x.dtype))


def _every_second(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    return summed(x, edge_index[:, ::2], m.held[::2])


def _kinds(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    kind = (torch.arange(edge_index.size(1)) >= 70).to(x.dtype)
    return summed(x, edge_index, kind + 0.5)


def _by_halves(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    one, two = edge_index.chunk(2, dim=1)
    return summed(m.a(x), one, torch.ones(1, dtype=x.dtype)) + summed(x, two, torch.ones(1, dtype=x.dtype))


def _split(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    one, two = edge_index.split([30, 90], dim=1)
    return summed(m.a(x), one, torch.ones(1, dtype=x.dtype)) + summed(x, two, torch.ones(1, dtype=x.dtype))


def _viewed(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    pairs = x[edge_index[0]].view(EDGES // 2, 2, -1).sum(1).repeat_interleave(2, dim=0)
    return x + scatter(pairs, edge_index[1], dim=0, dim_size=x.size(0), reduce="sum")


def _spread(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, edge_index.size(1), dtype=x.dtype)
    return summed(x, edge_index, weight)


def _rolled(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    return summed(x, edge_index, torch.roll((x[edge_index[0]] * x[edge_index[1]]).sum(-1), 1))


def _first_edge(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    return summed(x, edge_index, torch.ones(EDGES, dtype=x.dtype)) + x[edge_index[0]][0]


def _written(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    weight = (x[edge_index[0]] * x[edge_index[1]]).sum(-1)
    return summed(x, edge_index, torch.cat([weight[:60] * 2, weight[60:]]))


def _reverse(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    messages = x[edge_index[0]]
    return x + scatter(messages - messages[m.rev], edge_index[1], dim=0, dim_size=x.size(0), reduce="sum")


P = nn.Parameter
_WEIGHT, _MASK = table(EDGES), torch.arange(EDGES) < 50
_REV = torch.arange(EDGES).flip(0)


def _learned(
    weight_of: Callable[..., Tensor] | None = None, *shape: int, **more: object
) -> Callable[[], nn.Module]:
    made = {} if weight_of is None else {"weight_of": weight_of}
    return lambda: Weights(P(table(*(shape or (EDGES,)))), **made, **more)


TABLES: dict[str, Callable[[], nn.Module]] = {
    "a learned weight an edge": _learned(),
    "a kept weight an edge": lambda: Weights(table(EDGES)),
    "a sigmoid of it": _learned(lambda held, _: held.sigmoid()),
    "a row an edge": _learned(lambda held, _: held.sum(-1), EDGES, D),
    "a column an edge": _learned(lambda held, _: held.squeeze(-1), EDGES, 1),
    "a row of weights": _learned(lambda held, _: held.view(-1), 1, EDGES),
    "in gcn": _learned(lambda held, _: held.exp(), layer=pyg.GCNConv),
    "in tag": _learned(lambda held, _: held.exp(), layer=pyg.TAGConv),
    "in message": lambda: InMessage(table(EDGES)),
    "attributes of gatv2": lambda: Attributes(partial(pyg.GATv2Conv, edge_dim=D, add_self_loops=False)),
    "attributes of gat with loops": lambda: Attributes(partial(pyg.GATConv, edge_dim=D)),
    "attributes of transformer": lambda: Attributes(partial(pyg.TransformerConv, edge_dim=D)),
    "by hand": _mine(lambda m, _: m.w, w=P(table(EDGES))),
    "a plain attribute": _mine(lambda m, _: m.plain, plain=table(EDGES)),
    "in a parameter list": _mine(
        lambda m, _: m.ws[0] * m.ws[1], ws=nn.ParameterList([table(EDGES), table(EDGES)])
    ),
    "in a dict": _mine(lambda m, _: m.plain["w"] + 0, plain={"w": table(EDGES)}),
    "logits": lambda: Call(_attended, logit=P(table(EDGES))),
    "a mask": _mine(lambda m, _: torch.where(m.mask, 2.0, 0.5).double(), mask=_MASK),
    "masked edges": lambda: Call(
        lambda m, x, e: summed(x, e[:, m.mask], m.w[m.mask]), mask=_MASK, w=P(table(EDGES))
    ),
    "normalised by its sum": _mine(lambda m, _: m.w / m.w.sum(), w=P(table(EDGES, low=0.1))),
    "types": _mine(
        lambda m, _: m.of_type[m.edge_type], edge_type=torch.arange(EDGES) % 5, of_type=P(table(5))
    ),
    "an embedding of types": _mine(
        lambda m, _: m.of_type(m.edge_type).squeeze(-1),
        edge_type=torch.arange(EDGES) % 5,
        of_type=nn.Embedding(5, 1),
    ),
    "ids of reverse edges": lambda: Call(_reverse, rev=_REV),
    "its reverse's weight": _mine(lambda m, _: m.w[m.rev], rev=_REV, w=P(table(EDGES))),
    "read by an attribute": lambda: ByAttribute("e_id", lambda: P(table(EDGES))),
    "read by another's id": lambda: ByAttribute("pair", lambda: P(table(EDGES))),
    "an embedding by id": lambda: ByAttribute("pair", lambda: nn.Embedding(EDGES, 1)),
    "a partner's attributes": Alike,
    "the first edges": lambda: Call(_prefix, a=nn.Linear(8, 8), b=nn.Linear(8, 8)),
    "the last edges": lambda: Call(_last_ones),
    "every second edge": lambda: Call(_every_second, held=P(table(EDGES))),
    "kinds by place": lambda: Call(_kinds),
    "two halves": lambda: Call(_by_halves, a=nn.Linear(8, 8)),
    "two pieces": lambda: Call(_split, a=nn.Linear(8, 8)),
    "pairs of edges": lambda: Call(_viewed),
    "spread over edges": lambda: Call(_spread),
    "rolled": lambda: Call(_rolled),
    "one edge": lambda: Call(_first_edge),
    "the first ones doubled": lambda: Call(_written),
    "weights in parts": _mine(lambda m, _: torch.cat([m.a, m.b]), a=P(table(50)), b=P(table(70))),
    "a weight for the first": _mine(
        lambda m, e: torch.cat([m.a, torch.ones(e.size(1) - 50).double()]), a=P(table(50))
    ),
}
"""Tables of the edges and places among them, by name."""


def _dense(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    return to_dense_adj(edge_index, max_num_nodes=x.size(0))[0].to(x.dtype) @ x + x


def _both_ways(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    return m.conv(x, to_undirected(edge_index, num_nodes=x.size(0)))


def _neighbours(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    near = torch.cdist(x, x).topk(4, largest=False).indices
    ends = torch.stack([near.reshape(-1), torch.arange(x.size(0)).repeat_interleave(4)])
    return m.conv(x, ends) + m.conv(x, edge_index)


def _distinct(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    ids = (edge_index[0] * NODES + edge_index[1]).unique()
    return m.conv(x, torch.stack([ids // NODES, ids % NODES]))


def _two_hops(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    hop = to_dense_adj(edge_index, max_num_nodes=x.size(0))[0]
    return m.conv(x, (hop @ hop).nonzero().t())


def _matrix(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    ones = torch.ones(edge_index.size(1), dtype=x.dtype)
    return x + torch.sparse_coo_tensor(edge_index.flip(0), ones, (x.size(0), x.size(0))) @ x


def _hopped() -> nn.Module:
    return Call(_two_hops, conv=pyg.SAGEConv(8, 8))


ONE_RANK: dict[str, Callable[[], nn.Module]] = {
    "to_undirected": lambda: Call(_both_ways, conv=pyg.GCNConv(8, 8)),
    "to_undirected and gat": lambda: Call(_both_ways, conv=pyg.GATConv(8, 8)),
    "to_dense_adj": lambda: Call(_dense),
    "nearest neighbours": lambda: Call(_neighbours, conv=pyg.SAGEConv(8, 8)),
    "nearest neighbours and gat": lambda: Call(_neighbours, conv=pyg.GATv2Conv(8, 8)),
    "distinct edges": lambda: Call(_distinct, conv=pyg.GraphConv(8, 8)),
    "two hops": _hopped,
    "a sparse matrix": lambda: Call(_matrix),
}
"""What one rank runs as plain PyG does: edges that are made inside forward."""


class Flipped(nn.Module):
    """A function of rows, edges, weights and attributes, with layers of the module.

    Args:
        function: ``(self, x, edge_index, weight, attr)`` to rows of 8 columns.
        held: Modules and tensors that the module keeps.
    """

    def __init__(self, function: Callable[..., Tensor], **held: object) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)
        self.first, self.last = nn.Linear(FAN_IN, 8), nn.Linear(8, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        out = self.function(self, self.first(x), edge_index, edge_weight, edge_attr)
        return self.last(out.relu())


def _swapped(edge_index: Tensor) -> Tensor:
    source, target = edge_index
    return torch.stack([target, source])


def _unbound(edge_index: Tensor) -> Tensor:
    source, target = edge_index.unbind(0)
    return torch.stack((target, source), dim=0)


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda e: e.flip(0),
    "torch.flip": lambda e: torch.flip(e, dims=[0]),
    "by index": lambda e: e[[1, 0]],
    "by a tensor": lambda e: e[torch.tensor([1, 0])],
    "stack": _swapped,
    "unbind": _unbound,
    "cat": lambda e: torch.cat([e[1:], e[:1]]),
}
"""Ways to turn edges round."""


def _turned(turn: str, layer: Callable[[], nn.Module], given: str) -> Callable[[], nn.Module]:
    def function(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
        values = {"weight": [w], "attr": [a], "none": [], "learned": [m.w]}[given]
        return m.conv(x, TURNS[turn](e), *values)

    return lambda: Flipped(function, conv=layer(), w=P(table(EDGES)))


def _doubled(layer: Callable[[], nn.Module], given: str, turn: str = "flip") -> Callable[[], nn.Module]:
    def function(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
        values = {"weight": [torch.cat([w, w])], "attr": [torch.cat([a, -a])], "none": []}[given]
        return m.conv(x, torch.cat([e, TURNS[turn](e)], dim=1), *values)

    return lambda: Flipped(function, conv=layer())


def _by_hand(how: Callable[..., Tensor], **held: Callable[[], object]) -> Callable[[], nn.Module]:
    return lambda: Flipped(how, **{name: made() for name, made in held.items()})


def _mixed_ends(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
    gate = m.map(torch.cat([x[e[0]], x[e[1]], a], dim=-1)).sigmoid()
    return summed(x, e.flip(0), gate)


def _shares(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
    back = e.flip(0)
    return summed(x, back, softmax(m.map(a).squeeze(-1), back[1], num_nodes=x.size(0)))


def _masked_back(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
    heavy = w > 1
    return summed(x, e.flip(0)[:, heavy], w[heavy])


def _two_ways(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return m.there(x, e, w) + m.back(x, e.flip(0), w)


def _back_again(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return m.conv(x, e.flip(0).flip(0), w)


def _first_back(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return summed(x, e.flip(0)[:, :50], w[:50])


def _difference(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
    back = e.flip(0)
    return x + scatter((x[back[0]] - x[e[0]]) * w.view(-1, 1), e[1], dim=0, dim_size=x.size(0), reduce="sum")


def _round_trip(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
    sent = x[e[0]] * w.view(-1, 1)
    return x + scatter(sent, e.flip(0)[1], dim=0, dim_size=x.size(0), reduce="sum")


def _normed_back(m: Flipped, x: Tensor, e: Tensor, w: Tensor, a: Tensor) -> Tensor:
    back = e.flip(0)
    into = scatter(w, back[1], dim=0, dim_size=x.size(0), reduce="sum").clamp(min=1)
    return summed(x, back, w / into[back[1]])


_graph, _gcn = lambda: pyg.GraphConv(8, 8), lambda: pyg.GCNConv(8, 8)
_gat, _gine = lambda: pyg.GATv2Conv(8, 8, edge_dim=D), lambda: pyg.GINEConv(nn.Linear(8, 8), edge_dim=D)
_old_gat = lambda: pyg.GATConv(8, 8, edge_dim=D, add_self_loops=False)  # noqa: E731
_former, _sage = lambda: pyg.TransformerConv(8, 8, edge_dim=D), lambda: pyg.SAGEConv(8, 8)
_max = lambda: pyg.SAGEConv(8, 8, aggr="max")  # noqa: E731
_back = lambda: pyg.GraphConv(8, 8, flow="target_to_source")  # noqa: E731

FLIPS: dict[str, Callable[[], nn.Module]] = {
    **{f"{turn}, weights": _turned(turn, _graph, "weight") for turn in TURNS},
    **{f"{turn}, gcn": _turned(turn, _gcn, "weight") for turn in TURNS},
    **{f"{turn}, attributes of gatv2": _turned(turn, _gat, "attr") for turn in TURNS},
    **{f"{turn}, learned weights": _turned(turn, _graph, "learned") for turn in TURNS},
    **{f"{turn}, sage": _turned(turn, _sage, "none") for turn in TURNS},
    "attributes of gat": _turned("flip", _old_gat, "attr"),
    "attributes of gine": _turned("flip", _gine, "attr"),
    "attributes of transformer": _turned("flip", _former, "attr"),
    "the largest": _turned("flip", _max, "none"),
    "doubled, weights": _doubled(_graph, "weight"),
    "doubled, gcn": _doubled(_gcn, "weight"),
    "doubled, attributes of gatv2": _doubled(_gat, "attr"),
    "doubled, attributes of gine": _doubled(_gine, "attr"),
    "doubled, sage": _doubled(_sage, "none"),
    "doubled, the largest": _doubled(_max, "none"),
    "doubled by stack, weights": _doubled(_graph, "weight", "stack"),
    "doubled by index, attributes": _doubled(_gine, "attr", "by index"),
    "a gate of both ends": _by_hand(_mixed_ends, map=lambda: nn.Linear(16 + D, 1)),
    "shares by attributes": _by_hand(_shares, map=lambda: nn.Linear(D, 1)),
    "heavy edges back": _by_hand(_masked_back),
    "two ways": _by_hand(_two_ways, there=_graph, back=_graph),
    "two ways by dir-gnn": _turned("flip", lambda: pyg.DirGNNConv(pyg.SAGEConv(8, 8)), "none"),
    "there and back again": _by_hand(_back_again, conv=_graph),
    "the first edges back": _by_hand(_first_back),
    "differences of ends": _by_hand(_difference),
    "sent and taken back": _by_hand(_round_trip),
    "normed by what comes back": _by_hand(_normed_back),
    "a layer that goes back": _by_hand(lambda m, x, e, w, a: m.conv(x, e, w), conv=_back),
    "flipped into a layer that goes back": _turned("flip", _back, "weight"),
    "doubled into a layer that goes back": _doubled(_back, "weight"),
}
"""Edges turned round, with what belongs to each of them."""


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
