"""The forecast of halo bytes knows of partial sums: which layers send them, and how many rows they save."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

from kagome.components.parallelize import PartOptions
from kagome.config import parallel
from kagome.graph.partition import covers
from kagome.graph.partition.partition import extract, split_all
from kagome.planner.cost_model import CostRates, Load, halos
from kagome.profile.epoch_costs import summed_share
from kagome.profile.synthetic_graphs import GraphSize


def made(vertices: int = 40, edges: int = 400) -> Data:
    generator = torch.Generator().manual_seed(3)
    ends = (vertices * torch.rand(2, edges, generator=generator) ** 2).long()
    return Data(x=torch.randn(vertices, 6, generator=generator), edge_index=ends, num_nodes=vertices)


def test_bytes_are_those_of_rows_and_sums() -> None:
    rates = CostRates(
        seconds=0.0, row=0.0, edge=0.0, exchanged=0.0, meanwhile=0.0, uneven=1.0, meetings=0, forward=8.0,
        backward=4.0, weights=(),
    )  # fmt: skip
    loads = [Load(10, 20, 6, 8, 0.0, saved=(2, 3)), Load(10, 20, 8, 6, 0.0, saved=(3, 2))]
    assert halos(rates, loads, 2) == (12.0 * 5, 8 * 4 + 4 * 5 + 8 * 5 + 4 * 4)


@pytest.mark.parametrize(("kind", "share"), [("gcn", 1.0), ("sage", 1.0), ("gat", 0.0)])
def test_the_share_of_bytes_that_sums_replace_is_measured(kind: str, share: float) -> None:
    layers: dict[str, type[nn.Module]] = {"gcn": pyg.GCN, "sage": pyg.GraphSAGE, "gat": pyg.GAT}
    part = extract(made(), torch.zeros(40, dtype=torch.int64), 0, 1)
    found = summed_share(layers[kind](6, 8, 2), part, PartOptions())
    assert found == pytest.approx(share, abs=1e-9)


def test_saved_rows_are_those_of_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made()
    graph = GraphSize(40, 400, data)
    assert graph.saved(3, 0) == [(0, 0)] * 3  # a run looks for sums in larger graphs
    monkeypatch.setattr(parallel, "LEAST_EDGES", 400)
    found = graph.saved(3, 0)
    parts = split_all(data, graph.owner("metis", 3, 0), 3)
    read = [
        covers.halo_cover(*part.edge_index.numpy(), part.own.numel(), part.recv_counts, covers.LEAST_SAVED)
        for part in parts
    ]
    less = np.stack([each.read - each.counts for each in read])
    assert less.sum() > 0
    assert found == list(zip(less.sum(0), less.sum(1), strict=True))
    assert GraphSize(40, 400).saved(3, 0) == [(0, 0)] * 3  # not at hand
