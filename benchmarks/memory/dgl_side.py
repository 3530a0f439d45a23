"""DGL's side: its own layers in a stack like PyG's, over a graph with 32-bit ids.

Where it sits: ``one_run`` trains it. DGL is the extra ``bench``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from rivals import import_dgl
from torch import Tensor, nn
from torch_geometric.data import Data
from trial import Trial

dgl, fault = import_dgl()
if dgl is None:
    raise SystemExit(fault)


class Stack(nn.Module):
    """GraphConv, SAGEConv or GATConv, layer upon layer, with ReLU between."""

    def __init__(self, model: str, widths: list[int], heads: int) -> None:
        super().__init__()
        last, convs = len(widths) - 2, []
        for place, (fan_in, fan_out) in enumerate(pairwise(widths)):
            if model == "gcn":
                convs.append(dgl.nn.GraphConv(fan_in, fan_out))
            elif model == "sage":
                convs.append(dgl.nn.SAGEConv(fan_in, fan_out, "mean"))
            else:
                # As in PyG's GAT: the heads of the last layer are averaged, those of the others joined.
                convs.append(dgl.nn.GATConv(fan_in, fan_out if place == last else fan_out // heads, heads))
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """Return the scores of all vertices.

        Shapes:
            x ``[N, F]`` -> ``[N, C]``.
        """
        for place, conv in enumerate(self.convs):
            last = place == len(self.convs) - 1
            x = conv(graph, x)
            if x.dim() == 3:
                x = x.mean(1) if last else x.flatten(1)
            x = x if last else torch.relu(x)
        return x


def built(trial: Trial, data: Data) -> tuple[nn.Module, Any]:
    """Return the model and the graph, with loops where the layers of PyG add them."""
    graph = dgl.graph((data.edge_index[0].int(), data.edge_index[1].int()), num_nodes=data.num_nodes)
    graph = dgl.add_self_loop(graph) if trial.model != "sage" else graph
    torch.manual_seed(0)
    widths = [data.x.size(1), *[trial.hidden] * (trial.layers - 1), int(data.y.max()) + 1]
    return Stack(trial.model, widths, trial.heads), graph
