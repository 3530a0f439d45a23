"""Sums within ``memory_gib`` leave the rows of all vertices on the host."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome import Parallel, Trainer
from kagome.config import Train
from kagome.feature_parallel import tiled_reduce
from training import CLASSES, QUIET, graph

VERTICES, COLUMNS = 3_000, 64
BOUND = 2**18


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.GCNConv(COLUMNS, out) for out in (COLUMNS, COLUMNS, CLASSES))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


def peaks() -> list[tuple[int, int, int]]:
    """For each sum the peak of device memory above what was there, the result's bytes, and the slice's."""
    data = graph(torch.float64, VERTICES)
    data.x = torch.randn(VERTICES, COLUMNS, dtype=torch.float64)
    model = Layers().double()
    found: list[tuple[int, int, int]] = []
    forward = tiled_reduce._Hop.forward

    def watched(ctx: Any, rows: Any, weight: Any, token: Any, hop: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = forward(ctx, rows, weight, token, hop)
        peak = torch.cuda.max_memory_allocated() - before
        found.append((peak, out[0].nbytes, hop.edge_layout.rows.total * hop.mine * rows.itemsize))
        return out

    cut = Parallel(tensor=2, memory_gib=BOUND / 2**30, reuse=False, partitioner="contiguous")
    with patch.object(tiled_reduce._Hop, "forward", staticmethod(watched)):
        train = Train(epochs=2, check=False)
        with Trainer(model, data, parallel=cut, train=train, report=QUIET) as it:
            assert it.mesh.device.type == "cuda"
            it.fit()
    return found


def test_the_slice_of_all_vertices_rests_on_the_host(devices: Any) -> None:
    for rank in devices.run(2, peaks):
        large = [each for each in rank if each[2] > 2 * BOUND]
        assert large
        for peak, result, whole in large:
            # The exchange copies what it packs, which the bound does not count.
            assert peak <= result + 2 * BOUND < result + whole
