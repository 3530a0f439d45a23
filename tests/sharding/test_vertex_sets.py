"""Graphs of several vertex sets under ``kagome.shard``: outputs and every gradient, on 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import WORLDS, grads
from torch import Tensor, nn
from torch_geometric.data import HeteroData

import kagome
from kagome.comm.channel import Channel

SIZES = {"paper": 23, "author": 17, "field": 3}
LINKS = {
    ("author", "writes", "paper"): 61,
    ("paper", "cites", "paper"): 90,
    ("paper", "about", "field"): 41,
    ("field", "holds", "paper"): 37,
}


def hetero() -> HeteroData:
    """Three vertex types, one with fewer vertices than there may be ranks, and one without features."""
    generator = torch.Generator().manual_seed(3)
    data = HeteroData()
    for kind, width in (("paper", 5), ("author", 6)):
        data[kind].x = torch.randn(SIZES[kind], width, generator=generator, dtype=torch.float64)
    data["field"].num_nodes = SIZES["field"]
    for (source, relation, target), count in LINKS.items():
        ends = [torch.randint(SIZES[kind], (count,), generator=generator) for kind in (source, target)]
        data[source, relation, target].edge_index = torch.stack(ends)
        weights = torch.randn(count, 2, generator=generator, dtype=torch.float64)
        data[source, relation, target].edge_attr = weights
    return data


class Fields(nn.Module):
    """A model of three vertex types, with a learned table for the one without features."""

    def __init__(self, layers: Callable[[dict[str, int]], nn.Module], widths: dict[str, int]) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZES["field"], widths["field"])
        self.one, self.out = layers(widths), nn.Linear(8, 4)

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor], attr: dict[Any, Tensor]) -> Any:
        x = {**x, "field": self.table.weight}
        h = self.one(x, edges, attr) if isinstance(self.one, Edged) else self.one(x, edges)
        return {kind: self.out(rows.relu()) for kind, rows in h.items()}


class Edged(nn.Module):
    """``HeteroConv`` with attributes of edges."""

    def __init__(self, make: Callable[[tuple[int, int], int], nn.Module], widths: dict[str, int]) -> None:
        super().__init__()
        self.conv = pyg.HeteroConv({link: make((widths[link[0]], widths[link[2]]), 8) for link in LINKS})

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor], attr: dict[Any, Tensor]) -> Any:
        return self.conv(x, edges, edge_attr_dict=attr)


class TwoLayers(nn.Module):
    """GraphSAGE, as ``to_hetero`` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv((-1, -1), 8), pyg.SAGEConv((-1, -1), 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index).relu(), edge_index)


def to_hetero(_widths: dict[str, int]) -> nn.Module:
    return pyg.to_hetero(TwoLayers(), (list(SIZES), list(LINKS)), aggr="sum")


LAYERS: dict[str, Callable[[dict[str, int]], nn.Module]] = {
    "sage": lambda widths: pyg.HeteroConv(
        {link: pyg.SAGEConv((widths[link[0]], widths[link[2]]), 8) for link in LINKS}
    ),
    "gat": lambda widths: Edged(
        lambda sizes, out: pyg.GATConv(sizes, out, edge_dim=2, add_self_loops=False), widths
    ),
    "gatv2": lambda widths: Edged(
        lambda sizes, out: pyg.GATv2Conv(sizes, out, edge_dim=2, add_self_loops=False), widths
    ),
    "transformer": lambda widths: Edged(
        lambda sizes, out: pyg.TransformerConv(sizes, out, edge_dim=2, heads=2, concat=False), widths
    ),
    "gine": lambda widths: Edged(
        lambda sizes, out: pyg.GINEConv(nn.Linear(sizes[0], out), edge_dim=2), dict.fromkeys(widths, 5)
    ),
    "hgt": lambda widths: pyg.HGTConv(widths, 8, (list(SIZES), list(LINKS)), heads=2),
    "han": lambda widths: pyg.HANConv(widths, 8, (list(SIZES), list(LINKS)), heads=2),
    "to_hetero": to_hetero,
}


def net_of(
    channel: Channel | None, model: nn.Module, data: Any, **settings: Any
) -> AbstractContextManager[Any]:
    """A sharded model, or the whole one with the same methods."""
    return nullcontext(Whole(model)) if channel is None else kagome.shard(model, data, log=str, **settings)


class Whole:
    """The reference of a scenario: what a sharded model has, of the model itself on the whole graph."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rank, self.ranks = model, 0, 1
        self.mean: Any = lambda v, weight=None: (
            v.mean() if weight is None else (v * weight).sum() / weight.expand_as(v).sum()
        )

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)

    def place(self, value: Tensor, rows: str, *, axis: int = 0) -> Tensor:
        return value

    def gather(self, value: Tensor, rows: str, *, axis: int = 0) -> Tensor:
        return value.detach()

    def read(self, value: Tensor, ids: Tensor, rows: str) -> Tensor:
        return value[ids]


def by_types(channel: Channel | None, kind: str) -> dict[str, Tensor]:
    """A model of ``HeteroData``: a loss over two types, gradients of two backward passes."""
    torch.manual_seed(5)
    data = hetero()
    widths = {"paper": 5, "author": 5 if kind == "gine" else 6, "field": 5 if kind == "gine" else 7}
    if kind == "gine":
        data["author"].x = data["author"].x[:, :5].contiguous()
    model = Fields(LAYERS[kind], widths).double()
    with torch.no_grad():  # lazy layers take their shapes
        model(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
    found: dict[str, Tensor] = {}
    with net_of(channel, model, data) as net:
        for _ in range(2):
            out = net(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
            loss = sum(net.mean(rows**2) for rows in out.values() if rows is not None)
            loss.backward()
        for name, rows in out.items():
            whole = net.gather(rows, name)
            if channel is None or channel.rank == 0:
                found[f"out {name}"] = whole
            else:
                found[f"out {name}"] = torch.zeros(0)
    return grads(model) | {"loss": loss.detach()} | found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", LAYERS)
def test_models_of_several_vertex_types(ranks: Any, world: int, kind: str) -> None:
    expected = by_types(None, kind)
    for rank, found in enumerate(ranks(world, by_types, kind)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if rank and name.startswith("out"):
                continue
            torch.testing.assert_close(
                found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
