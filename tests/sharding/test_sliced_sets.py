"""Feature slices on several vertex sets: outputs and every gradient, with one part and with two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import both, grads, of_first
from test_vertex_sets import LAYERS, SETS, by_types, net_of
from torch import Tensor, nn
from torch.nn import functional

import kagome
from kagome.comm.channel import Channel

SLICED = ("sage", "gat", "to_hetero")
"""Layers of which some columns of all rows are reduced; the others read a halo, as on one set."""


def sliced(channel: Channel | None, kind: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    sent = "transpose" if kind in SLICED else "halo"
    found = by_types(channel, kind, sent, guard=False, **settings)
    return {name: value for name, value in found.items() if not name.startswith("out")}


CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one part": (2, {"tensor": 2}),
    "three slices": (3, {"tensor": 3}),
    "two parts": (4, {"tensor": 2, "graph": 2}),
    "within memory": (3, {"tensor": 3, "memory_gib": 1e-5}),
}


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("cut", CUTS)
def test_slices_of_several_vertex_types(ranks: Any, kind: str, cut: str) -> None:
    world, settings = CUTS[cut]
    both(ranks, world, sliced, kind, settings)


class Columns(nn.Module):
    """Reductions of columns, two hops without a map between them, and edges that count both sets' rows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.into, self.back = pyg.SimpleConv(aggr=how), pyg.SimpleConv(aggr=how)
        self.grid, self.mesh, self.how = nn.Linear(5, 7), nn.Linear(3, 7), how

    def forward(self, grid: Tensor, mesh: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        h, m = self.grid(grid), self.mesh(mesh).tanh()
        m = m + self.into((h, m), up)
        return 0.5 * self.back((m, h), down) + h, m


def columns(channel: Channel | None, how: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ends = [torch.randint(n, (67,), generator=generator) for n in (SETS["grid"], SETS["fine"])]
    up = torch.stack(ends)
    graph = kagome.Graph(
        grid=kagome.Vertices(SETS["grid"]),
        fine=kagome.Vertices(SETS["fine"]),
        up=kagome.Edges("grid", "fine", up),
        down=kagome.Edges("fine", "grid", up.flip(0).contiguous()),
    )
    torch.manual_seed(5)
    model = Columns(how).double()
    grid = torch.randn(SETS["grid"], 5, generator=generator, dtype=torch.float64)
    mesh = torch.randn(SETS["fine"], 3, generator=generator, dtype=torch.float64)
    cut = {} if channel is None else {"parallel": kagome.Parallel(guard=False, **settings)}
    with net_of(channel, model, graph, **cut) as net:
        for _ in range(2):
            one, two = net(grid, mesh, up, up.flip(0).contiguous())
            loss = net.mean(functional.softplus(one)) + net.mean(two**2)
            loss.backward()
        rows = net.gather(one, "grid")
    assert channel is None or net.traffic.bytes["transpose"]
    return grads(model) | {"loss": loss.detach(), "rows": of_first(channel, rows, (SETS["grid"], 7))}


@pytest.mark.some(1, each="how")
@pytest.mark.parametrize("how", ["sum", "mean", "max"])
@pytest.mark.parametrize("cut", CUTS)
def test_columns_between_two_sets(ranks: Any, how: str, cut: str) -> None:
    world, settings = CUTS[cut]
    both(ranks, world, columns, how, settings)
