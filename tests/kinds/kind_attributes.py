"""Kind 3: attributes with neither a row a vertex nor a row an edge, and arguments of forward by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from by_hand import graph
from cases import Case, with_targets

FEATURES, WIDTH, OUT = 6, 8, 4


def drawn(*shape: int, seed: int = 3) -> Tensor:
    """Numbers of one seed, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def given(**attributes: Any) -> Callable[[], Data]:
    """The sample graph with float targets and these attributes."""

    def make() -> Data:
        data = with_targets(graph())
        for name, value in attributes.items():
            data[name] = value(data) if callable(value) else value
        return data

    return make


class Two(nn.Module):
    """Two convolutions; a case says what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv(FEATURES, WIDTH), pyg.SAGEConv(WIDTH, OUT)


class GlobalRow(Two):
    """``u [1, 3]``, as PyG's MetaLayer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, u: Tensor | None = None) -> Tensor:
        h = self.one(x, edge_index)
        if u is not None:
            h = h + self.lin(u)
        return self.two(h.tanh(), edge_index)


class GlobalExpanded(Two):
    """A vector of the whole graph beside each row's features."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH + 3, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, u: Tensor) -> Tensor:
        h = self.one(x, edge_index)
        h = self.lin(torch.cat([h, u.expand(h.size(0), -1)], dim=-1))
        return self.two(h.tanh(), edge_index)


class GlobalByBatch(Two):
    """``u[batch]``, as in PyG's global blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH + 3, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        h = self.lin(torch.cat([self.one(x, edge_index), u[batch]], dim=1))
        return self.two(h.tanh(), edge_index)


class Temperature(Two):
    """A Python number."""

    def forward(self, x: Tensor, edge_index: Tensor, temperature: float = 1.0) -> Tensor:
        return self.two((self.one(x, edge_index) / temperature).tanh(), edge_index)


class Tau(Two):
    """A tensor without an axis."""

    def forward(self, x: Tensor, edge_index: Tensor, tau: Tensor) -> Tensor:
        return self.two((self.one(x, edge_index) * tau).tanh(), edge_index)


class Modes(Two):
    """A string chooses what is computed."""

    def forward(self, x: Tensor, edge_index: Tensor, mode: str = "tanh") -> Tensor:
        h = self.one(x, edge_index)
        h = h.sigmoid() if mode == "sigmoid" else h.tanh()
        return self.two(h, edge_index)


class Scales(Two):
    """A list of numbers."""

    def forward(self, x: Tensor, edge_index: Tensor, scales: list[float]) -> Tensor:
        h = self.one(x, edge_index)
        return self.two(sum(torch.sin(h * scale) for scale in scales), edge_index)


class Settings(Two):
    """A dict of numbers."""

    def forward(self, x: Tensor, edge_index: Tensor, hyper: dict[str, float]) -> Tensor:
        h = self.one(x, edge_index) * hyper["gain"] + hyper["shift"]
        return self.two(h.tanh(), edge_index)


class Names(Two):
    """A list of texts is counted."""

    def forward(self, x: Tensor, edge_index: Tensor, names: list[str]) -> Tensor:
        return self.two((self.one(x, edge_index) * len(names)).tanh(), edge_index)


class Flag(Two):
    """A truth."""

    def forward(self, x: Tensor, edge_index: Tensor, residual: bool = False) -> Tensor:
        h = self.one(x, edge_index).tanh()
        out = self.two(h, edge_index)
        return out + h[:, :OUT] if residual else out


class Prototypes(Two):
    """Distances to K vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, OUT)

    def forward(self, x: Tensor, edge_index: Tensor, prototypes: Tensor) -> Tensor:
        h = self.one(x, edge_index).tanh()
        return self.last(torch.cdist(h, prototypes).neg().exp()) + self.two(h, edge_index)


class Attending(Two):
    """A softmax over K keys, whose values are mixed."""

    def forward(self, x: Tensor, edge_index: Tensor, keys: Tensor) -> Tensor:
        h = self.one(x, edge_index)
        h = h + (h @ keys.t()).softmax(-1) @ keys
        return self.two(h.tanh(), edge_index)


class Mixing(Two):
    """A matrix of features by features."""

    def forward(self, x: Tensor, edge_index: Tensor, mixing: Tensor) -> Tensor:
        return self.two(self.one(x @ mixing, edge_index).tanh(), edge_index)


class Standardised(Two):
    """The mean and the spread of each feature, kept with the data."""

    def forward(self, x: Tensor, edge_index: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return self.two(self.one((x - mean) / std, edge_index).tanh(), edge_index)


class Table(Two):
    """Integers: the family of each kind of vertex."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, node_type: Tensor, family: Tensor) -> Tensor:
        h = self.one(x, edge_index) + self.emb(family[node_type])
        return self.two(h.tanh(), edge_index)


