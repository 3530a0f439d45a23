"""Models that turn edges round, with the weights and attributes that belong to them, as users write them.

Where it sits: ``test_edge_flips`` trains each of them in plain PyG and by Kagome, on the graph of
``edge_models``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import scatter, softmax

from edge_models import EDGES, FAN_IN, FAN_OUT, D, P, summed, table


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
