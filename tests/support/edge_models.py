"""Models that hold a table of the edges, or speak of edges by their place in the list, as users write them.

Where it sits: ``test_edge_order`` trains each of them in plain PyG and by Kagome. All are built for one
graph, :func:`graph`, whose edges come shuffled, sorted and duplicated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, dropout_edge, scatter, softmax, to_dense_adj, to_undirected

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
    weight = weight.view(weight.size(0), -1)
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


def _ones(x: Tensor) -> Tensor:
    return torch.ones(1, dtype=x.dtype)


def _all_but_five_written(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    weight = (x[edge_index[0]] * x[edge_index[1]]).sum(-1)
    weight[5 : weight.size(0)] = 2.0
    return summed(x, edge_index, weight)


def _messages(
    how: Callable[[Tensor], Tensor], turn: Callable[[Tensor], Tensor] = lambda e: e
) -> Callable[[], nn.Module]:
    """A model that changes its messages in one way before it adds them up, along edges made in one way."""

    def function(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
        ends = turn(edge_index)
        return x + scatter(how(x[ends[0]]), ends[1], dim=0, dim_size=x.size(0), reduce="sum")

    return lambda: Call(function)


def _scaled(pieces: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([piece * (k + 1) for k, piece in enumerate(pieces)])


def _places_of_twice(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    weight = torch.arange(2 * edge_index.size(1), dtype=x.dtype) / EDGES
    return summed(x, torch.cat([edge_index, edge_index], 1), weight)


def _reverse(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    messages = x[edge_index[0]]
    return x + scatter(messages - messages[m.rev], edge_index[1], dim=0, dim_size=x.size(0), reduce="sum")


def _in_order(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    order = edge_index[1].argsort(stable=True)
    return summed(x, edge_index[:, order], m.w[order])


def _some(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    some = (edge_index[0] < edge_index[1]).nonzero().view(-1)
    return summed(x, edge_index[:, some], m.w[some])


def _coalesced(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    return summed(x, *coalesce(edge_index, m.w, reduce="mean"))


def _one_way(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    both, kept = dropout_edge(edge_index, 1e-12, force_undirected=True)  # which drops none
    return summed(x, both, m.w[kept])


def _turned_in_place(m: Call, x: Tensor, edge_index: Tensor) -> Tensor:
    ends, some = edge_index.clone(), edge_index[0] < 10
    ends[:, some] = ends[:, some].flip(0)
    return summed(x, ends, m.w)


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
        of_type=nn.Embedding.from_pretrained(table(5, 1), freeze=False),
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
    "in another order": lambda: Call(_in_order, w=P(table(EDGES))),
    "some by their numbers": lambda: Call(_some, w=P(table(EDGES))),
    "coalesced": lambda: Call(_coalesced, w=P(table(EDGES))),
    "one of both ways": lambda: Call(_one_way, w=P(table(EDGES))),
    "some turned in place": lambda: Call(_turned_in_place, w=P(table(EDGES))),
    "weights in parts": _mine(lambda m, _: torch.cat([m.a, m.b]), a=P(table(50)), b=P(table(70))),
    "the last edges, narrowed": lambda: Call(lambda m, x, e: summed(x, e.narrow(1, -40, 40), _ones(x))),
    "narrowed to all edges": lambda: Call(lambda m, x, e: summed(x, e.narrow(1, 0, e.size(1)), _ones(x))),
    "all but the first edges": lambda: Call(lambda m, x, e: summed(x, e[:, 50 : e.size(1)], _ones(x))),
    "as many as some edges": lambda: Call(
        lambda m, x, e: summed(x, e[:, : e[:, e[0] < e[1]].size(1)], _ones(x))
    ),
    "as many as vertices": lambda: Call(lambda m, x, e: summed(x, e[:, : x.size(0)], _ones(x))),
    "all but the first written": lambda: Call(_all_but_five_written),
    "split by their number": _mine(
        lambda m, e: torch.cat([piece * (k + 1) for k, piece in enumerate(m.w.split(e.size(1)))]),
        w=P(table(EDGES)),
    ),
    "from the end by their number": lambda: Call(lambda m, x, e: summed(x, e[:, -e.size(1) :], _ones(x))),
    "by twice their number": lambda: Call(lambda m, x, e: x + x.mean(0) * 100 / (2 * e.size(1))),
    "by a share of their number": lambda: Call(lambda m, x, e: x * (e.size(1) * 0.01)),
    "by their number less vertices": lambda: Call(lambda m, x, e: x * 30 / (e.size(1) - x.size(0))),
    "by vertices and their number": lambda: Call(lambda m, x, e: x * 30 / (x.size(0) + e.size(1))),
    "branches by twice their number": lambda: Call(lambda m, x, e: x if e.size(1) * 2 > 200 else x * 2),
    "ones for edges twice": lambda: Call(
        lambda m, x, e: summed(x, torch.cat([e, e], 1), torch.ones(2 * e.size(1), dtype=x.dtype))
    ),
    "places among edges twice": lambda: Call(_places_of_twice),
    "heads by unflatten": _messages(lambda v: v.unflatten(1, (2, 4)).sum(1).repeat(1, 2)),
    "heads by a named shape": _messages(lambda v: v.reshape(shape=(-1, 2, 4)).sum(1).repeat(1, 2)),
    "pairs by unflatten": _messages(lambda v: v.unflatten(0, (-1, 2)).sum(1).repeat_interleave(2, 0)),
    "pairs by a named shape": _messages(
        lambda v: v.reshape(shape=(EDGES // 2, 2, 8)).sum(1).repeat_interleave(2, 0)
    ),
    "places among flipped edges": _messages(
        lambda v: v * torch.arange(v.size(0), dtype=v.dtype).view(-1, 1), lambda e: e.flip(0)
    ),
    "places among some edges": _messages(
        lambda v: v * torch.arange(v.size(0), dtype=v.dtype).view(-1, 1), lambda e: e[:, e[0] < e[1]]
    ),
    "places among some edges, flipped": _messages(
        lambda v: v * torch.arange(v.size(0), dtype=v.dtype).view(-1, 1), lambda e: e.flip(0)[:, :50]
    ),
    "sections by name": _messages(lambda v: _scaled(torch.tensor_split(v, sections=4))),
    "ends by name": _messages(lambda v: _scaled(torch.tensor_split(v, indices=(7, 50)))),
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