class Kinds(Two):
    """A vector a kind of edge: looked up by the edges."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor, strength: Tensor) -> Tensor:
        h = self.one(x, edge_index).tanh()
        gate = strength[edge_type].sigmoid().unsqueeze(-1)
        source, target = edge_index
        summed = torch.zeros_like(h).index_add(0, target, h[source] * gate)
        return self.two(h + summed, edge_index)


class Chosen(Two):
    """Which columns count, by a mask of columns."""

    def forward(self, x: Tensor, edge_index: Tensor, used: Tensor) -> Tensor:
        return self.two(self.one(x * used, edge_index).tanh(), edge_index)


class ChosenIds(Two):
    """Which columns count, by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = pyg.SAGEConv(3, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, columns: Tensor) -> Tensor:
        return self.two(self.one(x[:, columns], edge_index).tanh(), edge_index)


class Whole(Two):
    """The data whole, as many PyG examples write it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, WIDTH)

    def forward(self, data: Data) -> Tensor:
        x, edge_index = data.x, data.edge_index
        h = self.one(x, edge_index) + self.lin(data.u)
        return self.two(h.tanh() * data.gain, edge_index)


class WholeAsked(Two):
    """The data whole; what it may lack is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, WIDTH)

    def forward(self, data: Data) -> Tensor:
        h = self.one(data.x, data.edge_index)
        if "u" in data:
            h = h + self.lin(data.u)
        if getattr(data, "gain", None) is not None:
            h = h * data.gain
        return self.two(h.tanh(), data.edge_index)


class Batched(Two):
    """One graph's mean, by ``batch``."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        h = self.one(x, edge_index).tanh()
        if batch is None:
            batch = x.new_zeros(x.size(0), dtype=torch.long)
        mean = pyg.global_mean_pool(h, batch, size=1)
        return self.two(h + mean[batch], edge_index)


class BatchedNorm(Two):
    """A norm that asks for ``batch``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = pyg.GraphNorm(WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        return self.two(self.norm(self.one(x, edge_index), batch).tanh(), edge_index)


class Counted(Two):
    """``num_nodes`` as a divisor."""

    def forward(self, x: Tensor, edge_index: Tensor, num_nodes: int | None = None) -> Tensor:
        h = self.one(x, edge_index)
        h = h / (1 if num_nodes is None else num_nodes**0.5)
        return self.two(h.tanh(), edge_index)


class Pointers(Two):
    """``ptr``: where graphs begin, read for their number."""

    def forward(self, x: Tensor, edge_index: Tensor, ptr: Tensor) -> Tensor:
        return self.two((self.one(x, edge_index) * (ptr.numel() - 1) / ptr[-1]).tanh(), edge_index)


class EdgeDim(Two):
    """A number whose name begins as those of edges do."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, edge_dim: int) -> Tensor:
        h = self.one(x, edge_index).tanh()
        gate = edge_attr[:, :edge_dim].sum(-1, keepdim=True).sigmoid()
        source, target = edge_index
        return self.two(h + torch.zeros_like(h).index_add(0, target, h[source] * gate), edge_index)


class EdgeScale(Two):
    """A row named as an edge's is, and the same for all edges."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, edge_mean: Tensor) -> Tensor:
        h = self.one(x, edge_index).tanh()
        gate = (edge_attr - edge_mean).sum(-1, keepdim=True).sigmoid()
        source, target = edge_index
        return self.two(h + torch.zeros_like(h).index_add(0, target, h[source] * gate), edge_index)


class NodeScale(Two):
    """A row named as a vertex's is, and the same for all vertices."""

    def forward(self, x: Tensor, edge_index: Tensor, node_mean: Tensor) -> Tensor:
        return self.two(self.one(x - node_mean, edge_index).tanh(), edge_index)


class Optional(Two):
    """An attribute that is None."""

    def forward(self, x: Tensor, edge_index: Tensor, extra: Tensor | None = None) -> Tensor:
        h = self.one(x, edge_index)
        return self.two((h if extra is None else h + extra).tanh(), edge_index)


class Turned(Two):
    """What is given is turned to a tensor."""

    def forward(self, x: Tensor, edge_index: Tensor, extra: Any) -> Tensor:
        return self.two((self.one(x, edge_index) + torch.as_tensor(extra)).tanh(), edge_index)


class Weighted(nn.Module):
    """``edge_weight=None`` and ``edge_attr=None``, of which the data has both and the layer takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.GCNConv(FEATURES, WIDTH), pyg.GCNConv(WIDTH, OUT)

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, size: Any = None
    ) -> Tensor:
        h = self.one(x, edge_index, edge_weight).tanh()
        return self.two(h, edge_index, edge_weight)


class Positional(Two):
    """Keyword-only arguments after the two usual ones."""

    def forward(
        self, x: Tensor, edge_index: Tensor, *, gain: float = 2.0, shift: Tensor | None = None
    ) -> Tensor:
        h = self.one(x, edge_index) * gain
        return self.two((h if shift is None else h + shift).tanh(), edge_index)


class Rest(Two):
    """``**kwargs``: what the data has besides is not given by a name."""

    def forward(self, x: Tensor, edge_index: Tensor, u: Tensor, **kwargs: Any) -> Tensor:
        return self.two((self.one(x, edge_index) + u).tanh() + len(kwargs), edge_index)


class SecondEdges(Two):
    """A second edge list."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_index2: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index).tanh(), edge_index2)


class Negatives(Two):
    """A second edge list under a name that does not say so."""

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:
        h = self.one(x, edge_index).tanh()
        out = self.two(h, edge_index)
        score = (out[pairs[0]] * out[pairs[1]]).sum(-1)
        return out + score.mean()


class Codebook(Two):
    """The nearest of K codes, straight through."""

    def forward(self, x: Tensor, edge_index: Tensor, codes: Tensor) -> Tensor:
        h = self.one(x, edge_index).tanh()
        nearest = codes[torch.cdist(h, codes).argmin(1)]
        return self.two(h + (nearest - h).detach(), edge_index)


class Hops(Two):
    """An integer says how often is propagated."""

    def __init__(self) -> None:
        super().__init__()
        self.hop = pyg.SimpleConv(aggr="mean")

    def forward(self, x: Tensor, edge_index: Tensor, hops: int) -> Tensor:
        h = self.one(x, edge_index).tanh()
        for _ in range(hops):
            h = 0.5 * h + 0.5 * self.hop(h, edge_index)
        return self.two(h, edge_index)


def of_kinds(data: Data) -> Tensor:
    """A number a kind of edge."""
    return drawn(int(data.edge_type.max()) + 1)


def batch_of(data: Data) -> Tensor:
    """All vertices in one graph."""
    return torch.zeros(data.num_nodes, dtype=torch.long)


def edges_of(data: Data) -> int:
    """How many edges there are."""
    return int(data.edge_index.size(1))


CASES: dict[str, Case] = {
    "u [1, 3], None by default": Case(GlobalRow, given(u=drawn(1, 3))),
    "u that is not there": Case(GlobalRow, given()),
    "u [1, 3] expanded to rows": Case(GlobalExpanded, given(u=drawn(1, 3))),
    "u[batch]": Case(GlobalByBatch, given(u=drawn(1, 3), batch=batch_of)),
    "a number": Case(Temperature, given(temperature=0.7)),
    "a whole number for a float": Case(Temperature, given(temperature=2)),
    "a tensor without an axis": Case(Tau, given(tau=torch.tensor(0.7, dtype=torch.float64))),
    "a tensor of one entry": Case(Tau, given(tau=torch.tensor([0.7], dtype=torch.float64))),
    "a text": Case(Modes, given(mode="sigmoid")),
    "a list of numbers": Case(Scales, given(scales=[0.5, 1.0, 2.0])),
    "a tuple of numbers": Case(Scales, given(scales=(0.5, 1.5))),
    "a tensor of numbers, gone through": Case(Scales, given(scales=drawn(4))),
    "a dict": Case(Settings, given(hyper={"gain": 1.5, "shift": 0.25})),
    "a list of texts": Case(Names, given(names=["one", "two", "three"])),
    "a list of as many texts as vertices": Case(Names, given(names=["v"] * 30)),
    "a truth": Case(Flag, given(residual=True)),
    "a truth that is false": Case(Flag, given(residual=False)),
    "prototypes [K, d]": Case(Prototypes, given(prototypes=drawn(5, WIDTH))),
    "keys [K, d]": Case(Attending, given(keys=drawn(7, WIDTH))),
    "as many keys as vertices": Case(Attending, given(keys=drawn(30, WIDTH))),
    "as many keys as edges": Case(Attending, given(keys=lambda d: drawn(edges_of(d), WIDTH))),
    "codes [K, d]": Case(Codebook, given(codes=drawn(6, WIDTH))),
    "as many codes as vertices": Case(Codebook, given(codes=drawn(30, WIDTH))),
    "a matrix [F, F]": Case(Mixing, given(mixing=drawn(FEATURES, FEATURES))),
    "mean and spread of features": Case(
        Standardised, given(mean=lambda d: d.x.mean(0), std=lambda d: d.x.std(0, keepdim=True))
    ),
    "a table of whole numbers": Case(
        Table, given(family=lambda d: torch.arange(int(d.node_type.max()) + 1) % 3)
    ),
    "a table in int32": Case(
        Table, given(family=lambda d: (torch.arange(int(d.node_type.max()) + 1) % 3).int())
    ),
    "a number a kind of edge": Case(Kinds, given(strength=of_kinds)),
    "a mask of columns": Case(Chosen, given(used=torch.tensor([True, False, True, True, False, True]))),
    "numbers of columns": Case(ChosenIds, given(columns=torch.tensor([0, 2, 5]))),
    "the data whole": Case(Whole, given(u=drawn(1, 3), gain=1.5)),
    "the data whole, asked": Case(WholeAsked, given(u=drawn(1, 3), gain=1.5)),
    "the data whole, asked in vain": Case(WholeAsked, given()),
    "batch": Case(Batched, given(batch=batch_of)),
    "batch that is not there": Case(Batched, given()),
    "batch in a norm": Case(BatchedNorm, given(batch=batch_of)),
    "num_nodes": Case(Counted, given(num_nodes=30)),
    "num_nodes that nobody set": Case(Counted, given()),
    "ptr": Case(Pointers, given(ptr=torch.tensor([0, 30]))),
    "edge_dim": Case(EdgeDim, given(edge_dim=2)),
    "edge_mean [1, d]": Case(EdgeScale, given(edge_mean=lambda d: d.edge_attr.mean(0, keepdim=True))),
    "edge_mean [d]": Case(EdgeScale, given(edge_mean=lambda d: d.edge_attr.mean(0))),
    "node_mean [1, d]": Case(NodeScale, given(node_mean=lambda d: d.x.mean(0, keepdim=True))),
    "None": Case(Optional, given(extra=None)),
    "a number where a tensor is usual": Case(Optional, given(extra=0.5)),
    "an array of numpy": Case(Turned, given(extra=drawn(1, WIDTH).numpy())),
    "an argument with None that nobody gives": Case(Weighted, given()),
    "keyword-only arguments": Case(Positional, given(gain=0.5, shift=drawn(WIDTH))),
    "keyword-only arguments by default": Case(Positional, given()),
    "**kwargs": Case(Rest, given(u=drawn(1, WIDTH), gain=0.5)),
    "how many hops": Case(Hops, given(hops=3)),
    "a second edge list": Case(SecondEdges, given(edge_index2=lambda d: d.edge_index.flip(0)), unclear=True),
    "pairs [2, m]": Case(
        Negatives, given(pairs=lambda d: torch.arange(34).view(2, 17) * 7 % 30), unclear=True
    ),
}
